"""Triton kernels of paged attention: `attend_kernel`, and `reduce_kernel`, which merges its splits.

INVARIANT: a query's context is cut into splits at fixed positions, and each split into key tiles at fixed positions. A
split starts from an empty softmax state, and the splits are merged in ascending order by `_merge`, whether one program
computes them in a loop or one program computes each. Tiles that a query does not attend to leave its state unchanged.

Scores are kept in units of log2, since exp2 is the hardware's exponential.
"""

import triton
import triton.language as tl

from penstock_server.device.triton.fp8 import decode

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _interval(position, source_len, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):
    """`AttentionMask.interval`. WINDOW, CHUNK: 0 for none."""
    zero = position * 0
    if PART == "source" and WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0), tl.minimum(position + WINDOW, source_len)
    if PART == "source":
        return zero, zero + source_len
    first = zero
    if PART == "answer":
        first += source_len
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    return first, position + 1


@triton.jit
def _merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """Merges two softmax states: maxima and sums [rows], unnormalized outputs [rows, dim]. Merging an empty state
    (maximum -inf, zeros) is exact. The explicit fma gives the same bits in every kernel."""
    top = tl.maximum(max_a, max_b)
    anchor = tl.where(top == MINUS_INFINITY, 0.0, top)
    scale_a, scale_b = tl.exp2(max_a - anchor), tl.exp2(max_b - anchor)
    wide_b = tl.broadcast_to(scale_b[:, None], acc_b.shape)
    return top, tl.fma(sum_b, scale_b, sum_a * scale_a), tl.fma(acc_b, wide_b, acc_a * scale_a[:, None])


@triton.jit
def _normalize(top, total, acc, sinks, heads, is_valid, value_scale, dtype: tl.constexpr):
    """The output [rows, dim] of a softmax state, after the sinks of the rows' heads took part in it. The explicit fma
    gives the same bits in every kernel."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_valid, other=0.0).to(tl.float32)
        anchor = tl.maximum(top, sink * LOG2_E)
        decay = tl.exp2(top - anchor)
        total = tl.fma(total, decay, tl.exp2(tl.fma(sink, tl.full(sink.shape, LOG2_E, tl.float32), -anchor)))
        acc = acc * decay[:, None]
    return (acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale).to(dtype)


@triton.jit
def _round_to_bfloat16(x):
    """float32 → the nearest bfloat16, as float32; ties to even. Written out because the interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load_rows(pointers, is_row, columns, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """[rows, WIDTH]: the first DIM elements behind each pointer, then zeros; zeros for rows that are not `is_row`."""
    mask = is_row[:, None]
    if WIDTH != DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load_cached(
    pointers, is_row, columns, dtype: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr
):
    """`_load_rows` of a cache, as the operands of a product with `dtype`."""
    rows = _load_rows(pointers, is_row, columns, WIDTH, DIM)
    if FORMAT != "":
        rows = decode(rows, dtype, FORMAT)
    return rows


@triton.jit
def _load_rotated(pointers, is_row, columns, cos, sin, dtype: tl.constexpr, DIM: tl.constexpr):
    """`_load_rows`, rotated; the pairs are in halves. cos, sin: pointers to the DIM // 2 numbers of each row."""
    half: tl.constexpr = DIM // 2
    is_first = columns < half
    mask = is_row[:, None] & (columns < DIM)[None, :]
    x = tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.where(is_first, columns + half, columns - half)
    y = tl.load(pointers[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    pair = tl.where(is_first, columns, columns - half)
    c = tl.load(cos[:, None] + pair[None, :], mask=mask, other=0.0)
    s = tl.load(sin[:, None] + pair[None, :], mask=mask, other=0.0)
    return (x * c + y * tl.where(is_first[None, :], -s, s)).to(dtype)


# What differs between steps must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["num_tiles", "num_sequences", "num_splits", "table_stride", "has_ends"],
    do_not_specialize_on_alignment=[
        "block_tables",
        "query_starts",
        "context_lens",
        "source_lens",
        "ends",
        "tile_sequences",
        "tile_queries",
    ],
)
def attend_kernel(
    output,  # [tokens, HEADS, VALUE_DIM]
    partial_acc,  # [sequences, HEADS, num_splits, VALUE_DIM] float32: unnormalized outputs of each split
    partial_stats,  # [sequences, HEADS, num_splits, 2] float32: maximum and sum of each split
    queries,  # [tokens, HEADS, HEAD_DIM], or MAIN_DIM elements if there is a rotary part
    rotary,  # [tokens, HEADS, HEAD_DIM - MAIN_DIM], rotated when it is read; None: queries are whole
    cos,  # [positions, (HEAD_DIM - MAIN_DIM) // 2] float32 or None
    sin,  # the same
    cache,  # [blocks, KV heads, BLOCK_TOKENS, STORED_DIM]
    block_tables,  # [sequences, max blocks]
    query_starts,  # [sequences + 1]
    context_lens,  # [sequences]
    source_lens,  # [sequences] or None
    ends,  # [tokens]: the end of what each token attends to; None: of a mask that does not read them
    has_ends,  # 0: a token attends to no later one, and `ends` is not read
    tile_sequences,  # [num_tiles]: the sequence of each query tile; num_sequences: the tile is unused
    tile_queries,  # [num_tiles]: the first query of each query tile, counted within its sequence
    slopes,  # [HEADS] float32 or None
    sinks,  # [HEADS] or None
    bias,  # [HEADS, bias_width] float32 or None
    num_tiles,
    num_sequences,
    num_splits,  # 0 or 1: one program computes all splits of a sequence
    table_stride,
    token_stride,
    head_stride,
    rotary_token_stride,
    rotary_head_stride,
    bias_width,
    scale,  # scale of scores, and of stored keys
    soft_cap,
    alibi_scale,
    value_scale,  # scale of stored values
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,  # offset of the value within a cache row
    STORED_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_ALIBI_BFLOAT16: tl.constexpr,
    PRECISION: tl.constexpr,  # input precision of tl.dot
    FORMAT: tl.constexpr,  # format of the cache's fp8 numbers; "": it holds the queries' dtype
    ROWS: tl.constexpr,  # rows of a query tile: TILE_QUERIES queries times TILE_HEADS heads of one KV head
    TILE_HEADS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    KEYS: tl.constexpr,  # keys of a key tile
    SPLIT: tl.constexpr,  # positions of a split, a multiple of KEYS
    MAIN_DIM: tl.constexpr,  # a key is read in two parts, of MAIN_DIM and (unless 0) REST_DIM elements
    REST_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,  # VALUE_DIM, rounded up to a power of two
    IS_VALUE_MAIN: tl.constexpr,  # the value is the main part of the key
):
    """Axis 0 of the grid: `num_tiles` query tiles, then `num_splits` splits of each sequence. With more than one split,
    a sequence that has one query is computed by the latter programs. Axis 1: tiles of query heads."""
    dtype: tl.constexpr = output.dtype.element_ty
    program = tl.program_id(0)
    is_split = program >= num_tiles
    item = program - num_tiles
    sequence = tl.load(tile_sequences + program, mask=program < num_tiles, other=0)
    first_query = tl.load(tile_queries + program, mask=program < num_tiles, other=0)
    if is_split:
        sequence = item // num_splits
    if sequence >= num_sequences:
        return
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if first_query >= num_queries:
        return
    if is_split != ((num_queries == 1) & (num_splits > 1)):
        return
    context_len = tl.load(context_lens + sequence)
    source_len = 0
    if source_lens is not None:
        source_len = tl.load(source_lens + sequence)

    # The positions that any query of the tile attends to, and their splits.
    computed = context_len - num_queries
    low, _ = _interval(computed + first_query, source_len, WINDOW, CHUNK, PART)
    last_query = tl.minimum(first_query + TILE_QUERIES, num_queries) - 1
    _, high = _interval(computed + last_query, source_len, WINDOW, CHUNK, PART)
    if ends is not None:
        high = tl.maximum(high, tl.load(ends + start + last_query, mask=last_query < num_queries * has_ends, other=0))
    first_split = low // SPLIT
    end_split = tl.cdiv(high, SPLIT)
    if is_split:
        first_split += item % num_splits
        if first_split >= end_split:
            return
        end_split = first_split + 1

    # The rows of the tile.
    groups_tiles: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(1) // groups_tiles
    row = tl.arange(0, ROWS)
    query = first_query + row // TILE_HEADS
    head_in_group = tl.program_id(1) % groups_tiles * TILE_HEADS + row % TILE_HEADS
    is_valid = (row < TILE_QUERIES * TILE_HEADS) & (query < num_queries) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    position = computed + query
    first, stop = _interval(position, source_len, WINDOW, CHUNK, PART)
    token = (start + query).to(tl.int64)
    if ends is not None:
        stop = tl.maximum(stop, tl.load(ends + token, mask=is_valid & (query < num_queries * has_ends), other=0))
    main = tl.arange(0, MAIN_DIM)
    pointers = queries + token * token_stride + head * head_stride
    query_main = _load_rows(pointers, is_valid, main, MAIN_DIM, HEAD_DIM)
    if REST_DIM > 0:
        rest = tl.arange(0, REST_DIM)
        if rotary is not None:
            pointers = rotary + token * rotary_token_stride + head * rotary_head_stride
            place = position.to(tl.int64) * ((HEAD_DIM - MAIN_DIM) // 2)
            query_rest = _load_rotated(
                pointers, is_valid, rest, cos + place, sin + place, query_main.dtype, HEAD_DIM - MAIN_DIM
            )
        else:
            query_rest = _load_rows(pointers + MAIN_DIM, is_valid, rest, REST_DIM, HEAD_DIM - MAIN_DIM)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_valid, other=0.0)

    value_column = tl.arange(0, VALUE_WIDTH)
    total_max = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    total_sum = tl.zeros([ROWS], tl.float32)
    total_acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for split in range(first_split, end_split):
        row_max = tl.full([ROWS], MINUS_INFINITY, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        begin = tl.maximum(split * SPLIT, low // KEYS * KEYS)
        end = tl.minimum((split + 1) * SPLIT, high)
        for tile_start in range(begin, end, KEYS):
            # Slots outside of the interval may belong to other sequences, so they are not read.
            key = tile_start + tl.arange(0, KEYS)
            is_read = (key >= low) & (key < high)
            blocks = tl.load(
                block_tables + sequence.to(tl.int64) * table_stride + key // BLOCK_TOKENS, mask=is_read, other=0
            )
            slot = (blocks.to(tl.int64) * (HEADS // GROUP) + kv_head) * BLOCK_TOKENS + key % BLOCK_TOKENS
            stored = cache + slot * STORED_DIM
            key_main = _load_cached(stored, is_read, main, query_main.dtype, MAIN_DIM, HEAD_DIM, FORMAT)
            scores = tl.dot(query_main, tl.trans(key_main), input_precision=PRECISION)
            if REST_DIM > 0:
                key_rest = _load_cached(
                    stored + MAIN_DIM, is_read, rest, query_main.dtype, REST_DIM, HEAD_DIM - MAIN_DIM, FORMAT
                )
                scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision=PRECISION)
            scores *= scale
            if HAS_SOFT_CAP:
                # cap * tanh(score / cap)
                scores = soft_cap - 2.0 * soft_cap / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)
            if slopes is not None:
                if IS_ALIBI_BFLOAT16:
                    rounded = _round_to_bfloat16(key.to(tl.float32))
                    scores += _round_to_bfloat16(slope[:, None] * rounded[None, :]) * alibi_scale
                else:  # relative to the query: softmax ignores the offset, and small products are exact
                    scores += slope[:, None] * (key[None, :] - position[:, None]) * alibi_scale
            if bias is not None:
                farthest = bias_width // 2
                distance = tl.minimum(tl.maximum(key[None, :] - position[:, None], -farthest), farthest)
                scores += tl.load(
                    bias + head[:, None] * bias_width + farthest + distance, mask=is_valid[:, None], other=0.0
                )
            is_visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
            scores = tl.where(is_visible, scores * LOG2_E, MINUS_INFINITY)

            new_max = tl.maximum(row_max, tl.max(scores, 1))
            anchor = tl.where(new_max == MINUS_INFINITY, 0.0, new_max)
            weights = tl.exp2(scores - anchor[:, None])
            decay = tl.exp2(row_max - anchor)
            row_sum = row_sum * decay + tl.sum(weights, 1)
            if IS_VALUE_MAIN:
                value = key_main
            else:
                value = _load_cached(
                    stored + VALUE_OFFSET, is_read, value_column, query_main.dtype, VALUE_WIDTH, VALUE_DIM, FORMAT
                )
            acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
            row_max = new_max
        total_max, total_sum, total_acc = _merge(total_max, total_sum, total_acc, row_max, row_sum, acc)

    is_stored = is_valid[:, None] & (value_column < VALUE_DIM)[None, :]
    if is_split:
        partial = (sequence.to(tl.int64) * HEADS + head) * num_splits + item % num_splits
        tl.store(partial_stats + partial * 2, total_max, mask=is_valid)
        tl.store(partial_stats + partial * 2 + 1, total_sum, mask=is_valid)
        tl.store(partial_acc + partial[:, None] * VALUE_DIM + value_column[None, :], total_acc, mask=is_stored)
    else:
        result = _normalize(total_max, total_sum, total_acc, sinks, head, is_valid, value_scale, dtype)
        rows = output + (token * HEADS + head) * VALUE_DIM
        tl.store(rows[:, None] + value_column[None, :], result, mask=is_stored)


@triton.jit(
    do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["query_starts", "context_lens", "source_lens"]
)
def reduce_kernel(
    output,  # as in attend_kernel, as all that follow
    partial_acc,
    partial_stats,
    query_starts,
    context_lens,
    source_lens,
    sinks,
    num_splits,
    value_scale,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Merges the splits of the sequences that have one query. Grid: sequences, query heads."""
    sequence = tl.program_id(0)
    start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - start != 1:
        return
    source_len = 0
    if source_lens is not None:
        source_len = tl.load(source_lens + sequence)
    low, high = _interval(tl.load(context_lens + sequence) - 1, source_len, WINDOW, CHUNK, PART)
    row = tl.arange(0, 1)
    head = tl.program_id(1) + row
    column = tl.arange(0, VALUE_WIDTH)
    is_stored = (column < VALUE_DIM)[None, :]
    total_max = tl.full([1], MINUS_INFINITY, tl.float32)
    total_sum = tl.zeros([1], tl.float32)
    total_acc = tl.zeros([1, VALUE_WIDTH], tl.float32)
    first = (sequence.to(tl.int64) * HEADS + head) * num_splits
    for split in range(tl.cdiv(high, SPLIT) - low // SPLIT):
        split_max = tl.load(partial_stats + (first + split) * 2)
        split_sum = tl.load(partial_stats + (first + split) * 2 + 1)
        rows = partial_acc + (first + split) * VALUE_DIM
        acc = tl.load(rows[:, None] + column[None, :], mask=is_stored, other=0.0)
        total_max, total_sum, total_acc = _merge(total_max, total_sum, total_acc, split_max, split_sum, acc)
    dtype: tl.constexpr = output.dtype.element_ty
    result = _normalize(total_max, total_sum, total_acc, sinks, head, row == 0, value_scale, dtype)
    rows = output + (start.to(tl.int64) * HEADS + head) * VALUE_DIM
    tl.store(rows[:, None] + column[None, :], result, mask=is_stored)
