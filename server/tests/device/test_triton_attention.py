"""The attention kernels against the reference, on a GPU or in Triton's interpreter; and all kernels compiled for GPUs
without running there.

The interpreter's `tl.dot` is wrong for bfloat16, so there the kernels run in float32 and float16 only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_pages import Pages, Step, random, stored_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.device.attention import choose_attention, fp8, preferred_block_tokens
from penstock_server.device.attention.fp8 import FP8_DTYPES, KvScales
from penstock_server.device.attention.interface import (
    Alibi,
    AttentionMask,
    AttentionShape,
    HeadNorms,
    LatentQueries,
    Latents,
    Rotation,
    StepBatch,
    Transform,
)
from penstock_server.device.ops import NormVariant
from penstock_server.device.reference.attention import ReferenceAttention
from penstock_server.device.reference.ops import TorchOps
from penstock_server.device.triton import device as triton_device
from tested_device import DEVICE, one_order_of_sums, triton_skip_reason
from torch import Tensor
from torch._subclasses import FakeTensorMode

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton.attention import backend
from penstock_server.device.triton.attention.backend import TritonAttention
from penstock_server.device.triton.attention.tile import Tile, key_parts, padded_dim, query_tile

pytestmark = pytest.mark.usefixtures("on_tested_device")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Tile(rows=16, keys=32, split_tokens=64, num_warps=4, num_stages=1)
# (computed tokens, new tokens): a new prompt, decode rows with and without splits, a chunk after a prefix, and a
# sequence without new tokens.
MIXED = [(0, 20), (140, 1), (60, 9), (7, 1), (20, 0)]
DECODE = [(130, 1), (0, 1), (63, 1), (64, 1)]


def make_pages(
    shape: AttentionShape,
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
    tile: Tile | None = SMALL,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> Pages:
    attention = TritonAttention(shape, DEVICE, dtype, tile, kv_dtype)
    return Pages(attention, dtype, lengths, kv_dtype=kv_dtype, **options)


def assert_near_reference(shape: AttentionShape, spans: list[tuple[int, int]], **options: Any) -> None:
    make_pages(shape, [computed + new for computed, new in spans], **options).assert_near_reference(
        [(i, *span) for i, span in enumerate(spans)]
    )


PLAIN = AttentionShape(4, 2, 16, 0.3, 16)
# Query heads, KV heads, head size, block size: groups that are no power of two, that fill a tile and that need several.
SIZES = [
    (4, 4, 16, 16),
    (4, 1, 64, 32),
    (6, 2, 20, 64),
    (7, 1, 5, 16),
    (16, 1, 32, 128),
    (19, 1, 96, 16),
    (3, 3, 80, 32),
    (2, 1, 256, 16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), SIZES)
def test_every_size_computes_the_reference(heads: int, kv_heads: int, head_dim: int, block_tokens: int) -> None:
    assert_near_reference(AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, block_tokens), MIXED)


SLOPES = (0.5, 0.25, 0.1, 0.7)
VARIANTS = {
    "window": replace(PLAIN, mask=AttentionMask(window=5)),
    "window-of-splits": replace(PLAIN, mask=AttentionMask(window=64)),
    "chunk": replace(PLAIN, mask=AttentionMask(chunk=24)),
    "window-and-chunk": replace(PLAIN, mask=AttentionMask(window=9, chunk=40)),
    "soft-cap": replace(PLAIN, soft_cap=0.7),
    "alibi": replace(PLAIN, alibi=Alibi(SLOPES)),
    "scaled-alibi": replace(PLAIN, alibi=Alibi(SLOPES, is_scaled=True)),
    "relative-bias": replace(PLAIN, has_relative_bias=True),
    "sinks": replace(PLAIN, mask=AttentionMask(window=20)),
    "value-dim": replace(PLAIN, value_dim=5),
    "values-in-keys": replace(PLAIN, num_kv_heads=1, value_dim=6, values_in_keys=True),
    "values-are-main-part": replace(PLAIN, num_kv_heads=1, head_dim=36, value_dim=32, values_in_keys=True),
    "latent": AttentionShape(3, 1, 576, 0.05, 64, value_dim=512, values_in_keys=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_the_reference(name: str) -> None:
    assert_near_reference(VARIANTS[name], MIXED, has_sinks=name == "sinks")


@pytest.mark.parametrize("name", ["window-of-splits", "chunk", "sinks", "latent"])
def test_steps_of_decode_rows_compute_the_reference(name: str) -> None:
    assert_near_reference(VARIANTS[name], DECODE, has_sinks=name == "sinks")


@pytest.mark.parametrize("window", [None, 5, 64])
def test_tokens_of_an_image_see_all_of_it(window: int | None) -> None:
    shape = replace(PLAIN, mask=AttentionMask(window=window, sees_spans=True))
    spans = [(0, 20), (140, 1), (60, 90), (7, 1), (20, 0), (90, 11)]
    images = (range(3, 9), range(9, 11), range(62, 100))
    assert_near_reference(shape, spans, images=images)
    assert_near_reference(shape, spans)  # a step without images


def test_alibi_in_bfloat16_rounds_as_the_reference() -> None:
    """Positions beyond 256 are not exact in bfloat16."""
    shape = replace(PLAIN, alibi=Alibi(SLOPES, is_scaled=True, is_bfloat16=True))
    assert_near_reference(shape, [(290, 20), (300, 1)])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("part", ["source", "answer"])
def test_sources_and_answers_compute_the_reference(part: str, has_bias: bool) -> None:
    shape = replace(PLAIN, mask=AttentionMask(part=part), has_relative_bias=has_bias)  # type: ignore[arg-type]
    spans = [(40, 9), (100, 1), (33, 1), (21, 40)]
    assert_near_reference(shape, spans, source_lens=[40, 70, 5, 20])
    if part == "source":  # an encoder's own queries attend to the whole source
        assert_near_reference(shape, [(0, 40), (0, 7)], source_lens=[40, 7])


NARROW_DTYPES = [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "window-and-chunk", "soft-cap", "sinks", "latent"])
def test_narrow_dtypes_compute_the_reference(name: str, dtype: torch.dtype) -> None:
    shape = {"plain": PLAIN, **VARIANTS}[name]
    assert_near_reference(shape, MIXED, dtype=dtype, has_sinks=name == "sinks")


def test_the_tiles_of_a_gpu_compute_the_reference() -> None:
    shape = AttentionShape(4, 1, 64, 0.125, 64)
    assert_near_reference(shape, [(0, 20), (530, 1), (500, 20)], tile=Tile.of(shape, torch.bfloat16))


def test_strided_inputs_are_read_in_place() -> None:
    pages = make_pages(PLAIN, [50])
    queries, batch = pages.batch([(0, 30, 20)])
    wide = torch.cat([random(5, 20, 3, 16), queries], dim=1)[:, 3:]
    metadata = pages.attention.prepare(batch)
    assert torch.equal(pages.attention.attend(wide, pages.caches[0], metadata), pages.attend([(0, 30, 20)]))


@pytest.mark.parametrize("name", ["plain", "value-dim", "values-in-keys", "latent"])
def test_written_rows_are_at_their_slots_and_nothing_else_changes(name: str) -> None:
    shape = {"plain": PLAIN, **VARIANTS}[name]
    attention = TritonAttention(shape, DEVICE, torch.float32)
    cache = attention.allocate(num_blocks=3)
    fused = random(6, 9, 2 * shape.num_kv_heads, shape.head_dim)  # keys and values are views of one tensor
    keys, values = fused.chunk(2, dim=1)
    values = values[..., : shape.output_dim]
    slots = torch.randperm(3 * shape.block_tokens, generator=torch.Generator("cpu").manual_seed(7), device="cpu")[
        :9
    ].to(DEVICE)
    attention.write_kv(cache, keys, values, slots)
    expected = torch.zeros(3 * shape.block_tokens, shape.num_kv_heads, attention.stored_dim)
    expected[slots] = stored_rows(shape, keys, values)
    assert torch.equal(cache.transpose(1, 2).flatten(0, 1), expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(4, 16, 8), (4, 20, 5), (70, 64, 16)])
def test_writing_rotates_queries_in_place_and_keys_as_they_are_stored(
    heads: int, head_dim: int, half: int, is_interleaved: bool
) -> None:
    shape = AttentionShape(heads, 2, head_dim, 1.0, 16, value_dim=7)
    attention = TritonAttention(shape, DEVICE, torch.float32)
    cos, sin = random(1, 30, half), random(2, 30, half)
    positions, slots = torch.tensor([3, 0, 29]), torch.tensor([40, 2, 17])
    fused = random(6, 3, heads + 4, head_dim)
    expected_queries, expected_keys = fused[:, :heads].clone(), fused[:, heads : heads + 2].clone()
    queries, keys, values = fused.split([heads, 2, 2], dim=1)
    cache = attention.allocate(num_blocks=3)
    rotation = Rotation(cos, sin, positions, is_interleaved)
    attention.write_kv(cache, keys, values[..., :7], slots, Transform(queries, rotation=rotation))
    TorchOps().rotate(expected_queries, expected_keys, cos, sin, positions, interleaved=is_interleaved)
    torch.testing.assert_close(queries, expected_queries)
    stored = cache.transpose(1, 2).flatten(0, 1)[slots]
    torch.testing.assert_close(stored, stored_rows(shape, expected_keys, values[..., :7]))


SCALES = KvScales(0.03, 0.7)
LATENTS = {
    "deepseek": (VARIANTS["latent"], 96),
    "deepseek-lite": (VARIANTS["latent"], 0),
    "padded": (AttentionShape(5, 1, 22, 0.3, 16, value_dim=16, values_in_keys=True), 24),
}


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", LATENTS)
def test_latents_are_normed_rotated_and_stored(name: str, kv_dtype: torch.dtype | None) -> None:
    """Rows with a negative slot, which pad recorded steps, are not stored."""
    shape, query_dim = LATENTS[name]
    attention = TritonAttention(shape, DEVICE, torch.float32, kv_dtype=kv_dtype)
    assert attention.latent is not None
    value_dim, half = shape.output_dim, (shape.head_dim - shape.output_dim) // 2
    cos, sin, positions = random(1, 30, half), random(2, 30, half), torch.tensor([3, 0, 29, 0])
    x = random(3, 4, query_dim + shape.head_dim)
    query_weight, weight = random(4, query_dim) if query_dim else None, random(5, value_dim)
    cache, slots = attention.allocate(num_blocks=2), torch.tensor([20, 2, 17, -1])
    latents = Latents(x, query_weight, weight, 1e-6, cos, sin, positions)
    found = attention.latent.write_latents(cache, latents, slots, SCALES)
    ops, variant = TorchOps(), NormVariant(1e-6)
    query_latents, of_keys, rotary = x.split([query_dim, value_dim, 2 * half], dim=1)
    rotary = rotary[:, None].clone()
    ops.rotate(rotary, rotary[:, :0], cos, sin, positions)
    expected = torch.zeros(2 * shape.block_tokens, shape.head_dim)
    expected[slots[:3]] = torch.cat([ops.norm(of_keys, weight, None, variant), rotary[:, 0]], dim=1)[:3]
    stored = cache.flatten(0, 2)
    if kv_dtype is None:
        torch.testing.assert_close(stored, expected)
    else:  # rounded to three bits
        torch.testing.assert_close(fp8.decode(stored, kv_dtype, SCALES.keys), expected, atol=1e-3, rtol=2**-4)
    if query_weight is None:
        assert found is None
    else:
        assert found is not None
        torch.testing.assert_close(found, ops.norm(query_latents, query_weight, None, variant))


@pytest.mark.parametrize("spans", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("name", ["deepseek", "padded"])
def test_queries_in_two_parts_are_rotated_by_their_positions(name: str, spans: list[tuple[int, int]]) -> None:
    shape, _ = LATENTS[name]
    pages = make_pages(shape, [computed + new for computed, new in spans])
    assert pages.attention.latent is not None
    step = [(i, *span) for i, span in enumerate(spans)]
    queries, batch = pages.batch(step)
    absorbed, rotary = queries.split([shape.output_dim, shape.head_dim - shape.output_dim], dim=-1)
    cos, sin = random(1, 200, rotary.shape[-1] // 2), random(2, 200, rotary.shape[-1] // 2)
    parts = LatentQueries(absorbed.contiguous(), rotary.clone(), cos, sin)
    metadata = pages.attention.prepare(batch)
    found = pages.attention.latent.attend_latents(parts, pages.caches[0], metadata)
    positions = torch.cat([torch.arange(computed, computed + new) for computed, new in spans])
    TorchOps().rotate(rotary, rotary[:, :0], cos, sin, positions)
    expected = pages.attention.attend(queries, pages.caches[0], metadata)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


FP8_VARIANTS = ["plain", "window-of-splits", "soft-cap", "sinks", "value-dim", "values-are-main-part", "latent"]


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
@pytest.mark.parametrize("name", FP8_VARIANTS)
def test_an_fp8_cache_computes_the_reference_of_rounded_keys_and_values(name: str, kv_dtype: torch.dtype) -> None:
    shape = {"plain": PLAIN, **VARIANTS}[name]
    assert_near_reference(shape, MIXED, has_sinks=name == "sinks", kv_dtype=kv_dtype, scales=SCALES)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
def test_an_fp8_cache_computes_the_reference_in_narrow_dtypes(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    assert_near_reference(PLAIN, MIXED, dtype=dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
def test_every_number_is_stored_in_fp8_as_torch_rounds_it(kv_dtype: torch.dtype, scale: float) -> None:
    """All numbers of float16, which hold all ties, and large ones; a token of slot -1 is not stored."""
    keys = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.float16).float().view(16, 16, 256)
    values = keys * 1e4
    shape = AttentionShape(16, 16, 256, 1.0, 16)
    attention = TritonAttention(shape, DEVICE, torch.float32, kv_dtype=kv_dtype)
    cache = attention.allocate(num_blocks=1)
    slots = torch.arange(16)
    slots[3] = -1
    attention.write_kv(cache, keys, values, slots, scales=KvScales(scale, scale / 2))
    stored = cache.transpose(1, 2).flatten(0, 1)
    expected = torch.cat([fp8.encode(keys, kv_dtype, scale), fp8.encode(values, kv_dtype, scale / 2)], dim=2)
    expected[3] = 0
    is_nan = expected.view(kv_dtype).float().isnan()  # NaN of either sign
    assert torch.equal(stored.view(kv_dtype).float().isnan(), is_nan)
    assert torch.equal(stored[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW_DTYPES], ids=str)
@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
def test_every_fp8_number_is_read_exactly(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A sequence of one token: its output is the value."""
    attention = TritonAttention(AttentionShape(1, 1, 16, 1.0, 16, value_dim=256), DEVICE, dtype, SMALL, kv_dtype)
    cache = attention.allocate(num_blocks=1)
    bits = torch.arange(256, dtype=torch.int32).to(torch.int8)
    cache[0, 0, 0, 16:] = bits
    ints = torch.zeros(1, dtype=torch.int64)
    batch = StepBatch(ints, ints, ints, torch.tensor([0, 1]).int(), ints.int() + 1, ints.int()[None], ints, 1, 1)
    output = attention.attend(torch.zeros(1, 1, 16, dtype=dtype), cache, attention.prepare(batch))
    torch.testing.assert_close(
        output.flatten(), fp8.decode(bits, kv_dtype, 1.0).to(dtype), equal_nan=True, atol=0, rtol=0
    )


RMS, WIDE, LAYER = NormVariant(1e-5), NormVariant(1e-5, is_wide=True), NormVariant(1e-5, "layer")


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW_DTYPES], ids=str)
@pytest.mark.parametrize("half", [0, 5, 10], ids=["no rope", "partial rope", "rope"])
@pytest.mark.parametrize(
    ("follows_rotation", "clip"),
    [(False, None), (True, None), (False, 0.75)],
    ids=["norm before", "norm after", "clipped, norm before"],
)
@pytest.mark.parametrize(
    ("variant", "weight_shape", "has_bias", "is_whole"),
    [
        (None, None, False, False),
        (RMS, (1, 20), False, False),  # Qwen3, Hunyuan
        (WIDE, (1, 20), False, False),  # Gemma 3
        (WIDE, (6, 20), False, True),  # OLMo 2
        (LAYER, (6, 20), False, False),  # Cohere
        (LAYER, (1, 20), True, False),  # Persimmon
        (LAYER, (6, 20), True, True),
    ],
)
def test_queries_keys_and_values_are_transformed_as_they_are_stored(
    variant: NormVariant | None,
    weight_shape: tuple[int, int] | None,
    has_bias: bool,
    is_whole: bool,
    follows_rotation: bool,
    clip: float | None,
    half: int,
    dtype: torch.dtype,
) -> None:
    shape = AttentionShape(4, 2, 20, 1.0, 16)
    attention, torch_ops = TritonAttention(shape, DEVICE, dtype), TorchOps()
    cos, sin, positions = random(1, 30, half), random(2, 30, half), torch.tensor([3, 0, 29])
    slots = torch.tensor([40, 2, 17])
    # Gemma's weights are float32 for any model.
    of_dtype = torch.float32 if variant is WIDE else dtype
    weights = None if weight_shape is None else random(3, *weight_shape).to(of_dtype)
    biases = random(4, *(weight_shape or ())).to(dtype) if has_bias else None

    def of_heads(parameters: Tensor | None, heads: slice) -> Tensor | None:
        return None if parameters is None else parameters[0] if len(parameters) == 1 else parameters[heads]

    def normed(x: Tensor, heads: slice) -> Tensor:
        weight, bias = of_heads(weights, heads), of_heads(biases, heads)
        if variant is None:
            return x
        if not is_whole:
            return torch_ops.norm(x, weight, bias, variant)
        flat = [None if each is None else each.flatten() for each in (weight, bias)]
        return torch_ops.norm(x.flatten(1), *flat, variant).view(x.shape)

    of_queries, of_keys = slice(0, 4), slice(4, 6)
    qkv = random(6, 3, 8, 20).to(dtype)
    clipped = qkv if clip is None else qkv.clamp(-clip, clip)
    expected = [clipped[:, heads].clone() for heads in (of_queries, of_keys)]
    if not follows_rotation:
        expected = [normed(x, heads) for x, heads in zip(expected, (of_queries, of_keys), strict=True)]
    if half:
        torch_ops.rotate(*expected, cos, sin, positions)
    if follows_rotation:
        expected = [normed(x, heads) for x, heads in zip(expected, (of_queries, of_keys), strict=True)]

    queries, keys, values = qkv.clone().split([4, 2, 2], dim=1)
    cache = attention.allocate(num_blocks=3)
    norms = None
    if variant is not None:
        norms = HeadNorms(
            *(of_heads(parameters, heads) for heads in (of_queries, of_keys) for parameters in (weights, biases)),
            eps=variant.eps,
            is_layer=variant.kind == "layer",
            is_wide=variant.is_wide,
            is_whole=is_whole,
            follows_rotation=follows_rotation,
        )
    rotation = Rotation(cos, sin, positions, False) if half else None
    attention.write_kv(cache, keys, values, slots, Transform(queries, clip, norms, rotation))
    stored_keys, stored_values = cache.transpose(1, 2).flatten(0, 1)[slots].split(20, dim=2)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close([queries, stored_keys], expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(stored_values, clipped[:, 6:])
    assert torch.equal(keys, qkv[:, 4:6])


def test_numbers_that_are_not_clipped_stay_not_a_number() -> None:
    attention = TritonAttention(AttentionShape(2, 1, 16, 1.0, 16), DEVICE, torch.float32)
    qkv = torch.full((1, 4, 16), float("nan"))
    qkv[..., 0], qkv[..., 1] = float("inf"), float("-inf")
    expected = qkv.clamp(-2.0, 2.0)
    queries, keys, values = qkv.split([2, 1, 1], dim=1)
    cache = attention.allocate(num_blocks=1)
    attention.write_kv(cache, keys, values, torch.tensor([5]), Transform(queries, 2.0))
    stored = cache[0, 0, 5].view(2, 16)
    torch.testing.assert_close(torch.cat([queries[0], stored]), expected[0], equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
def test_keys_are_rotated_before_they_are_rounded_to_fp8(kv_dtype: torch.dtype, is_interleaved: bool) -> None:
    shape = AttentionShape(4, 2, 20, 1.0, 16)
    wide, narrow = (TritonAttention(shape, DEVICE, torch.float32, kv_dtype=each) for each in (None, kv_dtype))
    cos, sin = random(1, 30, 5), random(2, 30, 5)
    positions, slots = torch.tensor([3, 0, 29]), torch.tensor([40, 2, 17])
    rows = []
    for attention in (wide, narrow):
        queries, keys, values = random(6, 3, 8, 20).split([4, 2, 2], dim=1)
        cache = attention.allocate(num_blocks=3)
        rotation = Rotation(cos, sin, positions, is_interleaved)
        attention.write_kv(cache, keys, values, slots, Transform(queries, rotation=rotation), SCALES)
        rows.append(cache.transpose(1, 2).flatten(0, 1)[slots])
    expected_keys, expected_values = rows[0].split(20, dim=2)
    found_keys, found_values = rows[1].split(20, dim=2)
    assert torch.equal(found_keys, fp8.encode(expected_keys, kv_dtype, SCALES.keys))
    assert torch.equal(found_values, fp8.encode(expected_values, kv_dtype, SCALES.values))


def test_few_partial_bytes_mean_no_splits_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = make_pages(PLAIN, [150, 40])
    step = [(0, 149, 1), (1, 39, 1)]
    split = pages.attend(step)
    monkeypatch.setattr(backend, "MAX_PARTIAL_BYTES", 0)
    assert torch.equal(pages.attend(step), split)


INVARIANT = {name: VARIANTS[name] for name in ("window", "chunk", "soft-cap", "alibi", "sinks", "values-in-keys")}
LENGTHS = [75, 40]


@cache
def whole_prompts(name: str) -> tuple[Pages, list[Tensor]]:
    """Sequences, and the outputs of all their tokens: each sequence alone, its prompt in one chunk."""
    kv_dtype = torch.float8_e4m3fn if name == "fp8" else None
    shape = {"plain": PLAIN, "fp8": PLAIN, **INVARIANT}[name]
    pages = make_pages(shape, LENGTHS, kv_dtype=kv_dtype, has_sinks=name == "sinks", scales=SCALES)
    return pages, [pages.attend([(sequence, 0, length)]) for sequence, length in enumerate(LENGTHS)]


@settings(max_examples=15, deadline=None)
@given(data=st.data(), name=st.sampled_from(["plain", "fp8", *INVARIANT]))
def test_bits_depend_neither_on_the_batch_nor_on_the_cut(data: st.DataObject, name: str) -> None:
    with one_order_of_sums():
        check_bits(data, *whole_prompts(name))


def check_bits(data: st.DataObject, pages: Pages, alone: list[Tensor]) -> None:
    """alone: the outputs of each sequence, from one step with nothing else."""
    step: Step = []
    for sequence in data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)):  # one sequence may come twice
        computed = data.draw(st.integers(0, LENGTHS[sequence] - 1))
        new = data.draw(st.one_of(st.just(1), st.integers(1, LENGTHS[sequence] - computed)))
        step.append((sequence, computed, new))
    expected = torch.cat([alone[sequence][computed : computed + new] for sequence, computed, new in step])
    assert torch.equal(pages.attend(step), expected)


@given(st.integers(1, 200), st.sampled_from([16, 32, 64]))
def test_query_tiles_cover_a_group(group: int, rows: int) -> None:
    heads, queries = query_tile(group, rows)
    assert 1 <= heads * queries <= rows
    assert heads * -(-group // heads) - group < heads


@given(st.integers(1, 576))
def test_key_parts_cover_a_head(head_dim: int) -> None:
    main, rest = key_parts(replace(PLAIN, head_dim=head_dim))
    assert main + rest >= head_dim
    assert main + rest <= padded_dim(head_dim)


def test_the_first_part_of_a_latent_key_is_its_value() -> None:
    for head_dim, value_dim, parts in ((576, 512, (512, 64)), (20, 16, (16, 16)), (60, 24, (64, 0))):
        shape = AttentionShape(6, 1, head_dim, 0.1, 16, value_dim=value_dim, values_in_keys=True)
        assert key_parts(shape) == parts
        assert (TritonAttention(shape, CPU, torch.float32).latent is None) == (parts[1] == 0)


@pytest.mark.parametrize("spans", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("name", ["window", "alibi", "value-dim", "latent"])
def test_a_step_neither_waits_for_the_device_nor_leaves_it(
    name: str, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors have no data: `.item()` and mixed devices raise."""
    launched: list[str] = []

    def launch(function: Any, grid: tuple[int, int], **arguments: Any) -> None:
        assert all(type(size) is int for size in grid)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        assert all(tensor.device.type == "cuda" for tensor in tensors)
        launched.append(function.fn.__name__)

    monkeypatch.setattr(triton_device, "launch", launch)
    shape, lens = VARIANTS[name], [computed + new for computed, new in spans]
    num_tokens, max_new = sum(new for _, new in spans), max(new for _, new in spans)
    with FakeTensorMode():
        ints = torch.empty(num_tokens, dtype=torch.int64, device=CUDA)
        starts, context_lens = (
            torch.empty(len(spans) + 1, device=CUDA).int(),
            torch.empty(len(spans), device=CUDA).int(),
        )
        tables = torch.empty(len(spans), 10, device=CUDA).int()
        batch = StepBatch(ints, ints, ints, starts, context_lens, tables, ints, max_new, max(lens), context_lens)
        attention = TritonAttention(shape, CUDA, torch.bfloat16, SMALL)
        heads = torch.empty(
            num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=CUDA
        ).bfloat16()
        queries, keys, values = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        cache = attention.allocate(num_blocks=7)
        attention.write_kv(cache, keys, values[..., : shape.output_dim], ints)
        metadata = attention.prepare(batch)
        for _ in range(2):
            output = attention.attend(queries, cache, metadata)
        assert output.shape == (num_tokens, shape.num_heads, shape.output_dim)
    assert launched == ["write_kernel", *["attend_kernel", "reduce_kernel"] * 2]


def test_cuda_devices_get_triton_where_it_supports_the_shape(caplog: pytest.LogCaptureFixture) -> None:
    attention = choose_attention(PLAIN, CUDA, torch.bfloat16)
    assert attention.name == "triton"
    assert attention.preferred_block_tokens == preferred_block_tokens(CUDA, torch.bfloat16) == 64
    assert choose_attention(PLAIN, CPU, torch.float64).name == "reference"
    assert choose_attention(replace(PLAIN, head_dim=257), CUDA, torch.bfloat16).name == "reference"
    assert "heads have 257 elements, at most 256 are supported" in caplog.text
    fp8_attention = choose_attention(PLAIN, CUDA, torch.bfloat16, torch.float8_e5m2)
    assert (fp8_attention.name, 2 * fp8_attention.bytes_per_block()) == ("triton", attention.bytes_per_block())


def test_without_triton_cuda_devices_get_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_device.importlib.util, "find_spec", lambda name: None)
    assert preferred_block_tokens(CUDA, torch.bfloat16) == ReferenceAttention.preferred_block_tokens
    assert choose_attention(PLAIN, CUDA, torch.bfloat16).name == "reference"


def test_block_bytes_are_what_is_allocated() -> None:
    for shape in (PLAIN, *VARIANTS.values()):
        attention = TritonAttention(shape, DEVICE, torch.float16)
        allocated = attention.allocate(num_blocks=5)
        assert allocated.nbytes == 5 * attention.bytes_per_block()
        assert not allocated.any()
        narrow = TritonAttention(shape, DEVICE, torch.float16, kv_dtype=torch.float8_e5m2)
        assert narrow.allocate(num_blocks=5).nbytes == 5 * narrow.bytes_per_block() == allocated.nbytes // 2


PROGRAM = Path(__file__).parents[1] / "programs" / "triton_compile_program.py"
NUM_KERNELS = {  # by case of the program
    "operators": 6,
    "summand": 1,
    **dict.fromkeys(("latent", "float32-latent", "fp8-latent"), 4),
    **dict.fromkeys(("adapters-bfloat16", "adapters-float16", "adapters-float32"), 3),
    "deterministic": 2,
    "deterministic-float32": 2,
    "deterministic-heads": 1,
    "quantized-w8a8-many": 2,
    **{f"routing-{name}": 2 for name in ("deepseek", "qwen", "gpt-oss", "phimoe")},
    **{f"experts-bfloat16-{rows}": 2 for rows in ("few", "some", "more", "many")},
    "experts-float32-few": 1,
}
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # limit of one program, by compute capability
MAX_TENSOR_MEMORY_COLUMNS = 512  # limit of compute capability 10.0; Triton compiles a kernel that needs more to a trap


def test_kernels_compile_and_fit_without_a_gpu() -> None:
    compile_and_check(["64", "128", "whole", "256", "latent", "operators", "summand", "fp8-e4m3fn", "fp8-e5m2"])


def test_deterministic_products_are_one_compilation_for_any_number_of_rows() -> None:
    kernels = compile_and_check(["deterministic", "deterministic-heads", "deterministic-float32"])
    assert all(each["shared_bytes"] <= 99 << 10 and each["stack_bytes"] == 0 for each in kernels), kernels


def test_adapters_are_one_compilation_for_any_number_of_rows() -> None:
    kernels = compile_and_check(["adapters-bfloat16"])
    assert all(each["shared_bytes"] <= 99 << 10 and each["stack_bytes"] <= 16 for each in kernels), kernels


def test_quantized_layers_use_one_kind_of_product_for_any_number_of_rows() -> None:
    assert_one_kind_of_product("gptq")


def test_experts_use_one_kind_of_product_for_any_number_of_rows() -> None:
    kernels = compile_and_check(["routing-deepseek", "experts-bfloat16-few", "experts-bfloat16-many"])
    assert_small_and_one_product(kernels)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_experts_of_every_kind_compile() -> None:
    assert_small_and_one_product(compile_and_check([name for name in NUM_KERNELS if name.startswith("experts-bf")]))
    compile_and_check([name for name in NUM_KERNELS if name.startswith(("routing", "experts-float32"))])


def assert_small_and_one_product(kernels: list[dict[str, Any]]) -> None:
    """Like `assert_one_kind_of_product`, and asserts that kernels fit into shared memory."""
    assert all(each["shared_bytes"] <= 99 << 10 for each in kernels if each["capability"] == 80), kernels
    for name in ("grouped_kernel", "grouped_product_kernel"):
        for capability in MAX_SHARED_BYTES:
            found = [each for each in kernels if (each["kernel"], each["capability"]) == (name, capability)]
            assert len({product for each in found for product in each["products"]}) == 1, found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quantized_layers_of_every_kind_compile() -> None:
    assert_one_kind_of_product("awq", "q4_k", "q6_k", "w8", "fp8", "nf4", "iq4_xs", "mxfp4")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_layers_with_inputs_of_8_bits_compile() -> None:
    kernels = compile_and_check(["quantized-w8a8-few", "quantized-w8a8-many"])
    products = [each for each in kernels if each["kernel"] == "int8_product_kernel"]
    assert all("s8" in name or "i8" in name for each in products for name in each["products"])
    assert all(each["products"] and each["shared_bytes"] <= 99 << 10 for each in products)


def assert_one_kind_of_product(*formats: str) -> None:
    """Its instruction adds up the same features in the same step, whatever the tile, so that tiles give the same
    bits."""
    kernels = compile_and_check([f"quantized-{name}-{rows}" for name in formats for rows in ("few", "many")])
    # Compute capabilities 8.6 and 8.9 run the code of 8.0.
    assert all(each["shared_bytes"] <= 99 << 10 for each in kernels if each["capability"] == 80), kernels
    for capability in MAX_SHARED_BYTES:
        products = [each["products"] for each in kernels if each["capability"] == capability and each["products"]]
        assert len(products) == 2 * len(formats)
        assert len({name for names in products for name in names}) == 1, products


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_variant_compiles_and_fits_without_a_gpu() -> None:
    norms = ["normed", "normed-256", "whole-40", "clipped"]
    variants = ["sinks", "soft-cap", "alibi", "relative-bias", "chunk", "fp8-64", "fp8-256", "fp8-latent"]
    compile_and_check(["adapters-float16", "adapters-float32"])
    compile_and_check(["float16", "float32", "float32-256", "float32-latent", *norms, *variants])


def compile_and_check(names: list[str]) -> list[dict[str, Any]]:
    """The resources of each compiled kernel."""
    path = os.pathsep.join([str(Path(triton_device.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), ",".join(map(str, MAX_SHARED_BYTES)), ",".join(names)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    kernels = [json.loads(line) for line in ran.stdout.splitlines()]
    num_kernels = sum(NUM_KERNELS.get(name, 1 if name.endswith("-many") else 3) for name in names)
    assert len(kernels) == num_kernels * len(MAX_SHARED_BYTES)
    for each in kernels:
        # The bits of a row would depend on its step if different steps launched different kernels.
        assert each["num_compilations"] == 1, each
        assert each["shared_bytes"] <= MAX_SHARED_BYTES[each["capability"]], each
        assert each["tensor_memory_columns"] <= MAX_TENSOR_MEMORY_COLUMNS, each
        # Spilled registers of a thread.
        assert each["stack_bytes"] <= (512 if each["case"].startswith("float32") else 256), each
    return kernels
