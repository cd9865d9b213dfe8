"""Structured output: for each token of a sequence, a grammar gives a mask over the vocabulary.

`compiler` compiles grammars concurrently with the steps, and first in a separate process (`trial`). `state` follows the
constrained sequences and computes the masks of a step. Both processes share `start`, `language`, `vocabulary` and
`metaspace`. llguidance does the parsing. Nothing here imports torch.
"""
