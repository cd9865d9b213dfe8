"""Triton kernels of the operators between matrix products. A program computes whole rows, so a row's bits depend on no
other row."""

import triton
import triton.language as tl

from penstock_server.kernels.triton_fp8 import encode


@triton.jit
def norm_kernel(
    output,  # [rows, heads, DIM]
    x,  # [rows, heads, DIM]
    residual,  # [rows, heads, DIM] or None: x is added to it in place, and the sum is normalized
    weight,  # [DIM] or [heads, DIM] or None
    bias,  # [DIM] or None
    row_stride,  # of x
    head_stride,  # of x
    eps,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least DIM
    IS_LAYER: tl.constexpr,  # LayerNorm, not RMSNorm
    IS_WIDE: tl.constexpr,  # round once, at the end
    WEIGHT_STRIDE: tl.constexpr,  # between the weights of two heads; 0: they share one
):
    """Grid: rows, heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    mask = column < DIM
    place = (row * tl.num_programs(1) + head) * DIM + column
    wide = tl.load(x + row * row_stride + head * head_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        total = (wide + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + place, total, mask=mask)
        wide = total.to(tl.float32)
    if IS_LAYER:
        wide = tl.where(mask, wide - tl.sum(wide, 0) / DIM, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    if not IS_WIDE:
        wide = wide.to(output.dtype.element_ty).to(tl.float32)
    if weight is not None:
        wide = wide * tl.load(weight + head * WEIGHT_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        wide = wide + tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + place, wide.to(output.dtype.element_ty), mask=mask)


@triton.jit
def to_stored(x, dtype: tl.constexpr, factor, FORMAT: tl.constexpr):
    """x in the cache's dtype; with a FORMAT, the bits of x * factor in fp8."""
    if FORMAT != "":
        x = encode(x.to(tl.float32) * factor, FORMAT)
    return x.to(dtype)


@triton.jit
def head_statistics(
    rows, is_head, eps, IS_NORMED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, IS_LAYER: tl.constexpr
):
    """For `normalized`: the mean of each head [heads] behind the pointers `rows` (of an RMSNorm 0), and the factor that
    gives it the variance 1; anything if not IS_NORMED."""
    mean = tl.zeros(is_head.shape, tl.float32)
    factor = mean
    if IS_NORMED:
        column = tl.arange(0, WIDTH)
        mask = is_head[:, None] & (column < DIM)[None, :]
        wide = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if IS_LAYER:
            mean = tl.sum(wide, 1) / DIM
            wide = tl.where(mask, wide - mean[:, None], 0.0)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
    return mean, factor


@triton.jit
def normalized(
    x, mean, factor, weight, bias, places, mask, dtype: tl.constexpr, IS_NORMED: tl.constexpr, IS_WIDE: tl.constexpr
):
    """x [heads, columns] float32, or its norm, rounded as if it were stored. weight, bias: behind `places`, or None."""
    if IS_NORMED:
        x = (x - mean[:, None]) * factor[:, None]
        if not IS_WIDE:
            x = x.to(dtype).to(tl.float32)
        if weight is not None:
            x = x * tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            x = x + tl.load(bias + places, mask=mask, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x


@triton.jit
def rotate_pairs(
    source,
    target,
    is_head,
    cos,
    sin,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    factor=1.0,
    FORMAT: tl.constexpr = "",
    mean=None,
    norm_factor=None,
    weight=None,
    bias=None,
    weight_rows=None,
    IS_NORMED: tl.constexpr = False,
    IS_WIDE: tl.constexpr = False,
):
    """Reads the rotary elements of some heads behind the pointers source [heads] and writes them, rotated, behind
    target [heads]. cos, sin: pointers to the HALF numbers of the token's position. WIDTH: HALF or more, a power of two.
    factor, FORMAT: as in `to_stored`. IS_NORMED: elements are normalized before; mean, norm_factor, weight, bias,
    IS_WIDE: as in `normalized`, weight_rows [heads]: where the head's weight begins.

    One thread reads both elements of a pair and writes both, so target may be source.
    """
    pair = tl.arange(0, WIDTH)
    is_pair = pair < HALF
    mask = is_head[:, None] & is_pair[None, :]
    if IS_INTERLEAVED:
        places, distance = 2 * pair, 1
    else:
        places, distance = pair, HALF
    first = tl.load(source[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + places[None, :] + distance, mask=mask, other=0.0).to(tl.float32)
    if IS_NORMED:
        of_weight = weight_rows[:, None] + places[None, :]
        stored: tl.constexpr = source.dtype.element_ty
        first = normalized(first, mean, norm_factor, weight, bias, of_weight, mask, stored, IS_NORMED, IS_WIDE)
        of_weight += distance
        second = normalized(second, mean, norm_factor, weight, bias, of_weight, mask, stored, IS_NORMED, IS_WIDE)
    c = tl.load(cos + pair, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + pair, mask=is_pair, other=0.0)[None, :]
    dtype = target.dtype.element_ty
    rotated_first = to_stored(first * c - second * s, dtype, factor, FORMAT)
    rotated_second = to_stored(second * c + first * s, dtype, factor, FORMAT)
    tl.store(target[:, None] + places[None, :], rotated_first, mask=mask)
    tl.store(target[:, None] + places[None, :] + distance, rotated_second, mask=mask)


@triton.jit
def rotate_kernel(
    queries,  # [tokens, heads, head_dim]
    keys,  # [tokens, KV heads, head_dim]
    cos,  # [positions, HALF] float32
    sin,  # [positions, HALF] float32
    positions,  # [tokens] int64
    num_query_tiles,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Rotates in place. Grid: tokens, tiles of TILE_HEADS query heads and then of KV heads."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    head = tl.arange(0, TILE_HEADS)
    if tile < num_query_tiles:
        head += tile * TILE_HEADS
        rows, is_head = queries + token * query_token_stride + head * query_head_stride, head < HEADS
    else:
        head += (tile - num_query_tiles) * TILE_HEADS
        rows, is_head = keys + token * key_token_stride + head * key_head_stride, head < KV_HEADS
    rotate_pairs(rows, rows, is_head, cos + position * HALF, sin + position * HALF, HALF, WIDTH, IS_INTERLEAVED)


@triton.jit
def activated(x, NAME: tl.constexpr, above=None, below=None):
    """An activation function of float32. above, below: pointers to the factors of xIELU."""
    if NAME == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "quick_gelu":
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        y = tl.maximum(x, 0.0)
        y = y * y
    elif NAME == "xielu":
        # As in `activation.Xielu`. exp(x) - 1 of a small x is a series, since the difference would be rounding errors.
        z = tl.minimum(x, -1e-6)
        series = z * (1.0 + z * (0.5 + z * (0.16666667 + z * (0.041666668 + z * 0.008333334))))
        expm1 = tl.where(z > -0.25, series, tl.exp(z) - 1.0)
        negative = (expm1 - x) * tl.load(below).to(tl.float32)
        y = tl.where(x > 0.0, tl.load(above).to(tl.float32) * x * x, negative) + 0.5 * x
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * u))
    return y


@triton.jit
def activate_kernel(
    output,  # [rows, DIM]
    x,  # [rows, DIM]
    above,  # of `activated`
    below,
    row_stride,  # of x
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a program
    NAME: tl.constexpr,
):
    """activation(x). Grid: rows, parts of WIDTH elements."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < DIM
    y = activated(tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32), NAME, above, below)
    tl.store(output + row * DIM + column, y.to(output.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(
    output,  # [rows, DIM]
    x,  # [rows, 2 * DIM]: gates, then what they multiply
    row_stride,  # of x
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a program
    NAME: tl.constexpr,  # of the activation
):
    """activation(gate) * up, with the activation rounded as if it were stored. Grid: rows, parts of WIDTH elements."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < DIM
    dtype = output.dtype.element_ty
    gate = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + DIM + column, mask=mask, other=0.0).to(tl.float32)
    gated = activated(gate, NAME).to(dtype).to(tl.float32) * up
    tl.store(output + row * DIM + column, gated.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows_per_input"])
def grouped_kernel(
    output,  # [pairs, COLUMNS]
    x,  # [pairs / rows_per_input, DEPTH]
    weight,  # [EXPERTS, COLUMNS, DEPTH]
    bias,  # [EXPERTS, COLUMNS] or None
    order,  # [pairs] int64: the pairs by expert
    ends,  # [EXPERTS] int64: the end of each expert's pairs in `order`
    tile_experts,  # [tiles] int64; EXPERTS: the tile is unused
    tile_starts,  # [tiles] int64
    rows_per_input,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,  # of tl.dot
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """The product of each pair's row of x with the weight of its expert. Grid: tiles of pairs, tiles of columns."""
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert >= EXPERTS:
        return
    place = tl.load(tile_starts + tl.program_id(0)) + tl.arange(0, TILE_ROWS)
    is_row = place < tl.load(ends + expert)
    pair = tl.load(order + place, mask=is_row, other=0)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = column < COLUMNS
    depth = tl.arange(0, TILE_DEPTH)
    rows = x + (pair // rows_per_input)[:, None] * DEPTH + depth[None, :]
    columns = weight + (expert * COLUMNS + column)[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, DEPTH, TILE_DEPTH):
        is_inside = depth < DEPTH - start
        a = tl.load(rows + start, mask=is_row[:, None] & is_inside[None, :], other=0.0)
        b = tl.load(columns + start, mask=is_inside[:, None] & is_column[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if bias is not None:
        acc += tl.load(bias + expert * COLUMNS + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(output + pair[:, None] * COLUMNS + column[None, :], acc.to(output.dtype.element_ty), mask=mask)


@triton.jit
def weighted_sum_kernel(
    output,  # [rows, FEATURES] float32
    results,  # [rows, TOP_K, FEATURES]
    weights,  # [rows, TOP_K] float32
    TOP_K: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a program
):
    """Grid: rows, parts of WIDTH features."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < FEATURES
    total = tl.zeros([WIDTH], tl.float32)
    for place in range(TOP_K):
        result = tl.load(results + (row * TOP_K + place) * FEATURES + column, mask=mask, other=0.0).to(tl.float32)
        total += result * tl.load(weights + row * TOP_K + place)
    tl.store(output + row * FEATURES + column, total, mask=mask)
