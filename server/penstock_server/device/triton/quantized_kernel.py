"""Triton kernels of linear layers with quantized weights. Codes become floating-point weights in registers.

The input features are cut into blocks of 256, as super-groups are, and these into 8 units of 32. Word j of an output
and a block holds the codes of the features j, 32 + j, 64 + j, … of the block, the first in its lowest bits. So a shift
of a tile of words gives the codes of a unit, and no thread needs what another one has loaded. The highest bits of codes
of 3, 5 and 6 bits are in words of their own.

INVARIANT: an output is the sum of its splits in ascending order, and a split is one chain over ascending units. Only
the layer's shape determines the splits, so a row's bits do not depend on the other rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock_server.device.quantized import SUPER_GROUP
from penstock_server.device.triton.grouped_kernel import expert_columns, store_pairs
from penstock_server.device.triton.kernel import activated


class Weight(NamedTuple):
    """The tensors of a weight; None: it has none. `words` and `high_words` hold codes. The others are int32 words of
    packed numbers. PERF: loads of fewer than 4 bytes would not run ahead of the products."""

    words: Any  # [blocks, outputs, 32]
    high_words: Any  # the same
    scales: Any  # [groups / packed, outputs]
    mins: Any  # [groups / min_packed, outputs]: mins or zero points
    factors: Any  # [blocks, outputs]: a float16 factor of scales and, in the high half, of mins


class Form(NamedTuple):
    """How a weight is stored."""

    outputs: int
    depth: int  # input features
    blocks: int
    bits: int  # bits of a code in `words`
    high_bits: int  # above them, in `high_words`
    offset: int
    group: int  # input features that share a scale
    packed: int  # scales in a word: 1 float32, 2 of 16 bits, 4 of 8, 8 of 4
    number: str  # see `QuantFormat`
    min_packed: int  # mins or zero points in a word
    min_number: str  # their type
    has_zeros: bool  # zero points in the place of mins
    code: str  # the same
    table: tuple[int, int] | None  # what codes stand for, plus 128: bytes 0 to 7 and 8 to 15, the first one lowest
    block: int = SUPER_GROUP  # input features
    unit: int = 32  # input features


@triton.jit
def _load_words(words, block, output, is_output, FORM: tl.constexpr):
    """[outputs, 32]"""
    places = (block * FORM.outputs + output)[:, None] * FORM.unit + tl.arange(0, FORM.unit)[None, :]
    return tl.load(words + places, mask=is_output[:, None], other=0)


@triton.jit
def _codes(words, high_words, unit: tl.constexpr, FORM: tl.constexpr):
    """The codes of a unit as float32, exactly."""
    code = (words >> (FORM.bits * unit)).to(tl.int32) & ((1 << FORM.bits) - 1)
    if FORM.high_bits > 0:
        high = (high_words >> (FORM.high_bits * unit)).to(tl.int32) & ((1 << FORM.high_bits) - 1)
        code |= high << FORM.bits
    if FORM.code != "integer":
        # A finite number's bits, moved to where float32 has them, are that number divided by a power of two.
        fraction_bits: tl.constexpr = 3 if FORM.code == "e4m3fn" else 2
        bias: tl.constexpr = 7 if FORM.code == "e4m3fn" else 15
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << (23 - fraction_bits))
        return bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - bias)
    zero: tl.constexpr = 8388608.0 if FORM.table is None else 8388608.0 + 128.0
    if FORM.table is not None:
        low: tl.constexpr = FORM.table[0]
        high: tl.constexpr = FORM.table[1]
        code = (tl.where(code < 8, low, high).to(tl.int64) >> (8 * (code & 7))).to(tl.int32) & 0xFF
    # PERF: GPUs convert integers at a fraction of the rate of additions. These are the bits of 2**23 + code.
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - zero


@triton.jit
def _half(word, position):
    """The float16 number at position 0 or 1 of a word."""
    return (word >> (16 * position)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_group(
    numbers, factors, which: tl.constexpr, block, feature: tl.constexpr, output, is_output, FORM: tl.constexpr
):
    """[outputs] float32: the numbers, scales (0), or mins or zero points (1), of the group of a block's feature."""
    per_block: tl.constexpr = FORM.block // FORM.group
    packed: tl.constexpr = FORM.packed if which == 0 else FORM.min_packed
    number: tl.constexpr = FORM.number if which == 0 else FORM.min_number
    if FORM.block % FORM.group == 0 and per_block % packed == 0:
        # PERF: the compiler sees which groups share a word, and loads it once.
        place = block * (per_block // packed) + feature // FORM.group // packed
        position = feature // FORM.group % packed
    else:
        group = (block * FORM.block + feature) // FORM.group
        place, position = group // packed, group % packed
    word = tl.load(numbers + place * FORM.outputs + output, mask=is_output, other=0)
    if number == "float32":
        found = word.to(tl.float32, bitcast=True)
    elif number == "float16":
        found = _half(word, position)
    elif number == "bfloat16":
        found = ((word >> (16 * position)) << 16).to(tl.float32, bitcast=True)
    elif number == "int8":
        found = ((word << (24 - 8 * position)) >> 24).to(tl.float32)
    elif number == "uint8":
        found = ((word >> (8 * position)) & 0xFF).to(tl.float32)
    elif number == "uint4":
        found = ((word >> (4 * position)) & 0xF).to(tl.float32)
    else:
        # Byte n is 2**(n - 128). Twice that of byte 0 is subnormal: it has no exponent.
        exponent = (word >> (8 * position)) & 0xFF
        found = tl.maximum(exponent << 23, 1 << 22).to(tl.float32, bitcast=True) * 0.5
    if factors is not None:
        found *= _half(tl.load(factors + block * FORM.outputs + output, mask=is_output, other=0), which)
    return found


@triton.jit
def _load_numbers(
    numbers, factors, which: tl.constexpr, block, unit: tl.constexpr, output, is_output, FORM: tl.constexpr
):
    """The scales (0), or mins or zero points (1), of a unit's features: float32 [outputs, 1], or [outputs, 32] if there
    are two groups."""
    feature: tl.constexpr = unit * FORM.unit
    found = _load_group(numbers, factors, which, block, feature, output, is_output, FORM)[:, None]
    if FORM.group < FORM.unit:
        second = _load_group(numbers, factors, which, block, feature + FORM.group, output, is_output, FORM)
        found = tl.where(tl.arange(0, FORM.unit)[None, :] < FORM.group, found, second[:, None])
    return found


@triton.jit
def _load_weights(
    weight, words, high_words, block, unit: tl.constexpr, output, is_output, dtype: tl.constexpr, FORM: tl.constexpr
):
    """[outputs, 32] in dtype: the weights of a unit, as `QuantizedRows.dequantized` states and rounded."""
    code = _codes(words, high_words, unit, FORM)
    scale = _load_numbers(weight.scales, weight.factors, 0, block, unit, output, is_output, FORM)
    if weight.mins is None:
        found = (code - FORM.offset) * scale
    else:
        least = _load_numbers(weight.mins, weight.factors, 1, block, unit, output, is_output, FORM)
        if FORM.has_zeros:
            least = -least * scale
        elif FORM.offset > 0:
            least -= FORM.offset * scale
        found = code * scale + least
    return found.to(dtype)


@triton.jit
def _chain(
    x,  # the pointers of the rows [rows]
    is_row,
    weight,
    output,
    is_output,
    first_block,
    end_block,
    order,  # [depth] int32: the input feature of each column of the weight; None: they are in order
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """[outputs, rows] float32: the products of these blocks, in one chain of sums."""
    acc = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for block in range(first_block, end_block):
        words = _load_words(weight.words, block, output, is_output, FORM)
        high_words = words
        if weight.high_words is not None:
            high_words = _load_words(weight.high_words, block, output, is_output, FORM)
        for unit in tl.static_range(FORM.block // FORM.unit):
            feature = block * FORM.block + unit * FORM.unit + tl.arange(0, FORM.unit)
            mask = is_row[None, :]
            if FORM.depth % FORM.block > 0:
                mask = mask & (feature < FORM.depth)[:, None]
            if order is not None:
                feature = tl.load(order + feature, mask=feature < FORM.depth, other=0)
            inputs = tl.load(x[None, :] + feature[:, None], mask=mask, other=0.0)
            weights = _load_weights(weight, words, high_words, block, unit, output, is_output, inputs.dtype, FORM)
            acc = tl.dot(weights, inputs, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _finish(
    total,  # [outputs, rows] float32
    y,  # the pointers of the rows [rows]
    is_row,
    bias,
    first_output,
    FORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Adds the bias, applies the gate, and stores."""
    column = first_output + tl.arange(0, TILE_OUTPUTS)
    is_column = column < FORM.outputs
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = total.reshape(TILE_OUTPUTS // 2, 2, TILE_ROWS).permute(0, 2, 1).split()
        total = activated(gate, "silu") * up
        column = first_output // 2 + tl.arange(0, TILE_OUTPUTS // 2)
        is_column = column < FORM.outputs // 2
    tl.store(y[None, :] + column[:, None], total.to(y.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    y,  # [num_rows, …]: the weight's columns of the output
    partials,  # [NUM_SPLITS, num_rows, outputs] float32: one for each split, for `merge_kernel`; None: y is stored
    x,  # [num_rows, depth]
    weight,  # a Weight
    bias,  # [outputs] or None
    num_rows,
    y_stride,
    x_stride,
    FORM: tl.constexpr,
    IS_GATED: tl.constexpr,  # outputs are pairs: a gate, and what it multiplies
    NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,  # input precision of tl.dot
    TILE_OUTPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Grid: tiles of outputs times tiles of rows; the number of splits if there are partials, otherwise 1."""
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    row = (tl.program_id(0) % num_row_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    is_row = row < num_rows
    first_output = tl.program_id(0) // num_row_tiles * TILE_OUTPUTS
    output = first_output + tl.arange(0, TILE_OUTPUTS)
    is_output = output < FORM.outputs
    first_split, end_split = 0, NUM_SPLITS
    if partials is not None:
        first_split = tl.program_id(1)
        end_split = first_split + 1
    total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for split in range(first_split, end_split):
        end_block = tl.minimum((split + 1) * SPLIT_BLOCKS, FORM.blocks)
        total += _chain(
            x + row * x_stride,
            is_row,
            weight,
            output,
            is_output,
            split * SPLIT_BLOCKS,
            end_block,
            None,
            FORM,
            PRECISION,
            TILE_OUTPUTS,
            TILE_ROWS,
        )
    if partials is not None:
        places = (first_split * num_rows + row)[None, :] * FORM.outputs + output[:, None]
        tl.store(partials + places, total, mask=is_output[:, None] & is_row[None, :])
    else:
        _finish(total, y + row * y_stride, is_row, bias, first_output, FORM, IS_GATED, TILE_OUTPUTS, TILE_ROWS)


@triton.jit(do_not_specialize=["num_rows", "rows_per_input", "num_parts"])
def grouped_product_kernel(
    output,
    x,
    weight,  # a Weight: the outputs of all experts, one expert after the other
    bias,
    columns_order,  # [EXPERTS, depth] int32: the input feature of each column; None: they are in order
    counts,
    pairs,
    num_rows,
    rows_per_input,
    num_parts,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,  # input precision of tl.dot
    TILE_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Like `triton_grouped_kernel.grouped_kernel`, with quantized weights."""
    expert, part = tl.program_id(1) // num_parts, tl.program_id(1) % num_parts
    count = tl.load(counts + expert)
    tile = tl.program_id(0)
    column, is_column = expert_columns(tile, COLUMNS, TILE_COLUMNS, ACTIVATION)
    if columns_order is not None:
        columns_order += expert * FORM.depth
    if bias is not None:
        bias += expert * COLUMNS
    for first in range(part * TILE_ROWS, count, num_parts * TILE_ROWS):
        place = first + tl.arange(0, TILE_ROWS)
        is_row = place < count
        pair = tl.load(pairs + expert * num_rows + place, mask=is_row, other=0)
        total = _chain(
            x + (pair // rows_per_input).to(tl.int64) * FORM.depth,
            is_row,
            weight,
            expert.to(tl.int64) * COLUMNS + column,
            is_column,
            0,
            FORM.blocks,
            columns_order,
            FORM,
            PRECISION,
            TILE_COLUMNS,
            TILE_ROWS,
        )
        store_pairs(
            total,
            output,
            pair,
            is_row,
            bias,
            tile,
            column,
            is_column,
            COLUMNS,
            ACTIVATION,
            ALPHA,
            LIMIT,
            TILE_COLUMNS,
            TILE_ROWS,
        )


@triton.jit
def merge_kernel(
    y,
    partials,
    bias,
    y_stride,
    FORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """Arguments as of `product_kernel`. Grid: rows, tiles of outputs."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    first_output = tl.program_id(1) * TILE_OUTPUTS
    output = first_output + tl.arange(0, TILE_OUTPUTS)
    total = tl.zeros([TILE_OUTPUTS, 1], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        places = (split * tl.num_programs(0) + row)[None, :] * FORM.outputs + output[:, None]
        total += tl.load(partials + places, mask=(output < FORM.outputs)[:, None], other=0.0)
    _finish(total, y + row * y_stride, row >= 0, bias, first_output, FORM, IS_GATED, TILE_OUTPUTS, 1)


@triton.jit
def lookup_kernel(
    y,  # [ids, depth]
    ids,  # [ids] int64: rows of a table whose rows from `first_row` on are the weight's
    weight,  # a Weight
    first_row,
    FORM: tl.constexpr,
):
    """Stores the rows that are the weight's. Grid: ids, blocks."""
    place, block = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.program_id(1)
    output = tl.load(ids + place) - first_row
    is_output = (output >= 0) & (output < FORM.outputs)
    words = _load_words(weight.words, block, output, is_output, FORM)
    high_words = words
    if weight.high_words is not None:
        high_words = _load_words(weight.high_words, block, output, is_output, FORM)
    for unit in tl.static_range(FORM.block // FORM.unit):
        row = _load_weights(weight, words, high_words, block, unit, output, is_output, y.dtype.element_ty, FORM)
        feature = block * FORM.block + unit * FORM.unit + tl.arange(0, FORM.unit)
        mask = is_output[:, None] & (feature < FORM.depth)[None, :]
        tl.store(y + place[:, None] * FORM.depth + feature[None, :], row, mask=mask)
