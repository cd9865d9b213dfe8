"""Sequences longer than the KV cache, with a model whose layers all have a sliding window."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from binary import start
from client import ask
from fault.probe import wait_for_rest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WINDOW, POOL, LONGEST = 20, 64, 512
NUM_TOKENS = 200
TEXTS = ["a river " * 16, "so it was said", "x" * 70]


def save(folder: Path) -> tuple[Any, Tokenizer]:
    """Save a tiny random model over bytes. Returns it with its tokenizer."""
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.MistralConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        sliding_window=WINDOW,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(2)
    model = transformers.MistralForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def test_a_windowed_sequence_may_exceed_the_kv_cache(tmp_path: Path) -> None:
    model, tokenizer = save(tmp_path)
    server = start("--model-id", str(tmp_path), "--dtype", "float32", "--max-batch-total-tokens", str(POOL))
    assert ask(server, "/info").json["max_total_tokens"] == LONGEST

    def generate(text: str) -> list[int]:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        answer = ask(server, "/generate", {"inputs": text, "parameters": parameters})
        return [token["id"] for token in answer.json["details"]["tokens"]]

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        answers = list(pool.map(generate, TEXTS))
    for text, answer in zip(TEXTS, answers, strict=True):
        prompt = torch.tensor([tokenizer.encode(text).ids])
        expected = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert answer == expected
        assert len(answer) == NUM_TOKENS > 3 * POOL
    wait_for_rest(server)
    assert server.stop() == 0
