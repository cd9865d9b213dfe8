"""Converts published tokenizer files to `tokenizer.json`, as plain data. Imports no torch, tokenizers or transformers.

docs/adr/tokenizers.md says why transformers does not convert them.
"""
