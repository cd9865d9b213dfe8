"""All layers of a decoder in one native call per step, with native kernels.

The result equals that of the layers one by one to the bit. PERF: it saves their Python calls, some 40 µs a layer.

A layer says what it computes as operations on registers, which are a step's intermediate results; see
`kernels/src/stack/`. INVARIANT: the operations that a part appends are those that it computes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from penstock_server.attention.fp8 import KvScales
from penstock_server.attention.interface import Attention, StepAdapters
from penstock_server.attention.native import NativeAttention
from penstock_server.collectives.shared_memory import SharedMemory
from penstock_server.kernels.native_ops import NativeActivation, NativeNorm, NativeOps, NativeRouting
from penstock_server.kernels.ops import Elementwise, Ops, PackedNorm
from penstock_server.layers.linear import Linear, OrderedLinear
from penstock_server.layers.step import StepContext
from penstock_server.parallel import RankGroup, Split

if TYPE_CHECKING:
    from penstock_server.kernels.native_build import NativeBuild

logger = logging.getLogger(__name__)

Register = Literal[
    "residual",  # the embeddings, to which layers add
    "normed",  # the input of attention or MLP
    "qkv",
    "attended",
    "latents",  # of latent attention: what all heads share, before it is normed and rotated
    "query_latent",  # normed
    "queries",  # of latent attention: the plain parts of all heads, then their rotated parts
    "unpadded",  # "qkv" and "attended" of heads that the cache pads
    "values",  # of all heads, of what latent attention attended to
    "inner",  # the MLP's first product
    "activated",
    "projected",  # what attention or MLP add to the residual
    "sum",  # what both together add to it
    "gathered",  # the columns of all ranks
    "part",  # this rank's columns of a product of what was gathered
    "ordered",  # the input of a layer in the order of its weight's columns
    "logits",  # the router's
    "shared",  # the shared expert's output
    "gate",  # its logit
    "output",  # of the stack
]


class NotNativeError(Exception):
    """What a stack has no operation for, for people."""


class NativeProgram:
    """A stack that is being written: each method appends an operation, or raises NotNativeError if there is none for
    this part. Raises ValueError if sizes do not fit together."""

    def __init__(self, hidden_size: int, build: NativeBuild, *, adapts: bool = False) -> None:
        """All parts must have been made by the kernels of this build. adapts: the stack runs rows with adapters."""
        self.adapts = adapts
        self._build = build
        self._native = build.module.Program(hidden_size)
        self._attention: NativeAttention | None = None

    def linear(
        self, linear: Linear, source: Register, target: Register, *, adds: bool = False, apart: bool = False
    ) -> None:
        """adds: to what is in the target. apart: gate and up of a gated layer, without its activation."""
        if isinstance(linear, OrderedLinear):
            self._native.reorder(linear.order.tolist(), source, "ordered")
            linear, source = linear.linear, "ordered"
        self._native.linear(self._packed(linear), source, target, adds, apart)

    def adapt(self, site: int | None, source: Register, target: Register) -> None:
        """Adds to "target", a layer's product with "source", what the rows' adapters add to the layer, which is this
        site; None: no site. Nothing is appended to a stack without adapters."""
        if self.adapts and site is not None:
            self._native.adapt(site, source, target)

    def adapt_heads(
        self, sites: range | None, source: Register, target: Register, source_step: int, target_step: int
    ) -> None:
        """As `adapt`, to the products of the layers of heads, a site each. A head's inputs begin `source_step` columns
        after those of the head before, and its results `target_step` columns."""
        if self.adapts and sites is not None:
            self._native.adapt(sites.start, source, target, (len(sites), (source_step, target_step)))

    def reserve(self, register: Register, width: int) -> None:
        """Gives a register a width, so that `heads` and `copy` write its columns."""
        self._native.reserve(register, width)

    def heads(self, linears: Sequence[Linear], source: Register, target: Register, step: int) -> None:
        """A dense linear layer of each head: its inputs follow each other, its results begin `step` columns apart."""
        self._native.heads([self._packed(linear) for linear in linears], source, target, step)

    def copy(
        self,
        source: Register,
        source_columns: tuple[int, int],
        target: Register,
        target_columns: tuple[int, int],
        width: int,
        count: int = 1,
    ) -> None:
        """Copies `count` pieces of `width` columns, given the first one's column and the distance to the next one."""
        self._native.copy((source, *source_columns), (target, *target_columns), count, width)

    def pad(self, source: Register, target: Register, num_heads: int, dims: tuple[int, int]) -> None:
        """Heads of `dims[0]` columns become heads of `dims[1]`, which end with zeros."""
        self._native.pad(source, target, num_heads, *dims)

    def norm(self, norm: PackedNorm, source: Register, target: Register) -> None:
        self._native.norm(_native_norm(norm), source, target)

    def norm_heads(self, norm: PackedNorm, register: Register, first: int, num_groups: int) -> None:
        """Norms in place `num_groups` groups of elements, from column `first` on."""
        self._native.norm_heads(_native_norm(norm), register, first, num_groups)

    def activate(self, function: Elementwise, source: Register, target: Register) -> None:
        """function: of `Ops.elementwise` or `Ops.gated`."""
        self._native.activate(_native_activation(function), source, target)

    def scale(self, register: Register, factor: float) -> None:
        self._native.scale(register, factor)

    def clamp(self, register: Register, bound: float) -> None:
        self._native.clamp(register, bound)

    def add(self, source: Register, target: Register) -> None:
        self._native.add(source, target)

    def rotate(self, attention: Attention, rope: tuple[Tensor, Tensor], *, interleaved: bool) -> None:
        """Rotates the queries and keys in "qkv"; of keys that contain values, what is behind these."""
        self._native.rotate(_native_attention(attention).native, *rope, interleaved)

    def scale_queries(self, attention: Attention, factors: Tensor, period: int) -> None:
        """Multiplies the queries in "qkv" by the factor of their position, `factors[(position + 1) // period]`."""
        self._native.scale_queries(_native_attention(attention).native, factors, period)

    def write(self, attention: Attention, scales: KvScales | None = None) -> None:
        """Stores the keys and values in "qkv" in the cache of the next layer. scales: of the layer, as of
        `Attention.write_kv`."""
        self._attention = _native_attention(attention)
        self._native.write(self._attention.native, scales)

    def attend(self, sinks: Tensor | None = None) -> None:
        """Attention of the queries in "qkv" over the cache that was written last. sinks [heads]: as of
        `Attention.attend`."""
        self._native.attend(None if sinks is None else sinks.to(self._build.dtype).contiguous())

    def gather(self, group: RankGroup, widths: tuple[int, ...], source: Register, target: Register) -> None:
        """Joins the columns of all ranks, `widths[rank]` of each."""
        self._native.gather(self._collective(group), widths, source, target)

    def _collective(self, group: RankGroup) -> Any:
        if not isinstance(group.collectives, SharedMemory):
            raise NotNativeError(f"{group.size} ranks that do not share memory")
        if not isinstance(group.collectives.native, self._build.module.Collective):
            raise NotNativeError("ranks that share memory through kernels in another data type")
        return group.collectives.native

    def experts(
        self,
        routing: NativeRouting,
        router: Linear | None,
        experts: Iterable[tuple[Linear, Linear]],
        activation: Elementwise | None,
        gate: Elementwise | None,
        first_site: int | None,
        split: Split,
        group: RankGroup,
        shared: Literal["plain", "gated"] | None,
        source: Register,
        target: Register,
    ) -> None:
        """The weighted sum of each row's experts, routed by "logits", or by a router whose logits are float32. experts:
        gate and up, and down, of each expert of this rank. activation: of gate and up, if these layers are not gated.
        gate: the activation of gated layers, apart. first_site: as of `expert_sites`; None: adapters change no expert.
        split: the experts of each rank. shared: adds "shared", or its product with the sigmoid of "gate"."""
        packed = [(self._packed(gate_up), self._packed(down)) for gate_up, down in experts]
        ranks = (self._collective(group), split.widths()) if group.size > 1 else None
        first_site = first_site if self.adapts else None
        activation = activation if first_site is None else activation or gate
        native = None if activation is None else _native_activation(activation)
        wide = None if router is None else router.native
        self._native.experts(routing.packed, wide, packed, native, ranks, shared, first_site, source, target)

    def select(self, registers: Sequence[Register]) -> None:
        """From here on, these registers have the sampled rows only, and no other register is read."""
        self._native.select(registers)

    def output(self, norm: PackedNorm | None, hidden_size: int) -> None:
        """The stack returns the norm of the residual; None: the residual."""
        if norm is not None:
            self.norm(norm, "residual", "output")
            return
        self.reserve("output", hidden_size)
        self.copy("residual", (0, 0), "output", (0, 0), hidden_size)

    def _packed(self, linear: Linear) -> Any:
        if linear.native is None:
            raise NotNativeError("experts whose columns are reordered")
        if not isinstance(linear.native, self._build.module.PackedLinear):
            raise NotNativeError("a linear layer in another data type")
        return linear.native

    def finish(self) -> NativeStack:
        assert self._attention is not None, "a decoder has at least one layer"
        return NativeStack(self._native.finish(self._attention.native), self._build)


class NativeStack:
    """Layers and the final norm."""

    @classmethod
    def of(
        cls, append_layers: Callable[[NativeProgram], None], hidden_size: int, ops: Ops, what: str = "layers"
    ) -> NativeStack | None:
        """The stack that `append_layers` writes. None if the layers must run one by one. what: they are, in the log."""
        try:
            if not isinstance(ops, NativeOps):
                raise NotNativeError(f"{ops.name} operators")
            stack = cls.written_by(append_layers, hidden_size, ops.build)
        except NotNativeError as reason:
            # Only a CPU has native operators.
            logger.log(
                logging.INFO if isinstance(ops, NativeOps) else logging.DEBUG, "%s: one by one (%s)", what, reason
            )
            return None
        logger.debug("%s: one native call", what)
        return stack

    @classmethod
    def written_by(
        cls,
        append_layers: Callable[[NativeProgram], None],
        hidden_size: int,
        build: NativeBuild,
        *,
        adapts: bool = False,
    ) -> NativeStack:
        """adapts: as of `NativeProgram`. Raises NotNativeError as `append_layers` does."""
        program = NativeProgram(hidden_size, build, adapts=adapts)
        append_layers(program)
        return program.finish()

    def __init__(self, native: Any, build: NativeBuild) -> None:
        self.build = build
        self._run = native.run

    def run(
        self,
        residual: Tensor,
        caches: list[Tensor],
        step: StepContext,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """residual: embeddings [tokens, hidden], overwritten. adapters: of a stack that was written for them.
        Returns the output of the sampled rows [samples, hidden]. Raises
        RuntimeError when another rank's process has exited."""
        batch = step.batch
        output = residual.new_empty((batch.sample_rows.shape[0], residual.shape[1]))
        metadata = step.metadata[NativeAttention.name]
        adapted = None if adapters is None else ([adapter.packed for adapter in adapters.loaded], adapters.of_tokens)
        self._run(residual, batch.positions, batch.slots, metadata, caches, batch.sample_rows, output, adapted)
        return output


def _native_norm(norm: PackedNorm) -> Any:
    if not isinstance(norm, NativeNorm):
        raise NotNativeError("a norm without weights")
    return norm.packed


def _native_activation(function: Elementwise) -> Any:
    if not isinstance(function, NativeActivation):
        raise NotNativeError("an activation that is not native")
    return function.packed


def padded_head_dim(attention: Attention) -> int:
    """Elements of a head in the cache. Raises NotNativeError."""
    return _native_attention(attention).padded_dims[0]


def _native_attention(attention: Attention) -> NativeAttention:
    if not isinstance(attention, NativeAttention):
        raise NotNativeError(f"{attention.name} attention")
    return attention
