"""Triton kernels of matrix products whose bits do not depend on the number of rows.

INVARIANT: an element is the sum of its splits in ascending order, and a split is one chain over ascending tiles of
features. Splits and tiles are at fixed features, and one compiled kernel computes any number of rows, so it changes no
bit whether one program computes all splits of a tile or one program computes each.
"""

import triton
import triton.language as tl


# What differs between steps must not select another compiled kernel.
@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def product_kernel(
    y,  # [num_rows, matrices, COLUMNS]
    partials,  # [num_partials, num_rows, matrices, COLUMNS] float32
    x,  # [num_rows, matrices, DEPTH]
    weight,  # [matrices, COLUMNS, DEPTH]
    bias,  # [matrices, COLUMNS] or None
    num_rows,
    num_partials,  # 0: one program computes all splits of a tile
    Y_ROW: tl.constexpr,  # strides
    Y_MATRIX: tl.constexpr,
    X_ROW: tl.constexpr,
    X_MATRIX: tl.constexpr,
    MATRICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,  # features of a split, a multiple of TILE_DEPTH
    PRECISION: tl.constexpr,  # input precision of tl.dot
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """Axis 0 of the grid: tiles of columns times tiles of rows, which change faster, so that they share the weight in
    the cache. Axis 1: the splits (1 without partials) of each matrix."""
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    row = (tl.program_id(0) % num_row_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    column = tl.program_id(0) // num_row_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row, is_column = row < num_rows, column < COLUMNS
    matrix = tl.program_id(1) % MATRICES
    first_split, end_split = 0, (DEPTH + SPLIT - 1) // SPLIT
    if num_partials > 0:
        first_split = tl.program_id(1) // MATRICES
        end_split = first_split + 1
    depth = tl.arange(0, TILE_DEPTH)
    rows = x + row[:, None] * X_ROW + matrix * X_MATRIX + depth[None, :]
    columns = weight + (matrix.to(tl.int64) * COLUMNS + column)[None, :] * DEPTH + depth[:, None]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for split in range(first_split, end_split):
        acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, DEPTH), TILE_DEPTH):
            row_mask, column_mask = is_row[:, None], is_column[None, :]
            if DEPTH % TILE_DEPTH > 0:
                is_inside = depth < DEPTH - start
                row_mask, column_mask = row_mask & is_inside[None, :], column_mask & is_inside[:, None]
            a = tl.load(rows + start, mask=row_mask, other=0.0)
            b = tl.load(columns + start, mask=column_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        total += acc
    mask = is_row[:, None] & is_column[None, :]
    if num_partials > 0:
        place = ((first_split * num_rows + row) * MATRICES + matrix) * COLUMNS
        tl.store(partials + place[:, None] + column[None, :], total, mask=mask)
    else:
        if bias is not None:
            total += tl.load(bias + matrix * COLUMNS + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        outputs = y + row * Y_ROW + matrix * Y_MATRIX
        tl.store(outputs[:, None] + column[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    y,  # as in product_kernel, as all that follow
    partials,
    bias,
    Y_ROW: tl.constexpr,
    Y_MATRIX: tl.constexpr,
    MATRICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a program
):
    """Adds the splits up. Grid: rows, parts of WIDTH columns of each matrix."""
    row = tl.program_id(0).to(tl.int64)
    matrix = tl.program_id(1) % MATRICES
    column = tl.program_id(1) // MATRICES * WIDTH + tl.arange(0, WIDTH)
    is_column = column < COLUMNS
    total = tl.zeros([WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        place = ((split * tl.num_programs(0) + row) * MATRICES + matrix) * COLUMNS
        total += tl.load(partials + place + column, mask=is_column, other=0.0)
    if bias is not None:
        total += tl.load(bias + matrix * COLUMNS + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + row * Y_ROW + matrix * Y_MATRIX + column, total.to(y.dtype.element_ty), mask=is_column)
