"""Triton kernels of many experts at once: their products with dense weights, and the sum of each row's experts.

INVARIANT: an output is one chain over ascending features, in tiles whose weights are the first operand, so neither the
number of rows nor a row's place in a tile changes its bits.
"""

import triton
import triton.language as tl

from penstock_server.device.triton.kernel import activated


@triton.jit
def expert_columns(tile, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The columns [TILE_COLUMNS] that a program computes of an expert's, and which exist. With an activation, gates
    alternate with what they multiply, which is COLUMNS / 2 further."""
    column = tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = column < COLUMNS
    if ACTIVATION != "":
        column = column % 2 * (COLUMNS // 2) + column // 2
    return column, is_column


@triton.jit
def store_pairs(
    total,  # [columns, rows] float32
    output,  # [pairs, COLUMNS], or half of them with an activation
    pair,  # [rows]
    is_row,
    bias,  # bias of this expert [COLUMNS], or None
    tile,
    column,  # see `expert_columns`
    is_column,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # activation of gates; "": there are none
    ALPHA: tl.constexpr,  # alpha of a clamped SwiGLU, as LIMIT
    LIMIT: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Adds the bias, multiplies by the activated gates, and stores."""
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    width: tl.constexpr = COLUMNS if ACTIVATION == "" else COLUMNS // 2
    if ACTIVATION != "":
        gate, up = total.reshape(TILE_COLUMNS // 2, 2, TILE_ROWS).permute(0, 2, 1).split()
        if ACTIVATION == "clamped-swiglu":
            gate, up = tl.minimum(gate, LIMIT), tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
            total = gate / (1.0 + tl.exp(-gate * ALPHA)) * (up + 1.0)
        else:
            total = activated(gate, ACTIVATION) * up
        column = tile * (TILE_COLUMNS // 2) + tl.arange(0, TILE_COLUMNS // 2)
        is_column = column < width
    places = output + pair.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(places, total.to(output.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows", "rows_per_input", "num_parts"])
def grouped_kernel(
    output,  # as in `store_pairs`
    x,  # [pairs / rows_per_input, DEPTH]
    weight,  # [EXPERTS, COLUMNS, DEPTH]
    bias,  # [EXPERTS, COLUMNS] or None
    counts,  # see `route_kernel`
    pairs,
    num_rows,
    rows_per_input,
    num_parts,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,  # as in `store_pairs`
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,  # input precision of tl.dot
    TILE_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """The product of each pair's row of x with the weight of its expert. Grid: tiles of columns; num_parts programs for
    each expert, which take turns at its tiles of rows."""
    expert, part = tl.program_id(1) // num_parts, tl.program_id(1) % num_parts
    count = tl.load(counts + expert)
    tile = tl.program_id(0)
    column, is_column = expert_columns(tile, COLUMNS, TILE_COLUMNS, ACTIVATION)
    depth = tl.arange(0, TILE_DEPTH)
    columns = weight + (expert.to(tl.int64) * COLUMNS + column)[:, None] * DEPTH + depth[None, :]
    if bias is not None:
        bias += expert * COLUMNS
    for first in range(part * TILE_ROWS, count, num_parts * TILE_ROWS):
        place = first + tl.arange(0, TILE_ROWS)
        is_row = place < count
        pair = tl.load(pairs + expert * num_rows + place, mask=is_row, other=0)
        rows = x + (pair // rows_per_input).to(tl.int64)[None, :] * DEPTH + depth[:, None]
        total = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
        for start in range(0, DEPTH, TILE_DEPTH):
            row_mask, column_mask = is_row[None, :], is_column[:, None]
            if DEPTH % TILE_DEPTH > 0:
                is_inside = depth < DEPTH - start
                row_mask, column_mask = row_mask & is_inside[:, None], column_mask & is_inside[None, :]
            a = tl.load(columns + start, mask=column_mask, other=0.0)
            b = tl.load(rows + start, mask=row_mask, other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
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
def weighted_sum_kernel(
    output,  # [rows, FEATURES]
    results,  # [rows, TOP_K, FEATURES]
    weights,  # see `route_kernel`
    experts,
    counts,  # set to zero
    shared,  # [rows, FEATURES]: of the shared expert, added last; or None
    shared_stride,  # between its rows
    TOP_K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    FIRST: tl.constexpr,  # the results of other experts than these are left out
    EXPERTS: tl.constexpr,
    MINE: tl.constexpr,  # experts of this rank in counts
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a program
    MINE_WIDTH: tl.constexpr,  # a power of two, at least MINE
):
    """Grid: rows, parts of WIDTH features."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < FEATURES
    total = tl.zeros([WIDTH], tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts + row * TOP_K + place) - FIRST
        num_there = tl.where((expert >= 0) & (expert < EXPERTS), FEATURES, 0)
        its_results = results + (row * TOP_K + place) * FEATURES + column
        result = tl.load(its_results, mask=column < num_there, other=0.0).to(tl.float32)
        total += result * tl.load(weights + row * NUM_WEIGHTS + place)
    if shared is not None:
        result = tl.load(shared + row * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
        if NUM_WEIGHTS > TOP_K:
            result *= tl.load(weights + row * NUM_WEIGHTS + TOP_K)
        total += result
    tl.store(output + row * FEATURES + column, total.to(output.dtype.element_ty), mask=mask)
    if (row == 0) & (tl.program_id(1) == 0):
        mine = tl.arange(0, MINE_WIDTH)
        tl.store(counts + mine, tl.zeros([MINE_WIDTH], tl.int32), mask=mine < MINE)
