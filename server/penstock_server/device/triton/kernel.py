"""Triton kernels of the operators between matrix products. A program computes whole rows, so a row's bits depend on no
other row."""

import triton
import triton.language as tl

from penstock_server.device.triton.fp8 import encode


@triton.jit
def normed(
    x, mask, weight, bias, eps, dtype: tl.constexpr, DIM: tl.constexpr, IS_LAYER: tl.constexpr, IS_WIDE: tl.constexpr
):
    """The norm of a row in float32. weight, bias: pointers to its elements, or None; dtype: of the result."""
    if IS_LAYER:
        x = tl.where(mask, x - tl.sum(x, 0) / DIM, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    if not IS_WIDE:
        x = x.to(dtype).to(tl.float32)
    if weight is not None:
        x = x * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        x = x + tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def norm_kernel(
    output,  # [rows, heads, DIM] or None: only the residual is wanted
    x,  # [rows, heads, DIM]
    residual,  # [rows, heads, DIM] or None: the summand is added to it in place, and the sum is normalized
    other,  # [rows, heads, DIM] or None: added to the summand
    weight,  # [DIM] or [heads, DIM] or None
    bias,  # [DIM] or None
    row_stride,  # stride of the rows of x
    head_stride,  # stride of the heads of x
    eps,
    inner_weight,  # [DIM] or None: of a norm that makes the summand from x
    inner_bias,  # [DIM] or None
    inner_eps,
    FACTOR: tl.constexpr,  # factor of the summand
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least DIM
    IS_LAYER: tl.constexpr,  # LayerNorm, not RMSNorm
    IS_WIDE: tl.constexpr,  # round once, at the end
    WEIGHT_STRIDE: tl.constexpr,  # between the weights of two heads; 0: they share one
    HAS_INNER: tl.constexpr,
    INNER_IS_LAYER: tl.constexpr,
    INNER_IS_WIDE: tl.constexpr,
):
    """Each intermediate result is rounded as if it were stored. Grid: rows, heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    mask = column < DIM
    place = (row * tl.num_programs(1) + head) * DIM + column
    wide = tl.load(x + row * row_stride + head * head_stride + column, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if HAS_INNER:
        if inner_weight is not None:
            inner_weight += column
        if inner_bias is not None:
            inner_bias += column
        wide = normed(wide, mask, inner_weight, inner_bias, inner_eps, dtype, DIM, INNER_IS_LAYER, INNER_IS_WIDE)
        wide = wide.to(dtype).to(tl.float32)
    if FACTOR != 1.0:
        wide = (wide * FACTOR).to(dtype).to(tl.float32)
    if other is not None:
        wide = wide + tl.load(other + place, mask=mask, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
    if residual is not None:
        total = (wide + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + place, total, mask=mask)
        wide = total.to(tl.float32)
    if output is not None:
        if weight is not None:
            weight += head * WEIGHT_STRIDE + column
        if bias is not None:
            bias += column
        result: tl.constexpr = output.dtype.element_ty
        wide = normed(wide, mask, weight, bias, eps, result, DIM, IS_LAYER, IS_WIDE)
        tl.store(output + place, wide.to(result), mask=mask)


@triton.jit
def to_stored(x, dtype: tl.constexpr, factor, FORMAT: tl.constexpr):
    """x in the cache's dtype; with a FORMAT, the bits of x * factor in fp8."""
    if FORMAT != "":
        x = encode(x.to(tl.float32) * factor, FORMAT)
    return x.to(dtype)


@triton.jit
def rotated(first, second, cos, sin, pair, is_pair):
    """Pairs of elements [heads, pairs] float32, rotated. cos, sin: pointers to the numbers of the token's position;
    pair [pairs]: their places."""
    c = tl.load(cos + pair, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + pair, mask=is_pair, other=0.0)[None, :]
    return first * c - second * s, second * c + first * s


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
    factor,
    FORMAT: tl.constexpr,
):
    """Reads the rotary elements of some heads behind the pointers source [heads] and writes them, rotated, behind
    target [heads]. cos, sin: pointers to the HALF numbers of the token's position. WIDTH: HALF or more, a power of two.
    factor, FORMAT: as in `to_stored`.

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
    first, second = rotated(first, second, cos, sin, pair, is_pair)
    dtype = target.dtype.element_ty
    tl.store(target[:, None] + places[None, :], to_stored(first, dtype, factor, FORMAT), mask=mask)
    tl.store(target[:, None] + places[None, :] + distance, to_stored(second, dtype, factor, FORMAT), mask=mask)


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
    c, s = cos + position * HALF, sin + position * HALF
    rotate_pairs(rows, rows, is_head, c, s, HALF, WIDTH, IS_INTERLEAVED, 1.0, "")


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
    elif NAME == "tanh":
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    elif NAME == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif NAME == "linear":
        y = x
    elif NAME == "xielu":
        # As in `activation.Xielu`. exp(x) - 1 of a small x is a series, since the difference would be rounding errors.
        z = tl.minimum(x, -1e-6)
        series = z * (1.0 + z * (0.5 + z * (0.16666667 + z * (0.041666668 + z * 0.008333334))))
        expm1 = tl.where(z > -0.25, series, tl.exp(z) - 1.0)
        negative = (expm1 - x) * tl.load(below).to(tl.float32)
        y = tl.where(x > 0.0, tl.load(above).to(tl.float32) * x * x, negative) + 0.5 * x
    else:
        tl.static_assert(NAME == "gelu_new")
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * u))
    return y


@triton.jit
def activate_kernel(
    output,  # [rows, DIM]
    x,  # [rows, DIM]
    above,  # see `activated`
    below,
    row_stride,  # stride of the rows of x
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
    row_stride,  # stride of the rows of x
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a program
    NAME: tl.constexpr,  # name of the activation
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
