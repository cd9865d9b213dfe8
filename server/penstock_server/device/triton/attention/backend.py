"""Implements `Attention` with the kernels of this folder.

A row's result has the same bits in every batch and for every cut of its prompt into chunks: tiles and splits are at
fixed positions of the sequence, their sizes depend on the layer alone, and one compiled kernel computes prompts and
decode rows. The bits may differ on another device, for another block size, and from another version of Triton.

Neither `prepare` nor `attend` reads a device tensor on the host: grids come from `max_query_tokens`,
`max_context_tokens` and the tensors' shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.attention.interface import (
    AttentionShape,
    LatentKernels,
    LatentQueries,
    Latents,
    StepBatch,
    Transform,
)
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.attention import PREFERRED_BLOCK_TOKENS, kernel, write_kernel
from penstock_server.device.triton.attention.tile import Tile, key_parts, padded_dim, query_tile

# Memory for the partial results of splits. Steps that would need more compute all splits of a sequence in one program.
MAX_PARTIAL_BYTES = 128 << 20
MAX_WRITE_ELEMENTS = 4096  # in the tile of heads of a program of `write_kernel`, unless it needs all heads
# The kernels' names of the fp8 dtypes, and the factor that `decode` leaves to its caller.
FP8_FORMATS = {torch.float8_e4m3fn: ("e4m3fn", 256.0), torch.float8_e5m2: ("e5m2", 1.0)}


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The sequence of each query tile, and the tile's first query. The number of tiles is an upper bound."""

    sequences: Tensor  # [tiles] int32; the number of sequences: the tile is unused
    queries: Tensor  # [tiles] int32


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """A step's tensors, and its query tiles by the number of queries of a tile."""

    batch: StepBatch
    by_size: dict[int, QueryTiles] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return self.batch.context_lens.shape[0]

    def tiles(self, size: int, num_tokens: int) -> QueryTiles:
        """The tiles of `size` queries each."""
        if self.batch.max_query_tokens == 1:
            size = 1
        if size not in self.by_size:
            self.by_size[size] = self._tiles(size, num_tokens)
        return self.by_size[size]

    def _tiles(self, size: int, num_tokens: int) -> QueryTiles:
        device, num_sequences = self.batch.query_starts.device, self.num_sequences
        if size >= self.batch.max_query_tokens:  # a tile per sequence
            sequences = torch.arange(num_sequences, dtype=torch.int32, device=device)
            return QueryTiles(sequences, torch.zeros_like(sequences))
        counts = self.batch.query_starts.diff().add_(size - 1).div_(size, rounding_mode="floor")
        ends = counts.cumsum(0)
        tiles = torch.arange(num_tokens // size + num_sequences, device=device)
        sequences = torch.searchsorted(ends, tiles, right=True)
        starts = torch.nn.functional.pad(ends, (1, 0))
        return QueryTiles(sequences.int(), tiles.sub_(starts[sequences]).mul_(size).int())


class TritonAttention:
    """Implements `Attention`. Cache of one layer: [blocks, kv_heads, block_tokens, head_dim + value_dim], keys
    first; fp8 as int8."""

    name = "triton"
    transforms = True
    preferred_block_tokens = PREFERRED_BLOCK_TOKENS

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        tile: Tile | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """tile: sizes for tests that exercise many tiles and splits. kv_dtype: as of `choose_attention`."""
        self.shape = shape
        self.device = device
        self.stored_dtype = dtype if kv_dtype is None else torch.int8
        self._fp8_format, self._decode_factor = ("", 1.0) if kv_dtype is None else FP8_FORMATS[kv_dtype]
        self.tile = tile or Tile.of(shape, dtype, is_fp8=kv_dtype is not None)
        assert self.tile.split_tokens % self.tile.keys == 0
        value_dim = 0 if shape.values_in_keys else shape.output_dim
        self.stored_dim = shape.head_dim + value_dim
        group = shape.num_heads // shape.num_kv_heads
        self._tile_heads, self._tile_queries = query_tile(group, self.tile.rows)
        self._head_tiles = shape.num_kv_heads * -(-group // self._tile_heads)
        self._slopes = None
        if shape.alibi is not None:
            slopes = torch.tensor(shape.alibi.slopes, device=device)
            self._slopes = slopes.bfloat16().float() if shape.alibi.is_bfloat16 else slopes
        self._alibi_scale = shape.scale if shape.alibi is not None and shape.alibi.is_scaled else 1.0
        main, rest = key_parts(shape)
        mask = {"WINDOW": shape.mask.window or 0, "CHUNK": shape.mask.chunk or 0, "PART": shape.mask.part}
        self._shared = {
            **mask,
            "HEADS": shape.num_heads,
            "VALUE_DIM": shape.output_dim,
            "SPLIT": self.tile.split_tokens,
            "VALUE_WIDTH": padded_dim(shape.output_dim),
        }
        self._attend = {
            **self._shared,
            "GROUP": group,
            "HEAD_DIM": shape.head_dim,
            "VALUE_OFFSET": 0 if shape.values_in_keys else shape.head_dim,
            "STORED_DIM": self.stored_dim,
            "BLOCK_TOKENS": shape.block_tokens,
            "HAS_SOFT_CAP": shape.soft_cap is not None,
            "IS_ALIBI_BFLOAT16": shape.alibi is not None and shape.alibi.is_bfloat16,
            # Tensor cores would round float32 to tf32.
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "FORMAT": self._fp8_format,
            "ROWS": self.tile.rows,
            "TILE_HEADS": self._tile_heads,
            "TILE_QUERIES": self._tile_queries,
            "KEYS": self.tile.keys,
            "MAIN_DIM": main,
            "REST_DIM": rest,
            "IS_VALUE_MAIN": shape.values_in_keys and shape.output_dim == main,
            "num_warps": self.tile.num_warps,
            "num_stages": self.tile.num_stages,
        }
        has_latent_kernels = self._attend["IS_VALUE_MAIN"] and rest > 0 and (shape.head_dim - main) % 2 == 0
        self.latent: LatentKernels | None = self if has_latent_kernels and shape.num_kv_heads == 1 else None
        self._write_width = padded_dim(max(shape.head_dim, value_dim))
        self._write = {
            "HEADS": shape.num_heads,
            "KV_HEADS": shape.num_kv_heads,
            "BLOCK_TOKENS": shape.block_tokens,
            "KEY_DIM": shape.head_dim,
            "VALUE_DIM": value_dim,
            "FORMAT": self._fp8_format,
        }

    def allocate(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, self.shape.num_kv_heads, self.shape.block_tokens, self.stored_dim)
        return torch.zeros(shape, dtype=self.stored_dtype, device=self.device)

    def bytes_per_block(self) -> int:
        return self.shape.block_tokens * self.shape.num_kv_heads * self.stored_dim * self.stored_dtype.itemsize

    @staticmethod
    def prepare(batch: StepBatch) -> TritonMetadata:
        return TritonMetadata(batch)

    def write_kv(
        self,
        cache: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        transform: Transform | None = None,
        scales: KvScales | None = None,
    ) -> None:
        scales = scales or KvScales()
        keys, values = _with_dense_heads(keys), _with_dense_heads(values)
        form = write_kernel.Form.of(transform, self._write_width)
        tile_heads, num_warps = self._write_tile(form)
        queries = norms = rotation = None
        num_query_tiles, clip = 0, 0.0
        if transform is not None:
            queries, norms, rotation = transform.queries, transform.norms, transform.rotation
            clip = transform.clip or 0.0
            assert queries.stride(-1) == 1
            num_query_tiles = -(-self.shape.num_heads // tile_heads)
        triton_device.launch(
            write_kernel.write_kernel,
            (slots.shape[0], num_query_tiles - (-self.shape.num_kv_heads // tile_heads)),
            cache=cache,
            queries=queries,
            keys=keys,
            values=values,
            slots=slots,
            positions=None if rotation is None else rotation.positions,
            cos=None if rotation is None else rotation.cos,
            sin=None if rotation is None else rotation.sin,
            clip=clip,
            query_weight=None if norms is None else norms.query_weight,
            query_bias=None if norms is None else norms.query_bias,
            key_weight=None if norms is None else norms.key_weight,
            key_bias=None if norms is None else norms.key_bias,
            eps=0.0 if norms is None else norms.eps,
            num_query_tiles=num_query_tiles,
            query_token_stride=0 if queries is None else queries.stride(0),
            query_head_stride=0 if queries is None else queries.stride(1),
            key_token_stride=keys.stride(0),
            key_head_stride=keys.stride(1),
            value_token_stride=values.stride(0),
            value_head_stride=values.stride(1),
            key_factor=1.0 / scales.keys,
            value_factor=1.0 / scales.values,
            TILE_HEADS=tile_heads,
            FORM=form,
            num_warps=num_warps,
            **self._write,
        )

    def _write_tile(self, form: write_kernel.Form) -> tuple[int, int]:
        """The heads of a program of `write_kernel`, and its warps."""
        shape = self.shape
        if form.is_whole:
            heads = padded_dim(max(shape.num_heads, shape.num_kv_heads))
        else:
            heads = min(padded_dim(shape.num_kv_heads), max(1, MAX_WRITE_ELEMENTS // form.width))
        return heads, min(16, max(4, heads * form.width // 1024))

    def write_latents(
        self, cache: Tensor, latents: Latents, slots: Tensor, scales: KvScales | None = None
    ) -> Tensor | None:
        x, weight, half = latents.x, latents.query_weight, latents.cos.shape[1]
        assert x.stride(-1) == 1
        query_dim = 0 if weight is None else weight.shape[0]
        query_latents = None if weight is None else x.new_empty((x.shape[0], query_dim))
        query_width = padded_dim(query_dim) if query_dim else 0
        width = max(self.shape.output_dim, query_width)
        triton_device.launch(
            write_kernel.write_latents_kernel,
            (x.shape[0], 1 if query_latents is None else 2),
            cache=cache,
            query_latents=query_latents,
            x=x,
            slots=slots,
            positions=latents.positions,
            cos=latents.cos,
            sin=latents.sin,
            query_weight=weight,
            weight=latents.weight,
            eps=latents.eps,
            row_stride=x.stride(0),
            factor=1.0 / (scales or KvScales()).keys,
            QUERY_DIM=query_dim,
            QUERY_WIDTH=query_width,
            LATENT_DIM=self.shape.output_dim,
            HALF=half,
            HALF_WIDTH=padded_dim(half),
            FORMAT=self._fp8_format,
            num_warps=min(16, max(1, width // 512)),
        )
        return query_latents

    def attend_latents(
        self, queries: LatentQueries, cache: Tensor, metadata: TritonMetadata, scales: KvScales | None = None
    ) -> Tensor:
        return self._attend_parts(queries.absorbed, queries, cache, metadata, None, None, scales)

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        metadata: TritonMetadata,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        return self._attend_parts(queries, None, cache, metadata, sinks, bias, scales)

    def _attend_parts(
        self,
        queries: Tensor,
        latent: LatentQueries | None,
        cache: Tensor,
        metadata: TritonMetadata,
        sinks: Tensor | None,
        bias: Tensor | None,
        scales: KvScales | None,
    ) -> Tensor:
        """latent: its rotary part completes the queries."""
        shape, batch, scales = self.shape, metadata.batch, scales or KvScales()
        assert sinks is None or shape.alibi is None, "sinks need scores without an offset"
        queries = _with_dense_heads(queries)
        rotary = None if latent is None else _with_dense_heads(latent.rotary)
        num_tokens, num_sequences = queries.shape[0], metadata.num_sequences
        output = queries.new_empty((num_tokens, shape.num_heads, shape.output_dim))
        num_splits = self._num_splits(batch, num_sequences)
        # Always tensors: a kernel compiled for None would be another one.
        sizes = (num_sequences, shape.num_heads, num_splits) if num_splits > 1 else (0,)
        partial_acc = torch.empty((*sizes, shape.output_dim), dtype=torch.float32, device=queries.device)
        tiles = metadata.tiles(self._tile_queries, num_tokens)
        is_decode = batch.max_query_tokens == 1
        # A step of decode rows alone needs either its query tiles or its splits.
        num_tiles = 0 if is_decode and num_splits > 1 else tiles.sequences.shape[0]
        of_batch = {
            "output": output,
            "partial_acc": partial_acc,
            "partial_stats": torch.empty((*sizes, 2), dtype=torch.float32, device=queries.device),
            "query_starts": batch.query_starts,
            "context_lens": batch.context_lens,
            "source_lens": batch.source_lens,
            "sinks": sinks,
            "num_splits": num_splits,
            "value_scale": (scales.keys if shape.values_in_keys else scales.values) * self._decode_factor,
        }
        triton_device.launch(
            kernel.attend_kernel,
            (num_tiles + (num_sequences * num_splits if num_splits > 1 else 0), self._head_tiles),
            **of_batch,
            queries=queries,
            rotary=rotary,
            cos=None if latent is None else latent.cos,
            sin=None if latent is None else latent.sin,
            cache=cache,
            block_tables=batch.block_tables,
            # Always a tensor, and a flag: a kernel compiled for None would be another one.
            ends=(batch.context_lens if batch.ends is None else batch.ends) if shape.mask.sees_spans else None,
            has_ends=int(batch.ends is not None),
            tile_sequences=tiles.sequences,
            tile_queries=tiles.queries,
            slopes=self._slopes,
            bias=None if bias is None else bias.float().contiguous(),
            num_tiles=num_tiles,
            num_sequences=num_sequences,
            table_stride=batch.block_tables.stride(0),
            token_stride=queries.stride(0),
            head_stride=queries.stride(1),
            rotary_token_stride=0 if rotary is None else rotary.stride(0),
            rotary_head_stride=0 if rotary is None else rotary.stride(1),
            bias_width=0 if bias is None else bias.shape[1],
            scale=shape.scale * scales.keys * self._decode_factor,
            soft_cap=shape.soft_cap or 0.0,
            alibi_scale=self._alibi_scale,
            **self._attend,
        )
        if num_splits > 1:
            triton_device.launch(
                kernel.reduce_kernel, (num_sequences, shape.num_heads), **of_batch, **self._shared, num_warps=1
            )
        return output

    def _num_splits(self, batch: StepBatch, num_sequences: int) -> int:
        """Upper bound on the splits of one query. 1: one program computes all splits of a sequence."""
        split_tokens = self.tile.split_tokens
        num_splits = -(-batch.max_context_tokens // split_tokens)
        if (span := self.shape.mask.max_span) is not None:
            num_splits = min(num_splits, -(-(span - 1) // split_tokens) + 1)
        needed = num_sequences * num_splits * self.shape.num_heads * self.shape.output_dim * 4
        return num_splits if needed <= MAX_PARTIAL_BYTES else 1


def _with_dense_heads(x: Tensor) -> Tensor:
    """[tokens, heads, dim], whose elements of one head are adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()
