"""One layer of a decoder: attention and MLP around a residual, with norms where the spec places them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock_server.attention.interface import Attention, StepBatch
from penstock_server.layers.attention import AttentionBlock, AttentionSpec
from penstock_server.layers.context import BuildContext
from penstock_server.layers.cross_attention import CrossAttentionBlock
from penstock_server.layers.experts import MixtureOfExperts, MoeSpec
from penstock_server.layers.latent_attention import LatentAttentionBlock, LatentAttentionSpec
from penstock_server.layers.mlp import ActivatedLinear, Mlp, MlpSpec
from penstock_server.layers.native_stack import StackLayer
from penstock_server.layers.norm import Norm, norm_parameters
from penstock_server.layers.shard import Shard
from penstock_server.models.spec import LayerSpec, Placement
from penstock_server.weights.loader import Parameter


class AttentionPart(Protocol):
    """What runs a layer's attention."""

    @property
    def attention(self) -> Attention: ...

    def store(self, x: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """x [tokens, hidden]: writes what later tokens read into the cache; what `attend` needs of these tokens."""
        ...

    def attend(self, queries: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, any width]"""
        ...

    def project(self, attended: Tensor) -> Tensor:
        """Any rows of what `attend` gave → [rows, hidden], the same on all ranks."""
        ...


class MlpPart(Protocol):
    """What runs a layer's MLP."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        ...


# What runs a part, by the type of its spec. Each has `parameters(spec, prefix, hidden_size, shard)` and
# `load(spec, prefix, context)`.
ATTENTION_PARTS: dict[type, Any] = {AttentionSpec: AttentionBlock, LatentAttentionSpec: LatentAttentionBlock}
MLP_PARTS: dict[type, Any] = {MlpSpec: Mlp, MoeSpec: MixtureOfExperts}


def layer_parameters(spec: LayerSpec, prefix: str, hidden_size: int, shard: Shard) -> dict[str, Parameter]:
    table = ATTENTION_PARTS[type(spec.attention)].parameters(spec.attention, f"{prefix}.attention", hidden_size, shard)
    table |= MLP_PARTS[type(spec.mlp)].parameters(spec.mlp, f"{prefix}.mlp", hidden_size, shard)
    if spec.cross is not None:
        table |= AttentionBlock.parameters(spec.cross, f"{prefix}.cross", hidden_size, shard)
    for name in _norm_names(spec):
        table |= norm_parameters(f"{prefix}.{name}", spec.norm, (hidden_size,))
    return table


@dataclass(slots=True)
class Stream:
    """What runs through the layers: [rows, hidden], written to in place, and what is yet to be added to it."""

    residual: Tensor
    pending: Tensor | None = None

    def enter(self, norm: Norm | None) -> Tensor:
        """Adds what is pending, and gives the norm of the sum, or the sum itself."""
        pending, self.pending = self.pending, None
        if pending is None:
            return self.residual if norm is None else norm(self.residual)
        if norm is not None:
            return norm.add(pending, self.residual)
        self.residual += pending
        return self.residual

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows only. Nothing is pending."""
        self.residual = self.residual[rows]


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attention: AttentionPart
    mlp: MlpPart
    norms: dict[str, Norm]
    cross: CrossAttentionBlock | None

    @classmethod
    def load(cls, spec: LayerSpec, prefix: str, context: BuildContext) -> Layer:
        attention = ATTENTION_PARTS[type(spec.attention)].load(spec.attention, f"{prefix}.attention", context)
        mlp = MLP_PARTS[type(spec.mlp)].load(spec.mlp, f"{prefix}.mlp", context)
        loader, ops = context.loader, context.ops
        norms = {name: Norm.load(loader, ops, f"{prefix}.{name}", spec.norm) for name in _norm_names(spec)}
        cross = None if spec.cross is None else CrossAttentionBlock.load(spec.cross, f"{prefix}.cross", context)
        return cls(spec, attention, mlp, norms, cross)

    def run(self, stream: Stream, cache: Tensor, batch: StepBatch, rows: Tensor | None) -> None:
        """rows: those whose outputs are wanted, where it is not all: behind the last attention only they go on."""
        x = self._enter(stream, "attention_norm")
        queries = self.attention.store(x, cache, batch)
        if rows is not None and rows.shape[0] == 0:
            stream.keep(rows)
            return
        attended = self.attention.attend(queries, cache, batch)
        if rows is not None and self.cross is None:
            attended, x = attended[rows], x[rows]
            stream.keep(rows)
        attended = self._leave("attention_post_norm", self.attention.project(attended))
        if self.spec.parallel:
            # The MLP reads what the attention read, or a norm of its own of the same residual.
            x = x if self.spec.shares_norm else self.norms["mlp_norm"](stream.residual)
            stream.pending = attended + self._leave("mlp_post_norm", self.mlp(x))
            return
        self._add(stream, attended, "attention_sum_norm")
        if self.cross is not None:
            attended = self.cross.attend(self._enter(stream, "cross_norm"), cache, batch)
            if rows is not None:
                attended = attended[rows]
                stream.keep(rows)
            self._add(stream, self._leave("cross_post_norm", self.cross.project(attended)), "cross_sum_norm")
        x = self._enter(stream, "mlp_norm")
        self._add(stream, self._leave("mlp_post_norm", self.mlp(x)), "mlp_sum_norm")

    def for_stack(self) -> StackLayer:
        assert isinstance(self.attention, AttentionBlock)
        assert isinstance(self.mlp, Mlp)
        attention_norm, mlp_norm = self.norms["attention_norm"].weight, self.norms["mlp_norm"].weight
        assert attention_norm is not None
        assert mlp_norm is not None
        gate_up = self.mlp.inner
        assert not isinstance(gate_up, ActivatedLinear)
        return StackLayer(
            attention_norm=attention_norm,
            qkv=self.attention.qkv,
            output=self.attention.output.linear,
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=self.mlp.down.linear,
        )

    def _enter(self, stream: Stream, name: str) -> Tensor:
        x = stream.enter(self.norms.get(name))
        if self.spec.residual_is_normed:
            stream.residual = x
        return x

    def _add(self, stream: Stream, x: Tensor, name: str) -> None:
        """To the residual, which where norms are put on sums becomes the norm of this name at once."""
        stream.pending = x
        if self.spec.placement is Placement.SUM:
            stream.residual = stream.enter(self.norms[name])

    def _leave(self, name: str, x: Tensor) -> Tensor:
        norm = self.norms.get(name)
        if norm is not None:
            x = norm(x)
        return x if self.spec.residual_multiplier == 1.0 else x * self.spec.residual_multiplier


def _norm_names(spec: LayerSpec) -> list[str]:
    if spec.placement is Placement.SUM:
        return [f"{part}_sum_norm" for part in spec.parts]
    names = [f"{part}_norm" for part in spec.parts] if spec.has_norms_before else []
    if spec.parallel and spec.shares_norm and names:
        names.remove("mlp_norm")
    if spec.placement is not Placement.PRE:
        names += [f"{part}_post_norm" for part in spec.parts]
    return names
