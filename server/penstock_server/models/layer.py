"""One layer of an encoder or decoder: attention and MLP around a residual, with norms where the spec places them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock_server.device.attention.interface import Attention
from penstock_server.device.ops import PackedNorm
from penstock_server.device.state import StateLayout
from penstock_server.layers.attention import AttentionBlock, AttentionSpec
from penstock_server.layers.context import BuildContext
from penstock_server.layers.cross_attention import CrossAttentionBlock
from penstock_server.layers.experts import MixtureOfExperts, MoeSpec
from penstock_server.layers.gated_delta import GatedDeltaBlock, GatedDeltaSpec
from penstock_server.layers.latent_attention import LatentAttentionBlock, LatentAttentionSpec
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.mamba import MambaBlock, MambaSpec
from penstock_server.layers.mamba2 import Mamba2Block, Mamba2Spec
from penstock_server.layers.mlp import Mlp, MlpSpec
from penstock_server.layers.norm import load_norm, norm_parameters
from penstock_server.layers.operation import Add, Norm, Program, Register, Scale, Select
from penstock_server.layers.row_parallel import RowParallelLinear
from penstock_server.layers.short_conv import ShortConvBlock, ShortConvSpec
from penstock_server.models.spec import LayerSpec, NormPlacement
from penstock_server.weights.loader import Parameter


class AttentionPart(Protocol):
    """The attention of a layer, or what it has instead: a state between tokens."""

    @property
    def attention(self) -> Attention | None:
        """Over the KV cache."""
        ...

    @property
    def states(self) -> tuple[StateLayout, ...]:
        """What it keeps of a sequence between tokens, in the program's order; none: keys and values."""
        ...

    @property
    def output(self) -> RowParallelLinear: ...

    def append_to(self, program: Program, source: Register) -> Register:
        """Appends all that comes before the output projection, given the block's input. Returns where the result is."""
        ...


class MlpPart(Protocol):
    """The MLP of a layer."""

    def append_to(self, program: Program, source: Register, target: Register) -> None:
        """Appends [rows, hidden] → the same, on all ranks."""
        ...


# The class of a part by the type of its spec. Each has `parameters(spec, prefix, layout)` and `load(spec, prefix,
# context)`.
ATTENTION_PARTS: dict[type, Any] = {
    AttentionSpec: AttentionBlock,
    GatedDeltaSpec: GatedDeltaBlock,
    LatentAttentionSpec: LatentAttentionBlock,
    ShortConvSpec: ShortConvBlock,
    Mamba2Spec: Mamba2Block,
    MambaSpec: MambaBlock,
}
MLP_PARTS: dict[type, Any] = {MlpSpec: Mlp, MoeSpec: MixtureOfExperts}


def layer_parameters(spec: LayerSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
    table: dict[str, Parameter] = {}
    if spec.beside is not None:
        table |= Mamba2Block.parameters(spec.beside, f"{prefix}.beside", layout)
    if spec.attention is not None:
        table |= ATTENTION_PARTS[type(spec.attention)].parameters(spec.attention, f"{prefix}.attention", layout)
    if spec.mlp is not None:
        table |= MLP_PARTS[type(spec.mlp)].parameters(spec.mlp, f"{prefix}.mlp", layout)
    if spec.cross is not None:
        table |= CrossAttentionBlock.parameters(spec.cross, f"{prefix}.cross", layout)
    for name in _norm_names(spec):
        table |= norm_parameters(f"{prefix}.{name}", spec.norm, (layout.shard.hidden_size,))
    return table


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attention: AttentionPart | None
    mlp: MlpPart | None
    norms: dict[str, PackedNorm]
    cross: CrossAttentionBlock | None
    beside: Mamba2Block | None
    num_bytes: int

    @classmethod
    def load(cls, spec: LayerSpec, prefix: str, context: BuildContext) -> Layer:
        bytes_before = context.loader.loaded_bytes
        attention = mlp = None
        if spec.attention is not None:
            attention = ATTENTION_PARTS[type(spec.attention)].load(spec.attention, f"{prefix}.attention", context)
        if spec.mlp is not None:
            mlp = MLP_PARTS[type(spec.mlp)].load(spec.mlp, f"{prefix}.mlp", context)
        loader, ops = context.loader, context.ops
        norms = {name: load_norm(loader, ops, f"{prefix}.{name}", spec.norm) for name in _norm_names(spec)}
        cross = None if spec.cross is None else CrossAttentionBlock.load(spec.cross, f"{prefix}.cross", context)
        beside = None if spec.beside is None else Mamba2Block.load(spec.beside, f"{prefix}.beside", context)
        return cls(spec, attention, mlp, norms, cross, beside, loader.loaded_bytes - bytes_before)

    @property
    def memories(self) -> tuple[AttentionPart, ...]:
        """The parts with a cache, in the program's order."""
        return tuple(part for part in (self.beside, self.attention) if part is not None)

    @property
    def caches(self) -> tuple[StateLayout | None, ...]:
        """The layout of each cache, in the program's order; None: it is for keys and values."""
        return tuple(layout for part in self.memories for layout in part.states or (None,))

    def append_to(self, program: Program, *, is_last: bool) -> None:
        """Appends the layer. is_last: after its last attention, only the sampled rows continue."""
        spec, cross, mlp = self.spec, self.cross, self.mlp
        if self.attention is not None:
            x = self._enter(program, "attention")
            if self.beside is not None:
                self.beside.output.append_to(program, self.beside.append_to(program, x), "sum")
                _scale(program, "sum", spec.multipliers.beside)
            attended = self.attention.append_to(program, x)
            if is_last and cross is None:
                kept: list[Register] = [attended]
                if spec.parallel:
                    kept.append(x)
                if self.beside is not None:
                    kept.append("sum")
                program.append(Select("residual", "residual", kept))
            self.attention.output.append_to(program, attended, "projected")
            if spec.parallel and mlp is not None:
                self._append_parallel(program, mlp, x)
                return
            _scale(program, "residual", spec.multipliers.attention_residual)
            self._add(program, "attention", spec.multipliers.attention, None if self.beside is None else "sum")
        elif is_last:
            program.append(Select("residual", "residual", ()))
        if cross is not None:
            attended = cross.append_to(program, self._enter(program, "cross"))
            if is_last:
                program.append(Select("residual", "residual", (attended,)))
            cross.output.append_to(program, attended, "projected")
            self._add(program, "cross")
        if mlp is not None:
            x = self._enter(program, "mlp")
            _scale(program, x, spec.multipliers.mlp_input)
            mlp.append_to(program, x, "projected")
            _scale(program, "residual", spec.multipliers.mlp_residual)
            self._add(program, "mlp", spec.multipliers.mlp)

    def _append_parallel(self, program: Program, mlp: MlpPart, x: Register) -> None:
        """Appends the MLP and the addition of its result and the attention's. x: the attention's input."""
        spec, post_norm = self.spec, self.norms.get("attention_post_norm")
        if post_norm is not None:
            program.append(Norm("projected", "projected", post_norm))
        _scale(program, "projected", spec.multipliers.attention)
        # The MLP reads the attention's input, or another norm of the same residual.
        mlp.append_to(program, x if spec.shares_norm else self._enter(program, "mlp"), "sum")
        norm = self.norms.get("mlp_post_norm")
        program.append(Add("sum", "residual", norm, spec.multipliers.mlp, "projected"))

    def _enter(self, program: Program, part: str) -> Register:
        """Register with the input of a part: the residual, or its norm if there is one."""
        norm = self.norms.get(f"{part}_norm")
        if norm is None:
            return "residual"
        target: Register = "residual" if self.spec.residual_is_normed else "normed"
        program.append(Norm("residual", target, norm))
        return target

    def _add(self, program: Program, part: str, factor: float = 1.0, other: Register | None = None) -> None:
        """Adds the output of a part and another one's to the residual, whose norm follows at once if norms stand on the
        sums."""
        norm = self.norms.get(f"{part}_post_norm")
        program.append(Add("projected", "residual", norm, factor, other))
        if self.spec.placement is NormPlacement.SUM:
            program.append(Norm("residual", "residual", self.norms[f"{part}_sum_norm"]))


def _scale(program: Program, register: Register, factor: float) -> None:
    if factor != 1.0:
        program.append(Scale(register, register, factor))


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
