"""One layer of an encoder or decoder: attention and MLP around a residual, with norms where the spec places them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from penstock_server.attention.interface import Attention
from penstock_server.kernels.ops import Ops, PackedNorm, Summand
from penstock_server.layers.attention import AttentionBlock, AttentionSpec
from penstock_server.layers.context import BuildContext
from penstock_server.layers.cross_attention import CrossAttentionBlock
from penstock_server.layers.experts import MixtureOfExperts, MoeSpec
from penstock_server.layers.latent_attention import LatentAttentionBlock, LatentAttentionSpec
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.mlp import Mlp, MlpSpec
from penstock_server.layers.native_stack import NativeProgram, NotNativeError, Register
from penstock_server.layers.norm import load_norm, norm_parameters
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.step import StepContext
from penstock_server.models.spec import LayerSpec, NormPlacement
from penstock_server.weights.loader import Parameter


class AttentionPart(Protocol):
    """The attention of a layer, in three steps."""

    @property
    def attention(self) -> Attention: ...

    @property
    def output(self) -> RowParallelLinear: ...

    def store(self, x: Tensor, cache: Tensor, step: StepContext) -> Any:
        """x [tokens, hidden]: writes keys and values to the cache, and returns the queries for `attend`."""
        ...

    def attend(self, queries: Any, cache: Tensor, step: StepContext) -> Tensor:
        """[tokens, any width]"""
        ...

    def project(self, attended: Tensor, step: StepContext) -> Tensor:
        """Any rows of what `attend` returned → [rows, hidden], the same on all ranks. step: of these rows."""
        ...

    def append_to(self, program: NativeProgram, source: Register) -> Register:
        """Appends `store` and `attend` of the input in `source` to a native stack. Returns where the result is. Raises
        NotNativeError."""
        ...


class MlpPart(Protocol):
    """The MLP of a layer."""

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → the same, on all ranks."""
        ...

    def append_to(self, program: NativeProgram, source: Register, target: Register, *, adds: bool = False) -> None:
        """Appends the same to a native stack. adds: to what is in the target. Raises NotNativeError."""
        ...


class Append(Protocol):
    """Appends what computes the output of a part to a native stack."""

    def __call__(self, target: Register, *, adds: bool = False) -> None: ...


# The class of a part by the type of its spec. Each has `parameters(spec, prefix, layout)` and `load(spec, prefix,
# context)`.
ATTENTION_PARTS: dict[type, Any] = {AttentionSpec: AttentionBlock, LatentAttentionSpec: LatentAttentionBlock}
MLP_PARTS: dict[type, Any] = {MlpSpec: Mlp, MoeSpec: MixtureOfExperts}


def layer_parameters(spec: LayerSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
    table = ATTENTION_PARTS[type(spec.attention)].parameters(spec.attention, f"{prefix}.attention", layout)
    table |= MLP_PARTS[type(spec.mlp)].parameters(spec.mlp, f"{prefix}.mlp", layout)
    if spec.cross is not None:
        table |= CrossAttentionBlock.parameters(spec.cross, f"{prefix}.cross", layout)
    for name in _norm_names(spec):
        table |= norm_parameters(f"{prefix}.{name}", spec.norm, (layout.shard.hidden_size,))
    return table


@dataclass(slots=True)
class ResidualStream:
    """The residual [rows, hidden], which layers write to in place, and a summand that has not been added to it yet: the
    next norm adds it in the same pass."""

    residual: Tensor
    ops: Ops
    pending: Summand | None = None

    def enter(self, norm: PackedNorm | None) -> Tensor:
        """Adds the pending summand and returns the norm of the sum, or the sum."""
        pending, self.pending = self.pending, None
        if pending is not None:
            return self.ops.add(self.residual, pending, norm)
        return self.residual if norm is None else norm(self.residual)

    def keep(self, rows: Tensor) -> None:
        """Drops all other rows. Requires that no summand is pending."""
        self.residual = self.residual[rows]


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attention: AttentionPart
    mlp: MlpPart
    norms: dict[str, PackedNorm]
    cross: CrossAttentionBlock | None

    @classmethod
    def load(cls, spec: LayerSpec, prefix: str, context: BuildContext) -> Layer:
        attention = ATTENTION_PARTS[type(spec.attention)].load(spec.attention, f"{prefix}.attention", context)
        mlp = MLP_PARTS[type(spec.mlp)].load(spec.mlp, f"{prefix}.mlp", context)
        loader, ops = context.loader, context.ops
        norms = {name: load_norm(loader, ops, f"{prefix}.{name}", spec.norm) for name in _norm_names(spec)}
        cross = None if spec.cross is None else CrossAttentionBlock.load(spec.cross, f"{prefix}.cross", context)
        return cls(spec, attention, mlp, norms, cross)

    def run(self, stream: ResidualStream, cache: Tensor, step: StepContext, rows: Tensor | None) -> None:
        """rows: the rows whose outputs are wanted; after the layer's last attention, only they continue. None: all."""
        x = self._enter(stream, "attention_norm")
        queries = self.attention.store(x, cache, step)
        if rows is not None and rows.shape[0] == 0:
            stream.keep(rows)
            return
        attended = self.attention.attend(queries, cache, step)
        kept = step if rows is None else step.select(rows)
        if rows is not None and self.cross is None:
            attended, x, step = attended[rows], x[rows], kept
            stream.keep(rows)
        output = self._leave("attention_post_norm", self.attention.project(attended, step))
        if self.spec.parallel:
            # The MLP reads the attention's input, or another norm of the same residual.
            x = x if self.spec.shares_norm else self.norms["mlp_norm"](stream.residual)
            summand = self._leave("mlp_post_norm", self.mlp(x, step))
            stream.pending = replace(summand, other=output.value())
            return
        self._add(stream, output, "attention_sum_norm")
        if self.cross is not None:
            attended = self.cross.attend(self._enter(stream, "cross_norm"), cache, step)
            if rows is not None:
                attended, step = attended[rows], kept
                stream.keep(rows)
            self._add(stream, self._leave("cross_post_norm", self.cross.project(attended, step)), "cross_sum_norm")
        x = self._enter(stream, "mlp_norm")
        self._add(stream, self._leave("mlp_post_norm", self.mlp(x, step)), "mlp_sum_norm")

    def append_to(self, program: NativeProgram, *, is_last: bool) -> None:
        """Appends `run` to a native stack. is_last: after its attention, only the sampled rows continue."""
        attention, spec = self.attention, self.spec
        if self.cross is not None:
            raise NotNativeError("cross-attention")
        x = self._append_enter(program, "attention_norm")
        attended = attention.append_to(program, x)
        if is_last:
            kept: list[Register] = ["residual", attended]
            program.select([*kept, x] if spec.parallel and spec.shares_norm else kept)
        project = partial(attention.output.append_to, program, attended)
        if spec.parallel:
            self._append_leave(program, project, "attention_post_norm", "projected")
            x = x if spec.shares_norm else self._append_enter(program, "mlp_norm")
            self._append_leave(program, partial(self.mlp.append_to, program, x), "mlp_post_norm", "sum")
            program.add("sum", "projected")
            program.add("projected", "residual")
            return
        self._append_add(program, project, "attention")
        x = self._append_enter(program, "mlp_norm")
        self._append_add(program, partial(self.mlp.append_to, program, x), "mlp")

    def _enter(self, stream: ResidualStream, name: str) -> Tensor:
        """The input of a part: the norm of this name if there is one."""
        x = stream.enter(self.norms.get(name))
        if self.spec.residual_is_normed:
            stream.residual = x
        return x

    def _add(self, stream: ResidualStream, output: Summand, name: str) -> None:
        """Adds the output of a part; if norms stand on the sums, the norm of this name follows at once."""
        stream.pending = output
        if self.spec.placement is NormPlacement.SUM:
            stream.residual = stream.enter(self.norms[name])

    def _leave(self, name: str, x: Tensor) -> Summand:
        """The output of a part, normed if there is a norm of this name, and scaled."""
        return Summand(x, self.norms.get(name), self.spec.residual_multiplier)

    def _append_enter(self, program: NativeProgram, name: str) -> Register:
        """`_enter` in a native stack. Returns where the input of a part is."""
        if name not in self.norms:
            return "residual"
        target: Register = "residual" if self.spec.residual_is_normed else "normed"
        program.norm(self.norms[name], "residual", target)
        return target

    def _append_add(self, program: NativeProgram, append: Append, part: str) -> None:
        """`_leave` and `_add` in a native stack, of the output of this part."""
        if f"{part}_post_norm" not in self.norms and self.spec.residual_multiplier == 1.0:
            append("residual", adds=True)
        else:
            self._append_leave(program, append, f"{part}_post_norm", "projected")
            program.add("projected", "residual")
        if self.spec.placement is NormPlacement.SUM:
            program.norm(self.norms[f"{part}_sum_norm"], "residual", "residual")

    def _append_leave(self, program: NativeProgram, append: Append, name: str, target: Register) -> None:
        """`_leave` in a native stack, of the output of a part."""
        append(target)
        if name in self.norms:
            program.norm(self.norms[name], target, target)
        if self.spec.residual_multiplier != 1.0:
            program.scale(target, self.spec.residual_multiplier)


def _norm_names(spec: LayerSpec) -> list[str]:
    if spec.placement is NormPlacement.SUM:
        return [f"{part}_sum_norm" for part in spec.parts]
    names = [f"{part}_norm" for part in spec.parts] if spec.has_norms_before else []
    if not spec.has_attention_norm:
        names.remove("attention_norm")
    if spec.parallel and spec.shares_norm and names:
        names.remove("mlp_norm")
    if spec.placement is not NormPlacement.PRE:
        names += [f"{part}_post_norm" for part in spec.parts]
    return names
