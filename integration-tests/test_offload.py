"""--kv-offload-gib and --kv-offload-disk-gib: prefixes come back with the same tokens, also after kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from binary import Server, launch, start
from client import ask
from fault.probe import metric, restarts

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("offload")]

# Together far more than the pool of 512 tokens, each with less than a half of it.
PROMPTS = [f"Story {number}. " + "Once upon a time " * 40 for number in range(6)]
FLAGS = ("--max-batch-total-tokens", "512", "--max-total-tokens", "256", "--standby", "off")


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


# The memory of the second one has room for half of what is evicted.
@pytest.mark.parametrize(
    ("tiers", "flags"),
    [
        (["memory"], ["--kv-offload-gib", "0.2"]),
        (["memory", "disk"], ["--kv-offload-gib", "0.005", "--kv-offload-disk-gib", "0.2", "--num-shard", "2"]),
    ],
)
def test_prefixes_come_back_with_the_same_tokens(
    tiers: list[str], flags: list[str], expected: list[list[dict]], tmp_path: Path
) -> None:
    folder = ["--kv-offload-folder", str(tmp_path)] if "disk" in tiers else []
    server = start(*FLAGS, *flags, *folder)
    assert [tokens(server, prompt) for prompt in PROMPTS] == expected
    offloaded = {tier: metric(server, f'penstock_kv_offloaded_blocks{{tier="{tier}"}}') for tier in ("memory", "disk")}
    assert [tier for tier, num_blocks in offloaded.items() if num_blocks > 0] == tiers
    assert [tokens(server, prompt) for prompt in PROMPTS] == expected
    assert metric(server, "penstock_prefix_hit_tokens") > 100 * len(PROMPTS), "all prompts were there"
    assert restarts(server) == 0, "no slot has failed its check"
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    assert [tokens(server, prompt) for prompt in PROMPTS] == expected, "the new worker has none of them"
    assert server.stop() == 0, server.last_lines()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-offload-gib=-1"], "--kv-offload-gib is -1, must be at least 0"),
        (["--kv-offload-gib", "1", "--kv-offload-folder", "/tmp"], "--kv-offload-disk-gib is 0, must be above 0 with"),
        (["--kv-offload-disk-gib", "1"], "--kv-offload-disk-gib is 1, must be 0 without --kv-offload-folder"),
        (["--kv-offload-gib", "1000000"], "lower --kv-offload-gib"),
        (["--kv-offload-disk-gib", "1", "--kv-offload-folder", "/missing"], "/missing: cannot reserve"),
    ],
)
def test_what_cannot_be_is_refused_before_the_server_is_ready(flags: list[str], message: str) -> None:
    process = launch(*flags)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in output
