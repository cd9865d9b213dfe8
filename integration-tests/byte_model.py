"""Tiny random models over bytes, for the real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_tokenizer(folder: Path) -> Tokenizer:
    """Save a tokenizer whose 256 tokens are the bytes, and return it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # listed in another order in each process
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def save(folder: Path, max_tokens: int, window: int | None) -> tuple[Any, Tokenizer]:
    """Save a model for sequences of `max_tokens`, with a sliding window or without. Returns it with its tokenizer."""
    tokenizer = save_tokenizer(folder)
    config = transformers.MistralConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=max_tokens,
        sliding_window=window,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(2)
    model = transformers.MistralForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def greedy(model: Any, tokenizer: Tokenizer, text: str, num_tokens: int) -> list[int]:
    """The token ids that transformers generates after a text."""
    prompt = torch.tensor([tokenizer.encode(text).ids])
    generated: list[int] = model.generate(prompt, max_new_tokens=num_tokens, do_sample=False)[0].tolist()
    return generated[prompt.shape[1] :]
