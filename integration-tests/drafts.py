"""Answers whose draft tokens are right, also across a worker's death.

The scheduler gives drafts by the times of steps, and none while it measures that their rows take as long as steps. So
requests are made again until some drafts are right.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from binary import Server, logged, paused
from client import ask
from fault.probe import health, metric, restarts, wait_for_rest, wait_for_restart, wait_until
from test_worker_death import Stream, ranks

ACCEPTED = "penstock_accepted_draft_tokens"
RECOVERED = "the model workers have recovered"


def num_accepted(details: dict[str, Any]) -> int:
    """The draft tokens of an answer that were right, by its details."""
    return int(details.get("draft_tokens", {"accepted": 0})["accepted"])


def wait_for_right_drafts(server: Server, request: dict[str, Any]) -> Any:
    """The details of an answer to the request, some of whose draft tokens were right."""
    found: list[Any] = []

    def has_right_drafts() -> bool:
        found.append(ask(server, "/generate", request).json["details"])
        return num_accepted(found[-1]) > 0

    wait_until(has_right_drafts, "drafts are right")
    return found[-1]


def token_ids(stream: Stream) -> list[int]:
    return [token for token, _, _ in stream.result()[0]]


def interrupted(server: Server, requests: list[dict[str, Any]]) -> list[Stream]:
    """The ended streams of `requests`, which ask for details. A worker's death interrupted each after its second token,
    and after draft tokens of some were right. After it, draft tokens are right again."""
    found: list[Stream] = []

    def are_interrupted() -> bool:
        found[:] = _kill_while_drafting(server, requests)
        return bool(found)

    wait_until(are_interrupted, "a worker's death interrupts streams with right drafts")
    assert sum(num_accepted(stream.last_event()["details"]) for stream in found) > 0
    wait_for_right_drafts(server, requests[0])
    return found


def _kill_while_drafting(server: Server, requests: list[dict[str, Any]]) -> list[Stream]:
    """One attempt; no streams if some were complete before the worker died."""
    wait_until(lambda: health(server) == 200)
    wait_for_rest(server)  # the drafts of earlier requests are counted
    worker, num_restarts, num_lines = ranks(server)[0], restarts(server), len(server.lines)
    before = metric(server, ACCEPTED)
    streams = [Stream(server, request) for request in requests]

    def are_drafting() -> bool:
        return all(len(stream.events) >= 2 for stream in streams) and metric(server, ACCEPTED) > before

    def are_running() -> bool:
        return all(stream.running() for stream in streams)

    wait_until(lambda: are_drafting() or not are_running(), "streams have right drafts, or end")
    with paused(worker):
        is_killed = are_drafting() and are_running()
        if is_killed:
            os.kill(worker, signal.SIGKILL)
    for stream in streams:
        stream.result()
    if not is_killed:
        return []
    wait_for_restart(server, num_restarts)
    wait_until(lambda: bool(logged(server, RECOVERED, "sequences", num_lines)), "the log tells of the restart")
    (num_interrupted,) = logged(server, RECOVERED, "sequences", num_lines).values()
    return streams if num_interrupted == len(streams) else []
