"""--kv-offload-gib: prefixes that the pool has no room for come back with the same tokens, also after kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from binary import Server, launch, start
from client import ask
from fault.probe import metric

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("offload")]

# Together far more than the pool of 1,024 tokens, each with less than a half of it.
PROMPTS = [f"Story {number}. " + "Once upon a time " * 80 for number in range(6)]
FLAGS = ("--max-batch-total-tokens", "1024", "--max-total-tokens", "512", "--standby", "off")


def tokens(server: Server, prompt: str) -> list[dict]:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 8, "details": True}}
    return ask(server, "/generate", body).json["details"]["tokens"]


@pytest.fixture(scope="module")
def expected() -> list[list[dict]]:
    server = start(*FLAGS)
    twice = [[tokens(server, prompt) for prompt in PROMPTS] for _ in range(2)]
    assert metric(server, "penstock_prefix_hit_tokens") == 0, "the pool is too small for them"
    assert server.stop() == 0
    assert twice[0] == twice[1]
    return twice[0]


@pytest.mark.parametrize("place", ["memory", "file of two ranks"])
def test_prefixes_come_back_with_the_same_tokens(place: str, expected: list[list[dict]], tmp_path: Path) -> None:
    more = [] if place == "memory" else ["--kv-offload-folder", str(tmp_path), "--num-shard", "2"]
    server = start(*FLAGS, "--kv-offload-gib", "0.2", *more)
    assert [tokens(server, prompt) for prompt in PROMPTS] == expected
    assert metric(server, "penstock_kv_offloaded_blocks") > 0
    assert [tokens(server, prompt) for prompt in PROMPTS] == expected
    assert metric(server, "penstock_prefix_hit_tokens") > 200 * len(PROMPTS), "all prompts were there"
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    assert [tokens(server, prompt) for prompt in PROMPTS] == expected, "the new worker has none of them"
    assert server.stop() == 0, server.last_lines()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-offload-gib=-1"], "--kv-offload-gib is -1, must be at least 0"),
        (["--kv-offload-folder", "/tmp"], "above 0 with --kv-offload-folder"),
        (["--kv-offload-gib", "1000000"], "lower --kv-offload-gib"),
        (["--kv-offload-gib", "1", "--kv-offload-folder", "/missing"], "--kv-offload-folder /missing: cannot reserve"),
    ],
)
def test_what_cannot_be_is_refused_before_the_server_is_ready(flags: list[str], message: str) -> None:
    process = launch(*flags)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in output
