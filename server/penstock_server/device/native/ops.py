"""The operators as native kernels on a CPU, from a build of the package `penstock_kernels`.

A row's result never depends on the other rows. The kernels check the tensors that they are given: a wrong one raises
TypeError or ValueError.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock_server.device import ACTIVATION_BITS
from penstock_server.device.activation import native_form
from penstock_server.device.gated_delta import GatedDelta
from penstock_server.device.mamba import MambaConv, MambaScan
from penstock_server.device.mamba2 import Mamba2
from penstock_server.device.native.build import find_build
from penstock_server.device.quantized import Kept
from penstock_server.device.short_conv import ShortConv

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from penstock_server.device.native.build import NativeBuild
    from penstock_server.device.ops import (
        Elementwise,
        Lookup,
        NormVariant,
        PackedLinear,
        PackedNorm,
        QuantizedPacker,
        Summand,
        Weight,
    )
    from penstock_server.device.quantized import QuantizedMatrix
    from penstock_server.device.state import Recurrence, StateRows


class NativeLinear:
    """A packed linear layer. The native package owns the memory of its weight."""

    __slots__ = ("_apply", "_dtype", "in_features", "out_features", "packed")

    def __init__(self, packed: Any, num_rows: int, in_features: int, dtype: torch.dtype, *, gated: bool) -> None:
        """dtype: of inputs and results."""
        self.packed = packed
        self._apply = packed.apply
        self._dtype = dtype
        self.in_features = in_features
        self.out_features = num_rows // 2 if gated else num_rows

    @classmethod
    def dense(cls, kernels: Any, weight: Weight, bias: Tensor | None, *, gated: bool) -> NativeLinear:
        from penstock_server.device.ops import pieces_of

        rows, in_features = weight.shape
        packing = kernels.linear(rows, in_features, None if bias is None else bias.contiguous(), gated)
        for piece in pieces_of(weight):
            packing.add_rows(piece.contiguous())
        return cls(packing.finish(), rows, in_features, weight.dtype, gated=gated)

    @classmethod
    def quantized(
        cls,
        kernels: Any,
        matrices: Sequence[QuantizedMatrix],
        bias: Tensor | None,
        activation_bits: int,
        dtype: torch.dtype,
        *,
        gated: bool,
    ) -> NativeLinear:
        formats = [matrix.format for matrix in matrices]
        rows, in_features = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        segments = [
            (num_rows, one.bits, one.group, one.offset, one.has_mins, one.number, one.zeros, one.table, one.code)
            for matrix, one in zip(matrices, formats, strict=True)
            # Gate and up are packed apart, also where they are one matrix of the checkpoint.
            for num_rows in ([rows // 2] * 2 if gated and len(matrices) == 1 else [matrix.shape[0]])
        ]
        contiguous = None if bias is None else bias.contiguous()
        packing = kernels.quantized(segments, in_features, contiguous, gated, activation_bits)
        for matrix in matrices:
            for piece in matrix.pieces():
                packing.add_rows(piece.codes, piece.numbers, piece.factors)
        return cls(packing.finish(), rows, in_features, dtype, gated=gated)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] → [rows, out_features]. If gated, silu(gate) * up of a weight with gate rows first."""
        y = x.new_empty((x.shape[0], self.out_features))
        self._apply(x, y)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: [ids] int64 → [ids, in_features]. Not for gated layers."""
        rows = torch.empty((ids.shape[0], self.in_features), dtype=self._dtype)
        self.packed.copy_rows(ids, rows)
        return rows


class NativeNorm:
    """Implements `PackedNorm`."""

    __slots__ = ("_apply", "_apply_heads", "_dtype", "_empty_like", "_plain", "packed")

    def __init__(self, packed: Any, dtype: torch.dtype, plain: PackedNorm) -> None:
        """dtype: of the kernel's inputs. plain: for a residual stream in another dtype, as of T5 in float16."""
        self._empty_like = torch.empty_like
        self._dtype = dtype
        self._plain = plain
        self.packed = packed
        self._apply = packed.apply
        self._apply_heads = packed.apply_heads

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dtype != self._dtype or (residual is not None and residual.dtype != self._dtype):
            return self._plain(x, residual)
        y = self._empty_like(x)
        if x.dim() == 3:
            self._apply_heads(x, y)
        else:
            self._apply(x, y, residual)
        return y


class NativeActivation:
    """A function of one number. torch computes the end of a vector loop differently from the rest, so with torch's
    function a result would depend on the number's place in the batch."""

    __slots__ = ("_apply", "packed")

    def __init__(self, packed: Any) -> None:
        self.packed = packed
        self._apply = packed.apply

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape)
        self._apply(x, y)
        return y


class NativeGate(NativeActivation):
    """A function whose results are multiplied by the second half of each row."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty((x.shape[0], x.shape[1] // 2))
        self._apply(x, y)
        return y


class NativeWideLinear:
    """A linear layer whose results are float32."""

    __slots__ = ("_apply", "in_features", "out_features", "packed")

    def __init__(self, packed: Any, out_features: int, in_features: int) -> None:
        self.packed = packed
        self._apply = packed.apply
        self.in_features = in_features
        self.out_features = out_features

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] → [rows, out_features] float32"""
        y = torch.empty((x.shape[0], self.out_features))
        self._apply(x, y)
        return y


class RoutingRule(Protocol):
    """What the kernels read of a `RoutingSpec`."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def scoring(self) -> str: ...
    @property
    def norm_power(self) -> float | None: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_score(self) -> str: ...
    @property
    def jitter(self) -> float: ...
    @property
    def scales_inputs(self) -> bool: ...
    @property
    def is_wide(self) -> bool: ...


class NativeRouting:
    """How logits choose experts."""

    __slots__ = ("_apply", "_top_k", "packed")

    def __init__(self, packed: Any, rule: RoutingRule) -> None:
        self.packed = packed
        self._apply = packed.apply_wide if rule.is_wide else packed.apply
        self._top_k = rule.top_k

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [rows, experts] → weights [rows, top_k] float32 and experts [rows, top_k] int64, the best first."""
        weights = torch.empty((logits.shape[0], self._top_k))
        experts = torch.empty((logits.shape[0], self._top_k), dtype=torch.int64)
        self._apply(logits, experts, weights)
        return weights, experts


class NativeRecurrence:
    """Implements `PackedRecurrence`."""

    __slots__ = ("_apply", "net", "packed")

    def __init__(self, packed: Any, net: Recurrence) -> None:
        self.packed = packed
        self._apply = packed.apply
        self.net = net

    def __call__(self, inputs: Sequence[Tensor], slots: Tensor, of: StateRows) -> Tensor:
        outputs = inputs[0].new_empty((len(inputs[0]), self.net.output_width))
        self._apply(inputs, slots, of.query_starts, of.context_lens, of.slots, outputs)
        return outputs


class NativeOps:
    """Implements `Ops`."""

    name = "native"
    kept = Kept(mixed=False)  # no kernel multiplies integers and 8-bit floats
    groups_experts = False
    adds_adapters = False

    def __init__(
        self, build: NativeBuild, num_threads: int | None = None, activation_bits: int = ACTIVATION_BITS
    ) -> None:
        """activation_bits: of the inputs of quantized weights, 8 or 16."""
        from penstock_server.device.reference.ops import TorchOps

        self.build = build
        self._num_threads = num_threads
        self._kernels = build.kernels(num_threads)
        self._activation_bits = activation_bits
        self._torch = TorchOps()  # for residual streams in another data type

    @property
    def quantized_packer(self) -> QuantizedPacker:
        return self._pack_quantized

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> NativeLinear:
        kernels = self._kernels
        if weight.dtype != self.build.dtype:  # kept in float32 in a float16 model
            build = find_build(torch.device("cpu"), weight.dtype, self.build.isa.name)
            assert build is not None, "an instruction set has kernels for all data types"
            kernels = build.kernels(self._num_threads)
        return NativeLinear.dense(kernels, weight, bias, gated=False)

    def pack_wide(self, weight: Tensor) -> PackedLinear:
        return NativeWideLinear(self._kernels.wide_linear(weight.contiguous()), *weight.shape)

    def pack_tied(self, weight: Weight) -> tuple[NativeLinear, Lookup]:
        """The packed weight serves both."""
        linear = self.pack_linear(weight, None)
        return linear, linear.rows

    def pack_gate_up(self, weight: Weight, bias: Tensor | None) -> NativeLinear:
        """weight [2 * dim, in_features], gate first. The layer returns silu(gate) * up [rows, dim]."""
        return NativeLinear.dense(self._kernels, weight, bias, gated=True)

    def _pack_quantized(
        self, matrices: Sequence[QuantizedMatrix], bias: Tensor | None, *, gated: bool = False
    ) -> tuple[NativeLinear, Lookup]:
        """Implements `QuantizedPacker`."""
        bits, dtype = self._activation_bits, self.build.dtype
        linear = NativeLinear.quantized(self._kernels, matrices, bias, bits, dtype, gated=gated)
        return linear, linear.rows

    def pack_heads(self, weight: Tensor) -> None:
        return None

    def pack_norm(self, weight: Tensor, bias: Tensor | None, variant: NormVariant) -> PackedNorm:
        kind = "wide rms" if variant.kind == "rms" and variant.is_wide else variant.kind
        dim = weight.shape[-1]
        weights = weight.float().contiguous().view(-1, dim)
        biases = None if bias is None else bias.float().contiguous().view(-1, dim)
        packed = self._kernels.norm(kind, weights, biases, variant.eps)
        return NativeNorm(packed, self.build.dtype, self._torch.pack_norm(weight, bias, variant))

    def adapt(self, site: int, x: Tensor, y: Tensor, adapters: Sequence[Any], of_rows: Tensor) -> None:
        """Adds to y [rows, columns], a layer's product with x [rows, in_features], what the rows' adapters add at this
        site. adapters: packed for this build; of_rows [rows] int64: the index of each row's adapter, or -1."""
        self._kernels.adapt(site, x, y, (adapters, of_rows))

    def routing(self, rule: RoutingRule, correction: Tensor | None) -> NativeRouting:
        """correction [experts] float32: added to the scores for the choice."""
        return NativeRouting(self._kernels.routing(rule, correction), rule)

    def add(self, residual: Tensor, summand: Summand, norm: PackedNorm | None) -> Tensor:
        return summand.add_to(residual, norm)

    def rotate(
        self,
        queries: Tensor,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        interleaved: bool = False,
    ) -> None:
        self._kernels.rotate(queries, keys, cos, sin, positions, interleaved)

    def elementwise(self, function: Elementwise) -> Elementwise:
        form = native_form(function)
        return (
            partial(_in_float64, function) if form is None else NativeActivation(self._kernels.activation(*form, False))
        )

    def gated(self, activation: Elementwise) -> Elementwise:
        form = native_form(activation)
        if form is None:
            return self._torch.gated(partial(_in_float64, activation))
        return NativeGate(self._kernels.activation(*form, True))

    def pack_recurrence(self, net: Recurrence) -> NativeRecurrence:
        packers: dict[type, Any] = {
            GatedDelta: self._kernels.gated_delta,
            Mamba2: self._kernels.mamba2,
            MambaConv: self._kernels.mamba_conv,
            MambaScan: self._kernels.mamba_scan,
            ShortConv: self._kernels.short_conv,
        }
        return NativeRecurrence(packers[type(net)](net), net)

    def clamped_swiglu(self, alpha: float, limit: float) -> Elementwise:
        """[rows, 2 * dim], gate first → [rows, dim], as the experts of gpt-oss compute it."""
        return NativeGate(self._kernels.activation("clamped swiglu", [alpha, limit], True))

    def argmax_logprob(
        self, logits: Tensor, places: npt.NDArray[np.int64] | None = None, masks: npt.NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The greedy choice of each row of logits [rows, vocab]: ids [rows] int64 (the lowest of equal ones) and their
        logprobs [rows] float32.

        places: the rows whose choice is restricted by masks [places, words]; bit b of word w allows token 32 * w + b. A
        row that contains NaN or +infinity, in an allowed place or not, and a row whose mask allows no token, has id -1
        and logprob NaN.
        """
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        logprobs = torch.empty(logits.shape[0], dtype=torch.float32)
        restricted = None
        if places is not None and masks is not None and len(places):
            restricted = torch.from_numpy(places), torch.from_numpy(masks)
        self._kernels.argmax_logprob(logits, ids, logprobs, restricted)
        return ids, logprobs


def _in_float64(function: Elementwise, x: Tensor) -> Tensor:
    """torch computes an element differently at the end of a vector loop; in float64, rounding hides it."""
    return function(x.double()).to(x.dtype)
