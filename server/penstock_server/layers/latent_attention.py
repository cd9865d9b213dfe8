"""Multi-head latent attention (DeepSeek V2, https://arxiv.org/abs/2405.04434): all heads read one compressed latent.

The cache holds of each token the normed latent and one rotated key part, for all heads and layers alike: keys are
[latent, rotated], values the latent itself. What would unfold the latent into keys and values of each head is applied
to the queries and to the outputs instead (§2.1.2 there). Sharded by query heads; every rank computes the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.attention.interface import Attention, AttentionShape, StepBatch
from penstock_server.errors import ConfigError
from penstock_server.kernels.ops import Ops, PackedLinear
from penstock_server.layers.context import BuildContext
from penstock_server.layers.linear import Layout, LinearOut, out_parameters
from penstock_server.layers.rope import RopeSpec
from penstock_server.layers.shard import Shard
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Sizes as config.json calls them."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeSpec  # of the rotated part; interleaved as DeepSeek stores it
    q_lora_rank: int | None = None  # None: queries are projected directly
    norm_eps: float = 1e-6  # of the norms of the latents; transformers has no setting for it
    has_bias: bool = False  # of the projections from and to the hidden dimension, other than the direct one of queries
    mscale: float = 1.0  # the softmax scale is multiplied with its square: yarn's magnitude for `mscale_all_dim`

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
        """The latent, which all heads read."""
        return 1

    @property
    def query_dim(self) -> int:
        """Of one head, before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def key_dim(self) -> int:
        """What the cache holds of a token."""
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


def latent_attention_parameters(
    spec: LatentAttentionSpec, prefix: str, hidden_size: int, shard: Shard
) -> dict[str, Parameter]:
    """`prefix.{q_a,q_b}.weight` and `prefix.q_norm.weight`, or `prefix.q.weight`; `prefix.{kv_a,kv_b}.weight`,
    `prefix.kv_norm.weight`, `prefix.output.weight`. Split over the ranks: heads of q, q_b, kv_b and output."""
    mine = shard.heads(spec.num_heads, spec.num_kv_heads).mine

    def by_heads(dim: int) -> Part:
        return Part(0, range(mine.start * dim, mine.stop * dim))

    queries = spec.num_heads * spec.query_dim
    unfolded_dim = spec.qk_nope_head_dim + spec.v_head_dim
    table = {
        f"{prefix}.kv_a.weight": Parameter((spec.key_dim, hidden_size)),
        f"{prefix}.kv_norm.weight": Parameter((spec.kv_lora_rank,)),
        f"{prefix}.kv_b.weight": Parameter((spec.num_heads * unfolded_dim, spec.kv_lora_rank), by_heads(unfolded_dim)),
    }
    columns = by_heads(spec.v_head_dim).range
    table |= out_parameters(
        f"{prefix}.output", (hidden_size, spec.num_heads * spec.v_head_dim), columns, shard, spec.has_bias
    )
    if spec.q_lora_rank is None:
        table[f"{prefix}.q.weight"] = Parameter((queries, hidden_size), by_heads(spec.query_dim))
    else:
        table[f"{prefix}.q_a.weight"] = Parameter((spec.q_lora_rank, hidden_size))
        table[f"{prefix}.q_norm.weight"] = Parameter((spec.q_lora_rank,))
        table[f"{prefix}.q_b.weight"] = Parameter((queries, spec.q_lora_rank), by_heads(spec.query_dim))
    if spec.has_bias:
        table[f"{prefix}.kv_a.bias"] = Parameter((spec.key_dim,))
        if spec.q_lora_rank is not None:
            table[f"{prefix}.q_a.bias"] = Parameter((spec.q_lora_rank,))
    return table


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A matrix of its own for each head."""

    linears: list[PackedLinear]  # on a CPU, where rows must not see each other
    weight: Tensor | None  # elsewhere: [heads, in, out]

    @classmethod
    def pack(cls, ops: Ops, weight: Tensor) -> HeadLinear:
        """weight [heads, out, in]"""
        if weight.device.type == "cpu":
            return cls([ops.pack_linear(of_head.contiguous(), None) for of_head in weight], None)
        return cls([], weight.transpose(1, 2).contiguous())

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """[rows, heads, in] → out [rows, heads, out]"""
        if self.weight is not None:
            out.copy_(torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1))
        for head, linear in enumerate(self.linears):
            out[:, head] = linear(x[:, head])


@dataclass(frozen=True, slots=True)
class LatentAttentionBlock:
    """Has the three steps of `AttentionBlock`."""

    spec: LatentAttentionSpec
    down: (
        PackedLinear  # hidden → what all heads share: the queries' latent if they have one, the latent, the rotated key
    )
    q_norm: Tensor | None  # [q_lora_rank]
    queries: PackedLinear  # → unrotated parts of all heads on this rank, then their rotated parts
    kv_norm: Tensor  # [kv_lora_rank]
    absorb: HeadLinear  # [rows, heads, qk_nope_head_dim] → [rows, heads, kv_lora_rank]
    unfold: HeadLinear  # [rows, heads, kv_lora_rank] → [rows, heads, v_head_dim]
    output: LinearOut
    shape: AttentionShape
    ops: Ops
    attention: Attention
    cos: Tensor  # [max positions, qk_rope_head_dim / 2] float32, with yarn's factor where it has one
    sin: Tensor

    @staticmethod
    def parameters(spec: LatentAttentionSpec, prefix: str, hidden_size: int, shard: Shard) -> dict[str, Parameter]:
        return latent_attention_parameters(spec, prefix, hidden_size, shard)

    @staticmethod
    def cached_numbers(spec: LatentAttentionSpec, shard: Shard) -> int:
        """How many numbers of a token this rank's cache keeps: the same on all ranks."""
        return spec.key_dim

    @classmethod
    def load(cls, spec: LatentAttentionSpec, prefix: str, context: BuildContext) -> LatentAttentionBlock:
        loader, ops = context.loader, context.ops
        heads = context.shard.heads(spec.num_heads, spec.num_kv_heads).heads
        shape = spec.attention_shape(heads.mine, context.block_tokens)
        layout = Layout.into_hidden(context.shard, heads.widths(spec.v_head_dim))
        cos, sin = context.rope(spec.rope)
        kv_a, kv_a_bias = loader.read(f"{prefix}.kv_a.weight"), loader.read_if_there(f"{prefix}.kv_a.bias")
        down, down_bias = _rotated_rows_in_halves(kv_a, spec), kv_a_bias
        if down_bias is not None:
            down_bias = _rotated_rows_in_halves(down_bias, spec)
        q_norm = None
        if spec.q_lora_rank is None:
            queries = loader.read(f"{prefix}.q.weight")
        else:
            q_norm, queries = loader.read(f"{prefix}.q_norm.weight"), loader.read(f"{prefix}.q_b.weight")
            down = torch.cat([loader.read(f"{prefix}.q_a.weight"), down])
            if down_bias is not None:
                down_bias = torch.cat([loader.read(f"{prefix}.q_a.bias"), down_bias])
        unfold = loader.read(f"{prefix}.kv_b.weight").unflatten(0, (shape.num_heads, -1))
        keys, values = unfold.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        return cls(
            spec=spec,
            down=ops.pack_linear(down, down_bias),
            q_norm=q_norm,
            queries=ops.pack_linear(_queries_in_order(queries, shape.num_heads, spec), None),
            kv_norm=loader.read(f"{prefix}.kv_norm.weight"),
            absorb=HeadLinear.pack(ops, keys.transpose(1, 2)),
            unfold=HeadLinear.pack(ops, values),
            output=LinearOut.load(loader, ops, f"{prefix}.output", layout),
            shape=shape,
            ops=ops,
            attention=context.attention(shape),
            cos=cos,
            sin=sin,
        )

    def store(self, x: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """Writes the new tokens' latents into the cache; the absorbed queries [tokens, heads, key_dim]."""
        spec, heads = self.spec, self.shape.num_heads
        *q_latent, latent, rotated_key = self.down(x).split(
            [*([spec.q_lora_rank] if spec.q_lora_rank else []), spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1
        )
        if self.q_norm is not None:
            x = self.ops.rms_norm(q_latent[0].contiguous(), self.q_norm, spec.norm_eps)
        plain, rotated = self.queries(x).split([heads * spec.qk_nope_head_dim, heads * spec.qk_rope_head_dim], dim=-1)
        rotated, rotated_key = rotated.unflatten(-1, (heads, -1)), rotated_key[:, None]
        self.ops.rotate(rotated, rotated_key, self.cos, self.sin, batch.positions)
        queries = x.new_empty((x.shape[0], heads, spec.key_dim))
        self.absorb(plain.unflatten(-1, (heads, -1)), queries[..., : spec.kv_lora_rank])
        queries[..., spec.kv_lora_rank :] = rotated
        latent = self.ops.rms_norm(latent.contiguous(), self.kv_norm, spec.norm_eps)
        keys = torch.cat([latent[:, None], rotated_key], dim=-1)
        self.attention.write(cache, keys, keys[..., : spec.kv_lora_rank], batch.slots)
        return queries

    def attend(self, queries: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, heads on this rank * v_head_dim]"""
        attended = self.attention.attend(queries, cache, batch)
        values = attended.new_empty((*attended.shape[:2], self.spec.v_head_dim))
        self.unfold(attended, values)
        return values.flatten(1)

    def project(self, attended: Tensor) -> Tensor:
        """[rows, hidden], the same on all ranks."""
        return self.output(attended)


def _rotated_rows_in_halves(weight: Tensor, spec: LatentAttentionSpec) -> Tensor:
    """[..., rows that end in those of a rotated part, or its bias]: pairs side by side become halves, as `Ops.rotate`
    has them. Products of queries and keys stay the same when both are reordered."""
    if not spec.rope.interleaved:
        return weight
    plain, rotated = weight[: -spec.qk_rope_head_dim], weight[-spec.qk_rope_head_dim :]
    return torch.cat([plain, rotated[0::2], rotated[1::2]])


def _queries_in_order(weight: Tensor, num_heads: int, spec: LatentAttentionSpec) -> Tensor:
    """Rows head by head [plain, rotated] → the plain rows of all heads, then the rotated ones of all."""
    by_head = torch.stack([_rotated_rows_in_halves(of_head, spec) for of_head in weight.unflatten(0, (num_heads, -1))])
    plain, rotated = by_head.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=1)
    return torch.cat([plain.flatten(0, 1), rotated.flatten(0, 1)])
