"""What adapters add to layers on GPUs: Triton's kernels against torch, on a GPU or in Triton's interpreter.

The interpreter's `tl.dot` is wrong for bfloat16, so there the kernels run in float32 and float16 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tested_device import DEVICE, one_order_of_sums, triton_skip_reason
from torch import Tensor

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton import low_rank as triton_low_rank
from penstock_server.device.triton.low_rank import DeviceAdapter, ExpertPairs, LowRankSum, PlainPart

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}
DTYPES = [dtype for dtype in TOLERANCE if DEVICE.type == "cuda" or dtype != torch.bfloat16]
MAX_RANK, MAX_ADAPTERS = 40, 3


@pytest.fixture(autouse=True, scope="module")
def with_one_order() -> Iterator[None]:
    with one_order_of_sums():
        yield


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(dtype)


def make_parts(
    seed: int, ranks: tuple[int | None, ...], columns: tuple[int, ...], depth: int, dtype: torch.dtype
) -> list[PlainPart | None]:
    """The parts of a layer. ranks: None: the adapter has nothing for this part."""
    return [
        None
        if rank is None
        else PlainPart(
            random(seed + part, rank, depth, dtype=dtype) / depth**0.5,
            random(seed + 10 * part, width, rank, dtype=dtype),
            0.3 + seed,
        )
        for part, (rank, width) in enumerate(zip(ranks, columns, strict=True))
    ]


class Layer:
    """The second of two layers, and three adapters for it."""

    def __init__(self, columns: tuple[int, ...], depth: int, dtype: torch.dtype) -> None:
        ranks = [tuple([rank, None, 3][:: 1 if rank > 5 else -1][: len(columns)]) for rank in (1, 8, MAX_RANK)]
        of_first = make_parts(7, (4,), (8,), 16, dtype)
        self.parts = [make_parts(seed, each, columns, depth, dtype) for seed, each in enumerate(ranks)]
        self.adapters = [DeviceAdapter.pack([*of_first, *parts], dtype, DEVICE) for parts in self.parts]
        ends = torch.tensor(columns).cumsum(0).tolist()
        self.columns = [range(end - width, end) for end, width in zip(ends, columns, strict=True)]
        self.sum = LowRankSum.of(1, self.columns, MAX_RANK, MAX_ADAPTERS, DEVICE)
        self.tables = torch.tensor([adapter.address for adapter in self.adapters], device=DEVICE)

    def apply(self, x: Tensor, y: Tensor, of_rows: list[int]) -> Tensor:
        result = y.to(DEVICE, copy=True)
        self.sum.add(x.to(DEVICE), result, torch.tensor(of_rows, device=DEVICE), self.tables)
        return result.cpu()

    def reference(self, x: Tensor, y: Tensor, of_rows: list[int]) -> Tensor:
        result = y.to(torch.float32, copy=True)
        for row, adapter in enumerate(of_rows):
            for columns, part in zip(self.columns, self.parts[adapter] if adapter >= 0 else [], strict=False):
                if part is not None:
                    added = part.up.float() @ (part.down.float() @ x[row].float())
                    result[row, columns.start : columns.stop] += part.scale * added
        return result.to(y.dtype)


ROWS = {
    "one": [1],
    "none": [-1, -1],
    "runs": [-1, 0, 0, 2, 1, -1, 1],
    "unsorted": [2, 0, 2, -1, 0, 1, 2],
    "tiles": [0] * 40 + [-1] * 3 + [2] * 30,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("columns", "depth"), [((200, 16, 130), 72), ((30,), 700), ((128, 128), 1100)])
def test_sums_equal_torch(name: str, columns: tuple[int, ...], depth: int, dtype: torch.dtype) -> None:
    layer, of_rows = Layer(columns, depth, dtype), ROWS[name]
    x, y = random(1, len(of_rows), depth, dtype=dtype), random(2, len(of_rows), sum(columns), dtype=dtype)
    found = layer.apply(x, y, of_rows)
    torch.testing.assert_close(found, layer.reference(x, y, of_rows), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    without = [row for row, adapter in enumerate(of_rows) if adapter < 0]
    assert torch.equal(found[without], y[without])


@cache
def bits_alone() -> tuple[Layer, Tensor, Tensor, dict[tuple[int, int], Tensor]]:
    """A layer, its inputs and products, and the result of each row with each adapter as the only row."""
    layer, x, y = Layer((30, 40), 700, torch.float32), random(1, 3, 700), random(2, 3, 70)
    rows = [(row, adapter) for row in range(3) for adapter in range(-1, 3)]
    return layer, x, y, {row: layer.apply(x[row[0], None], y[row[0], None], [row[1]]) for row in rows}


@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=36),
    max_partial_bytes=st.sampled_from([0, 1 << 30]),
)
def test_a_row_has_the_same_bits_in_every_batch(rows: list[tuple[int, int]], max_partial_bytes: int) -> None:
    """At any place among any others, with a program for each split, or one for all."""
    layer, x, y, alone = bits_alone()
    inputs = [row for row, _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_low_rank, "_MAX_PARTIAL_BYTES", max_partial_bytes)
        found = layer.apply(x[inputs], y[inputs], [adapter for _, adapter in rows])
    assert torch.equal(found, torch.cat([alone[row] for row in rows]))


@pytest.mark.parametrize("is_by_pair", [False, True], ids=["rows", "pairs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pair_gets_the_product_of_its_expert_and_adapter(dtype: torch.dtype, is_by_pair: bool) -> None:
    """Experts 2 to 4 are on this rank. An adapter has a part for each half of an expert's columns, and two parts of
    another layer follow those of each expert."""
    mine, depth, columns = range(2, 5), 70, [range(24), range(24, 40)]
    of_expert = [
        [make_parts(9 * adapter + expert, (5, 3), (24, 16), depth, dtype) for expert in mine] for adapter in range(2)
    ]
    other = make_parts(50, (4, 4), (8, 8), 16, dtype)
    adapters = [
        DeviceAdapter.pack([*other, *(part for parts in each for part in (*parts, *other))], dtype, DEVICE)
        for each in of_expert
    ]
    tables = torch.tensor([adapter.address for adapter in adapters], device=DEVICE)
    of_tokens = torch.tensor([0, 0, -1, 1, 1, 0, 1] * 6)
    experts = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(row))[:2] for row in range(42)])
    x, y = random(1, 84 if is_by_pair else 42, depth, dtype=dtype), random(2, 84, 40, dtype=dtype)
    found = y.to(DEVICE, copy=True)
    pairs = ExpertPairs.of(experts.int().to(DEVICE), mine, of_tokens.to(DEVICE), tables)
    LowRankSum.of(2, columns, MAX_RANK, MAX_ADAPTERS, DEVICE, 4).add_of_experts(x.to(DEVICE), found, pairs)
    expected = y.to(torch.float32, copy=True)
    for pair, expert in enumerate(experts.flatten().tolist()):
        adapter = int(of_tokens[pair // 2])
        if adapter >= 0 and expert in mine:
            row = x[pair if is_by_pair else pair // 2].float()
            for its, part in zip(columns, of_expert[adapter][expert - mine.start], strict=True):
                assert part is not None
                expected[pair, its.start : its.stop] += part.scale * (part.up.float() @ (part.down.float() @ row))
    torch.testing.assert_close(found.cpu(), expected.to(dtype), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_heads_are_read_and_written_in_place() -> None:
    """Each part of latent attention's projections has an input and a result of its own."""
    parts = make_parts(1, (8, 8, 8), (20, 20, 20), 12, torch.float32)
    adapter, tables = DeviceAdapter.pack(parts, torch.float32, DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    tables.fill_(adapter.address)
    x, y = random(1, 5, 3 * 12 + 4).to(DEVICE)[:, : 3 * 12].unflatten(1, (3, 12)), torch.zeros(5, 3, 30, device=DEVICE)
    low_rank = LowRankSum.of(0, [range(20)] * 3, 8, 1, DEVICE)
    low_rank.add(x, y[..., :20], torch.tensor([0, 0, -1, 0, 0], device=DEVICE), tables)
    for head, part in enumerate(parts):
        assert part is not None
        expected = part.scale * x[:, head].cpu() @ part.down.t() @ part.up.t()
        expected[2] = 0.0
        torch.testing.assert_close(y[:, head, :20].cpu(), expected, atol=1e-4, rtol=1e-4)
    assert not y[..., 20:].any()


def test_many_rows_are_added_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, y = Layer((30,), 72, torch.float32), random(1, 70, 72), random(2, 70, 30)
    whole = layer.apply(x, y, [1] * 70)
    monkeypatch.setattr(triton_low_rank, "WORKSPACE_BYTES", 4 * 48 * 33)
    assert torch.equal(layer.apply(x, y, [1] * 70), whole)


def test_no_row_is_no_launch() -> None:
    layer = Layer((30,), 72, torch.float32)
    assert layer.apply(random(1, 0, 72), random(2, 0, 30), []).shape == (0, 30)
