"""kill -9 of workers at random moments while streams run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from binary import Server

from .mix import Answer, Repeated, Request
from .probe import health, metrics, serving_ranks, wait_until

# A sequence fails when workers die three times in a row while they compute it (docs/guarantees.md, G1).
MOST_KILLS_IN_A_ROW = 2
EVENTS_BETWEEN = 6  # events of each choice after a kill, which end its quarantine
DOWNTIME = "penstock_worker_downtime_seconds"


@dataclass
class Kills:
    num_kills: int = 0
    num_restarts: int = 0
    num_answers: int = 0
    downtime_s: float = 0.0
    differences: list[str] = field(default_factory=list)


def kill_workers(
    server: Server,
    asked: Sequence[Request],
    expected: Sequence[Answer],
    num_kills: int,
    seed: str,
    victims: Callable[[Server], list[int]] = serving_ranks,
) -> Kills:
    """Kill `num_kills` of the victims. Sometimes another one follows, which may hit a group that is still starting."""
    moments = random.Random(seed)
    before, result = metrics(server), Kills()
    with Repeated(server, asked, expected) as streams:
        while result.num_kills < num_kills and streams.is_running():
            time.sleep(moments.uniform(0.0, 0.5))
            num_restarts = metrics(server).get("penstock_worker_restarts", 0.0)
            for place in range(min(moments.choice([1, 1, 1, MOST_KILLS_IN_A_ROW]), num_kills - result.num_kills)):
                if place > 0:
                    time.sleep(moments.uniform(0.0, 3.0))
                with suppress(ProcessLookupError, IndexError):
                    os.kill(moments.choice(victims(server)), signal.SIGKILL)
                    result.num_kills += 1
            killed_at = streams.progress()
            wait_until(
                lambda known=num_restarts: metrics(server).get("penstock_worker_restarts", 0.0) > known,
                "the workers were restarted",
            )
            wait_until(
                lambda known=killed_at: streams.have_gone_on(known, EVENTS_BETWEEN) or not streams.is_running(),
                "every choice has continued",
                timeout_s=300,
            )
    wait_until(lambda: health(server) == 200, "the server is healthy")
    after = metrics(server)
    result.num_restarts = int(after["penstock_worker_restarts"] - before.get("penstock_worker_restarts", 0))
    result.downtime_s = after[f"{DOWNTIME}_sum"] - before.get(f"{DOWNTIME}_sum", 0.0)
    result.num_answers, result.differences = streams.num_answers, streams.differences
    return result
