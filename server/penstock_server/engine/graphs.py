"""Decode steps as recorded graphs of device work: one launch starts what would be hundreds.

A graph is recorded for each bucket: a number of rows and a bound on their contexts. A row is the last token of a
sequence, or a draft token, which runs as a sequence of its own. So drafts need no graphs of their own: a step has at
most as many rows as there may be sequences. A step runs in the smallest bucket that holds it. Rows beyond its own are
padding: the token is not stored, and the context is empty.

INVARIANT: all graphs read the same memory, and run on one stream, in the order of the steps. So the copy of the next
step's inputs into this memory, and its output over the last one's, come after the last step has used them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from penstock_server.engine.host_batch import HostBatch
from penstock_server.engine.sequence import TableLimits
from penstock_server.engine.transfer import Upload
from penstock_server.models.interface import CausalModel

FIRST_CONTEXT_TOKENS = 1024  # size of the least bucket; each of the next holds twice as many
_MEASURED_GRAPHS = 8  # the driver allocates memory in pieces that are larger than a graph

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


def row_buckets(most: int, asked: Sequence[int] = ()) -> list[int]:
    """Numbers of rows, ascending: those asked for, as far as steps can have as many; empty: chosen up to `most`.
    Then padding is less than half, and from 64 on less than a quarter."""
    if asked:
        return sorted({min(size, most) for size in asked if size > 0})
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


def context_buckets(longest: int) -> list[int]:
    """Bounds on the tokens of a context, ascending to `longest`."""
    sizes = [FIRST_CONTEXT_TOKENS]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], longest]


def buckets(limits: TableLimits, asked: Sequence[int] = (), *, has_adapters: bool = False) -> list[Bucket]:
    """The largest first. asked: as of `row_buckets`. has_adapters: also those of steps with adapters, whose
    kernels other steps do not launch."""
    rows, contexts = row_buckets(limits.num_rows, asked), context_buckets(limits.max_sequence_tokens)
    kinds = [True, False] if has_adapters else [False]
    return [Bucket(*kind) for kind in product(reversed(rows), reversed(contexts), kinds)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The decode steps that one graph computes."""

    num_rows: int
    max_context_tokens: int
    has_adapters: bool = False  # whether any sequence may have one

    def pad(self, batch: HostBatch, block_tokens: int) -> HostBatch:
        """A decode step that the bucket holds, with all its rows."""
        sizes = self.num_rows, self.max_context_tokens, block_tokens
        return batch.with_single_rows().padded(*sizes, has_adapters=self.has_adapters)


@dataclass(frozen=True, slots=True)
class Graph:
    replay: Replay
    inputs: Tensor  # [bytes] uint8: the memory of the batch that it reads
    output: Tensor  # [rows of its bucket, hidden]


class StepGraphs:
    """The graphs of a model's decode steps."""

    def __init__(self, model: CausalModel, limits: TableLimits, device: torch.device, record: Recorder) -> None:
        """Without graphs; see `add`. The cache must be allocated, and stay."""
        self._model = model
        self._limits = limits
        self._device = device
        self._record = record
        self._memory: Tensor | None = None  # memory of the inputs
        self._graphs: dict[Bucket, Graph] = {}
        self._rows: list[int] = []
        self._contexts: list[int] = []

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Records these, which must be smaller than earlier ones, so that they find the memory of those."""
        for bucket in buckets:
            batch = bucket.pad(_empty(self._limits), self._limits.block_tokens)
            upload = Upload(self._device, self._memory)
            inputs = batch.put(upload.add)
            upload.start()
            self._memory = upload.memory
            replay, output = self._record(partial(self._model.forward, inputs))
            self._graphs[bucket] = Graph(replay, upload.memory[: upload.num_bytes], output)
        self._rows = sorted({bucket.num_rows for bucket in self._graphs})
        self._contexts = sorted({bucket.max_context_tokens for bucket in self._graphs})

    def __len__(self) -> int:
        return len(self._graphs)

    def bucket(self, batch: HostBatch) -> Bucket | None:
        """The smallest one that holds this step. None: the step is no decode step, or too large."""
        num, context = batch.num_tokens, batch.max_context_tokens
        if not self._graphs or not batch.is_decode or num > self._rows[-1] or context > self._contexts[-1]:
            return None
        rows = self._rows[bisect_left(self._rows, num)]
        return Bucket(rows, self._contexts[bisect_left(self._contexts, context)], batch.adapters is not None)

    def forward(self, bucket: Bucket, inputs: Tensor, num_rows: int) -> Tensor:
        """As the model's, of `num_rows` rows. inputs: the memory of their padded batch, at whose start it was
        put [at least the bytes of the batch] uint8. The output is valid until the next call."""
        graph = self._graphs[bucket]
        graph.inputs.copy_(inputs[: len(graph.inputs)])
        graph.replay()
        return graph.output[:num_rows]


def needed_bytes(graphs: StepGraphs, buckets: Sequence[Bucket], free_bytes: Callable[[], int]) -> int:
    """Estimates the device memory that the graphs of all buckets take, from that of the first few, which it records.
    free_bytes: of the device."""
    start = free_bytes()
    graphs.add(buckets[:1])
    after_first = free_bytes()
    graphs.add(buckets[1 : 1 + _MEASURED_GRAPHS])
    num_more = len(graphs) - 1
    # The largest one brings the memory of temporary tensors, which all share; each has its own list of launches.
    per_graph = max(0, after_first - free_bytes()) / num_more if num_more else 0
    return max(0, start - after_first) + math.ceil(per_graph * (len(buckets) - 1))


def _empty(limits: TableLimits) -> HostBatch:
    longs, ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
    batch = HostBatch(longs, longs, longs, ints, ints, np.zeros((0, 0), np.int32), longs, 1, 0)
    sources = ints if limits.max_source_tokens else None
    return replace(batch, source_lens=sources, state_slots=longs if limits.num_state_slots else None)
