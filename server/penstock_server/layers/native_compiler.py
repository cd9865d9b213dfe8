"""Compiles operations for the native kernels: `kernels/src/stack/`, which checks the widths of registers once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock_server.collectives.shared_memory import SharedMemory
from penstock_server.device.attention.interface import Attention
from penstock_server.device.native.attention import NativeAttention
from penstock_server.device.native.ops import (
    NativeActivation,
    NativeLinear,
    NativeNorm,
    NativeRecurrence,
    NativeWideLinear,
)
from penstock_server.device.ops import Elementwise, PackedLinear, PackedNorm, PackedRecurrence
from penstock_server.layers import operation as op
from penstock_server.layers.experts.layer import ListedExperts, MixtureOfExperts
from penstock_server.layers.head_linear import HeadLinear
from penstock_server.layers.linear import OrderedLinear
from penstock_server.layers.mlp import ActivatedLinear
from penstock_server.layers.operation import Operation
from penstock_server.layers.qk_norm import ProjectionNorm
from penstock_server.parallel import RankGroup

if TYPE_CHECKING:
    from penstock_server.device.attention.fp8 import KvScales
    from penstock_server.device.native.build import NativeBuild


class NotNativeError(Exception):
    """An operation that native kernels do not have, for people."""


def compiled(operations: Sequence[Operation], hidden_size: int, build: NativeBuild, *, adapts: bool) -> Any:
    """What runs these operations on a step's tensors. All parts must have been made by the kernels of this build.
    adapts: for rows with adapters. Raises NotNativeError, and ValueError if sizes do not fit together."""
    compiler = _Compiler(hidden_size, build, adapts=adapts)
    done = None
    for index, operation in enumerate(operations):
        if operation is not done:
            done = compiler.append(operation, operations[index + 1 :])
    return compiler.finish()


class _Compiler:
    """Appends operations to a native stack."""

    def __init__(self, hidden_size: int, build: NativeBuild, *, adapts: bool) -> None:
        self._hidden_size = hidden_size
        self._adapts = adapts
        self._build = build
        self._native = build.module.Program(hidden_size)
        self._attention: NativeAttention | None = None  # that wrote last
        # Registers that are elsewhere: heads that the cache pads are in "unpadded" before and behind attention.
        self._places: dict[str, str] = {}
        self._has_padded = False  # the heads in "qkv"

    def finish(self) -> Any:
        return self._native.finish(self._build.kernels()).run

    def append(self, operation: Operation, behind: Sequence[Operation]) -> Operation | None:
        """behind: the operations that follow. Returns the next one if it is done as well."""
        native, source, target = self._native, self._place(operation.source), self._place(operation.target)
        match operation:
            case op.Multiply():
                return self._multiply(operation, behind)
            case op.Norm(norm=norm):
                native.norm(_native_norm(norm), source, target)
            case op.Add():
                self._add(operation)
            case op.Scale(factor=factor):
                native.scale(target, factor)
            case op.AdvanceStates(net=net, sources=sources):
                native.advance_states(_native_net(net), sources, target)
            case op.Pick(pieces=pieces):
                self._pick(operation, pieces, behind)
            case op.Gate(function=function, heads=heads):
                if heads is not None:
                    native.reorder([head for head in range(heads[0]) for _ in range(heads[1])], source, "ordered")
                    source = "ordered"
                native.gate(_native_activation(function), source, target)
            case op.Activate(function=function):
                native.activate(_native_activation(function), source, target)
            case op.Clamp(bound=bound):
                native.clamp(target, bound)
            case op.NormHeads():
                self._norm_heads(operation, target)
            case op.Rotate(attention=attention, cos=cos, sin=sin, interleaved=interleaved):
                native.rotate(self._padded(attention).native, cos, sin, interleaved)
            case op.ScaleQueries(attention=attention, factors=factors, period=period):
                native.scale_queries(self._padded(attention).native, factors, period)
            case op.Write(attention=attention, scales=scales):
                self._write(attention, scales)
            case op.Attend():
                self._attend(operation)
            case op.NormLatents(latents=latents):
                self._norm_latents(latents)
            case op.AttendLatents(latents=latents):
                self._attend_latents(latents)
            case op.Experts(experts=experts):
                self._experts(experts, source, target)
            case op.Gather(group=group, widths=widths):
                native.gather(self._collective(group), widths, source, target)
            case op.Select():
                native.select([self._place(register) for register in operation.reads])
            case op.Copy():
                native.reserve(target, self._hidden_size)
                native.copy((source, 0, 0), (target, 0, 0), 1, self._hidden_size)
            case _:
                raise NotNativeError(f"operation {type(operation).__name__}")
        return None

    def _place(self, register: str) -> str:
        return self._places.get(register, register)

    def _multiply(self, multiply: op.Multiply, behind: Sequence[Operation]) -> Operation | None:
        """Adds the product at once if that is all that follows."""
        linear, source, target = multiply.linear, self._place(multiply.source), self._place(multiply.target)
        if multiply.target == "qkv":
            target = self._begin_heads(behind)
        features = source  # adapters read them in their own order
        if isinstance(linear, OrderedLinear):
            self._native.reorder(linear.order.tolist(), source, "ordered")
            linear, source = linear.linear, "ordered"
        packed, site = self._packed(linear), multiply.site if self._adapts else None
        if site is not None:
            apart = "inner" if multiply.gate is not None else target
            self._native.linear(packed, source, apart, False, multiply.gate is not None)
            self._native.adapt(site, features, apart)
            if multiply.gate is not None:
                self._native.activate(_native_activation(multiply.gate), apart, target)
            return None
        if behind and behind[0] == op.Add(multiply.target, "residual"):
            self._native.linear(packed, source, "residual", True, False)
            return behind[0]
        self._native.linear(packed, source, target, False, False)
        return None

    def _begin_heads(self, behind: Sequence[Operation]) -> str:
        """The place of queries, keys and values that are written next."""
        attention = next(each.attention for each in behind if isinstance(each, op.Write | op.Attend))
        self._places, self._has_padded = {"qkv": "unpadded"} if _padding(attention) else {}, False
        return self._place("qkv")

    def _pick(self, operation: Operation, pieces: Sequence[op.Pieces], behind: Sequence[Operation]) -> None:
        target = self._begin_heads(behind) if operation.target == "qkv" else self._place(operation.target)
        self._native.reserve(target, sum(each.count * each.width for each in pieces))
        place = 0
        for each in pieces:
            source = self._place(operation.source), each.first, each.step
            self._native.copy(source, (target, place, each.width), each.count, each.width)
            place += each.count * each.width

    def _add(self, add: op.Add) -> None:
        if add.norm is not None:
            self._native.norm(_native_norm(add.norm), add.source, add.source)
        if add.factor != 1.0:
            self._native.scale(add.source, add.factor)
        if add.other is not None:
            self._native.add(add.source, add.other)
        self._native.add(add.other or add.source, add.target)

    def _norm_heads(self, operation: op.NormHeads, register: str) -> None:
        if self._has_padded and operation.target == "qkv":
            raise NotNativeError(f"norm of rotated heads of {operation.head_dim} elements, which are padded")
        first = 0
        for norm, num_heads in zip(operation.norms, operation.num_heads, strict=True):
            if isinstance(norm, ProjectionNorm) and norm.group.size > 1:
                self._norm_columns(norm, register, first)
            elif isinstance(norm, ProjectionNorm):
                self._native.norm_heads(_native_norm(norm.norm), register, first, norm.num_groups)
            else:
                self._native.norm_heads(_native_norm(norm), register, first, num_heads)
            first += num_heads * operation.head_dim

    def _norm_columns(self, norm: ProjectionNorm, register: str, first: int) -> None:
        """Norms the columns of all ranks together, and keeps this rank's, which begin at the first one."""
        native, width = self._native, norm.widths[norm.group.rank]
        native.reserve("part", width)
        native.copy((register, first, 0), ("part", 0, 0), 1, width)
        native.gather(self._collective(norm.group), norm.widths, "part", "gathered")
        source = "gathered"
        if norm.columns is not None:
            source, start = "queries", 0
            native.reserve(source, len(norm.columns))
            for columns in norm.unique:
                native.copy(("gathered", columns.start, 0), (source, start, 0), 1, len(columns))
                start += len(columns)
        native.norm_heads(_native_norm(norm.norm), source, 0, norm.num_groups)
        native.copy((source, norm.mine.start, 0), (register, first, 0), 1, width)

    def _padded(self, attention: Attention) -> NativeAttention:
        """The attention, after its heads in "qkv" have been padded."""
        native, shape = _native_attention(attention), attention.shape
        if shape.output_dim != shape.head_dim and not shape.values_in_keys:
            raise NotNativeError(f"attention to values of {shape.output_dim} elements by keys of {shape.head_dim}")
        if self._places.pop("qkv", None) is not None:
            self._has_padded = True
            num_heads = shape.num_heads + 2 * shape.num_kv_heads
            self._native.pad("unpadded", "qkv", num_heads, shape.head_dim, native.padded_dims[0])
        return native

    def _write(self, attention: Attention, scales: KvScales | None) -> None:
        if attention.shape.has_relative_bias:
            raise NotNativeError("attention with a learned bias")
        self._attention = self._padded(attention)
        self._native.write(self._attention.native, scales)

    def _attend(self, attend: op.Attend) -> None:
        attention = _native_attention(attend.attention)
        if attention is not self._attention:
            raise NotNativeError("cross-attention")
        sinks = None if attend.sinks is None else attend.sinks.to(self._build.dtype).contiguous()
        self._native.attend(sinks)
        if _padding(attention):
            num_heads, dim, step = attention.shape.num_heads, attention.shape.head_dim, attention.padded_dims[0]
            self._places = {"attended": "unpadded"}
            self._native.reserve("unpadded", num_heads * dim)
            self._native.copy(("attended", 0, step), ("unpadded", 0, dim), num_heads, dim)

    def _norm_latents(self, latents: op.LatentOperands) -> None:
        width = latents.query_dim
        if latents.q_norm is not None:
            self._native.reserve("query_latent", width)
            self._native.copy(("latents", 0, width), ("query_latent", 0, width), 1, width)
            self._native.norm(_native_norm(latents.q_norm), "query_latent", "query_latent")

    def _attend_latents(self, latents: op.LatentOperands) -> None:
        native, attention = self._native, _native_attention(latents.attention)
        shape, dim, absorb, unfold = attention.shape, latents.dim, latents.absorb, latents.unfold
        if _padding(attention):
            raise NotNativeError(f"latent attention with heads of {shape.head_dim} elements, which are padded")
        num_heads, step, rotary = shape.num_heads, shape.head_dim, latents.rotary_dim
        # The queries of all heads, then the key: each a latent, then a rotated part.
        native.reserve("qkv", (num_heads + 1) * step)
        self._heads(absorb, "queries", "qkv", (latents.plain_dim, step))
        native.copy(("queries", num_heads * latents.plain_dim, rotary), ("qkv", dim, step), num_heads, rotary)
        native.copy(("latents", latents.query_dim, step), ("qkv", num_heads * step, step), 1, step)
        native.norm_heads(_native_norm(latents.kv_norm), "qkv", num_heads * step, 1)
        native.rotate(attention.native, latents.cos, latents.sin, False)
        self._write(attention, latents.scales)
        native.attend(None)
        native.reserve("values", num_heads * unfold.out_features)
        self._heads(unfold, "attended", "values", (dim, unfold.out_features))

    def _heads(self, heads: HeadLinear, source: str, target: str, steps: tuple[int, int]) -> None:
        """steps: columns from one head to the next, in source and target."""
        self._native.heads([self._packed(linear) for linear in heads.linears], source, target, steps[1])
        if self._adapts and heads.sites is not None:
            self._native.adapt(heads.sites.start, source, target, (len(heads.sites), steps))

    def _experts(self, moe: MixtureOfExperts, source: str, target: str) -> None:
        experts, shard = moe.experts, moe.shard
        assert isinstance(experts, ListedExperts), "other operators are not native"
        if shard.intermediate is not None:
            raise NotNativeError("fewer experts than ranks")
        assert experts.router.native is not None, "only native operators are compiled"
        activations = [each.activation for each in experts.gate_up if isinstance(each, ActivatedLinear)]
        activation = activations[0] if activations else None
        first_site = experts.first_site if self._adapts else None
        if first_site is not None:
            activation = activation or experts.gate
        inner = [each.linear if isinstance(each, ActivatedLinear) else each for each in experts.gate_up]
        shared = None if moe.shared is None else "plain"
        if experts.shared_gate is not None:
            shared = "gated"
            self._native.linear(self._packed(experts.shared_gate), source, "gate")
        wide = experts.router.linear.packed if isinstance(experts.router.linear, NativeWideLinear) else None
        if wide is None:
            self._native.linear(self._packed(experts.router.linear), source, "logits")
            if self._adapts and experts.router.site is not None:
                self._native.adapt(experts.router.site, source, "logits")
        self._native.experts(
            experts.router.native.packed,
            wide,
            [(self._packed(up), self._packed(down)) for up, down in zip(inner, experts.down, strict=True)],
            None if activation is None else _native_activation(activation),
            (self._collective(shard.shard.group), shard.experts.widths()) if shard.shard.group.size > 1 else None,
            shared,
            first_site,
            source,
            target,
        )

    def _collective(self, group: RankGroup) -> Any:
        if not isinstance(group.collectives, SharedMemory):
            raise NotNativeError(f"collective of {group.size} ranks that do not share memory")
        if not isinstance(group.collectives.native, self._build.module.Collective):
            raise NotNativeError("collective of ranks that share memory through kernels in another data type")
        return group.collectives.native

    def _packed(self, linear: PackedLinear) -> Any:
        if not isinstance(linear, NativeLinear):
            raise NotNativeError("experts whose columns are reordered")
        if not isinstance(linear.packed, self._build.module.PackedLinear):
            raise NotNativeError("linear layer in another data type")
        return linear.packed


def _native_norm(norm: PackedNorm | ProjectionNorm) -> Any:
    if not isinstance(norm, NativeNorm):
        raise NotNativeError("norm without weights")
    return norm.packed


def _native_activation(function: Elementwise) -> Any:
    if not isinstance(function, NativeActivation):
        raise NotNativeError("activation of this kind")
    return function.packed


def _native_net(net: PackedRecurrence) -> Any:
    assert isinstance(net, NativeRecurrence), "only native operators are compiled"
    return net.packed


def _native_attention(attention: Attention) -> NativeAttention:
    if not isinstance(attention, NativeAttention):
        raise NotNativeError(f"{attention.name} attention")
    return attention


def _padding(attention: Attention) -> int:
    """Elements that the cache adds to each head."""
    return _native_attention(attention).padded_dims[0] - attention.shape.head_dim
