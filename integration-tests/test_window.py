"""Sequences longer than the KV cache, with a model whose layers all have a sliding window."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from binary import start
from byte_model import greedy, save
from client import ask
from fault.probe import wait_for_rest

WINDOW, POOL, LONGEST = 20, 64, 512
NUM_TOKENS = 200
TEXTS = ["a river " * 16, "so it was said", "x" * 70]


def test_a_windowed_sequence_may_exceed_the_kv_cache(tmp_path: Path) -> None:
    model, tokenizer = save(tmp_path, LONGEST, WINDOW)
    server = start("--model-id", str(tmp_path), "--dtype", "float32", "--max-batch-total-tokens", str(POOL))
    assert ask(server, "/info").json["max_total_tokens"] == LONGEST

    def generate(text: str) -> list[int]:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        answer = ask(server, "/generate", {"inputs": text, "parameters": parameters})
        return [token["id"] for token in answer.json["details"]["tokens"]]

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        answers = list(pool.map(generate, TEXTS))
    for text, answer in zip(TEXTS, answers, strict=True):
        assert answer == greedy(model, tokenizer, text, NUM_TOKENS)
        assert len(answer) == NUM_TOKENS > 3 * POOL
    wait_for_rest(server)
    assert server.stop() == 0
