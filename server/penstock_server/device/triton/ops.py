"""The operators as Triton kernels, for CUDA devices, except products with dense matrices, which are torch's.

A row's result does not depend on the other rows, except through the matrix library's choice of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.activation import ACTIVATIONS, Xielu
from penstock_server.device.ops import (
    Elementwise,
    Lookup,
    NormVariant,
    PackedLinear,
    PackedNorm,
    QuantizedPacker,
    Summand,
    norm_dtype,
)
from penstock_server.device.quantized import ALL_KEPT, QuantizedMatrix
from penstock_server.device.reference.ops import GateUp, TorchNorm, TorchOps
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton import kernel as triton_kernel
from penstock_server.device.triton.quantized import QuantizedLinear, can_gate

# The names by which the kernels know activations.
KERNEL_ACTIVATIONS: dict[Elementwise, str] = {
    ACTIVATIONS[name]: name
    for name in ("silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2", "tanh", "sigmoid", "linear")
}
_NO_NORM = NormVariant(0.0)
_GATE_WIDTH = 1024  # elements of a program
_ROTATED_ELEMENTS = 2048  # elements of the tile of heads that a program rotates


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


class TritonOps(TorchOps):
    """Implements `Ops`."""

    name = "triton"
    kept = ALL_KEPT
    groups_experts = True
    adds_adapters = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """device: of packed weights; dtype: the model's."""
        self._device, self._dtype = device, dtype

    @property
    def quantized_packer(self) -> QuantizedPacker:
        return self.pack_quantized

    def pack_quantized(
        self, matrices: Sequence[QuantizedMatrix], bias: Tensor | None, *, gated: bool = False
    ) -> tuple[PackedLinear, Lookup]:
        """Implements `QuantizedPacker`."""
        is_fused = gated and can_gate(matrices, self._dtype, self._device)
        linear = QuantizedLinear.pack(matrices, bias, self._dtype, self._device, gated=is_fused)
        if gated and not is_fused:
            dim = linear.out_features // 2
            return GateUp(linear, self.gated(F.silu), dim, linear.in_features), linear.rows
        return linear, linear.rows

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        variant: NormVariant,
        residual: Tensor | None = None,
    ) -> Tensor:
        output = torch.empty(x.shape, dtype=norm_dtype(x, weight), device=x.device)
        _normalize(output, Summand(x), weight, bias, variant, residual)
        return output

    def add(self, residual: Tensor, summand: Summand, norm: PackedNorm | None) -> Tensor:
        if norm is None:
            _normalize(None, summand, None, None, _NO_NORM, residual)
            return residual
        assert isinstance(norm, TorchNorm)
        output = torch.empty(residual.shape, dtype=norm_dtype(residual, norm.weight), device=residual.device)
        _normalize(output, summand, norm.weight, norm.bias, norm.variant, residual)
        return output

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
        num_heads, num_kv_heads, half = queries.shape[1], keys.shape[1], cos.shape[1]
        width = power_of_two(half)
        tile_heads = min(power_of_two(max(num_heads, num_kv_heads)), max(1, _ROTATED_ELEMENTS // (2 * width)))
        num_query_tiles = -(-num_heads // tile_heads)
        triton_device.launch(
            triton_kernel.rotate_kernel,
            (queries.shape[0], num_query_tiles - (-num_kv_heads // tile_heads)),
            queries=queries,
            keys=keys,
            cos=cos,
            sin=sin,
            positions=positions,
            num_query_tiles=num_query_tiles,
            query_token_stride=queries.stride(0),
            query_head_stride=queries.stride(1),
            key_token_stride=keys.stride(0),
            key_head_stride=keys.stride(1),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HALF=half,
            WIDTH=width,
            TILE_HEADS=tile_heads,
            IS_INTERLEAVED=interleaved,
            num_warps=4,
        )

    def elementwise(self, function: Elementwise) -> Elementwise:
        if isinstance(function, Xielu):
            return partial(_activate, "xielu", function)
        name = KERNEL_ACTIVATIONS.get(function)
        return function if name is None else partial(_activate, name, None)

    def gated(self, activation: Elementwise) -> Elementwise:
        name = KERNEL_ACTIVATIONS.get(activation)
        return super().gated(activation) if name is None else partial(_gate, name)


def _normalize(
    output: Tensor | None,
    summand: Summand,
    weight: Tensor | None,
    bias: Tensor | None,
    variant: NormVariant,
    residual: Tensor | None,
) -> None:
    """output: of a norm of the summand, or of the sum with the residual, which becomes that; None: of none."""
    x, inner = summand.x, summand.norm
    assert inner is None or isinstance(inner, TorchNorm)
    if x.stride(-1) != 1:
        x = x.contiguous()
    dim = x.shape[-1]
    # [rows, heads, dim] with any strides, or rows of a tensor that is contiguous.
    rows = x if x.dim() == 3 else x.reshape(-1, 1, dim) if x.dim() != 2 else x[:, None]
    width = power_of_two(dim)
    triton_device.launch(
        triton_kernel.norm_kernel,
        (rows.shape[0], rows.shape[1]),
        output=output,
        x=rows,
        residual=residual,
        other=None if summand.other is None else summand.other.contiguous(),
        weight=weight,
        bias=bias,
        row_stride=rows.stride(0),
        head_stride=rows.stride(1),
        eps=variant.eps,
        inner_weight=None if inner is None else inner.weight,
        inner_bias=None if inner is None else inner.bias,
        inner_eps=0.0 if inner is None else inner.variant.eps,
        FACTOR=summand.factor,
        DIM=dim,
        WIDTH=width,
        IS_LAYER=variant.kind == "layer",
        IS_WIDE=_is_wide(variant),
        WEIGHT_STRIDE=dim if weight is not None and weight.dim() == 2 else 0,
        HAS_INNER=inner is not None,
        INNER_IS_LAYER=inner is not None and inner.variant.kind == "layer",
        INNER_IS_WIDE=inner is not None and _is_wide(inner.variant),
        num_warps=min(16, max(1, width // 512)),
    )


def _is_wide(variant: NormVariant) -> bool:
    return variant.is_wide or variant.kind == "layer"


def _activate(name: str, parameters: Xielu | None, x: Tensor) -> Tensor:
    dim = x.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, dim)
    triton_device.launch(
        triton_kernel.activate_kernel,
        (rows.shape[0], -(-dim // _GATE_WIDTH)),
        output=output,
        x=rows,
        above=None if parameters is None else parameters.above,
        below=None if parameters is None else parameters.below,
        row_stride=rows.stride(0),
        DIM=dim,
        WIDTH=_GATE_WIDTH,
        NAME=name,
        num_warps=4,
    )
    return output


def _gate(name: str, x: Tensor) -> Tensor:
    dim = x.shape[-1] // 2
    output = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, 2 * dim)
    triton_device.launch(
        triton_kernel.gate_kernel,
        (rows.shape[0], -(-dim // _GATE_WIDTH)),
        output=output,
        x=rows,
        row_stride=rows.stride(0),
        DIM=dim,
        WIDTH=_GATE_WIDTH,
        NAME=name,
        num_warps=4,
    )
    return output
