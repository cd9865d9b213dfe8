"""Structured output: a grammar becomes a mask of the vocabulary for every token of its sequence.

`compiler` turns grammars into matchers beside the steps, each tried first in a process of its own (`trial`); `state`
follows the constrained sequences of a stream and makes a step's masks; `start`, `language`, `vocabulary` and
`metaspace` are what both processes share. llguidance does the parsing. Nothing here needs torch.
"""
