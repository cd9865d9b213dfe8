"""What layers compute, as data: operations on registers, which are the intermediate results of a step.

A layer appends its operations to a `Program`, once for all devices. `native_compiler.py` compiles a program for native
kernels, and `interpreter.py` runs it with the operators of any device. No architecture is known behind a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.attention.interface import Attention, HeadNorms
from penstock_server.device.ops import Elementwise, PackedLinear, PackedNorm, PackedRecurrence
from penstock_server.layers.head_linear import HeadLinear
from penstock_server.layers.step import StepContext
from penstock_server.parallel import RankGroup

if TYPE_CHECKING:
    from penstock_server.layers.experts import MixtureOfExperts
    from penstock_server.layers.qk_norm import QkNorm

Register = Literal[
    "residual",  # the embeddings, to which layers add
    "normed",  # the input of attention or MLP
    "qkv",  # queries, keys and values; of attention over a source: queries
    "attended",
    "gated_qkv",  # queries, keys and values, and a gate for each element of "attended"
    "gates",  # these gates, or those of a layer that keeps a state, if they are computed apart
    "mixed",  # input of a layer that keeps a state
    "convolved",  # what a convolution makes of it
    "rates",  # its numbers for each head, or for all channels
    "steps",  # its numbers for each channel
    "decays",  # its decays, if these are computed apart
    "latents",  # what all heads of latent attention share, before it is normed and rotated; what "steps" are made of
    "query_latent",  # normed
    "queries",  # queries of latent attention: the plain parts of all heads, then their rotated parts
    "values",  # values of all heads, of what latent attention attended to
    "inner",  # the first product of an MLP or of a projection of low rank
    "activated",
    "projected",  # what attention or MLP add to the residual
    "sum",  # what the MLP adds to it besides
    "gathered",  # the columns of all ranks
    "part",  # this rank's columns of a product of what was gathered
    "shared",  # the shared expert's output
    "output",  # output of the program
]
Widths = Mapping[Register, int]


@dataclass(frozen=True, slots=True)
class Operation:
    """Computes a register from others. If source and target are one register, it is changed in place."""

    source: Register
    target: Register

    @property
    def reads(self) -> tuple[Register, ...]:
        return (self.source,)

    def width(self, widths: Widths) -> int:
        """Columns of the target, given those of the registers that are read. Raises ValueError if these do not fit."""
        return widths[self.source]


@dataclass(frozen=True, slots=True)
class Multiply(Operation):
    """The product of a linear layer, and what the rows' adapters add to it."""

    linear: PackedLinear
    site: int | None = None  # adapter site; None: no adapter changes the layer
    gate: Elementwise | None = None  # makes the layer's result of gate and up, if adapters change these before

    def width(self, widths: Widths) -> int:
        _expect(self, widths, self.linear.in_features)
        return self.linear.out_features


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    norm: PackedNorm


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """target += other + norm(source) * factor"""

    norm: PackedNorm | None = None
    factor: float = 1.0
    other: Register | None = None

    @property
    def reads(self) -> tuple[Register, ...]:
        return (self.source, self.target, *(() if self.other is None else (self.other,)))

    def width(self, widths: Widths) -> int:
        for register in self.reads:
            if widths[register] != widths[self.target]:
                raise ValueError(f"{register} has {widths[register]} columns, {self.target} {widths[self.target]}")
        return widths[self.target]


@dataclass(frozen=True, slots=True)
class Scale(Operation):
    """Multiplies by a factor, in place."""

    factor: float


@dataclass(frozen=True, slots=True)
class Activate(Operation):
    function: Elementwise  # operator of `Ops.elementwise` or `Ops.gated`
    is_gated: bool

    def width(self, widths: Widths) -> int:
        return widths[self.source] // 2 if self.is_gated else widths[self.source]


@dataclass(frozen=True, slots=True)
class Convert(Operation):
    """Rounds to a data type."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Gather(Operation):
    """Joins the columns of all ranks, `widths[rank]` of each."""

    group: RankGroup
    widths: tuple[int, ...]

    def width(self, widths: Widths) -> int:
        _expect(self, widths, self.widths[self.group.rank])
        return sum(self.widths)


@dataclass(frozen=True, slots=True)
class Reduce(Operation):
    """Adds up the registers of all ranks, in place."""

    group: RankGroup


@dataclass(frozen=True, slots=True)
class Clamp(Operation):
    """Clamps to ± `bound`, in place."""

    bound: float


@dataclass(frozen=True, slots=True)
class NormHeads(Operation):
    """Norms heads in place: the first `num_heads[0]` by the first norm, and so on."""

    norms: Sequence[QkNorm]
    num_heads: Sequence[int]
    head_dim: int
    fused: HeadNorms | None = None  # the norms of queries and keys, if an attention can compute them as it writes


@dataclass(frozen=True, slots=True)
class _OfAttention(Operation):
    """An operation on queries, keys and values of an attention, which are in one register, or on its queries."""

    attention: Attention

    def width(self, widths: Widths) -> int:
        shape = self.attention.shape
        num_keys = shape.num_heads + shape.num_kv_heads
        _expect(self, widths, num_keys * shape.head_dim + shape.num_kv_heads * shape.output_dim)
        return widths[self.source]


@dataclass(frozen=True, slots=True)
class Rotate(_OfAttention):
    """Rotary embedding of queries and keys in place; see `Ops.rotate`."""

    cos: Tensor  # [max positions, rotary_dim / 2] float32
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True)
class ScaleQueries(_OfAttention):
    """Multiplies queries in place by the factor of their position, `factors[(position + 1) // period]`."""

    factors: Tensor  # [periods] float32
    period: int


@dataclass(frozen=True, slots=True)
class Write(_OfAttention):
    """Stores keys and values in the cache of the next layer."""

    scales: KvScales | None  # see `Attention.write_kv`


@dataclass(frozen=True, slots=True)
class Attend(_OfAttention):
    """Attention of queries, which come first in the source, over the cache that was written last."""

    sinks: Tensor | None = None  # these as of `Attention.attend`
    bias: Tensor | None = None
    scales: KvScales | None = None

    def width(self, widths: Widths) -> int:
        return self.attention.shape.num_heads * self.attention.shape.output_dim


@dataclass(frozen=True, slots=True)
class Pick(Operation):
    """Columns of the source, in this order: `count` pieces of `width` columns that begin `step` apart."""

    pieces: Sequence[Pieces]

    def width(self, widths: Widths) -> int:
        end = max(each.end for each in self.pieces)
        if end > widths[self.source]:
            raise ValueError(f"{self.source} has {widths[self.source]} columns, Pick needs {end}")
        return sum(each.count * each.width for each in self.pieces)


@dataclass(frozen=True, slots=True)
class Pieces:
    first: int
    step: int
    count: int
    width: int

    @property
    def end(self) -> int:
        return self.first + (self.count - 1) * self.step + self.width


@dataclass(frozen=True, slots=True)
class Gate(Operation):
    """target *= function(source)"""

    function: Elementwise  # operator of `Ops.elementwise`
    # Number and dimension of the target's heads, of which each has a gate; None: each column has one.
    heads: tuple[int, int] | None = None

    @property
    def reads(self) -> tuple[Register, ...]:
        return self.source, self.target

    def width(self, widths: Widths) -> int:
        num_gates, dim = self.heads or (widths[self.target], 1)
        _expect(self, widths, num_gates)
        if num_gates * dim != widths[self.target]:
            raise ValueError(
                f"{num_gates} heads of {dim} columns are gated, but {self.target} has {widths[self.target]}"
            )
        return widths[self.target]


@dataclass(frozen=True, slots=True)
class AdvanceStates(Operation):
    """What a layer makes of the source and other registers, and of the states of the step's sequences, which are in the
    next layer's cache and advance."""

    net: PackedRecurrence
    others: tuple[Register, ...] = ()

    @property
    def sources(self) -> tuple[Register, ...]:
        """The net's inputs."""
        return self.source, *self.others

    @property
    def reads(self) -> tuple[Register, ...]:
        return self.sources

    def width(self, widths: Widths) -> int:
        found = tuple(widths[source] for source in self.sources)
        if found != tuple(self.net.net.input_widths):
            raise ValueError(f"{self.sources} have {found} columns, must have {self.net.net.input_widths}")
        return self.net.net.output_width


@dataclass(frozen=True, slots=True)
class LatentOperands:
    """What the operations of one latent attention share. The register "latents" has the latent of the queries if there
    is one, the latent, and the rotated key part. A key is the normed latent and the rotated part."""

    attention: Attention
    query_dim: int  # dimension of the queries' latent; 0: there is none
    plain_dim: int  # dimension of a query's part that is not rotated
    q_norm: PackedNorm | None
    kv_norm: PackedNorm
    absorb: HeadLinear  # plain parts of queries [rows, heads, plain_dim] → [rows, heads, latent]
    unfold: HeadLinear  # [rows, heads, latent] → [rows, heads, values of a head]
    cos: Tensor  # see `Rotate`
    sin: Tensor
    scales: KvScales | None

    @property
    def dim(self) -> int:
        """Elements of the latent."""
        return self.attention.shape.output_dim

    @property
    def rotary_dim(self) -> int:
        return self.attention.shape.head_dim - self.dim


@dataclass(frozen=True, slots=True)
class NormLatents(Operation):
    """The normed latent of the queries; without one, the source. The key is stored here or by `AttendLatents`."""

    latents: LatentOperands

    def width(self, widths: Widths) -> int:
        _expect(self, widths, self.latents.query_dim + self.latents.attention.shape.head_dim)
        return self.latents.query_dim or widths[self.source]


@dataclass(frozen=True, slots=True)
class AttendLatents(Operation):
    """Attention of the queries in the source over the cache of the next layer, in which it stores the key of "latents"
    if that was not done yet. The target has the values of all heads."""

    latents: LatentOperands

    @property
    def reads(self) -> tuple[Register, ...]:
        return self.source, "latents"

    def width(self, widths: Widths) -> int:
        num_heads, latents = self.latents.attention.shape.num_heads, self.latents
        _expect(self, widths, num_heads * (latents.plain_dim + latents.rotary_dim))
        return num_heads * latents.unfold.out_features


@dataclass(frozen=True, slots=True)
class Experts(Operation):
    """The weighted sum of each row's experts, and of "shared" if there is a shared expert."""

    experts: MixtureOfExperts

    @property
    def reads(self) -> tuple[Register, ...]:
        return (self.source,) if self.experts.shared is None else (self.source, "shared")


@dataclass(frozen=True, slots=True)
class Select(Operation):
    """From here on, the source and these registers have the sampled rows only, and no other register is read."""

    registers: Sequence[Register]

    @property
    def reads(self) -> tuple[Register, ...]:
        return self.source, *self.registers


@dataclass(frozen=True, slots=True)
class Copy(Operation):
    pass


Visitor = Callable[[Tensor, StepContext], None]
"""Reads a residual [tokens, hidden] or changes it in place."""


@dataclass(frozen=True, slots=True)
class Visit(Operation):
    """Shows the residual of all rows to a part of the model that is not a layer, in those steps that have visitors."""

    visitor: Visitor


class Program:
    """Operations in order, which read "residual" first and write "output" last."""

    def __init__(self, hidden_size: int) -> None:
        self.operations: list[Operation] = []
        self.hidden_size = hidden_size
        self._widths: dict[Register, int] = {"residual": hidden_size}
        self._has_selected = False

    def append(self, operation: Operation) -> None:
        """Raises ValueError if the operation reads what no operation has written, or if sizes do not fit together."""
        for register in operation.reads:
            if register not in self._widths:
                raise ValueError(f"{type(operation).__name__} reads {register}, which is not written")
        width = operation.width(self._widths)
        if operation.target == "residual" and width != self.hidden_size:
            raise ValueError(f"the residual has {self.hidden_size} columns, not {width}")
        if self._has_selected and isinstance(operation, _OfAttention | AttendLatents | AdvanceStates | Visit):
            raise ValueError(f"{type(operation).__name__} needs all rows, only the sampled ones are left")
        self._widths[operation.target] = width
        if isinstance(operation, Select):
            self._has_selected = True
            self._widths = {register: self._widths[register] for register in operation.reads}
        self.operations.append(operation)

    def output(self, norm: PackedNorm | None) -> None:
        """The program returns the norm of the residual; None: the residual."""
        self.append(Copy("residual", "output") if norm is None else Norm("residual", "output", norm))


def _expect(operation: Operation, widths: Widths, width: int) -> None:
    given = widths[operation.source]
    if given != width:
        raise ValueError(f"{operation.source} has {given} columns, {type(operation).__name__} needs {width}")
