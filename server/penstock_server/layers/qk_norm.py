"""Normalization of queries and keys, before their rotation or behind it: head by head, or over a whole projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock_server.layers.context import BuildContext
from penstock_server.layers.norm import Norm, NormSpec, norm_parameters
from penstock_server.layers.shard import HeadShare, Shard
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class QkNormSpec:
    norm: NormSpec
    # "head": all heads by one weight (Qwen3); "heads": each head by its own (Cohere); "projection": all heads at once
    over: Literal["head", "heads", "projection"] = "head"
    is_after_rope: bool = False  # Hunyuan


def qk_norm_parameters(spec: QkNormSpec, prefix: str, head_dim: int, share: HeadShare) -> dict[str, Parameter]:
    table: dict[str, Parameter] = {}
    num_heads, num_kv_heads = share.heads.parts[-1].stop, share.kv_heads[-1].stop
    for name, num, part in (("q_norm", num_heads, share.mine), ("k_norm", num_kv_heads, share.my_kv)):
        shape: tuple[int, ...] = (head_dim,)
        mine = None
        if spec.over == "heads":
            shape, mine = (num, head_dim), Part(0, part)
        elif spec.over == "projection":
            shape = (num * head_dim,)
        table |= norm_parameters(f"{prefix}.{name}", spec.norm, shape, mine)
    return table


@dataclass(frozen=True, slots=True)
class WholeNorm:
    """A norm over all ranks' heads together. They are gathered, so that its sums are those of a single rank."""

    norm: Norm
    group: RankGroup
    widths: tuple[int, ...]  # numbers on each rank
    columns: Tensor | None  # of what was gathered, each head once; None: all of it
    mine: slice  # of those

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads on this rank, head_dim] → the same."""
        if self.group.size == 1:
            return self.norm(x.flatten(1)).view(x.shape)
        gathered = self.group.all_gather_columns(x.flatten(1), self.widths)
        if self.columns is not None:
            gathered = gathered.index_select(1, self.columns)
        return self.norm(gathered)[:, self.mine].reshape(x.shape)


def load_qk_norms(
    spec: QkNormSpec, prefix: str, head_dim: int, share: HeadShare, context: BuildContext
) -> tuple[Norm | WholeNorm, Norm | WholeNorm]:
    """Of queries and of keys; each takes and gives [tokens, heads, head_dim]."""
    q, k = (Norm.load(context.loader, context.ops, f"{prefix}.{name}", spec.norm) for name in ("q_norm", "k_norm"))
    if spec.over != "projection":
        return q, k
    return _whole(q, share.heads.parts, head_dim, context.shard), _whole(k, share.kv_heads, head_dim, context.shard)


def _whole(norm: Norm, parts: tuple[range, ...], head_dim: int, shard: Shard) -> WholeNorm:
    """parts: each rank's heads, the same ones on neighbouring ranks where they are copies."""
    columns: list[int] = []
    start = num_seen = 0
    for part in parts:
        if part.stop > num_seen:
            columns += range(start, start + len(part) * head_dim)
            num_seen = part.stop
        start += len(part) * head_dim
    device = None if norm.weight is None else norm.weight.device
    picks = None if len(columns) == start else torch.tensor(columns, device=device)
    mine = parts[shard.group.rank]
    widths = tuple(len(part) * head_dim for part in parts)
    return WholeNorm(norm, shard.group, widths, picks, slice(mine.start * head_dim, mine.stop * head_dim))
