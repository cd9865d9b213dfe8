"""Keys and values in 8-bit floating point: the scales that they are divided by, and the conversions in torch.

Caches hold the numbers' bits as int8, so that nothing else needs to know these types.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# By the names of --kv-cache-dtype (https://arxiv.org/abs/2209.05433).
FP8_DTYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class KvScales(NamedTuple):
    """What the keys and the values of a layer are divided by when they are stored."""

    keys: float = 1.0
    values: float = 1.0


def encode(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The bits, as int8, of x / scale in an fp8 dtype. Numbers beyond its range become its largest; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp_(-largest, largest).to(dtype).view(torch.int8)


def decode(bits: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """float32: what `encode` has stored, times the scale."""
    return bits.view(dtype).float() * scale
