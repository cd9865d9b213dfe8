"""Normalization of queries and keys, before or after rope: per head, or over the whole projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock_server.device.attention.interface import HeadNorms
from penstock_server.device.ops import PackedNorm
from penstock_server.device.reference.ops import TorchNorm
from penstock_server.layers.context import BuildContext
from penstock_server.layers.norm import NormSpec, load_norm, norm_parameters
from penstock_server.layers.shard import HeadSplit, Shard
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class QkNormSpec:
    norm: NormSpec
    # "head": each head, one weight for all (Qwen3); "heads": each head, a weight per head (Cohere);
    # "projection": all heads together (OLMo 2)
    over: Literal["head", "heads", "projection"] = "head"
    is_after_rope: bool = False  # Hunyuan


def qk_norm_parameters(spec: QkNormSpec, prefix: str, head_dim: int, split: HeadSplit) -> dict[str, Parameter]:
    table: dict[str, Parameter] = {}
    num_heads, num_kv_heads = split.heads.parts[-1].stop, split.kv_heads[-1].stop
    for name, num, mine in (("q_norm", num_heads, split.mine), ("k_norm", num_kv_heads, split.my_kv)):
        shape: tuple[int, ...] = (head_dim,)
        part = None
        if spec.over == "heads":
            shape, part = (num, head_dim), Part(0, mine)
        elif spec.over == "projection":
            shape = (num * head_dim,)
        table |= norm_parameters(f"{prefix}.{name}", spec.norm, shape, part)
    return table


@dataclass(frozen=True, slots=True)
class ProjectionNorm:
    """A norm over the heads of all ranks together, or over groups of them. It gathers them, so its sums are those of a
    single rank."""

    norm: PackedNorm
    group: RankGroup
    widths: tuple[int, ...]  # columns on each rank
    unique: tuple[range, ...]  # the gathered columns that hold each head once
    columns: Tensor | None  # the same; None: all of them
    mine: slice  # this rank's columns of the result
    num_groups: int = 1  # parts of the gathered columns that are normed apart

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads on this rank, head_dim] → the same shape."""
        if self.group.size == 1:
            return self._normed(x.flatten(1)).view(x.shape)
        gathered = self.group.all_gather_columns(x.flatten(1), self.widths)
        if self.columns is not None:
            gathered = gathered.index_select(1, self.columns)
        return self._normed(gathered)[:, self.mine].reshape(x.shape)

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(1, (self.num_groups, -1))).flatten(1)


QkNorm = PackedNorm | ProjectionNorm
"""[tokens, heads, head_dim] → the same shape."""


def as_head_norms(norms: tuple[QkNorm, QkNorm], spec: QkNormSpec, head_dim: int, shard: Shard) -> HeadNorms | None:
    """The norms of queries and of keys, for an attention that computes them. None: they have operators of their own."""
    is_whole = spec.over == "projection"
    if is_whole and (shard.exact or shard.group.size > 1):
        return None  # several ranks gather the heads, and with `exact` one rank computes the same bits
    query, key = (norm.norm if isinstance(norm, ProjectionNorm) else norm for norm in norms)
    if not isinstance(query, TorchNorm) or not isinstance(key, TorchNorm):
        return None

    def by_heads(parameter: Tensor | None) -> Tensor | None:
        return parameter if parameter is None or not is_whole else parameter.view(-1, head_dim)

    return HeadNorms(
        query_weight=by_heads(query.weight),
        query_bias=by_heads(query.bias),
        key_weight=by_heads(key.weight),
        key_bias=by_heads(key.bias),
        eps=query.variant.eps,
        is_layer=query.variant.kind == "layer",
        is_wide=query.variant.is_wide,
        is_whole=is_whole,
        follows_rotation=spec.is_after_rope,
    )


def load_qk_norms(
    spec: QkNormSpec, prefix: str, head_dim: int, split: HeadSplit, context: BuildContext
) -> tuple[QkNorm, QkNorm]:
    """The norms of queries and of keys, from [tokens, heads, head_dim] to the same shape."""
    q, k = (load_norm(context.loader, context.ops, f"{prefix}.{name}", spec.norm) for name in ("q_norm", "k_norm"))
    if spec.over != "projection":
        return q, k
    shard = context.shard
    device = context.loader.device
    return (
        over_projection(q, split.heads.parts, head_dim, shard, device),
        over_projection(k, split.kv_heads, head_dim, shard, device),
    )


def over_projection(
    norm: PackedNorm,
    parts: tuple[range, ...],
    head_dim: int,
    shard: Shard,
    device: torch.device,
    num_groups: int = 1,
) -> ProjectionNorm:
    """parts: the heads of each rank; neighbouring ranks may hold copies of the same heads. num_groups: of
    `ProjectionNorm`."""
    unique: list[range] = []
    start = num_seen = 0
    for part in parts:
        if part.stop > num_seen:
            unique.append(range(start, start + len(part) * head_dim))
            num_seen = part.stop
        start += len(part) * head_dim
    columns = [column for each in unique for column in each]
    picks = None if len(columns) == start else torch.tensor(columns, device=device)
    mine = parts[shard.group.rank]
    widths = tuple(len(part) * head_dim for part in parts)
    columns_of_mine = slice(mine.start * head_dim, mine.stop * head_dim)
    return ProjectionNorm(norm, shard.group, widths, tuple(unique), picks, columns_of_mine, num_groups)
