"""Native kernels against torch over grids of shapes, and their guarantee: a row's bits do not depend on other rows."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_builds import build, native_ops
from penstock_server.device.activation import ACTIVATIONS
from penstock_server.device.attention import choose_attention, fp8
from penstock_server.device.attention.fp8 import FP8_DTYPES, KvScales
from penstock_server.device.attention.interface import Alibi, AttentionMask, AttentionShape, StepBatch
from penstock_server.device.native import attention as native
from penstock_server.device.native.ops import NativeActivation, NativeLinear, NativeNorm, NativeOps
from penstock_server.device.ops import NormVariant, PackedNorm
from penstock_server.device.reference.attention import ReferenceAttention
from penstock_server.device.reference.ops import TorchOps
from penstock_server.layers.executor import NativeExecutor
from penstock_server.layers.operation import Add, Attend, Multiply, Norm, Program, Rotate, Select, Write
from penstock_server.layers.step import StepContext
from torch import Tensor

pytestmark = pytest.mark.native

BF16 = torch.bfloat16
VARIANT = NormVariant(1e-5)
VARIANTS = [VARIANT, NormVariant(1e-6, is_wide=True), NormVariant(1e-5, "layer")]
SHAPES = [(1, 1), (17, 3), (48, 64), (100, 31), (576, 576), (960, 576), (130, 1536)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 32, 100, 260]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(BF16)


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return native_ops()


@pytest.fixture(scope="module")
def torch_ops() -> TorchOps:
    return TorchOps()


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_torch(ops: NativeOps, out_features: int, in_features: int, with_bias: bool) -> None:
    weight = random(out_features, in_features, scale=in_features**-0.5)
    bias = random(out_features) if with_bias else None
    packed = ops.pack_linear(weight, bias)
    for rows in ROWS:
        x = random(rows, in_features)
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float() if bias is not None else None)
        assert_near(packed(x), expected)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_linear_row_has_the_same_bits_alone_and_in_a_batch(ops: NativeOps, out_features: int, in_features: int) -> None:
    packed = ops.pack_linear(random(out_features, in_features), None)
    x = random(260, in_features)
    alone = torch.cat([packed(x[row : row + 1]) for row in range(260)])
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), alone[:rows])
    one_thread = native_ops(num_threads=1).pack_linear(random(out_features, in_features), None)
    assert torch.equal(one_thread(x), alone)


class InPieces:
    """A weight that is read some rows at a time, into the same memory."""

    def __init__(self, weight: Tensor, num_rows: int) -> None:
        self.weight, self.num_rows = weight, num_rows
        self.shape, self.dtype = tuple(weight.shape), weight.dtype

    def pieces(self) -> Iterator[Tensor]:
        memory = torch.empty_like(self.weight[: self.num_rows])
        for rows in self.weight.split(self.num_rows):
            yield memory[: len(rows)].copy_(rows)

    def whole(self) -> Tensor:
        return self.weight


@pytest.mark.parametrize("num_rows", [1, 5, 16, 40, 1000])
def test_a_weight_packed_in_pieces_computes_the_same(ops: NativeOps, num_rows: int) -> None:
    for out_features, in_features in SHAPES:
        weight, bias, x = random(2 * out_features, in_features), random(2 * out_features), random(9, in_features)
        pieces = InPieces(weight, num_rows)
        assert torch.equal(ops.pack_linear(pieces, bias)(x), ops.pack_linear(weight, bias)(x))
        assert torch.equal(ops.pack_gate_up(pieces, bias)(x), ops.pack_gate_up(weight, bias)(x))
        assert torch.equal(ops.pack_tied(pieces)[1](torch.arange(2 * out_features)), weight)


def test_linear_accepts_strided_rows_and_no_rows(ops: NativeOps) -> None:
    packed = ops.pack_linear(random(50, 64), None)
    wide = random(9, 200)
    assert torch.equal(packed(wide[:, 64:128]), packed(wide[:, 64:128].contiguous()))
    assert packed(wide[:0, :64]).shape == (0, 50)


@pytest.mark.parametrize(("vocabulary", "hidden"), [(1, 1), (48, 64), (50, 33), (500, 576)])
def test_a_tied_head_looks_up_its_rows(ops: NativeOps, vocabulary: int, hidden: int) -> None:
    weight = random(vocabulary, hidden)
    head, lookup = ops.pack_tied(weight)
    ids = torch.cat([torch.arange(vocabulary), torch.tensor([vocabulary - 1, 0])])
    assert torch.equal(lookup(ids), weight[ids])
    assert lookup(ids[:0]).shape == (0, hidden)
    x = random(2, hidden)
    assert torch.equal(head(x), ops.pack_linear(weight, None)(x))


def test_gate_up_equals_torch(ops: NativeOps) -> None:
    """silu(gate) * up of gate and up as the plain layer rounds them."""
    for dim in (1, 16, 200, 1536):
        weight, bias = random(2 * dim, 96, scale=0.1), random(2 * dim)
        for rows in ROWS:
            x = random(rows, 96)
            gate, up = ops.pack_linear(weight, bias)(x).float().chunk(2, dim=-1)
            assert_near(ops.pack_gate_up(weight, bias)(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dim", [1, 16, 100, 576, 4096])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_norms_equal_torch(ops: NativeOps, torch_ops: TorchOps, variant: NormVariant, dim: int) -> None:
    weight, bias = random(dim), random(dim, scale=0.5) if variant.kind == "layer" else None
    norm, reference = (each.pack_norm(weight, bias, variant) for each in (ops, torch_ops))
    for rows in ROWS:
        x, residual = random(rows, dim), random(rows + 1, dim)[1:].contiguous()
        assert_near(norm(x), reference(x))
        sum_native, sum_torch = residual.clone(), residual.clone()
        assert_near(norm(x, sum_native), reference(x, sum_torch))
        assert torch.equal(sum_native, sum_torch)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("has_own_weights", [False, True])
def test_norms_of_heads_equal_torch(
    ops: NativeOps, torch_ops: TorchOps, variant: NormVariant, has_own_weights: bool
) -> None:
    for heads, dim in ((1, 16), (3, 40), (8, 128)):
        weight = random(heads, dim).float() if has_own_weights else random(dim).float()
        fused = random(20, heads + 4, dim)
        norm = ops.pack_norm(weight, None, variant)
        normed = norm(fused[:, 1 : heads + 1])
        assert_near(normed, torch_ops.norm(fused[:, 1 : heads + 1], weight, None, variant))
        assert torch.equal(torch.cat([norm(row[:, 1 : heads + 1]) for row in fused.split(1)]), normed)


def angles(rotary_dim: int) -> tuple[Tensor, Tensor]:
    table = torch.outer(torch.arange(500.0), 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    return table.cos(), table.sin()


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (80, 20), (256, 256)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_equals_torch(
    ops: NativeOps, torch_ops: TorchOps, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    cos, sin = angles(rotary_dim)
    for rows in ROWS:
        positions = torch.randint(0, 500, (rows,))
        fused = random(rows, 9 + 3 + 3, head_dim)
        expected = fused.clone()
        ops.rotate(fused[:, :9], fused[:, 9:12], cos, sin, positions, interleaved=interleaved)
        torch_ops.rotate(expected[:, :9], expected[:, 9:12], cos, sin, positions, interleaved=interleaved)
        assert torch.equal(fused, expected)


def test_argmax_logprob_equals_torch(ops: NativeOps) -> None:
    for rows, vocab in [(1, 1), (3, 1000), (8, 49152), (2, 4097)]:
        logits = random(rows, vocab, scale=2.0)
        ids, logprobs = ops.argmax_logprob(logits)
        expected = logits.float().log_softmax(-1)
        assert torch.equal(ids, (logits == logits.max(-1, keepdim=True).values).int().argmax(-1))
        torch.testing.assert_close(logprobs, expected.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-4)


def test_argmax_logprob_flags_rows_with_nan() -> None:
    logits = random(3, 5000)
    logits[1, 4999] = float("nan")
    ids, logprobs = native_ops().argmax_logprob(logits)
    assert (ids[1], logprobs[1].isnan()) == (-1, True)
    assert (ids[[0, 2]] >= 0).all()
    assert logprobs[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 31), (4, 1000), (9, 4097), (8, 49152)])
def test_masked_argmax_logprob_equals_masked_logits_bit_for_bit(ops: NativeOps, rows: int, vocab: int) -> None:
    logits = random(rows, vocab, scale=2.0)
    places = np.arange(0, rows, 2)
    rng = np.random.default_rng(vocab)
    # Rows allow from all to a thousandth of the tokens, always the last; masks have more words than the logits need.
    allowed = rng.random((len(places), (vocab // 32 + 3) * 32)) < np.logspace(0, -3, len(places))[:, None]
    allowed[:, vocab - 1] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    masked = logits.clone()
    masked[torch.from_numpy(places)] += torch.from_numpy(np.where(allowed[:, :vocab], 0.0, -np.inf)).to(BF16)
    ids, logprobs = ops.argmax_logprob(logits, places, words)
    expected_ids, expected = ops.argmax_logprob(masked)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(logprobs, expected)
    assert torch.equal(ids, (masked == masked.max(-1, keepdim=True).values).int().argmax(-1))
    reference = masked.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs, reference, rtol=1e-4, atol=1e-4)


def test_masked_argmax_logprob_flags_empty_masks_and_broken_rows() -> None:
    logits = random(4, 5000)
    logits[1, 4999] = float("nan")
    logits[2, 4000] = float("inf")
    words = np.zeros((4, 157), np.int32)
    words[1:, 0] = 1 << 7
    ids, logprobs = native_ops().argmax_logprob(logits, np.arange(4), words)
    assert logprobs[:3].isnan().all()
    assert ids[:3].tolist() == [-1, -1, -1]
    assert (ids[3], logprobs[3]) == (7, 0.0)


class Pages:
    """Sequences whose keys and values are in shuffled blocks of a native and of a reference cache. The last block
    belongs to no sequence."""

    def __init__(
        self,
        shape: AttentionShape,
        lengths: list[int],
        has_sinks: bool = False,
        kv_dtype: torch.dtype | None = None,
        scales: KvScales | None = None,
    ) -> None:
        self.shape = shape
        self.scales = scales
        self.sinks = random(shape.num_heads, scale=2.0) if has_sinks else None
        self.bias = random(shape.num_heads, 2 * 50 + 1, scale=2.0).float() if shape.has_relative_bias else None
        self.source_lens = [min(100, length // 2) for length in lengths]
        self.native = native.NativeAttention(shape, build(), kv_dtype)
        self.reference = ReferenceAttention(shape, torch.device("cpu"), BF16, kv_dtype)
        counts = [-(-length // 16) for length in lengths]
        shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        self.tables = [[shuffled.pop() for _ in range(count)] for count in counts]
        self.others = sum(counts)
        self.caches = [attention.allocate(self.others + 1) for attention in (self.native, self.reference)]
        self.caches[0].view(torch.int8).fill_(-1)  # NaN in every format: makes reads of unwritten slots visible
        self.queries = [random(length, shape.num_heads, shape.head_dim) for length in lengths]
        for sequence, length in enumerate(lengths):
            keys = random(length, shape.num_kv_heads, shape.head_dim)
            values = keys if shape.values_in_keys else random(length, shape.num_kv_heads, shape.output_dim)
            slots = torch.tensor([self.tables[sequence][i // 16] * 16 + i % 16 for i in range(length)])
            self.native.write_kv(self.caches[0], keys, values, slots, scales=scales)
            self.reference.write_kv(self.caches[1], keys, values, slots, scales=scales)

    def batch(self, steps: list[tuple[int, int, int]]) -> tuple[Tensor, StepBatch]:
        """steps: (sequence, number of computed tokens, number of new tokens)"""
        queries = torch.cat([self.queries[s][computed : computed + count] for s, computed, count in steps])
        counts = torch.tensor([0] + [count for _, _, count in steps], dtype=torch.int32)
        context_lens = torch.tensor([computed + count for _, computed, count in steps], dtype=torch.int32)
        width = max(len(table) for table in self.tables)
        tables = torch.tensor(
            [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _, _ in steps], dtype=torch.int32
        )
        for row, (s, computed, _) in enumerate(steps):  # blocks before the first query's window are released
            first, _ = self.shape.mask.interval(torch.tensor([computed]), self.source_lens[s])
            tables[row, : int(first) // 16] = self.others
        empty = torch.empty(0, dtype=torch.int64)
        starts = counts.cumsum(0, dtype=torch.int32)
        batch = StepBatch(
            empty,
            empty,
            empty,
            starts,
            context_lens,
            tables,
            empty,
            int(counts.max()),
            int(context_lens.max()),
            torch.tensor([self.source_lens[s] for s, _, _ in steps], dtype=torch.int32),
        )
        return queries, batch

    def attend(self, steps: list[tuple[int, int, int]]) -> Tensor:
        queries, batch = self.batch(steps)
        metadata = self.native.prepare(batch)
        return self.native.attend(queries, self.caches[0], metadata, self.sinks, self.bias, self.scales)

    def assert_near_reference(self, steps: list[tuple[int, int, int]]) -> None:
        queries, batch = self.batch(steps)
        metadata = self.reference.prepare(batch)
        expected = self.reference.attend(queries, self.caches[1], metadata, self.sinks, self.bias, self.scales)
        assert_near(self.attend(steps), expected)


HEADS = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (6, 2, 80), (2, 1, 256), (2, 1, 512), (3, 3, 100), (2, 2, 5)]


def in_chunks(first: int, end: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, number of tokens) of chunks whose sizes repeat; the last chunk stops at the end."""
    starts = itertools.accumulate(itertools.cycle(sizes), initial=first)
    bounds = [*itertools.takewhile(end.__gt__, starts), end]
    return [(start, stop - start) for start, stop in itertools.pairwise(bounds)]


# The chunk sizes of prompts, and those of a token and its draft.
CUTS = [(50,), (256,), tuple(range(2, 10))]


def assert_drafts_have_the_same_bits(world: Pages, whole: Tensor, begin: int) -> None:
    """Tokens with drafts, across the end of a segment, in a batch with others. whole: the outputs from `begin` on."""
    for num_tokens in range(2, 10):
        first = 256 - num_tokens // 2
        crowd = world.attend([(1, 70, 7), (0, first, num_tokens)] + [(1, 76, 1), (1, 70, 3)] * 10)
        assert torch.equal(crowd[7 : 7 + num_tokens], whole[first - begin : first - begin + num_tokens])


def pages(heads: int, kv_heads: int, head_dim: int, lengths: list[int]) -> Pages:
    return Pages(AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, 16), lengths)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_attention_equals_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    world = pages(heads, kv_heads, head_dim, [1, 16, 17, 130, 600])
    for steps in (
        [(4, 599, 1)],
        [(s, length - 1, 1) for s, length in enumerate([1, 16, 17, 130, 600])],
        [(4, 0, 600)],
        [(0, 0, 1), (3, 37, 93), (2, 16, 1), (4, 250, 20), (1, 3, 13)],
    ):
        world.assert_near_reference(steps)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_attention_row_has_the_same_bits_alone_chunked_and_in_a_batch(heads: int, kv_heads: int, head_dim: int) -> None:
    world = pages(heads, kv_heads, head_dim, [600, 77])
    whole = world.attend([(0, 0, 600)])
    for sizes in [(16,), *CUTS]:
        parts = [world.attend([(0, *chunk)]) for chunk in in_chunks(0, 600, sizes)]
        assert torch.equal(torch.cat(parts), whole)
    for position in (0, 1, 63, 64, 100, 255, 256, 511, 512, 599):
        alone = world.attend([(0, position, 1)])
        assert torch.equal(alone[0], whole[position])
        crowd = world.attend([(1, 70, 7), (0, position, 1)] + [(1, 76, 1)] * 20)
        assert torch.equal(crowd[7], whole[position])
    assert_drafts_have_the_same_bits(world, whole, 0)


SLOPES = (0.5, 0.3, 0.11, 0.07, 0.9, 0.02)
VARIANTS = {
    "window": AttentionShape(6, 2, 64, 0.125, 16, mask=AttentionMask(window=100)),
    "chunk": AttentionShape(6, 2, 64, 0.125, 16, mask=AttentionMask(chunk=150)),
    "window-and-chunk": AttentionShape(6, 2, 64, 0.125, 16, mask=AttentionMask(window=70, chunk=300)),
    "soft-cap": AttentionShape(6, 2, 64, 0.4, 16, soft_cap=2.0),
    "alibi": AttentionShape(6, 2, 64, 0.125, 16, alibi=Alibi(SLOPES)),
    "scaled-alibi": AttentionShape(6, 2, 64, 0.125, 16, alibi=Alibi(SLOPES, is_scaled=True)),
    "falcon-alibi": AttentionShape(6, 2, 64, 0.125, 16, alibi=Alibi(SLOPES, is_scaled=True, is_bfloat16=True)),
    "sinks": AttentionShape(6, 2, 64, 0.125, 16),
    "value-dim": AttentionShape(6, 2, 64, 0.125, 16, value_dim=40),
    "values-in-keys": AttentionShape(16, 1, 72, 0.125, 16, value_dim=64, values_in_keys=True),
    "latent": AttentionShape(6, 1, 576, 0.05, 16, value_dim=512, values_in_keys=True),
    "source": AttentionShape(6, 2, 64, 0.125, 16, mask=AttentionMask(part="source")),
    "answer": AttentionShape(6, 2, 64, 0.125, 16, mask=AttentionMask(part="answer")),
    "bias": AttentionShape(6, 2, 64, 0.125, 16, has_relative_bias=True),
    "source-bias": AttentionShape(6, 2, 24, 1.0, 16, mask=AttentionMask(part="source"), has_relative_bias=True),
    "answer-bias": AttentionShape(6, 2, 24, 1.0, 16, mask=AttentionMask(part="answer"), has_relative_bias=True),
    "all": AttentionShape(6, 2, 64, 0.3, 16, mask=AttentionMask(window=90), soft_cap=9.0, alibi=Alibi(SLOPES)),
}


def assert_near_and_the_same_bits(world: Pages) -> None:
    """Equals the reference, with the same bits in every chunk and in a crowd."""
    begin = world.source_lens[0] if world.shape.mask.part == "answer" else 0
    for steps in ([(0, 599, 1)], [(0, begin, 600 - begin)], [(1, 40, 30), (0, 250, 150), (1, 76, 1)]):
        world.assert_near_reference(steps)
    whole = world.attend([(0, begin, 600 - begin)])
    for sizes in CUTS:
        parts = [world.attend([(0, *chunk)]) for chunk in in_chunks(begin, 600, sizes)]
        assert torch.equal(torch.cat(parts), whole)
    for position in (begin, begin + 1, 127, 128, 150, 255, 256, 599):
        crowd = world.attend([(1, 70, 7), (0, position, 1)] + [(1, 76, 1)] * 20)
        assert torch.equal(crowd[7], whole[position - begin])
    assert_drafts_have_the_same_bits(world, whole, begin)


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_of_every_shape_equals_the_reference_and_has_the_same_bits(name: str) -> None:
    assert native.unsupported_reason(VARIANTS[name]) is None
    assert_near_and_the_same_bits(Pages(VARIANTS[name], [600, 77], has_sinks=name in ("sinks", "all")))


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES)
@pytest.mark.parametrize("name", ["sinks", "scaled-alibi", "value-dim", "latent", "source-bias", "all"])
def test_attention_over_fp8_equals_the_reference_and_has_the_same_bits(name: str, kv_dtype: str) -> None:
    scales = None if name == "sinks" else KvScales(0.7, 0.03)
    has_sinks = name in ("sinks", "all")
    assert_near_and_the_same_bits(Pages(VARIANTS[name], [600, 77], has_sinks, FP8_DTYPES[kv_dtype], scales))


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=str)
def test_every_number_is_stored_in_fp8_as_torch_rounds_it(kv_dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    rows, scales = every.view(-1, 1, 64), KvScales(0.3, 7.0)
    attention = native.NativeAttention(AttentionShape(1, 1, 64, 0.125, 16), build(), kv_dtype)
    cache = attention.allocate(len(rows) // 16)
    attention.write_kv(cache, rows, rows, torch.arange(len(rows)), scales=scales)
    keys, values = cache.view(-1, 2, 16 * 64).unbind(1)
    for stored, scale in zip((keys, values), scales, strict=True):
        expected = fp8.encode(every, kv_dtype, scale)
        assert torch.equal(stored.flatten().sort().values, expected.sort().values)


def test_choice_of_native_attention_over_fp8() -> None:
    shape = AttentionShape(6, 2, 64, 0.125, 16)
    plain, narrow = (choose_attention(shape, torch.device("cpu"), BF16, dtype) for dtype in (None, torch.float8_e5m2))
    assert (narrow.name, 2 * narrow.bytes_per_block()) == ("native", plain.bytes_per_block())
    assert narrow.allocate(3).nbytes == 3 * narrow.bytes_per_block()


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(6, 2, 64, 0.125, 8),
        AttentionShape(6, 2, 1040, 0.125, 16),
        AttentionShape(6, 1, 64, 0.125, 16, value_dim=40, values_in_keys=True),
    ],
    ids=str,
)
def test_unsupported_shapes_use_the_reference(shape: AttentionShape) -> None:
    assert choose_attention(shape, torch.device("cpu"), BF16).name == "reference"


def test_queries_may_be_views_of_a_fused_tensor() -> None:
    world = pages(9, 3, 64, [100])
    queries, batch = world.batch([(0, 60, 40)])
    fused = torch.cat([queries, random(40, 6, 64)], dim=1)
    metadata = world.native.prepare(batch)
    actual = world.native.attend(fused[:, :9], world.caches[0], metadata)
    assert torch.equal(actual, world.native.attend(queries, world.caches[0], metadata))


@dataclass(frozen=True)
class SmallLayer:
    """A Llama layer whose MLP has a size of its own."""

    attention_norm: PackedNorm
    qkv: NativeLinear
    output: NativeLinear
    mlp_norm: PackedNorm
    gate_up: NativeLinear
    down: NativeLinear


@dataclass(frozen=True)
class SmallDecoder:
    attention: native.NativeAttention
    layers: list[SmallLayer]
    final_norm: PackedNorm
    rope: tuple[Tensor, Tensor]
    ops: NativeOps
    scales: KvScales | None = None

    def program(self) -> Program:
        program, attention = Program(96), self.attention
        for layer in self.layers:
            is_last = layer is self.layers[-1]
            for operation in (
                Norm("residual", "normed", layer.attention_norm),
                Multiply("normed", "qkv", layer.qkv),
                Rotate("qkv", "qkv", attention, *self.rope, interleaved=False),
                Write("qkv", "qkv", attention, self.scales),
                Attend("qkv", "attended", attention, scales=self.scales),
                *([Select("residual", "residual", ("attended",))] if is_last else []),
                Multiply("attended", "projected", layer.output),
                Add("projected", "residual"),
                Norm("residual", "normed", layer.mlp_norm),
                Multiply("normed", "activated", layer.gate_up),
                Multiply("activated", "projected", layer.down),
                Add("projected", "residual"),
            ):
                program.append(operation)
        program.output(self.final_norm)
        return program

    def stack(self) -> NativeExecutor:
        return NativeExecutor(self.program(), build())

    def one_by_one(self, residual: Tensor, caches: list[Tensor], step: StepContext) -> Tensor:
        batch = step.batch
        for layer, cache in zip(self.layers, caches, strict=True):
            qkv = layer.qkv(layer.attention_norm(residual)).view(-1, 8, 32)
            self.ops.rotate(qkv[:, :4], qkv[:, 4:6], *self.rope, batch.positions)
            self.attention.write_kv(cache, qkv[:, 4:6], qkv[:, 6:], batch.slots, scales=self.scales)
            metadata = step.metadata[self.attention.name]
            attended = self.attention.attend(qkv[:, :4], cache, metadata, scales=self.scales).flatten(1)
            normed = layer.mlp_norm(layer.output(attended), residual)
            residual += layer.down(layer.gate_up(normed))
        return self.final_norm(residual)[batch.sample_rows]


def small_decoder(ops: NativeOps, mask: AttentionMask, kv_dtype: torch.dtype | None = None) -> SmallDecoder:
    layers = [
        SmallLayer(
            attention_norm=ops.pack_norm(random(96), None, VARIANT),
            qkv=ops.pack_linear(random(8 * 32, 96, scale=0.1), random(8 * 32, scale=0.1)),
            output=ops.pack_linear(random(96, 4 * 32, scale=0.1), None),
            mlp_norm=ops.pack_norm(random(96), None, VARIANT),
            gate_up=ops.pack_gate_up(random(2 * 200 + layer * 100, 96, scale=0.1), None),
            down=ops.pack_linear(random(96, 200 + layer * 50, scale=0.1), None),
        )
        for layer in range(3)
    ]
    attention = native.NativeAttention(AttentionShape(4, 2, 32, 32**-0.5, 16, mask=mask), build(), kv_dtype)
    scales = None if kv_dtype is None else KvScales(0.3, 0.7)
    return SmallDecoder(attention, layers, ops.pack_norm(random(96), None, VARIANT), angles(32), ops, scales)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=70)])
def test_a_stack_of_layers_equals_its_operators(
    ops: NativeOps, mask: AttentionMask, kv_dtype: torch.dtype | None
) -> None:
    decoder = small_decoder(ops, mask, kv_dtype)
    attention, stack = decoder.attention, decoder.stack()
    caches, plain_caches = ([attention.allocate(80) for _ in decoder.layers] for _ in range(2))

    # sequence 0 in blocks 0.., sequence 1 in blocks 40..: chunks, single tokens, and steps that sample nothing
    computed = [0, 0]
    for counts, samples in [((33, 0), []), ((1, 0), [0]), ((250, 64), [249, 313]), ((1, 1), [0, 1]), ((1, 20), [5])]:
        sequences = [s for s in (0, 1) if counts[s]]
        positions = torch.cat([torch.arange(computed[s], computed[s] + counts[s]) for s in sequences])
        slots = torch.cat([torch.arange(computed[s], computed[s] + counts[s]) + 640 * s for s in sequences])
        computed = [computed[s] + counts[s] for s in (0, 1)]
        starts = torch.tensor([0] + [counts[s] for s in sequences], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = StepBatch(
            token_ids=positions,
            positions=positions,
            slots=slots,
            query_starts=starts,
            context_lens=torch.tensor([computed[s] for s in sequences], dtype=torch.int32),
            block_tables=torch.tensor([[s * 40 + i for i in range(40)] for s in sequences], dtype=torch.int32),
            sample_rows=torch.tensor(samples, dtype=torch.int64),
            max_query_tokens=max(counts),
            max_context_tokens=max(computed),
        )
        residual = random(len(positions), 96)
        step = StepContext(batch, {attention.name: attention.prepare(batch)})
        expected = decoder.one_by_one(residual.clone(), plain_caches, step)
        assert torch.equal(stack.run(residual, caches, step), expected)
        assert all(torch.equal(a, b) for a, b in zip(caches, plain_caches, strict=True))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_elementwise_function_depends_on_the_element_only(ops: NativeOps, name: str) -> None:
    """Also for elements at the end of a vector loop of torch, or of a thread's range."""
    function = ops.elementwise(ACTIVATIONS[name])
    for rows, dim in ((1, 1), (7, 33), (100, 1000), (3, 20_001)):
        fused = random(rows, 2 * dim, scale=3.0)
        gate = fused[:, :dim]
        together = function(gate)
        assert together.is_contiguous()
        expected = ACTIVATIONS[name](gate.float()).bfloat16()
        torch.testing.assert_close(together, expected, rtol=2**-7, atol=1e-6)
        assert torch.equal(torch.cat([function(gate[row : row + 1]) for row in range(rows)]), together)
    odd = torch.tensor([[float("inf"), -float("inf"), float("nan"), -0.0, 3e38]]).bfloat16()
    expected = ACTIVATIONS[name](odd.double()).bfloat16()
    torch.testing.assert_close(function(odd), expected, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_a_gate_is_the_activation_times_the_second_half(ops: NativeOps, name: str) -> None:
    activation, gated = ops.elementwise(ACTIVATIONS[name]), ops.gated(ACTIVATIONS[name])
    for rows, dim in ((1, 1), (7, 33), (100, 1000)):
        x = random(rows, 2 * dim, scale=3.0)
        assert torch.equal(gated(x), activation(x[:, :dim]) * x[:, dim:])


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def integers(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def batch_of(
    query_starts: tuple[int, ...] = (0, 1, 3),
    context_lens: tuple[int, ...] = (1, 20),
    tables: tuple[tuple[int, ...], ...] = ((0, 0), (1, 2)),
    source_lens: tuple[int, ...] | None = None,
    ends: tuple[int, ...] | None = None,
) -> object:
    of_tokens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    sources = None if source_lens is None else torch.tensor(source_lens, dtype=torch.int32)
    starts, contexts = (torch.tensor(numbers, dtype=torch.int32) for numbers in (query_starts, context_lens))
    return build().module.Batch(starts, contexts, torch.tensor(tables, dtype=torch.int32), sources, of_tokens)


Call = Callable[[NativeOps], object]


def norm(x: Tensor, width: int = 8) -> Call:
    return lambda ops: ops.pack_norm(zeros(width), None, VARIANT)(x)


def linear(x: Tensor, output: Tensor) -> Call:
    return lambda ops: ops.pack_linear(zeros(4, 8), None).packed.apply(x, output)


def packed_rows(num_rows: int) -> Call:
    """Finishes a weight of 4 rows after `num_rows`."""

    def pack(ops: NativeOps) -> object:
        packing = ops._kernels.linear(4, 8, None, False)
        packing.add_rows(zeros(num_rows, 8))
        return packing.finish()

    return pack


def rotated(keys: Tensor, positions: Tensor, rotary_dim: int = 64) -> Call:
    return lambda ops: ops.rotate(zeros(len(positions), 2, 64), keys, *angles(rotary_dim), positions)


def masked(rows: list[int], num_masks: int, num_words: int) -> Call:
    return lambda ops: ops.argmax_logprob(zeros(2, 40), np.array(rows), np.zeros((num_masks, num_words), np.int32))


# The error, a part of its message, and the call.
REJECTED: dict[str, tuple[type[Exception], str, Call]] = {
    "another object": (
        TypeError,
        "is list, must be a tensor\nwhile processing 'x'",
        lambda ops: ops.pack_norm(zeros(8), None, VARIANT).packed.apply([], zeros(2, 8)),
    ),
    "dtype": (
        TypeError,
        "dtype torch.float32, must be torch.bfloat16\nwhile processing 'x'",
        lambda ops: ops.pack_norm(zeros(8), None, VARIANT).packed.apply(zeros(2, 8).float(), zeros(2, 8)),
    ),
    "dimensions": (TypeError, "has 1 dimensions, must have 2\nwhile processing 'x'", linear(zeros(8), zeros(2, 4))),
    "device": (TypeError, "device meta, must be on the CPU\nwhile processing 'x'", norm(zeros(2, 8).to("meta"))),
    "shape": (ValueError, "x has rows of 1 by 8 elements, which its norm of 7", norm(zeros(2, 8), 7)),
    "residual's shape": (
        ValueError,
        "residual has shape",
        lambda ops: ops.pack_norm(zeros(8), None, VARIANT)(zeros(2, 8), zeros(1, 8)),
    ),
    "rows that are not contiguous": (ValueError, "x has shape", linear(zeros(8, 2).T, zeros(2, 4))),
    "output that is not contiguous": (ValueError, "output has shape", linear(zeros(2, 8), zeros(2, 9)[:, :4])),
    "output that is too small": (ValueError, "output has shape", linear(zeros(2, 8), zeros(1, 4))),
    "features": (ValueError, "x has shape", linear(zeros(2, 7), zeros(2, 4))),
    "bias": (ValueError, "bias has shape", lambda ops: ops.pack_linear(zeros(4, 8), zeros(3))),
    "size of a weight": (ValueError, "a weight cannot", lambda ops: ops._kernels.linear(1 << 40, 1 << 40, None, False)),
    "rows of a weight": (ValueError, "rows has 5 rows, the weight lacks 4", packed_rows(5)),
    "weight that is incomplete": (ValueError, "3 rows were packed", packed_rows(3)),
    "id of an embedding": (ValueError, "ids contains 4", lambda ops: ops.pack_tied(zeros(4, 8))[1](integers(0, 4))),
    "negative id": (ValueError, "ids contains -1", lambda ops: ops.pack_tied(zeros(4, 8))[1](integers(-1))),
    "position": (ValueError, "positions contains 500", rotated(zeros(1, 1, 64), integers(500))),
    "rotary dimensions": (ValueError, "cos has 33 columns", rotated(zeros(1, 1, 64), integers(0), 66)),
    "rows that overlap": (ValueError, "keys has strides", rotated(zeros(1, 1, 64).expand(2, 1, 64), integers(0, 1))),
    "row of a mask": (ValueError, "rows contains 2", masked([2], 1, 2)),
    "words of a mask": (ValueError, "masks has 1 words", masked([0], 1, 1)),
    "number of masks": (ValueError, "masks has shape", masked([0, 1], 1, 2)),
    "first query row": (ValueError, "query_starts is", lambda _: batch_of(query_starts=(1, 1, 3))),
    "descending query rows": (ValueError, "query_starts is", lambda _: batch_of(query_starts=(0, 3, 2))),
    "number of query rows": (ValueError, "query_starts has shape", lambda _: batch_of(query_starts=(0, 3))),
    "context shorter than its queries": (ValueError, "context_lens.1.", lambda _: batch_of(context_lens=(1, 1))),
    "context beyond its block table": (ValueError, "block_tables has 2", lambda _: batch_of(context_lens=(1, 33))),
    "negative block": (ValueError, "block_tables.1. contains -1", lambda _: batch_of(tables=((0, 0), (1, -1)))),
    "too few ends": (ValueError, "ends", lambda _: batch_of(ends=(1,))),
    "an end behind its context": (ValueError, "must ascend up to its context", lambda _: batch_of(ends=(1, 19, 21))),
    "an end before its token": (ValueError, "must ascend up to its context", lambda _: batch_of(ends=(1, 20, 19))),
    "negative source": (ValueError, "source_lens.0. is -1", lambda _: batch_of(source_lens=(-1, 0))),
    "source beyond its block table": (ValueError, "block_tables has 2", lambda _: batch_of(source_lens=(40, 0))),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_wrong_tensor_is_an_error_that_names_it(ops: NativeOps, name: str) -> None:
    error, message, call = REJECTED[name]
    with pytest.raises(error, match=message):
        call(ops)


def test_attention_rejects_what_lies_outside_of_its_cache() -> None:
    attention = native.NativeAttention(AttentionShape(2, 1, 64, 0.125, 16), build())
    cache, keys, queries = attention.allocate(3), random(1, 1, 64), random(3, 2, 64)
    attention.write_kv(cache, keys, keys, integers(47))
    attention.attend(queries, cache, batch_of())
    for slot in (48, -1):
        with pytest.raises(ValueError, match=f"slots contains {slot}, there are 48 slots"):
            attention.write_kv(cache, keys, keys, integers(slot))
    with pytest.raises(ValueError, match="slots has shape"):
        attention.write_kv(cache, keys, keys, integers(1, 2))
    with pytest.raises(ValueError, match="block_tables contains 3, the cache has 3 blocks"):
        attention.attend(queries, cache, batch_of(tables=((0, 0), (1, 3))))
    attention.attend(queries, cache, batch_of(tables=((0, 99), (1, 2))))  # the first sequence has one block
    for wrong in (random(2, 2, 64), random(3, 1, 64), random(3, 2, 48)):
        with pytest.raises(ValueError, match="queries has shape"):
            attention.attend(wrong, cache, batch_of())
    with pytest.raises(ValueError, match="cache has shape"):
        attention.attend(queries, cache[:, 1:], batch_of())
    with pytest.raises(ValueError, match="sinks has shape"):
        attention.attend(queries, cache, batch_of(), zeros(1))
    with pytest.raises(ValueError, match="bias must be given"):
        attention.attend(queries, cache, batch_of(), None, zeros(2, 3))
    for wrong_dtype in (torch.float16, torch.int16):
        with pytest.raises(
            ValueError, match=r"cache has shape .* and dtype (float16|int16), must have .* and bfloat16"
        ):
            attention.attend(queries, cache.view(wrong_dtype), batch_of())
    narrow = native.NativeAttention(attention.shape, build(), torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"cache has shape .* and dtype bfloat16, must have .* and int8"):
        narrow.attend(queries, cache, batch_of())
    with pytest.raises(ValueError, match="must be 1 for a cache that is not in fp8"):
        attention.attend(queries, cache, batch_of(), scales=KvScales(0.5, 1.0))
    with pytest.raises(ValueError, match='kv_dtype is "int8", must be float8_e4m3fn or float8_e5m2'):
        native.NativeAttention(attention.shape, build(), torch.int8)


def test_a_program_rejects_parts_of_ranks_that_do_not_fit(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(build().module.Collective.memory_bytes(2)))
    with memory.open("rb+", buffering=0) as opened:
        collective = build().module.Collective(0, [os.getpid()] * 2, opened.fileno())
    program = build().module.Program(96)
    with pytest.raises(ValueError, match="3 widths for 2 ranks"):
        program.gather(collective, [32, 32, 32], "residual", "gathered")
    with pytest.raises(ValueError, match="Residual has 96 columns, this rank's part of a gather must have 48"):
        program.gather(collective, [48, 48], "residual", "gathered")
    with pytest.raises(ValueError, match="Residual cannot be both"):
        program.gather(collective, [96, 96], "residual", "residual")
    with pytest.raises(ValueError, match="at most 4294967295 columns"):
        program.gather(collective, [96, 2**32 - 96], "residual", "gathered")


def test_a_stack_rejects_what_lies_outside_of_its_tables_and_caches(ops: NativeOps) -> None:
    decoder = small_decoder(ops, AttentionMask())
    attention, stack = decoder.attention, decoder.stack()
    caches = [attention.allocate(num_blocks) for num_blocks in (3, 2, 3)]
    batch = StepBatch(
        token_ids=integers(1, 2),
        positions=integers(0, 499),
        slots=integers(0, 31),
        query_starts=integers(0, 1, 2, dtype=torch.int32),
        context_lens=integers(1, 17, dtype=torch.int32),
        block_tables=torch.tensor([[0, 0], [0, 1]], dtype=torch.int32),
        sample_rows=integers(0, 1),
        max_query_tokens=1,
        max_context_tokens=17,
    )

    def run(batch: StepBatch, residual: Tensor, caches: list[Tensor]) -> Tensor:
        return stack.run(residual, caches, StepContext(batch, {attention.name: attention.prepare(batch)}))

    run(batch, random(2, 96), caches)
    for message, wrong in {
        "positions contains 500": replace(batch, positions=integers(0, 500)),
        "positions has shape": replace(batch, positions=integers(0)),
        "slots contains 32": replace(batch, slots=integers(0, 32)),
        "sample_rows contains 2": replace(batch, sample_rows=integers(0, 2)),
        "sample_rows has 3 rows": replace(batch, sample_rows=integers(0, 1, 1)),
        "block_tables contains 2": replace(batch, block_tables=torch.tensor([[0, 0], [0, 2]], dtype=torch.int32)),
        "has shape": replace(batch, query_starts=integers(0, 1, 3, dtype=torch.int32)),
    }.items():
        with pytest.raises(ValueError, match=message):
            run(wrong, random(2, 96), caches)
    with pytest.raises(ValueError, match="2 caches for 3 layers"):
        run(batch, random(2, 96), caches[:2])


Append = Callable[[NativeOps, Any], object]
"""Appends operations to a native program."""


def small_attention() -> native.NativeAttention:
    return native.NativeAttention(AttentionShape(2, 1, 16, 0.25, 16), build())


def norm_of(ops: NativeOps, dim: int) -> Any:
    norm = ops.pack_norm(zeros(dim), None, VARIANT)
    assert isinstance(norm, NativeNorm)
    return norm.packed


def linear_of(ops: NativeOps, out_features: int, in_features: int) -> Any:
    return ops.pack_linear(zeros(out_features, in_features), None).packed


def gate_of(ops: NativeOps) -> Any:
    gate = ops.gated(torch.sigmoid)
    assert isinstance(gate, NativeActivation)
    return gate.packed


def projected(ops: NativeOps, program: Any, width: int = 64) -> None:
    program.linear(linear_of(ops, width, 32), "residual", "qkv")


# A part of the error, and the operations.
WRONG_PROGRAMS: dict[str, tuple[str, Append]] = {
    "a norm of another size": (
        "Residual has 32 columns, a norm must have 31",
        lambda ops, program: program.norm(norm_of(ops, 31), "residual", "normed"),
    ),
    "a register without value": (
        "Normed is read before it is written",
        lambda ops, program: program.norm(norm_of(ops, 32), "normed", "normed"),
    ),
    "input and output in one place": (
        "Residual cannot be both input and output",
        lambda ops, program: program.linear(linear_of(ops, 32, 32), "residual", "residual"),
    ),
    "a sum of other widths": (
        "Residual has 32 columns, a sum must have 64",
        lambda ops, program: (projected(ops, program), program.add("qkv", "residual")),
    ),
    "too few queries, keys and values": (
        "Qkv has 63 columns, queries, keys and values must have 64",
        lambda ops, program: (projected(ops, program, 63), program.write(small_attention().native)),
    ),
    "norms of more heads than there are": (
        "a norm of 5 groups of 16 does not fit 64 columns",
        lambda ops, program: (
            projected(ops, program),
            program.norm_heads(norm_of(ops, 16), "qkv", 0, 5),
        ),
    ),
    "tables of other sizes": (
        "sin has shape",
        lambda ops, program: (
            projected(ops, program),
            program.rotate(small_attention().native, angles(16)[0], angles(8)[1], False),
        ),
    ),
    "a rotation wider than heads": (
        "cos has 9 columns, must have at most half of the 16 of a head",
        lambda ops, program: (
            projected(ops, program),
            program.rotate(small_attention().native, *angles(18), False),
        ),
    ),
    "queries without factors": (
        "0 factors for 8 positions each",
        lambda ops, program: (
            projected(ops, program),
            program.scale_queries(small_attention().native, torch.zeros(0), 8),
        ),
    ),
    "factors without positions": (
        "1 factors for 0 positions each",
        lambda ops, program: (
            projected(ops, program),
            program.scale_queries(small_attention().native, torch.ones(1), 0),
        ),
    ),
    "heads of more columns than there are": (
        "3 heads do not fit: 16 columns each to 8",
        lambda ops, program: (
            program.reserve("values", 24),
            program.heads([linear_of(ops, 8, 16)] * 3, "residual", "values", 8),
        ),
    ),
    "heads whose results overlap": (
        "2 heads do not fit: 16 columns each to 8, 7 apart",
        lambda ops, program: (
            program.reserve("values", 24),
            program.heads([linear_of(ops, 8, 16)] * 2, "residual", "values", 7),
        ),
    ),
    "a gated layer of a head": (
        "heads do not all have a dense layer",
        lambda ops, program: (
            program.reserve("values", 24),
            program.heads([ops.pack_gate_up(zeros(8, 16), None).packed] * 2, "residual", "values", 8),
        ),
    ),
    "copies to columns that there are not": (
        "Values has 24 columns, not 3 pieces of 8, 9 apart",
        lambda _, program: (
            program.reserve("values", 24),
            program.copy(("residual", 0, 8), ("values", 0, 9), 3, 8),
        ),
    ),
    "copies from columns that there are not": (
        "Residual has 32 columns, not 1 pieces of 8",
        lambda _, program: (
            program.reserve("values", 24),
            program.copy(("residual", 25, 8), ("values", 0, 8), 1, 8),
        ),
    ),
    "attention without a cache": ("attention needs a cache", lambda _, program: program.attend()),
    "attention of sampled rows": (
        "only the sampled rows are left",
        lambda ops, program: (
            projected(ops, program),
            program.write(small_attention().native),
            program.select(["residual", "qkv"]),
            program.attend(),
        ),
    ),
    "a register that was not kept": (
        "Qkv is read before it is written",
        lambda ops, program: (projected(ops, program), program.select(["residual"]), program.scale("qkv", 2.0)),
    ),
    "output for all rows": (
        "the output has sampled rows only",
        lambda ops, program: program.norm(norm_of(ops, 32), "residual", "output"),
    ),
    "a gate of an odd width": (
        "a gate and its factor have 63 columns",
        lambda ops, program: (
            projected(ops, program, 63),
            program.activate(gate_of(ops), "qkv", "activated"),
        ),
    ),
    "no output": (
        "a stack must output 32 columns",
        lambda ops, program: (
            projected(ops, program),
            program.write(small_attention().native),
            program.finish(build().kernels()),
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_a_stack_refuses_operations_that_do_not_fit(ops: NativeOps, name: str) -> None:
    message, append = WRONG_PROGRAMS[name]
    with pytest.raises(ValueError, match=message):
        append(ops, build().module.Program(32))


def test_checks_do_not_depend_on_assertions() -> None:
    program = """
import torch
from penstock_server.device.native.build import find_build
from penstock_server.device.native.ops import NativeOps
build = find_build(torch.device("cpu"), torch.bfloat16)
lookup = NativeOps(build).pack_tied(torch.zeros(4, 8, dtype=torch.bfloat16))[1]
lookup(torch.tensor([4]))
"""
    ran = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True)
    assert "ValueError: ids contains 4, there are 4 rows" in ran.stderr
