"""Linear layers on CUDA devices whose weights and inputs have 8 bits: tensor cores multiply them as they are. Inputs
are quantized row by row, by what they contain, so a row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.quantized import FLOAT8, QuantFormat, QuantizedMatrix
from penstock_server.device.triton import device as triton_device
from penstock_server.device.triton.narrow_kernel import int8_merge_kernel, int8_product_kernel, quantize_kernel

_QUANTIZED_WIDTH = 1024  # elements of a row that a program holds
_TILE_OUTPUTS, _TILE_DEPTH = 64, 128
_SPLIT_PROGRAMS = 512  # that the splits of a layer aim at
_MAX_SPLITS = 8
_MAX_SPLIT_ROWS = 64  # more rows make enough programs
_MERGED_OUTPUTS = 256  # outputs of a program


def is_narrow(format_: QuantFormat, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer's inputs are quantized. shape: [outputs, input features]; dtype: of the inputs."""
    if not format_.has_narrow_inputs:
        return False
    # torch._scaled_mm has scales for each row in bfloat16 only, and needs addresses that are multiples of 16.
    is_multiple = shape[0] % 16 == shape[1] % 16 == 0
    has_product = dtype == torch.bfloat16 and is_multiple and triton_device.multiplies_float8(device)
    return format_.code == "integer" or (format_.code == "e4m3fn" and has_product)


@dataclass(frozen=True, slots=True)
class NarrowSegment:
    """Consecutive outputs of a layer."""

    weight: Tensor  # [outputs, depth] int8 or float8_e4m3fn
    scales: Tensor  # [outputs] float32
    first_output: int
    bias: Tensor | None  # [outputs]

    @classmethod
    def pack(
        cls, matrices: Sequence[QuantizedMatrix], first_output: int, bias: Tensor | None, device: torch.device
    ) -> NarrowSegment:
        """The matrices have one format."""
        format_, depth = matrices[0].format, matrices[0].shape[1]
        weight = torch.empty((sum(each.shape[0] for each in matrices), depth), dtype=torch.uint8, device=device)
        scales = torch.empty(weight.shape[0], device=device)
        first = 0
        for matrix in matrices:
            for rows in matrix.pieces():
                end = first + rows.codes.shape[0]
                weight[first:end] = rows.codes.to(device)
                scales[first:end] = rows.scales[:, 0].to(device)
                first = end
        if format_.code == "integer":
            return cls(weight.sub_(format_.offset).view(torch.int8), scales, first_output, bias)  # modulo 256
        return cls(weight.view(FLOAT8[format_.code]), scales, first_output, bias)

    @property
    def num_columns(self) -> int:
        """Columns of the output."""
        return self.weight.shape[0]

    def apply(self, x: Tensor, y: Tensor) -> None:
        """x [rows, depth] → y [rows, num_columns]. The features of both are contiguous."""
        if not x.shape[0]:
            return
        if self.weight.dtype == torch.int8:
            codes, x_scales = quantize(x, "integer")
            self._multiply(codes, x_scales, y)
            return
        codes, x_scales = quantize(x, "e4m3fn")
        y.copy_(
            torch._scaled_mm(
                codes.view(self.weight.dtype),
                self.weight.t(),
                x_scales[:, None],
                self.scales[None],
                bias=self.bias,
                out_dtype=y.dtype,
            )
        )

    def _multiply(self, codes: Tensor, x_scales: Tensor, y: Tensor) -> None:
        """codes [rows, depth] int8, x_scales [rows] float32 → y [rows, num_columns]"""
        num_rows, (num_outputs, depth) = codes.shape[0], self.weight.shape
        split_depth = self._split_depth(num_rows)
        num_splits = -(-depth // split_depth)
        partials = None
        if num_splits > 1:
            partials = torch.empty((num_splits, num_rows, num_outputs), dtype=torch.int32, device=y.device)
        tile_rows = next((rows for rows in (16, 32, 64) if num_rows <= rows), 128)
        triton_device.launch(
            int8_product_kernel,
            (-(-num_outputs // _TILE_OUTPUTS) * -(-num_rows // tile_rows), num_splits),
            y=y,
            partials=partials,
            x=codes,
            x_scales=x_scales,
            weight=self.weight,
            scales=self.scales,
            bias=self.bias,
            num_rows=num_rows,
            y_stride=y.stride(0),
            OUTPUTS=num_outputs,
            DEPTH=depth,
            SPLIT_DEPTH=split_depth,
            TILE_ROWS=tile_rows,
            TILE_OUTPUTS=_TILE_OUTPUTS,
            TILE_DEPTH=_TILE_DEPTH,
            num_warps=4 if tile_rows < 128 else 8,
            num_stages=3,
        )
        if partials is not None:
            triton_device.launch(
                int8_merge_kernel,
                (num_rows, -(-num_outputs // _MERGED_OUTPUTS)),
                y=y,
                partials=partials,
                x_scales=x_scales,
                scales=self.scales,
                bias=self.bias,
                y_stride=y.stride(0),
                OUTPUTS=num_outputs,
                NUM_SPLITS=num_splits,
                TILE_OUTPUTS=_MERGED_OUTPUTS,
                num_warps=4,
            )

    def _split_depth(self, num_rows: int) -> int:
        """Input features of a split."""
        num_outputs, depth = self.weight.shape
        num_tiles = -(-depth // _TILE_DEPTH)
        splits = 1
        if num_rows <= _MAX_SPLIT_ROWS:
            splits = max(1, min(_MAX_SPLITS, _SPLIT_PROGRAMS // -(-num_outputs // _TILE_OUTPUTS), num_tiles))
        return -(-num_tiles // splits) * _TILE_DEPTH

    def look_up(self, ids: Tensor, y: Tensor) -> None:
        """Stores those rows of the layer's weight that are in this segment."""
        row = ids - self.first_output
        is_mine = (row >= 0) & (row < self.num_columns)
        row = row.clamp(0, self.num_columns - 1)
        weights = self.weight.view(torch.uint8)[row].view(self.weight.dtype).float() * self.scales[row, None]
        y.copy_(torch.where(is_mine[:, None], weights.to(y.dtype), y))


def quantize(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """x [rows, depth], whose features are contiguous → codes [rows, depth] int8, and scales [rows] float32. code: as of
    `QuantFormat`."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    triton_device.launch(
        quantize_kernel,
        (x.shape[0], 1),
        codes=codes,
        scales=scales,
        x=x,
        x_stride=x.stride(0),
        DEPTH=x.shape[1],
        CODE=code,
        WIDTH=_QUANTIZED_WIDTH,
        num_warps=4,
    )
    return codes, scales
