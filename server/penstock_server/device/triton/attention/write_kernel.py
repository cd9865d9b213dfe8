"""Triton kernels that store keys and values. A program computes heads of one token, so their bits depend on no other
token."""

from typing import NamedTuple

import triton
import triton.language as tl

from penstock_server.device.attention.interface import Transform
from penstock_server.device.triton.attention.tile import padded_dim
from penstock_server.device.triton.kernel import normed, rotate_pairs, rotated, to_stored


class Form(NamedTuple):
    """How queries and keys become what `Transform` says. INVARIANT: it depends on the layer alone."""

    width: int  # a power of two, at least the elements of a head
    half: int = 0  # half the number of rotated elements of a head
    half_width: int = 0  # a power of two, at least `half`
    is_interleaved: bool = False
    clips: bool = False
    is_normed: bool = False
    is_whole: bool = False  # see `HeadNorms`; a program has all heads of a token
    follows_rotation: bool = False
    is_layer: bool = False  # LayerNorm, not RMSNorm
    is_wide: bool = False  # as in norm_kernel
    weight_stride: int = 0  # between the weights of two heads; 0: they share one

    @classmethod
    def of(cls, transform: Transform | None, width: int) -> "Form":
        if transform is None:
            return cls(width)
        form = cls(width, clips=transform.clip is not None)
        if (rotation := transform.rotation) is not None:
            half = rotation.cos.shape[1]
            form = form._replace(half=half, half_width=padded_dim(half), is_interleaved=rotation.is_interleaved)
        if (norms := transform.norms) is not None:
            form = form._replace(
                is_normed=True,
                is_whole=norms.is_whole,
                follows_rotation=norms.follows_rotation,
                is_layer=norms.is_layer,
                is_wide=norms.is_layer or norms.is_wide,
                weight_stride=norms.weight_stride,
            )
        return form


@triton.jit
def _clipped(x, clip):
    """x within ± clip; NaN stays NaN."""
    return tl.where(x > clip, clip, tl.where(x < -clip, -clip, x))


@triton.jit
def _sum(first, second, rest, HAS_REST: tl.constexpr, FORM: tl.constexpr):
    """The sum of each head's elements, or of all heads'."""
    if FORM.half > 0:
        total = tl.sum(first, 1) + tl.sum(second, 1)
        if HAS_REST:
            total += tl.sum(rest, 1)
    else:
        total = tl.sum(rest, 1)
    if FORM.is_whole:
        total = tl.zeros_like(total) + tl.sum(total, 0)
    return total


@triton.jit
def _normalized(x, mean, factor, weight, bias, places, mask, dtype: tl.constexpr, FORM: tl.constexpr):
    """x [heads, elements] float32 → its norm, rounded as if it were stored. weight, bias: behind `places`, or None."""
    x = (x - mean[:, None]) * factor[:, None]
    if not FORM.is_wide:
        x = x.to(dtype).to(tl.float32)
    if weight is not None:
        x = x * tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        x = x + tl.load(bias + places, mask=mask, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _transform(
    source,
    target,
    head,
    is_head,
    cos,
    sin,
    clip,
    weight,
    bias,
    eps,
    factor,
    NUM: tl.constexpr,  # heads whose elements a norm is over
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    FORM: tl.constexpr,
):
    """Reads heads [heads] of DIM elements behind the pointers source, transforms them, and writes them behind target.
    cos, sin: pointers to the numbers of the token's position. factor, FORMAT: as in `to_stored`.

    Each element is read once, by the thread whose results depend on it, so target may be source."""
    dtype: tl.constexpr = source.dtype.element_ty
    has_rest: tl.constexpr = 2 * FORM.half < DIM
    first, second, rest = None, None, None
    if FORM.half > 0:
        pair = tl.arange(0, FORM.half_width)
        is_pair = pair < FORM.half
        pair_mask = is_head[:, None] & is_pair[None, :]
        first_place = (2 * pair if FORM.is_interleaved else pair)[None, :]
        second_place = first_place + (1 if FORM.is_interleaved else FORM.half)
        first = tl.load(source[:, None] + first_place, mask=pair_mask, other=0.0).to(tl.float32)
        second = tl.load(source[:, None] + second_place, mask=pair_mask, other=0.0).to(tl.float32)
    if has_rest:
        place = tl.arange(0, FORM.width)[None, :]
        mask = is_head[:, None] & (place >= 2 * FORM.half) & (place < DIM)
        rest = tl.load(source[:, None] + place, mask=mask, other=0.0).to(tl.float32)
    if FORM.clips:
        if FORM.half > 0:
            first, second = _clipped(first, clip), _clipped(second, clip)
        if has_rest:
            rest = _clipped(rest, clip)
    if FORM.half > 0 and FORM.follows_rotation:
        first, second = rotated(first, second, cos, sin, pair, is_pair)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if FORM.is_normed:
        mean = tl.zeros(is_head.shape, tl.float32)
        if FORM.is_layer:
            mean = _sum(first, second, rest, has_rest, FORM) / (NUM * DIM)
        first_square, second_square, rest_square = first, second, rest
        if FORM.half > 0:
            first_square = tl.where(pair_mask, first - mean[:, None], 0.0)
            first_square *= first_square
            second_square = tl.where(pair_mask, second - mean[:, None], 0.0)
            second_square *= second_square
        if has_rest:
            rest_square = tl.where(mask, rest - mean[:, None], 0.0)
            rest_square *= rest_square
        scale = tl.rsqrt(_sum(first_square, second_square, rest_square, has_rest, FORM) / (NUM * DIM) + eps)
        row = (head * FORM.weight_stride)[:, None]
        if FORM.half > 0:
            first = _normalized(first, mean, scale, weight, bias, row + first_place, pair_mask, dtype, FORM)
            second = _normalized(second, mean, scale, weight, bias, row + second_place, pair_mask, dtype, FORM)
        if has_rest:
            rest = _normalized(rest, mean, scale, weight, bias, row + place, mask, dtype, FORM)
    stored: tl.constexpr = target.dtype.element_ty
    if FORM.half > 0:
        if not FORM.follows_rotation:
            first, second = rotated(first, second, cos, sin, pair, is_pair)
        tl.store(target[:, None] + first_place, to_stored(first, stored, factor, FORMAT), mask=pair_mask)
        tl.store(target[:, None] + second_place, to_stored(second, stored, factor, FORMAT), mask=pair_mask)
    if has_rest:
        tl.store(target[:, None] + place, to_stored(rest, stored, factor, FORMAT), mask=mask)


@triton.jit
def write_kernel(
    cache,  # [blocks, KV_HEADS, BLOCK_TOKENS, KEY_DIM + VALUE_DIM]
    queries,  # [tokens, HEADS, KEY_DIM], transformed in place; None: nothing is transformed
    keys,  # [tokens, KV_HEADS, KEY_DIM]
    values,  # [tokens, KV_HEADS, VALUE_DIM]
    slots,  # [tokens] int64; negative: the token is padding
    positions,  # [tokens] int64, of the rotation; None: there is none
    cos,  # [positions, half] float32
    sin,  # [positions, half] float32
    clip,
    query_weight,  # [HEADS, KEY_DIM] or [KEY_DIM] or None, as all of the norms
    query_bias,
    key_weight,
    key_bias,
    eps,
    num_query_tiles,  # 0 without queries
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_factor,  # factor of keys stored in fp8
    value_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # 0: values are part of the keys
    TILE_HEADS: tl.constexpr,
    FORMAT: tl.constexpr,  # as in attend_kernel
    FORM: tl.constexpr,
):
    """Transforms queries, and stores keys and values at their slots, transformed too. Grid: tokens, tiles of TILE_HEADS
    query heads and then of KV heads."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, s = cos, sin
    if positions is not None:
        place = tl.load(positions + token) * FORM.half
        c, s = cos + place, sin + place
    if queries is not None:
        if tile < num_query_tiles:
            head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
            rows = queries + token * query_token_stride + head * query_head_stride
            # Elements that are only rotated elsewhere stay as they are.
            dim: tl.constexpr = KEY_DIM if FORM.is_normed or FORM.clips else 2 * FORM.half
            num: tl.constexpr = HEADS if FORM.is_whole else 1
            _transform(
                rows, rows, head, head < HEADS, c, s, clip, query_weight, query_bias, eps, 1.0, num, dim, "", FORM
            )
            return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = (tile - num_query_tiles) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    is_head = head < KV_HEADS
    stored = (slot // BLOCK_TOKENS * KV_HEADS + head) * BLOCK_TOKENS + slot % BLOCK_TOKENS
    rows = cache + stored * (KEY_DIM + VALUE_DIM)
    of_keys = keys + token * key_token_stride + head * key_head_stride
    kv_num: tl.constexpr = KV_HEADS if FORM.is_whole else 1
    _transform(
        of_keys, rows, head, is_head, c, s, clip, key_weight, key_bias, eps, key_factor, kv_num, KEY_DIM, FORMAT, FORM
    )
    if VALUE_DIM > 0:
        column = tl.arange(0, FORM.width)[None, :]
        mask = is_head[:, None] & (column < VALUE_DIM)
        of_values = values + token * value_token_stride + head * value_head_stride
        value = tl.load(of_values[:, None] + column, mask=mask, other=0.0)
        if FORM.clips:
            value = _clipped(value.to(tl.float32), clip)
        tl.store(
            rows[:, None] + KEY_DIM + column, to_stored(value, cache.dtype.element_ty, value_factor, FORMAT), mask=mask
        )


@triton.jit
def write_latents_kernel(
    cache,  # [slots, LATENT_DIM + 2 * HALF]
    query_latents,  # [tokens, QUERY_DIM], written; None: there are none
    x,  # [tokens, QUERY_DIM + LATENT_DIM + 2 * HALF]: the queries' latent, the latent, the rotary part of the key
    slots,  # [tokens] int64; negative: the token is padding
    positions,  # [tokens] int64
    cos,  # [positions, HALF] float32
    sin,  # [positions, HALF] float32
    query_weight,  # [QUERY_DIM] or None
    weight,  # [LATENT_DIM]
    eps,
    row_stride,  # stride of the rows of x
    factor,  # factor of keys stored in fp8
    QUERY_DIM: tl.constexpr,
    QUERY_WIDTH: tl.constexpr,  # a power of two, at least QUERY_DIM
    LATENT_DIM: tl.constexpr,  # a power of two
    HALF: tl.constexpr,  # half the size of the rotary part
    HALF_WIDTH: tl.constexpr,  # a power of two, at least HALF
    FORMAT: tl.constexpr,  # as in attend_kernel
):
    """Norms the latents and rotates the rest of the keys, which it stores at their slots. Grid: tokens, then 1 for the
    key and, if queries have a latent, 1 for that."""
    token = tl.program_id(0).to(tl.int64)
    row = x + token * row_stride
    dtype: tl.constexpr = x.dtype.element_ty
    if query_latents is not None:
        if tl.program_id(1) == 1:
            column = tl.arange(0, QUERY_WIDTH)
            mask = column < QUERY_DIM
            latent = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
            latent = normed(latent, mask, query_weight + column, None, eps, dtype, QUERY_DIM, False, False)
            tl.store(query_latents + token * QUERY_DIM + column, latent.to(dtype), mask=mask)
            return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    stored = cache + slot * (LATENT_DIM + 2 * HALF)
    column = tl.arange(0, LATENT_DIM)
    row += QUERY_DIM
    latent = tl.load(row + column).to(tl.float32)
    latent = normed(latent, column < LATENT_DIM, weight + column, None, eps, dtype, LATENT_DIM, False, False)
    tl.store(stored + column, to_stored(latent.to(dtype), cache.dtype.element_ty, factor, FORMAT))
    place = tl.load(positions + token) * HALF
    head = tl.arange(0, 1)
    rotate_pairs(
        row + LATENT_DIM + head,
        stored + LATENT_DIM + head,
        head == 0,
        cos + place,
        sin + place,
        HALF,
        HALF_WIDTH,
        False,
        factor,
        FORMAT,
    )
