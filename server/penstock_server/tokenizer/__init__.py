"""Tokenizers in any published form → `tokenizer.json`, as plain data. Imports no torch, tokenizers or transformers."""
