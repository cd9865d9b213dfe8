"""A pipeline of stages answers as one rank does, to the bit, also after kill -9 of a stage."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from binary import Server, start
from fault.probe import health, restarts, wait_for_restart, wait_until
from test_worker_death import Stream

pytestmark = pytest.mark.native

TOKENS = 96
REQUESTS: list[dict] = [
    {"inputs": inputs, "parameters": {"max_new_tokens": TOKENS, "seed": 7, **parameters}}
    for inputs, parameters in [
        ("A long story:", {}),
        ("The capital of France is", {"do_sample": True, "temperature": 0.9, "repetition_penalty": 1.1}),
        ("def fibonacci(n):", {"do_sample": True, "top_k": 50, "frequency_penalty": 0.3}),
        ("Digits:", {"grammar": {"type": "regex", "value": "([0-9]{4} )*"}}),
        ("Once upon a time " * 300, {}),  # takes several steps
    ]
]


SIZES = [(2, 1), pytest.param((3, 1), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: f"{sizes[0]} stages of {sizes[1]}")
def pipeline(request: pytest.FixtureRequest) -> Iterator[Server]:
    num_stages, num_shards = map(str, request.param)
    server = start("--pipeline-parallel-size", num_stages, "--num-shard", num_shards, "--standby", "off")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def expected(server: Server) -> list[tuple]:
    return [stream.result() for stream in [Stream(server, request) for request in REQUESTS]]


def test_stages_answer_as_one_rank(pipeline: Server, expected: list[tuple]) -> None:
    streams = [Stream(pipeline, request) for request in REQUESTS]
    assert [stream.result() for stream in streams] == expected


@pytest.mark.parametrize("rank", [-1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_death_of_a_stage_changes_no_token(pipeline: Server, expected: list[tuple], rank: int) -> None:
    before = restarts(pipeline)
    streams = [Stream(pipeline, request) for request in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > 5 for stream in streams) >= 3)
    os.kill(pipeline.worker_pids()[rank], signal.SIGKILL)
    assert [stream.result() for stream in streams] == expected
    wait_for_restart(pipeline, before)
    wait_until(lambda: health(pipeline) == 200)
