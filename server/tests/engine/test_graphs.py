"""Decode steps that are recorded as graphs, the graph that a step uses, and the memory that is kept for them; with a
recorder that repeats the function itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import record_eagerly
from fake_model import BLOCK_TOKENS, FakeModel, continuation, load_fake
from hypothesis import given
from hypothesis import strategies as st
from late_device import make_late
from penstock_server.engine import Engine, memory
from penstock_server.engine.drafting import ngram
from penstock_server.engine.graphs import Bucket, StepGraphs, buckets, context_buckets, needed_bytes, row_buckets
from penstock_server.engine.host_batch import HostAdapters, HostBatch
from penstock_server.engine.memory import Memory
from penstock_server.engine.sequence import TableLimits
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Sampling
from plans import Advance, listed, plan, step
from torch import Tensor

CPU = torch.device("cpu")
NUM_BLOCKS = 64


class FakeDevice:
    """A GPU as far as graphs see it: which bucket is recorded or replayed, and how much memory that takes."""

    def __init__(self) -> None:
        self.recorded: list[int] = []  # rows of each graph
        self.replayed: list[int] = []
        self.used_bytes = 0

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        replay, output = record_eagerly(run)
        self.used_bytes += 300 if self.recorded else 5000
        self.recorded.append(len(output))
        return lambda: (self.replayed.append(len(output)), replay()), output


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(FakeModel, "traits", replace(FakeModel.traits, is_recordable=True))
    monkeypatch.setattr("penstock_server.engine.start.CudaRecorder", lambda: device.record)
    make_late(monkeypatch)
    return device


def ready(graph_sizes: tuple[int, ...] = (), num_blocks: int = NUM_BLOCKS, *, proven: bool = True) -> Engine:
    engine, _ = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS, dtype="float32"), load_model=load_fake)
    limits = WarmUpConfig(64, 8, num_blocks=num_blocks, proven=proven, graph_sizes=graph_sizes)
    engine.num_blocks = engine.warm_up(limits).num_blocks  # type: ignore[attr-defined]
    return engine


@given(most=st.integers(1, 600), longest=st.integers(1, 200_000))
def test_buckets_ascend_to_the_limits_and_waste_less_than_half(most: int, longest: int) -> None:
    for sizes, limit, first in ((row_buckets(most), most, 1), (context_buckets(longest), longest, 1024)):
        assert sizes == sorted(set(sizes))
        assert sizes[0] == min(first, limit)
        assert sizes[-1] == limit
        assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))


def test_sizes_that_are_asked_for_are_taken() -> None:
    assert row_buckets(128, [8, 1, 0, 8, 32]) == [1, 8, 32]
    assert row_buckets(16, [1, 2, 32, 64]) == [1, 2, 16]


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    """These graphs read an adapter for each row, and the address of an adapter for each sequence."""
    limits, sizes = TableLimits(100, BLOCK_TOKENS, 64, 1000, 64), (2, 8)
    assert len(buckets(limits, sizes, has_adapters=True)) == 2 * len(buckets(limits, sizes)) == 4
    longs, ints = np.arange(2), np.arange(3, dtype=np.int32)
    batch = HostBatch(longs, longs, longs, ints, ints[1:], np.ones((2, 1), np.int32), longs, 1, 2)
    adapters = HostAdapters((), np.array([0, -1]), np.array([1 << 40]))
    padded = Bucket(4, 64, has_adapters=True).pad(replace(batch, adapters=adapters), BLOCK_TOKENS)
    without = Bucket(4, 64, has_adapters=True).pad(batch, BLOCK_TOKENS)
    assert padded.adapters is not None
    assert without.adapters is not None
    assert padded.adapters.of_tokens.tolist() == [0, -1, -1, -1]
    assert padded.adapters.addresses.tolist() == [1 << 40, 0, 0, 0]  # type: ignore[union-attr]
    assert without.adapters.of_tokens.tolist() == [-1] * 4
    assert Bucket(4, 64).pad(batch, BLOCK_TOKENS).adapters is None


def run(engine: Engine, num_sequences: int) -> None:
    """A prompt and a decode step of each."""
    engine.reset()
    ids = range(num_sequences)
    new = [NewSequence(i, [21, 22 + i], 2, 0, [2 * i, 2 * i + 1]) for i in ids]
    engine.step(plan(1, (), new, [Advance(i, 2, sample=True) for i in ids]))
    engine.step(plan(2, advances=[Advance(i, 1, sample=True) for i in ids]))


@pytest.mark.parametrize(
    ("sizes", "replayed"), [((), [1, 4, 8]), ((2, 5), [2, 5]), ((0,), []), ((0, 4), [4, 4])], ids=str
)
def test_a_decode_step_replays_the_smallest_graph_that_holds_it(
    sizes: tuple[int, ...], replayed: list[int], device: FakeDevice
) -> None:
    """A step with a prompt, and one with more sequences than the largest graph, replay none."""
    engine = ready(sizes)
    device.replayed.clear()
    for num_sequences in (1, 3, 7):
        run(engine, num_sequences)
    assert device.replayed == replayed


def test_a_step_with_drafts_replays_the_graph_of_as_many_rows(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of one sequence, right or wrong, and one of another."""
    engine = ready((2, 4, 8))
    prompt = [21, 22]
    expected = continuation(prompt, 8)
    for draft, num_tokens in ((expected[1:3], 4), ([5, 6], 2)):
        engine.reset()
        monkeypatch.setattr(ngram, "continuation", lambda history, most, draft=draft: np.array(draft[:most], np.int32))
        new = [NewSequence(i, prompt, 2, 0, [4 * i + block for block in range(4)]) for i in range(2)]
        found = listed(engine.step(plan(1, (), new, [Advance(i, 2, sample=True) for i in range(2)])).sampled)
        device.replayed.clear()
        advances = [Advance(0, 1, sample=True), Advance(1, 1, sample=True, num_draft_tokens=2)]
        result = engine.step(plan(2, advances=advances))
        assert device.replayed == [4]
        assert result.sequence_ids.tolist() == [0] + [1] * (num_tokens - 1)
        tokens = [token.id for token in (*found, *listed(result.sampled))]
        assert tokens == [expected[0]] * 2 + expected[1:2] + expected[1:num_tokens]


def test_a_prompt_whose_rows_are_all_outputs_replays_a_graph(device: FakeDevice) -> None:
    found = []
    for sizes, replayed in (((2, 4), [4]), ((0,), [])):
        engine = ready(sizes)
        device.replayed.clear()
        new = NewSequence(1, [21, 22, 23], 3, 0, range(3), Sampling(prompt_logprobs=True, top_n=2))
        found.append(step(engine, plan(1, (), [new], [Advance(1, 3, sample=True)])))
        assert device.replayed == replayed
    assert found[0] == found[1]


def test_tokens_become_sequences_whose_contexts_end_with_them() -> None:
    longs, ints = np.arange(5), np.array([0, 1, 5], np.int32)
    tables = np.array([[7, 0], [8, 9]], np.int32)
    sources = np.array([3, 2], np.int32)
    batch = HostBatch(longs, longs, longs, ints, np.array([9, 12], np.int32), tables, longs, 4, 12, sources)
    single = batch.with_single_rows()
    assert single.context_lens.tolist() == [9, 9, 10, 11, 12]
    assert single.query_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert single.block_tables.tolist() == [[7, 0]] + [[8, 9]] * 4
    assert single.source_lens is not None
    assert single.source_lens.tolist() == [3, 2, 2, 2, 2]
    assert single.max_query_tokens == 1
    for name in ("query_starts", "context_lens", "block_tables", "source_lens"):
        assert getattr(single, name).dtype == np.int32, "kernels are compiled for these"
    assert single.with_single_rows() is single


@pytest.mark.parametrize("proven", [False, True])
def test_graphs_are_recorded_by_a_first_group_and_by_one_that_replaces_it(proven: bool, device: FakeDevice) -> None:
    engine = ready((2, 4), proven=proven)
    assert device.recorded == [4, 2] * (1 if proven else 2), "the first group measures them before"
    run(engine, 3)
    assert device.replayed[-1] == 4


def test_the_memory_of_all_graphs_follows_from_a_few(device: FakeDevice) -> None:
    model = FakeModel()
    model.allocate_cache(1)
    limits = TableLimits(100, BLOCK_TOKENS, 64, 5000, 64)
    of_steps = buckets(limits)
    graphs = StepGraphs(model, limits, CPU, device.record)
    assert needed_bytes(graphs, of_steps, lambda: 1_000_000 - device.used_bytes) == 5000 + 300 * (len(of_steps) - 1)
    assert len(graphs) == len(device.recorded) == 9, "the others are not recorded for this"
    one = StepGraphs(model, limits, CPU, FakeDevice().record)
    assert needed_bytes(one, of_steps[:1], lambda: 7) == 0


def test_the_kv_pool_leaves_room_for_graphs(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.MemoryMeter, "measure", lambda self, releasing=0: Memory(1 << 30, 1 << 30, 0))
    monkeypatch.setattr(memory, "default_cap_bytes", lambda longest_bytes: 1 << 40)
    found = []
    for taken in (0, 800 << 20):
        monkeypatch.setattr("penstock_server.engine.start.needed_bytes", lambda *arguments, taken=taken: taken)
        monkeypatch.setattr(FakeModel, "kv_bytes_per_block", 1 << 16)
        found.append(ready((1,), num_blocks=0, proven=False).num_blocks)  # type: ignore[attr-defined]
    # Half of what is available, or what the steps leave.
    assert found[0] == (1 << 29) >> 16
    assert 0 < found[1] <= (224 << 20) >> 16
