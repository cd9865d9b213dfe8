"""Decode steps as recorded graphs of device work: one launch starts what would be hundreds.

A graph is recorded for each bucket: a number of sequences and a bound on their contexts. A step runs in the smallest
bucket that holds it. Rows beyond its own are padding: the token is not stored, and the context is empty.

INVARIANT: all graphs read the same buffers, and run on one stream, in the order of the steps. So the copies of the next
step into these buffers, and its output over the last one's, come after the last step has used them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from penstock_server.attention.interface import StepBatch
from penstock_server.engine.sequence import TableLimits
from penstock_server.models.interface import CausalModel

FIRST_CONTEXT_TOKENS = 1024  # of the least bucket; each of the next holds twice as many

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Runs a function that enqueues device work, and returns what repeats this work, and the tensor of its result, which
each repetition overwrites."""


class CudaRecorder:
    """Records CUDA graphs, which share the memory of their temporary tensors."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        run()  # compiles kernels, and makes libraries allocate what they keep
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate pinned memory meanwhile, which is not of this recording's concern.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output


def sequence_buckets(most: int) -> list[int]:
    """Numbers of sequences, ascending to `most`. Padding is less than half, and from 64 on less than a quarter."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


def context_buckets(longest: int) -> list[int]:
    """Bounds on the tokens of a context, ascending to `longest`."""
    sizes = [FIRST_CONTEXT_TOKENS]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], longest]


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Replay
    output: Tensor  # [sequences of its bucket, hidden]


class StepGraphs:
    """The graphs of a model's decode steps."""

    def __init__(self, model: CausalModel, limits: TableLimits, device: torch.device, record: Recorder) -> None:
        """Records all of them, the largest first, so that the others find its memory. The cache must be allocated."""
        self._model = model
        self._sequences = sequence_buckets(limits.num_rows)
        self._contexts = context_buckets(limits.max_sequence_tokens)
        longs = partial(torch.zeros, limits.num_rows, dtype=torch.int64, device=device)
        max_blocks = -(-limits.max_sequence_tokens // limits.block_tokens)
        self._buffers = StepBatch(
            token_ids=longs(),
            positions=longs(),
            slots=longs().fill_(-1),
            query_starts=torch.arange(limits.num_rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(limits.num_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(limits.num_rows, max_blocks, dtype=torch.int32, device=device),
            sample_rows=torch.arange(limits.num_rows, device=device),
            max_query_tokens=1,
            max_context_tokens=limits.max_sequence_tokens,
        )
        self._graphs: dict[tuple[int, int], Graph] = {}
        for bucket in product(reversed(self._sequences), reversed(self._contexts)):
            self._graphs[bucket] = Graph(*record(partial(model.forward, self._part(*bucket))))

    def __len__(self) -> int:
        return len(self._graphs)

    def forward(self, batch: StepBatch) -> Tensor:
        """As the model's. The output is valid until the next call."""
        num = batch.context_lens.shape[0]
        is_decode = batch.max_query_tokens == 1 and batch.sample_rows.shape[0] == num
        if not is_decode or num > self._sequences[-1] or batch.max_context_tokens > self._contexts[-1]:
            return self._model.forward(batch)
        size = self._sequences[bisect_left(self._sequences, num)]
        context = self._contexts[bisect_left(self._contexts, batch.max_context_tokens)]
        buffers = self._buffers
        for buffer, value in (
            (buffers.token_ids, batch.token_ids),
            (buffers.positions, batch.positions),
            (buffers.slots, batch.slots),
            (buffers.context_lens, batch.context_lens),
            (buffers.block_tables[:, : batch.block_tables.shape[1]], batch.block_tables),
        ):
            buffer[:num].copy_(value)
        if num < size:
            buffers.slots[num:size].fill_(-1)
            buffers.context_lens[num:size].zero_()
        graph = self._graphs[size, context]
        graph.replay()
        return graph.output[:num]

    def _part(self, num_sequences: int, max_context_tokens: int) -> StepBatch:
        """The buffers' rows of a bucket."""
        buffers = self._buffers
        return StepBatch(
            token_ids=buffers.token_ids[:num_sequences],
            positions=buffers.positions[:num_sequences],
            slots=buffers.slots[:num_sequences],
            query_starts=buffers.query_starts[: num_sequences + 1],
            context_lens=buffers.context_lens[:num_sequences],
            block_tables=buffers.block_tables[:num_sequences],
            sample_rows=buffers.sample_rows[:num_sequences],
            max_query_tokens=1,
            max_context_tokens=max_context_tokens,
        )
