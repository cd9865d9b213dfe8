"""The reference attention against torch's scaled_dot_product_attention, over steps of every kind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.device.attention import fp8
from penstock_server.device.attention.fp8 import FP8_DTYPES, KvScales
from penstock_server.device.attention.interface import Alibi, AttentionMask, AttentionShape, StepBatch
from penstock_server.device.reference.attention import ReferenceAttention
from torch import Tensor

CPU = torch.device("cpu")
BLOCK_TOKENS = 4


def make_shape(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, BLOCK_TOKENS)


def make_batch(spans: list[tuple[int, int]]) -> StepBatch:
    """spans: for each sequence, the number of cached and of new tokens. Its blocks are in random order."""
    totals = [seen + new for seen, new in spans]
    counts = [-(-total // BLOCK_TOKENS) for total in totals]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(sum(totals))).tolist()
    tables = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for row, ((seen, new), count) in enumerate(zip(spans, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        slots += [blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(seen, seen + new)]
        positions += range(seen, seen + new)
        starts.append(starts[-1] + new)
    return StepBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(totals, dtype=torch.int32),
        block_tables=tables,
        sample_rows=torch.zeros(0, dtype=torch.int64),
        max_query_tokens=max(new for _, new in spans),
        max_context_tokens=max(totals),
    )


def run(
    spans: list[tuple[int, int]],
    shape: AttentionShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    scales: KvScales | None = None,
) -> tuple[Tensor, Tensor]:
    """The output of paged attention for the new tokens, and that of torch's attention without pages, of keys and values
    as they are stored."""
    generator = torch.Generator().manual_seed(len(spans))

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.head_dim, generator=generator).to(dtype)

    batch = make_batch(spans)
    attention = ReferenceAttention(shape, CPU, dtype, kv_dtype)
    cache = attention.allocate(sum(-(-(seen + new) // BLOCK_TOKENS) for seen, new in spans))
    queries, expected = [], []
    new_keys, new_values = [], []
    for row, (seen, new) in enumerate(spans):
        query = random(new, shape.num_heads)
        keys, values = random(seen + new, shape.num_kv_heads), random(seen + new, shape.num_kv_heads)
        slots = [int(batch.block_tables[row, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(seen)]
        attention.write_kv(cache, keys[:seen], values[:seen], torch.tensor(slots, dtype=torch.int64), scales=scales)
        new_keys.append(keys[seen:])
        new_values.append(values[seen:])
        queries.append(query)
        if kv_dtype is not None:
            keys, values = (
                fp8.decode(fp8.encode(each, kv_dtype, scale), kv_dtype, scale)
                for each, scale in zip((keys, values), scales or KvScales(), strict=True)
            )
        visible = torch.ones(new, seen + new, dtype=torch.bool).tril(diagonal=seen)
        expected.append(
            torch.nn.functional.scaled_dot_product_attention(
                query.float().transpose(0, 1)[None],
                keys.float().transpose(0, 1)[None],
                values.float().transpose(0, 1)[None],
                attn_mask=visible,
                scale=shape.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        )
    attention.write_kv(cache, torch.cat(new_keys), torch.cat(new_values), batch.slots, scales=scales)
    attended = attention.attend(torch.cat(queries), cache, attention.prepare(batch), scales=scales)
    return attended, torch.cat(expected)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 16), (9, 3, 64), (5, 1, 10)])
@pytest.mark.parametrize(
    "spans",
    [[(0, 1)], [(7, 1), (0, 1), (31, 1)], [(0, 13)], [(5, 11), (0, 6)], [(9, 1), (0, 8), (4, 4), (17, 1)], [(3, 300)]],
)
def test_paged_attention_is_attention(spans: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int) -> None:
    actual, expected = run(spans, make_shape(heads, kv_heads, head_dim), torch.float32)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@given(spans=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_mix_of_chunks_and_single_tokens_is_attention(spans: list[tuple[int, int]]) -> None:
    actual, expected = run(spans, make_shape(4, 2, 8), torch.float32)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_softmax_is_in_float32() -> None:
    actual, expected = run([(0, 40), (12, 1)], make_shape(4, 2, 8), torch.bfloat16)
    # Only the result is rounded, by at most half a unit of bfloat16's last bit.
    torch.testing.assert_close(actual.float(), expected, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("scales", [None, KvScales(0.03, 0.7)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("name", FP8_DTYPES)
def test_an_fp8_cache_computes_attention_of_rounded_keys_and_values(name: str, scales: KvScales | None) -> None:
    spans = [(5, 11), (0, 6), (31, 1), (4, 4)]
    actual, expected = run(spans, make_shape(6, 2, 16), torch.float32, FP8_DTYPES[name], scales)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3fn", 448.0), ("fp8_e5m2", 57344.0)])
def test_what_exceeds_the_range_of_fp8_becomes_its_largest_number(name: str, largest: float) -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), -largest, float("nan"), 1.0])
    for scale in (1.0, 0.5):
        stored = fp8.decode(fp8.encode(x, FP8_DTYPES[name], scale), FP8_DTYPES[name], scale)
        limit = largest * scale
        expected = torch.tensor([limit, -limit, limit, -limit, float("nan"), 1.0])
        torch.testing.assert_close(stored, expected, equal_nan=True, atol=0, rtol=0)


def test_an_fp8_block_takes_half_the_bytes() -> None:
    shape = make_shape(6, 2, 16)
    plain = ReferenceAttention(shape, CPU, torch.bfloat16)
    narrow = ReferenceAttention(shape, CPU, torch.bfloat16, torch.float8_e4m3fn)
    assert 2 * narrow.bytes_per_block() == plain.bytes_per_block()
    assert narrow.allocate(num_blocks=3).nbytes == 3 * narrow.bytes_per_block()


VARIANTS = {
    "window": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, mask=AttentionMask(window=5)),
    "chunk": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, mask=AttentionMask(chunk=6)),
    "window-and-chunk": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, mask=AttentionMask(window=4, chunk=6)),
    "soft-cap": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, soft_cap=0.7),
    "alibi": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, alibi=Alibi((0.5, 0.25, 0.1, 0.7))),
    "scaled-alibi": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, alibi=Alibi((0.5, 0.25, 0.1, 0.7), is_scaled=True)),
    "sinks": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS),
    "value-dim": AttentionShape(4, 2, 8, 0.3, BLOCK_TOKENS, value_dim=5),
    "values-in-keys": AttentionShape(4, 1, 8, 0.3, BLOCK_TOKENS, value_dim=6, values_in_keys=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_its_formula(name: str) -> None:
    """Computed query by query in float64, over the keys and values that the mask selects."""
    shape = VARIANTS[name]
    generator = torch.Generator().manual_seed(3)
    length = 300  # more than MAX_QUERY_ROWS
    queries = torch.randn(length, 4, 8, generator=generator)
    keys = torch.randn(length, shape.num_kv_heads, 8, generator=generator)
    values = keys if shape.values_in_keys else torch.randn(length, 2, shape.output_dim, generator=generator)
    sinks = torch.randn(4, generator=generator) if name == "sinks" else None
    attention = ReferenceAttention(shape, CPU, torch.float32)
    cache = attention.allocate(-(-length // BLOCK_TOKENS))
    assert cache.nbytes == cache.shape[0] * attention.bytes_per_block()
    found = []
    for begin, stop in ((0, 4), (4, 299), (299, 300)):
        batch = make_batch([(begin, stop - begin)])
        batch = dataclasses.replace(
            batch,
            slots=torch.arange(begin, stop),
            block_tables=torch.arange(-(-stop // BLOCK_TOKENS), dtype=torch.int32)[None],
        )
        attention.write_kv(cache, keys[begin:stop], values[begin:stop], batch.slots)
        found.append(attention.attend(queries[begin:stop], cache, attention.prepare(batch), sinks))
    expected = [query_result(shape, queries, keys, values, position, sinks) for position in range(length)]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected), atol=1e-5, rtol=1e-5)


def query_result(
    shape: AttentionShape, queries: Tensor, keys: Tensor, values: Tensor, position: int, sinks: Tensor | None
) -> Tensor:
    """[heads, value_dim]"""
    first = 0
    if shape.mask.window is not None:
        first = max(first, position - shape.mask.window + 1)
    if shape.mask.chunk is not None:
        first = max(first, position // shape.mask.chunk * shape.mask.chunk)
    results = []
    for head in range(4):
        kv_head = head * shape.num_kv_heads // 4
        seen = slice(first, position + 1)
        scores = (keys[seen, kv_head].double() @ queries[position, head].double()) * shape.scale
        if shape.soft_cap is not None:
            scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
        if shape.alibi is not None:
            factor = shape.scale if shape.alibi.is_scaled else 1.0
            scores -= shape.alibi.slopes[head] * factor * (position - torch.arange(first, position + 1))
        weights = scores.exp()
        total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
        results.append((weights / total) @ values[seen, kv_head, : shape.output_dim].double())
    return torch.stack(results).float()


def test_block_bytes_are_what_is_allocated() -> None:
    attention = ReferenceAttention(make_shape(6, 2, 16), CPU, torch.bfloat16)
    cache = attention.allocate(num_blocks=5)
    assert cache.nbytes == 5 * attention.bytes_per_block()
    assert not cache.any()
