"""The real server on the device that it chooses, with a tiny model. `make gpu` runs this file on a GPU."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from binary import start
from byte_model import greedy, save
from client import ask, events
from fault.probe import wait_for_rest

NUM_TOKENS = 400
TEXTS = ["a river " * 16, "so it was said", "x" * 70, "y"]


def test_a_killed_worker_costs_no_token(tmp_path: Path) -> None:
    model, tokenizer = save(tmp_path, max_tokens=1024, window=None)
    server = start("--model-id", str(tmp_path), "--dtype", "float32")
    expected_device = os.environ.get("PENSTOCK_TEST_DEVICE", "cpu")
    if expected_device != "cpu":
        assert any(expected_device in line for line in server.lines), server.last_lines()

    def generate(text: str) -> list[int]:
        request = {"inputs": text, "parameters": {"max_new_tokens": NUM_TOKENS}}
        return [event["token"]["id"] for event in events(server, "/generate_stream", request)]

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        answers = [pool.submit(generate, text) for text in TEXTS]
        time.sleep(0.3)
        os.kill(server.worker_groups()[0][0], signal.SIGKILL)
        for text, answer in zip(TEXTS, answers, strict=True):
            assert answer.result() == greedy(model, tokenizer, text, NUM_TOKENS), server.last_lines()
    wait_for_rest(server)
    sampled = {"max_new_tokens": 20, "do_sample": True, "top_p": 0.8, "top_k": 30, "seed": 3, "top_n_tokens": 3}
    first, again = (
        ask(server, "/generate", {"inputs": "so", "parameters": {**sampled, "details": True}}).json for _ in range(2)
    )
    assert first["generated_text"] == again["generated_text"]
    assert [len(top) for top in first["details"]["top_tokens"]] == [3] * 20
    assert server.stop() == 0
