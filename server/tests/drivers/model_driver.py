"""Drives a model without the engine: it builds step batches and tracks the computed tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from penstock_server.device.attention.interface import StepBatch
from penstock_server.device.native.ops import NativeOps
from penstock_server.engine.batch import prompt_ends, with_images
from penstock_server.engine.host_batch import HostAdapters, HostBatch, split
from penstock_server.layers.executor import NativeExecutor
from penstock_server.layers.interpreter import Interpreter
from penstock_server.models.decoder import Decoder
from penstock_server.models.encoder import Encoder
from penstock_server.models.interface import CausalModel
from penstock_server.vision.encoder import PlacedImage
from tested_device import DEVICE
from torch import Tensor


def interpret(part: Decoder | Encoder) -> None:
    """Runs one operation after the other from now on, instead of native calls."""
    executor = part.executor
    assert isinstance(executor, NativeExecutor)
    part.executor = Interpreter(executor.program, NativeOps(executor.build))


def is_native(part: Decoder | Encoder) -> bool:
    return isinstance(part.executor, NativeExecutor)


@dataclass
class DrivenSequence:
    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    num_source: int = 0
    adapter: Any = None  # a result of `Adapters.load`
    images: Sequence[PlacedImage] = ()
    num_whole: int = 0  # leading tokens that attend to each other
    slot: int = -1  # the slot of its state; -1: the model keeps none


@dataclass
class ModelDriver:
    """One model with a pool of blocks, allocated from the end so that block ids are not in order."""

    model: CausalModel
    block_tokens: int = 4
    num_blocks: int = 64
    num_slots: int = 8
    device: torch.device = DEVICE

    def __post_init__(self) -> None:
        self.model.allocate_cache(self.num_blocks)
        self.free_blocks = list(range(self.num_blocks))
        self.free_slots: list[int] = []
        if self.model.states is not None:
            self.model.states.allocate(self.num_slots, num_snapshots=2)
            for tensor in self.model.states.tensors:
                tensor.fill_(float("nan"))  # what an earlier sequence has left is not read
            self.free_slots = list(range(self.num_slots))

    def sequence(self, token_ids: list[int], num_source: int = 0, adapter: Any = None) -> DrivenSequence:
        slot = self.free_slots.pop() if self.free_slots else -1
        return DrivenSequence(list(token_ids), [], num_source=num_source, adapter=adapter, slot=slot)

    def free(self, sequence: DrivenSequence) -> None:
        self.free_blocks.extend(sequence.blocks)
        sequence.blocks = []
        if sequence.slot >= 0:
            self.free_slots.append(sequence.slot)
            sequence.slot = -1

    @torch.inference_mode()
    def step(self, advances: list[tuple[DrivenSequence, int]], every_row: bool = False) -> Tensor:
        """Advances each sequence by a number of tokens. Returns the logits [sequences, vocab] of the last token of
        each, or with `every_row` of all tokens except the sources', on the CPU."""
        token_ids, positions, slots, starts, last_rows, rows = [], [], [], [0], [], []
        computed = np.array([sequence.num_computed for sequence, _ in advances])
        for sequence, num_tokens in advances:
            first, stop = sequence.num_computed, sequence.num_computed + num_tokens
            assert num_tokens >= 1
            assert stop <= len(sequence.token_ids)
            while len(sequence.blocks) * self.block_tokens < stop:
                sequence.blocks.append(self.free_blocks.pop())
            token_ids += sequence.token_ids[first:stop]
            rows += [len(positions) + p - first for p in range(max(first, sequence.num_source), stop)]
            positions += range(first, stop)
            slots += [
                sequence.blocks[p // self.block_tokens] * self.block_tokens + p % self.block_tokens
                for p in range(first, stop)
            ]
            starts.append(len(token_ids))
            last_rows.append(len(token_ids) - 1)
            sequence.num_computed = stop
        context_lens = [sequence.num_computed for sequence, _ in advances]
        width = max(len(sequence.blocks) for sequence, _ in advances)
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in advances]
        batch = HostBatch(
            token_ids=np.array(token_ids),
            positions=np.array(positions),
            slots=np.array(slots),
            query_starts=np.array(starts, np.int32),
            context_lens=np.array(context_lens, np.int32),
            block_tables=np.array(tables, np.int32),
            sample_rows=np.array(rows if every_row else last_rows, np.int64),
            max_query_tokens=max(num_tokens for _, num_tokens in advances),
            max_context_tokens=max(context_lens),
            adapters=_adapters(advances),
            state_slots=None if self.model.states is None else np.array([sequence.slot for sequence, _ in advances]),
        )
        if any(sequence.images for sequence, _ in advances):
            batch = with_images(batch, [sequence.images for sequence, _ in advances], computed)
        if any(sequence.num_whole for sequence, _ in advances):
            wholes = np.repeat([sequence.num_whole for sequence, _ in advances], [num for _, num in advances])
            batch = replace(batch, ends=prompt_ends(np.array(positions), wholes))
        if self.model.traits.max_source_tokens:
            batch, _ = split(batch, np.array([sequence.num_source for sequence, _ in advances]))
        on_device = batch.put(lambda array: torch.from_numpy(array).to(self.device))
        adapters = on_device.adapters and on_device.adapters.select(on_device.sample_rows)
        return self.model.logits(self.forward(batch, on_device), adapters).cpu()

    def forward(self, batch: HostBatch, on_device: StepBatch) -> Tensor:
        """The outputs of the rows that the step samples."""
        return self.model.forward(on_device)

    def greedy(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        chunk_tokens: int = 1 << 30,
        sources: list[int] | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt. All prompts run together, each prefilled in chunks while others decode.
        sources: the number of each prompt's leading tokens that are the encoder's, at most a chunk."""
        sequences = [self.sequence(*of_one) for of_one in zip(prompts, sources or [0] * len(prompts), strict=True)]
        while True:
            advances = []
            for sequence, prompt in zip(sequences, prompts, strict=True):
                pending = len(sequence.token_ids) - sequence.num_computed
                if pending and len(sequence.token_ids) - len(prompt) < num_tokens:
                    advances.append((sequence, min(chunk_tokens, pending)))
            if not advances:
                break
            chosen = self.step(advances).float().argmax(-1).tolist()
            for (sequence, _), token_id in zip(advances, chosen, strict=True):
                if sequence.num_computed == len(sequence.token_ids):
                    sequence.token_ids.append(token_id)
        for sequence in sequences:
            self.free(sequence)
        return [sequence.token_ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def _adapters(advances: list[tuple[DrivenSequence, int]]) -> HostAdapters | None:
    loaded: list[Any] = []
    for sequence, _ in advances:
        if sequence.adapter is not None and sequence.adapter not in loaded:
            loaded.append(sequence.adapter)
    indices = [-1 if sequence.adapter is None else loaded.index(sequence.adapter) for sequence, _ in advances]
    of_tokens = np.repeat(np.array(indices), [num_tokens for _, num_tokens in advances])
    return HostAdapters.of(loaded, of_tokens) if loaded else None
