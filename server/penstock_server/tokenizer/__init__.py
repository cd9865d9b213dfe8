"""Converts published tokenizer files to `tokenizer.json`, as plain data. Imports no torch, tokenizers or transformers.

ADR 34 says why not by transformers.
"""
