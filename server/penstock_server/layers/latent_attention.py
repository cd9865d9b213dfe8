"""Multi-head latent attention (DeepSeek V2, https://arxiv.org/abs/2405.04434): all heads read one compressed latent.

For each token the cache holds the normed latent and one rotated key part, shared by all heads: a key is [latent,
rotated], its value is the latent. The projections from the latent to each head's keys and values are absorbed into the
queries and the outputs (section 2.1.2 of the paper). Sharded by query heads; every rank computes the latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from penstock_server.device.attention.interface import Attention, AttentionShape
from penstock_server.device.ops import PackedLinear
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.gates import Gates
from penstock_server.layers.head_linear import HeadLinear
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.norm import NormSpec, load_norm
from penstock_server.layers.operation import (
    AttendLatents,
    LatentOperands,
    Multiply,
    NormLatents,
    Program,
    Register,
)
from penstock_server.layers.rope import RopeSpec
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.shard import Shard
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Sizes are named as in config.json."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeSpec | None  # rope of the rotated part; `interleaved` as DeepSeek stores it; None: it is not rotated
    q_lora_rank: int | None = None  # None: queries are projected directly
    norm_eps: float = 1e-6  # epsilon of the latents' norms; transformers has no setting for it
    has_bias: bool = False  # for the projections from and to the hidden dimension, except the direct one of queries
    mscale: float = 1.0  # its square is a factor of the softmax scale: yarn's magnitude for `mscale_all_dim`
    has_gates: bool = False  # the output of each head is multiplied by the sigmoid of a gate

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"config.json: {name} must be at least 1, not {getattr(self, name)}")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ConfigError(f"config.json: q_lora_rank must be at least 1 or null, not {self.q_lora_rank}")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"config.json: qk_rope_head_dim must be even, not {self.qk_rope_head_dim}")

    @property
    def num_kv_heads(self) -> int:
        """One: the latent, which all heads read."""
        return 1

    @property
    def query_dim(self) -> int:
        """Elements of one head's query before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def key_dim(self) -> int:
        """Elements that the cache holds for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def attention_shape(self, heads: range, block_tokens: int) -> AttentionShape:
        """heads: the query heads on this rank."""
        return AttentionShape(
            num_heads=len(heads),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.key_dim,
            scale=self.query_dim**-0.5 * self.mscale**2,
            block_tokens=block_tokens,
            value_dim=self.kv_lora_rank,
            values_in_keys=True,
        )


@dataclass(frozen=True, slots=True)
class LatentAttentionBlock:
    """Implements `AttentionPart`."""

    states: ClassVar[tuple[()]] = ()
    spec: LatentAttentionSpec
    # From hidden to what all heads share: the latent of the queries if there is one, the latent, the rotated key part.
    down: PackedLinear
    queries: PackedLinear  # to the unrotated parts of all heads on this rank, then their rotated parts
    latents: LatentOperands
    output: RowParallelLinear
    sites: tuple[int | None, int | None]  # adapter sites of `down` and of `queries`
    gates: Gates | None

    @property
    def attention(self) -> Attention:
        return self.latents.attention

    @staticmethod
    def parameters(spec: LatentAttentionSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        """`{q_a,q_norm,q_b}` or `q`, `{kv_a,kv_norm,kv_b}`, `gates`, `output`. The heads of q, q_b, kv_b, gates and
        output are split."""
        shard = layout.shard
        hidden_size, mine = shard.hidden_size, shard.heads(spec.num_heads, spec.num_kv_heads).mine

        def by_heads(dim: int) -> Part:
            return Part(0, range(mine.start * dim, mine.stop * dim))

        num_queries, kv_dim = spec.num_heads * spec.query_dim, spec.qk_nope_head_dim + spec.v_head_dim
        reordered = partial(layout.linear, is_reordered=True)
        down = partial(reordered, bias=spec.has_bias, layer=f"{prefix}.down")
        table = down(f"{prefix}.kv_a", (spec.key_dim, hidden_size))
        table[f"{prefix}.kv_norm.weight"] = Parameter((spec.kv_lora_rank,))
        expansion = spec.num_heads * kv_dim, spec.kv_lora_rank
        table |= layout.linear(f"{prefix}.kv_b", expansion, part=by_heads(kv_dim), is_dense=True)
        columns = by_heads(spec.v_head_dim).range
        table |= layout.into_hidden(f"{prefix}.output", spec.num_heads * spec.v_head_dim, columns, bias=spec.has_bias)
        if spec.has_gates:
            table |= layout.linear(f"{prefix}.gates", (spec.num_heads, hidden_size), part=by_heads(1))
        if spec.q_lora_rank is None:
            return table | reordered(f"{prefix}.q", (num_queries, hidden_size), part=by_heads(spec.query_dim))
        table |= down(f"{prefix}.q_a", (spec.q_lora_rank, hidden_size))
        table[f"{prefix}.q_norm.weight"] = Parameter((spec.q_lora_rank,))
        return table | reordered(f"{prefix}.q_b", (num_queries, spec.q_lora_rank), part=by_heads(spec.query_dim))

    @staticmethod
    def kv_elements_per_token(spec: LatentAttentionSpec, shard: Shard) -> int:
        """Cache elements of one token, the same on every rank."""
        return spec.key_dim

    @staticmethod
    def state_layouts(spec: LatentAttentionSpec, shard: Shard) -> tuple[()]:
        """It keeps keys and values, no state."""
        return ()

    @classmethod
    def load(cls, spec: LatentAttentionSpec, prefix: str, context: BuildContext) -> LatentAttentionBlock:
        loader, ops = context.loader, context.ops
        heads = context.shard.heads(spec.num_heads, spec.num_kv_heads).heads
        shape = spec.attention_shape(heads.mine, context.block_tokens)
        cos, sin = context.rope(spec.rope or RopeSpec("none", 1.0, spec.qk_rope_head_dim))
        norm = NormSpec("rms", spec.norm_eps)
        has_query_latent = spec.q_lora_rank is not None
        down_names = [*([f"{prefix}.q_a"] if has_query_latent else []), f"{prefix}.kv_a"]
        query_name = f"{prefix}.q_b" if has_query_latent else f"{prefix}.q"
        down, queries = context.weights(*down_names), context.weights(query_name)
        down_order = _down_order(spec, loader.device)
        query_order = _query_order(spec, shape.num_heads, loader.device)
        up, _ = context.weights(f"{prefix}.kv_b").dense()
        keys, values = up.unflatten(0, (shape.num_heads, -1)).split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        sites = context.site(*down_names, order=down_order), context.site(query_name, order=query_order)
        key_sites = value_sites = None
        if context.adapter_sites is not None:
            key_sites, value_sites = context.adapter_sites.add_heads(
                f"{prefix}.kv_b", shape.num_heads, spec.qk_nope_head_dim
            )
        latents = LatentOperands(
            attention=context.attention.for_shape(shape),
            query_dim=spec.q_lora_rank or 0,
            plain_dim=spec.qk_nope_head_dim,
            q_norm=load_norm(loader, ops, f"{prefix}.q_norm", norm) if has_query_latent else None,
            kv_norm=load_norm(loader, ops, f"{prefix}.kv_norm", norm),
            absorb=HeadLinear.pack(keys.transpose(1, 2), key_sites, context),
            unfold=HeadLinear.pack(values, value_sites, context),
            cos=cos,
            sin=sin,
            scales=context.kv_scales(f"{prefix}.kv_a", f"{prefix}.kv_a"),
        )
        return cls(
            spec=spec,
            down=down.reorder(down_order).pack(ops),
            queries=queries.reorder(query_order).pack(ops),
            latents=latents,
            output=RowParallelLinear.load(f"{prefix}.output", heads.widths(spec.v_head_dim), context),
            sites=sites,
            gates=Gates.load(f"{prefix}.gates", context) if spec.has_gates else None,
        )

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        has_query_latent = self.latents.q_norm is not None
        program.append(Multiply(source, "latents", self.down, self.sites[0]))
        program.append(NormLatents("latents", "query_latent", self.latents))
        program.append(Multiply("query_latent" if has_query_latent else source, "queries", self.queries, self.sites[1]))
        program.append(AttendLatents("queries", "values", self.latents))
        if self.gates is not None:
            heads = self.latents.attention.shape.num_heads, self.spec.v_head_dim
            self.gates.append_to(program, source, "values", heads)
        return "values"


def _down_order(spec: LatentAttentionSpec, device: torch.device) -> Tensor:
    """Outputs of q_a and kv_a → those of `LatentAttentionBlock.down`."""
    num_plain = (spec.q_lora_rank or 0) + spec.kv_lora_rank
    return torch.cat([torch.arange(num_plain, device=device), num_plain + _rope_order(spec, device)])


def _query_order(spec: LatentAttentionSpec, num_heads: int, device: torch.device) -> Tensor:
    """Outputs head by head [plain, rotated] → the plain parts of all heads, then the rotated parts of all heads."""
    starts = torch.arange(num_heads, device=device)[:, None] * spec.query_dim
    plain = starts + torch.arange(spec.qk_nope_head_dim, device=device)
    rotated = starts + spec.qk_nope_head_dim + _rope_order(spec, device)
    return torch.cat([plain.flatten(), rotated.flatten()])


def _rope_order(spec: LatentAttentionSpec, device: torch.device) -> Tensor:
    """Interleaved pairs → halves, as `Ops.rotate` takes them. Products of queries and keys do not change if both are
    reordered."""
    order = torch.arange(spec.qk_rope_head_dim, device=device)
    return torch.cat([order[0::2], order[1::2]]) if spec.rope is not None and spec.rope.interleaved else order
