"""Triton kernels of linear layers whose weights and inputs have 8 bits."""

import triton
import triton.language as tl

from penstock_server.device.triton.fp8 import encode


@triton.jit
def quantize_kernel(
    codes,  # [rows, DEPTH] int8: integers, or the bits of floats
    scales,  # [rows] float32
    x,  # [rows, DEPTH]
    x_stride,
    DEPTH: tl.constexpr,
    CODE: tl.constexpr,  # see `QuantFormat`
    WIDTH: tl.constexpr,
):
    """x = codes * scales: a row's greatest magnitude becomes the largest code. A row with NaN or infinity gets the
    scale NaN. Grid: rows, 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    most, poison = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, DEPTH, WIDTH):
        part = tl.load(x + row * x_stride + start + column, mask=column < DEPTH - start, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(part))
        poison += part * 0.0
    largest: tl.constexpr = 127.0 if CODE == "integer" else 448.0
    scale = tl.maximum(tl.max(most, 0) / largest, 2.0**-100)  # 1 / scale is finite
    tl.store(scales + row, scale + tl.sum(poison, 0))
    for start in range(0, DEPTH, WIDTH):
        mask = column < DEPTH - start
        part = tl.load(x + row * x_stride + start + column, mask=mask, other=0.0).to(tl.float32) * (1.0 / scale)
        if CODE == "integer":  # noqa: SIM108
            # The last bit of 1.5 * 2**23 is worth 1, so the sum with it is rounded to an integer, its lowest bits.
            code = (part + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        else:
            code = encode(part, CODE)
        tl.store(codes + row * DEPTH + start + column, code, mask=mask)


@triton.jit
def _finish(total, y, x_scales, scales, bias, row, is_row, y_stride, output, is_output):
    """Scales the sums [rows, outputs] int32, adds the bias, and stores."""
    result = total.to(tl.float32) * tl.load(x_scales + row, mask=is_row, other=0.0)[:, None]
    result *= tl.load(scales + output, mask=is_output, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = y + row[:, None] * y_stride + output[None, :]
    tl.store(places, result.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def int8_product_kernel(
    y,  # [rows, OUTPUTS]
    partials,  # [splits, rows, OUTPUTS] int32: the sums of the splits, instead of y; None: there is one split
    x,  # [rows, DEPTH] int8
    x_scales,  # [rows] float32
    weight,  # [OUTPUTS, DEPTH] int8
    scales,  # [OUTPUTS] float32
    bias,  # [OUTPUTS] or None
    num_rows,
    y_stride,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT_DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """Sums are exact integers, so their order does not matter. Grid: tiles of outputs times tiles of rows; splits."""
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    row = (tl.program_id(0) % num_row_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    is_row = row < num_rows
    output = tl.program_id(0) // num_row_tiles * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = output < OUTPUTS
    depth = tl.arange(0, TILE_DEPTH)
    first = tl.program_id(1) * SPLIT_DEPTH
    rows = x + row[:, None] * DEPTH + depth[None, :]
    columns = weight + output.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.int32)
    for start in range(first, tl.minimum(first + SPLIT_DEPTH, DEPTH), TILE_DEPTH):
        is_inside = depth < DEPTH - start
        a = tl.load(rows + start, mask=is_row[:, None] & is_inside[None, :], other=0)
        b = tl.load(columns + start, mask=is_inside[:, None] & is_output[None, :], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    if partials is not None:
        places = (tl.program_id(1) * num_rows + row)[:, None] * OUTPUTS + output[None, :]
        tl.store(partials + places, total, mask=is_row[:, None] & is_output[None, :])
    else:
        _finish(total, y, x_scales, scales, bias, row, is_row, y_stride, output, is_output)


@triton.jit
def int8_merge_kernel(
    y,
    partials,
    x_scales,
    scales,
    bias,
    y_stride,
    OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """Arguments as of `int8_product_kernel`. Grid: rows, tiles of outputs."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = output < OUTPUTS
    total = tl.zeros([1, TILE_OUTPUTS], tl.int32)
    for split in tl.static_range(NUM_SPLITS):
        places = (split * tl.num_programs(0) + row)[:, None] * OUTPUTS + output[None, :]
        total += tl.load(partials + places, mask=is_output[None, :], other=0)
    _finish(total, y, x_scales, scales, bias, row, row >= 0, y_stride, output, is_output)
