"""Tokenizers in any published form → `tokenizer.json`, as plain data. Imports no torch, no tokenizers, no transformers."""
