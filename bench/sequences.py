"""Sequences of the GPU benchmark, and the plans that advance them as the router would."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock_server.engine import Engine
from penstock_server.protocol.plan import Advances, NewSequence, Plan, Sampling, StepTiming

MAX_STEP_TOKENS = 8192


@dataclass
class Sequences:
    """Sequences of one length, and the plans that advance them."""

    engine: Engine
    block_tokens: int
    num_blocks: int
    step: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    first_block: int = 0
    timings: list[StepTiming] = field(default_factory=list)  # timings of all steps that were run

    def new(self, num: int, prompt_tokens: int, output_tokens: int) -> list[NewSequence]:
        """Sequences with all the blocks that they will need. Some may share blocks, because only time is measured."""
        per_sequence = -(-(prompt_tokens + output_tokens) // self.block_tokens)
        made = []
        for sequence_id in itertools.islice(self.ids, num):
            blocks = [(self.first_block + index) % self.num_blocks for index in range(per_sequence)]
            self.first_block = (self.first_block + per_sequence) % self.num_blocks
            tokens = [(sequence_id * 31 + place * 7) % 500 for place in range(prompt_tokens)]
            made.append(NewSequence(sequence_id, tokens, prompt_tokens, block_ids=blocks, sampling=Sampling()))
        return made

    def plan(self, advances: Sequence[tuple[Any, ...]], new: Sequence[NewSequence] = ()) -> Plan:
        self.step += 1
        columns = tuple(zip(*advances, strict=True))
        return Plan(self.step, (), new, Advances.of(*columns) if columns else Advances.of((), (), ()))

    def prefill(self, new: Sequence[NewSequence], most: int = MAX_STEP_TOKENS) -> Iterator[Plan]:
        """Chunks of at most `most` tokens, several prompts in one step where they fit."""
        started: list[NewSequence] = []
        advances: list[tuple[int, int, bool]] = []
        room = most
        for sequence in new:
            started.append(sequence)
            left = sequence.num_prompt_tokens
            while left:
                num = min(left, room)
                left -= num
                room -= num
                advances.append((sequence.sequence_id, num, left == 0))
                if room == 0:
                    yield self.plan(advances, started)
                    started, advances, room = [], [], most
        if advances:
            yield self.plan(advances, started)

    def decode(self, sequences: Sequence[NewSequence], num_steps: int, num_drafts: int = 0) -> Iterator[Plan]:
        """num_drafts: that each sequence may verify in a step."""
        advances = [(sequence.sequence_id, 1, True, (), num_drafts) for sequence in sequences]
        return (self.plan(advances) for _ in range(num_steps))

    def run(self, plans: Iterator[Plan]) -> list[float]:
        """Runs plans, two in flight. Returns the time at which each result was there."""
        times = []
        in_flight: deque[Any] = deque()
        for plan in plans:
            in_flight.append(self.engine.launch(plan))
            if len(in_flight) > 1:
                times.append(self._collect(in_flight.popleft()))
        return times + [self._collect(pending) for pending in in_flight]

    def _collect(self, pending: Any) -> float:
        result = self.engine.collect(pending)
        assert not result.failures, result.failures
        self.timings.append(result.timing)
        return time.perf_counter()

    def phases_s(self, num_steps: int) -> dict[str, float]:
        """The medians of the host's phases of the last steps, in seconds."""
        steps = [asdict(timing) for timing in self.timings[-num_steps:]]
        return {name: statistics.median(step[name] for step in steps) for name in steps[0]}

    def forget(self) -> None:
        self.engine.reset()
        self.step = 0
