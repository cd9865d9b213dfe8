"""The instruction set of the CPU kernels, from the flag to the answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from binary import start
from byte_model import save
from client import ask

NUM_TOKENS = 40
TEXTS = ["a river " * 6, "so it was said", "x" * 30]


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_answers_of_portable_kernels_do_not_depend_on_the_batch(tmp_path: Path, dtype: str) -> None:
    save(tmp_path, max_tokens=128, window=None)
    server = start("--model-id", str(tmp_path), "--dtype", dtype, "--cpu-isa", "portable")
    log = "\n".join(server.lines)
    assert f"operators: native (portable in {dtype})" in log

    def generate(text: str) -> list[int]:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        answer = ask(server, "/generate", {"inputs": text, "parameters": parameters})
        return [token["id"] for token in answer.json["details"]["tokens"]]

    alone = [generate(text) for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(generate, TEXTS)) == alone
    assert all(len(answer) == NUM_TOKENS for answer in alone)
    assert server.stop() == 0
