"""Triton kernels that add low-rank products of adapters (LoRA) to the product of a linear layer.

A tile of rows is cut into runs, which are adjacent rows with one adapter. The programs of a tile take turns at its
runs, so the launch depends on the number of rows alone. The rows of experts are pairs of a row and one of its experts,
ordered by expert and adapter: a run has one of both.

INVARIANT: an element of A·x is the sum of its splits in ascending order, a split is one chain over ascending features,
and an element of the product with B one chain over ascending ranks. Tiles have one size in every step, so a row's bits
depend on its own input and adapter only.
"""

import triton
import triton.language as tl

FIELDS = 4  # fields of a part's entry in the table of an adapter: addresses of A and B, rank, bits of the scale


@triton.jit
def runs_of_tile(of_rows, num_rows, tile, TILE_ROWS: tl.constexpr):
    """The rows of a tile, the adapter of each (-1: none), and the number of the run that it belongs to."""
    place = tl.arange(0, TILE_ROWS)
    row = tile * TILE_ROWS + place
    adapter = tl.load(of_rows + row, mask=row < num_rows, other=-1).to(tl.int32)
    before = tl.load(of_rows + row - 1, mask=(row < num_rows) & (place > 0), other=-1).to(tl.int32)
    run = tl.cumsum((adapter != before).to(tl.int32), 0)
    return row.to(tl.int64), adapter, run


@triton.jit
def entry_of(tables, adapter, part, num_adapters, FIELDS: tl.constexpr, EXPERT_PARTS: tl.constexpr):
    """Address of a part's entry in the table of an adapter, or of an expert and an adapter."""
    if EXPERT_PARTS > 0:
        part += adapter // num_adapters * EXPERT_PARTS
        adapter = adapter % num_adapters
    return tl.load(tables + adapter).to(tl.pointer_type(tl.int64)) + part * FIELDS


@triton.jit
def places_of(row, order, num_rows, rows_per_input):
    """Indices of the rows in x or y."""
    if order is None:
        return row
    return tl.load(order + row, mask=row < num_rows, other=0) // rows_per_input


# What differs between layers and steps must not select another compiled kernel.
@triton.jit(do_not_specialize=["num_rows", "num_partials", "first_part", "num_adapters", "rows_per_input"])
def shrink_kernel(
    inner,  # [max(1, num_partials), num_rows, PARTS, RANKS] float32
    x,  # [num_rows, DEPTH], or [num_rows, PARTS, DEPTH] if each part has an input of its own
    # [num_rows] int64: the adapter of each row, an index of tables, plus `num_adapters` times its expert; -1: none
    of_rows,
    tables,  # [adapters] int64: the address of each adapter's table [parts of all layers, FIELDS] int64
    order,  # [num_rows] int64: the pair that each row is, or None
    num_rows,
    num_adapters,
    rows_per_input,  # pairs for each row of x
    num_partials,  # 0: one program computes all splits
    first_part,  # first part of this layer in the tables
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,  # a multiple of TILE_RANKS
    X_ROW: tl.constexpr,  # strides
    X_PART: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,  # features of a split, a multiple of TILE_DEPTH
    PRECISION: tl.constexpr,  # input precision of tl.dot
    FIELDS: tl.constexpr,
    EXPERT_PARTS: tl.constexpr,  # parts of all layers from one expert to the next one; 0: rows are not of experts
    TURNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """A·x for each part of the layer. Grid: TURNS programs for each tile of rows; the splits (1 without partials) of
    each part."""
    row, adapter, run = runs_of_tile(of_rows, num_rows, tl.program_id(0) // TURNS, TILE_ROWS)
    part = tl.program_id(1) % PARTS
    first_split, end_split = 0, (DEPTH + SPLIT - 1) // SPLIT
    if num_partials > 0:
        first_split = tl.program_id(1) // PARTS
        end_split = first_split + 1
    depth = tl.arange(0, TILE_DEPTH)
    source = places_of(row, order, num_rows, rows_per_input)
    for turn in range(tl.program_id(0) % TURNS, tl.max(run, 0) + 1, TURNS):
        is_mine = (run == turn) & (adapter >= 0)
        its_adapter = tl.max(tl.where(is_mine, adapter, -1), 0)
        if its_adapter >= 0:
            entry = entry_of(tables, its_adapter, first_part + part, num_adapters, FIELDS, EXPERT_PARTS)
            down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
            num_ranks = tl.load(entry + 2).to(tl.int32)
            for first_rank in range(0, num_ranks, TILE_RANKS):
                rank = first_rank + tl.arange(0, TILE_RANKS)
                total = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
                for split in range(first_split, end_split):
                    acc = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
                    for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, DEPTH), TILE_DEPTH):
                        row_mask, rank_mask = is_mine[:, None], (rank < num_ranks)[None, :]
                        if DEPTH % TILE_DEPTH > 0:
                            is_inside = depth < DEPTH - start
                            row_mask, rank_mask = row_mask & is_inside[None, :], rank_mask & is_inside[:, None]
                        places = x + source[:, None] * X_ROW + part * X_PART + (start + depth)[None, :]
                        a = tl.load(places, mask=row_mask, other=0.0)
                        b = tl.load(down + rank[None, :] * DEPTH + (start + depth)[:, None], mask=rank_mask, other=0.0)
                        acc = tl.dot(a, b, acc, input_precision=PRECISION)
                    total += acc
                places = inner + ((first_split * num_rows + row) * PARTS + part)[:, None] * RANKS + rank[None, :]
                tl.store(places, total, mask=is_mine[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "first_part"])
def look_up_kernel(
    inner,  # [num_rows, RANKS] float32
    token_ids,  # [num_rows] int64
    dtype_of,  # a tensor in the dtype of adapters
    of_rows,  # this and the next parameter: see `shrink_kernel`
    tables,
    num_rows,
    num_tokens,  # tokens of the vocabulary
    first_part,
    RANKS: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
):
    """The columns of A at tokens, as the embedding's A·x. Grid: tiles of rows."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = row < num_rows
    adapter = tl.load(of_rows + row, mask=is_row, other=-1)
    token = tl.load(token_ids + row, mask=is_row, other=0)
    has_adapter = adapter >= 0
    entry = tl.load(tables + adapter, mask=has_adapter, other=0).to(tl.pointer_type(tl.int64)) + first_part * FIELDS
    down = tl.load(entry, mask=has_adapter, other=0).to(tl.pointer_type(dtype_of.dtype.element_ty))
    num_ranks = tl.load(entry + 2, mask=has_adapter, other=0)
    for first_rank in range(0, RANKS, TILE_RANKS):
        rank = first_rank + tl.arange(0, TILE_RANKS)
        is_rank = rank[None, :] < num_ranks[:, None]
        places = down[:, None] + rank.to(tl.int64)[None, :] * num_tokens + token[:, None]
        found = tl.load(places, mask=is_rank, other=0.0).to(tl.float32)
        tl.store(inner + row.to(tl.int64)[:, None] * RANKS + rank[None, :], found, mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_partials", "first_part", "num_adapters"])
def expand_kernel(
    y,  # [num_rows, columns], or [num_rows, PARTS, columns]: the product of the layer or the layers, which is added to
    inner,  # as in `shrink_kernel`, as all that follow
    of_rows,
    tables,
    order,
    tiles,  # [tiles of columns, 4] int32: the part and its first column; in it, the first column and the end of columns
    num_rows,
    num_adapters,
    num_partials,
    first_part,
    Y_ROW: tl.constexpr,  # strides
    Y_PART: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # divides the first column and the number of columns of each part
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    EXPERT_PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """y += scale · B(inner). Grid: TURNS programs for each tile of rows; tiles of columns."""
    row, adapter, run = runs_of_tile(of_rows, num_rows, tl.program_id(0) // TURNS, TILE_ROWS)
    tile = tiles + tl.program_id(1) * 4
    part, first_column = tl.load(tile), tl.multiple_of(tl.load(tile + 1), ALIGNMENT)
    column = tl.multiple_of(tl.load(tile + 2), TILE_COLUMNS) + tl.arange(0, TILE_COLUMNS)  # columns of the part
    is_column = column < tl.multiple_of(tl.load(tile + 3), ALIGNMENT)
    target = places_of(row, order, num_rows, 1)
    for turn in range(tl.program_id(0) % TURNS, tl.max(run, 0) + 1, TURNS):
        is_mine = (run == turn) & (adapter >= 0)
        its_adapter = tl.max(tl.where(is_mine, adapter, -1), 0)
        if its_adapter >= 0:
            entry = entry_of(tables, its_adapter, first_part + part, num_adapters, FIELDS, EXPERT_PARTS)
            up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)
            num_ranks = tl.load(entry + 2).to(tl.int32)
            scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
            stride = tl.cdiv(num_ranks, TILE_RANKS) * TILE_RANKS
            total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
            for first_rank in range(0, num_ranks, TILE_RANKS):
                rank = first_rank + tl.arange(0, TILE_RANKS)
                a = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
                for partial in range(tl.maximum(num_partials, 1)):
                    places = inner + ((partial * num_rows + row) * PARTS + part)[:, None] * RANKS + rank[None, :]
                    a += tl.load(places, mask=is_mine[:, None], other=0.0)
                b = tl.load(up + column[None, :] * stride + rank[:, None], mask=is_column[None, :], other=0.0)
                total = tl.dot(a * scale, b.to(tl.float32), total, input_precision=PRECISION)
            if num_ranks > 0:
                places = y + target[:, None] * Y_ROW + part * Y_PART + (first_column + column)[None, :]
                mask = is_mine[:, None] & is_column[None, :]
                product = tl.load(places, mask=mask, other=0.0).to(tl.float32)
                tl.store(places, (product + total).to(y.dtype.element_ty), mask=mask)
