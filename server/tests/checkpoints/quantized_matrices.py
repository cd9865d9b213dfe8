"""Random quantized matrices, on the CPU, as checkpoints hand them out."""

from __future__ import annotations

import torch
from penstock_server.device.quantized import FLOAT8, SUPER_GROUP, QuantFormat, QuantizedMatrix, QuantizedRows


def random_matrix(format_: QuantFormat, num_rows: int, num_columns: int) -> QuantizedMatrix:
    """In uneven pieces."""
    generator = torch.Generator("cpu").manual_seed(num_rows)

    def numbers(width: int, scale: float) -> torch.Tensor:
        shape = num_rows, -(-num_columns // width)
        return (torch.rand(shape, generator=generator, device="cpu") * scale).half().float()

    is_integer, most = format_.has_factors, 15 if format_.number == "uint4" else 63
    codes = torch.randint(0, 1 << format_.bits, (num_rows, num_columns), generator=generator, device="cpu").byte()
    if format_.code != "integer":
        codes[~codes.view(FLOAT8[format_.code]).float().isfinite()] = 1
    scales, mins = (
        numbers(format_.group, most).round() if is_integer else numbers(format_.group, 0.1) for _ in range(2)
    )
    scale_factors, min_factors = (numbers(SUPER_GROUP, 0.01) if is_integer else None for _ in range(2))
    if format_.number == "uint4" and min_factors is not None:
        mins, min_factors = -mins, -min_factors
    if format_.zeros is not None:
        mins = -(mins * 150).round() if format_.zeros.startswith("uint") else -mins
    if format_.number == "bfloat16":
        scales, mins = scales.bfloat16().float(), mins.bfloat16().float() if format_.zeros is None else mins
    if format_.number == "e8m0":
        scales = scales.clamp(min=2**-8).log2().round().exp2()
    if not format_.has_mins:
        rows = QuantizedRows(codes, scales, None, scale_factors)
    else:
        rows = QuantizedRows(codes, scales, -mins, scale_factors, min_factors)
    starts = range(0, num_rows, 7)
    return QuantizedMatrix(
        (num_rows, num_columns), format_, lambda: (rows.select(slice(start, start + 7)) for start in starts)
    )
