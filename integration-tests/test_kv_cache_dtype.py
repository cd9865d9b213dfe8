"""A KV cache in fp8, from the flag to the answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from binary import start
from byte_model import save
from client import ask

NUM_TOKENS = 40
TEXTS = ["a river " * 6, "so it was said", "x" * 30]


def test_answers_from_an_fp8_cache_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    save(tmp_path, max_tokens=128, window=None)
    server = start("--model-id", str(tmp_path), "--dtype", "float32", "--kv-cache-dtype", "fp8_e4m3fn")
    log = "\n".join(server.lines)
    assert "keys and values are stored in float8_e4m3fn" in log
    assert "reference, which is slow (not native: it does not store fp8" in log

    def generate(text: str) -> list[int]:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        answer = ask(server, "/generate", {"inputs": text, "parameters": parameters})
        return [token["id"] for token in answer.json["details"]["tokens"]]

    alone = [generate(text) for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(generate, TEXTS)) == alone
    assert all(len(answer) == NUM_TOKENS for answer in alone)
    assert server.stop() == 0
