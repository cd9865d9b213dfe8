"""Runs prompts through the engine under adverse scheduling: chunks, a shared prefix, a preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from penstock_server.engine import Engine
from penstock_server.engine.engine import LoadModel
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Adapter, ImageSpan, NewSequence, Sampling
from plans import Advance, plan, step
from tested_device import DEVICE

BLOCK_TOKENS = 4
MAX_STEP_TOKENS = 24


@dataclass
class Running:
    """The driver's state of one sequence."""

    id: int
    prompt: list[int]
    token_ids: list[int]
    num_source: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class EngineRun:
    """An engine with a pool of blocks, allocated from the end."""

    def __init__(
        self,
        folder: Path,
        load: LoadModel = load_model,
        num_source: Callable[[list[int]], int] = lambda _: 0,
        kv_dtype: torch.dtype | None = None,
        block_tokens: int = BLOCK_TOKENS,
        max_step_tokens: int = MAX_STEP_TOKENS,
    ) -> None:
        self.block_tokens = block_tokens
        options = LoadOptions(folder, torch.float32, DEVICE, self.block_tokens, kv_dtype=kv_dtype)
        self.engine = Engine(load(options, RankGroup()), RankGroup(), DEVICE, self.block_tokens)
        self.engine.warm_up(WarmUpConfig(max_step_tokens, 4, max_sequence_tokens=160, num_blocks=128))
        self.free_blocks = list(range(128))
        self.num_source = num_source
        self.images: Callable[[list[int]], Sequence[ImageSpan]] = lambda prompt: ()
        # Changes the end of a prompt's advance.
        self.end: Callable[[list[int], int], int] = lambda prompt, end: end
        self.sampling = Sampling()
        self.adapter: Adapter | None = None
        self.step = 0
        self.next_id = 1

    def greedy(self, prompts: list[list[int]], num_tokens: int, shared_tokens: int, chunk: int) -> list[list[int]]:
        """The new tokens of three prompts. The third shares the second's first `shared_tokens`, rounded down to whole
        blocks, and starts when those are computed. The second is preempted halfway and recomputed in other blocks."""
        first, second = self._sequence(prompts[0]), self._sequence(prompts[1])
        self._step([first], num_tokens, chunk, new=[first, second])
        while second.num_computed < len(second.prompt):
            self._step([first, second], num_tokens, chunk)
        third = self._sequence(prompts[2])
        third.num_computed = shared_tokens // self.block_tokens * self.block_tokens
        third.blocks = second.blocks[: third.num_computed // self.block_tokens]
        kept = list(third.blocks)
        self._step([third, first, second], num_tokens, chunk, new=[third])
        while len(second.token_ids) - len(second.prompt) < num_tokens // 2:
            self._step([first, second, third], num_tokens, chunk)
        again = Running(self._id(), second.prompt, second.token_ids, second.num_source)
        self.free_blocks[:0] = [block for block in second.blocks if block not in kept]
        self._step([again, third, first], num_tokens, chunk, new=[again], freed=[second.id])
        while self._step([first, again, third], num_tokens, chunk):
            pass
        return [sequence.token_ids[len(sequence.prompt) :] for sequence in (first, again, third)]

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _sequence(self, prompt: list[int]) -> Running:
        return Running(self._id(), prompt, list(prompt), self.num_source(prompt))

    def _step(
        self,
        sequences: list[Running],
        num_tokens: int,
        chunk: int,
        new: list[Running] | None = None,
        freed: list[int] | None = None,
    ) -> bool:
        """Runs one plan. Returns False if no sequence has work left."""
        told = [
            NewSequence(
                s.id,
                list(s.token_ids),
                len(s.prompt),
                s.num_computed,
                list(s.blocks),
                sampling=self.sampling,
                num_source_tokens=s.num_source,
                images=self.images(s.prompt),
                adapter=self.adapter,
            )
            for s in new or []
        ]
        advances, advanced = [], []
        for sequence in sequences:
            if len(sequence.token_ids) - len(sequence.prompt) >= num_tokens:
                continue
            least = sequence.num_source - sequence.num_computed  # a source is computed in one step
            count = min(max(chunk, least), len(sequence.token_ids) - sequence.num_computed)
            count = self.end(sequence.prompt, sequence.num_computed + count) - sequence.num_computed
            sequence.num_computed += count
            added = []
            while (len(sequence.blocks) + len(added)) * self.block_tokens < sequence.num_computed:
                added.append(self.free_blocks.pop())
            sequence.blocks += added
            is_sampled = sequence.num_computed == len(sequence.token_ids)
            advances.append(Advance(sequence.id, count, added, is_sampled))
            advanced.append(sequence)
        if not advances:
            return False
        self.step += 1
        by_id = {sequence.id: sequence for sequence in advanced}
        for output in step(self.engine, plan(self.step, freed or (), told, advances)):
            assert not output.error, output.error
            by_id[output.sequence_id].token_ids += [token.id for token in output.tokens]
        return True
