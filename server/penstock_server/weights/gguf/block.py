"""Takes the blocks of GGUF's quantized types apart: codes, scales and mins, without loss.

Source: ggml's block structures (ggml-common.h). A legacy type has blocks of 32 weights, a K type of 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from penstock_server.device.quantized import QuantFormat, QuantizedRows

LEGACY, SUPER = 32, 256
# Values of the codes, for types with tables.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the 4-bit floats of the OCP Microscaling Formats specification 1.0.
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

FORMATS: Mapping[Type, QuantFormat] = MappingProxyType(
    {
        Type.Q4_0: QuantFormat(4, LEGACY, offset=8, number="float16"),
        Type.Q4_1: QuantFormat(4, LEGACY, has_mins=True, number="float16"),
        Type.Q5_0: QuantFormat(5, LEGACY, offset=16, number="float16"),
        Type.Q5_1: QuantFormat(5, LEGACY, has_mins=True, number="float16"),
        Type.Q8_0: QuantFormat(8, LEGACY, offset=128, number="float16"),
        Type.Q2_K: QuantFormat(2, 16, has_mins=True, number="uint4"),
        Type.Q3_K: QuantFormat(3, 16, offset=4, number="int8"),
        Type.Q4_K: QuantFormat(4, 32, has_mins=True, number="int8"),
        Type.Q5_K: QuantFormat(5, 32, has_mins=True, number="int8"),
        Type.Q6_K: QuantFormat(6, 16, offset=32, number="int8"),
        Type.IQ4_NL: QuantFormat(4, LEGACY, number="float16", table=IQ4),
        Type.IQ4_XS: QuantFormat(4, LEGACY, number="int8", table=IQ4),
        Type.MXFP4: QuantFormat(4, LEGACY, number="e8m0", table=MXFP4),
    }
)


def unpack(raw: Tensor, type_: Type) -> QuantizedRows:
    """raw: [rows, bytes of a row] uint8, of a type in FORMATS."""
    num_rows, size = raw.shape[0], GGML_QUANT_SIZES[type_][1]

    def by_row(tensor: Tensor) -> Tensor:
        return tensor.reshape(num_rows, -1).contiguous()

    codes, *others = _UNPACKERS[type_](raw.reshape(-1, size))
    assert codes is not None
    scales, *rest = [None if tensor is None else by_row(tensor.float()) for tensor in others]
    assert scales is not None
    return QuantizedRows(by_row(codes), scales, *rest)


Parts = tuple[Tensor | None, ...]
"""[blocks, …]: codes; scales; mins, or None; if scales and mins are integers, the factors of both."""


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at this byte of each block: [blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """[blocks, n] → [blocks, 2 * n]: all low halves of the bytes, then all high ones."""
    return torch.cat([blocks & 15, blocks >> 4], 1)


def _bits(blocks: Tensor) -> Tensor:
    """[blocks, n] → [blocks, 8 * n]: the bits from the lowest of the first byte on."""
    return (blocks[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _planes(blocks: Tensor, bits: int) -> Tensor:
    """[blocks, n] → [blocks, 8 // bits, n]: the lowest `bits` bits of all bytes, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return blocks[:, None] >> shifts[:, None] & (1 << bits) - 1


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None  # two's complement plus 128


def _q2_k(blocks: Tensor) -> Parts:
    """16 bytes of 4-bit scales and mins, 64 of codes, d, dmin. Each 32 bytes of codes hold four runs of 32 weights."""
    groups = blocks[:, :16]
    codes = torch.cat([_planes(blocks[:, 16:48], 2), _planes(blocks[:, 48:80], 2)], 1)
    return codes, groups & 15, groups >> 4, _half(blocks, 80), -_half(blocks, 82)


def _q3_k(blocks: Tensor) -> Parts:
    """32 bytes of high bits, 64 of low ones, 12 of scales, d."""
    low = torch.cat([_planes(blocks[:, 32:64], 2), _planes(blocks[:, 64:96], 2)], 1)
    high = _planes(blocks[:, :32], 1)
    packed = blocks[:, 96:108]
    # 16 scales of 6 bits: 4 low bits in 8 bytes, then 2 high bits of each in 4 bytes.
    scales = _nibbles(packed[:, :8]) | _planes(packed[:, 8:], 2).flatten(1) << 4
    return low | high << 2, scales.view(torch.int8) - 32, None, _half(blocks, 108)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 mins of 6 bits in 12 bytes: [blocks, 12] → two [blocks, 8]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], 1)
    mins = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], 1)
    return scales, mins


def _k_nibbles(blocks: Tensor) -> Tensor:
    """[blocks, 128] → [blocks, 256]: each 32 bytes hold two runs of 32 weights."""
    return _planes(blocks.reshape(-1, 32), 4).reshape(-1, SUPER)


def _q4_k(blocks: Tensor) -> Parts:
    """d, dmin, 12 bytes of scales and mins, 128 of codes."""
    scales, mins = _k_scales(blocks[:, 4:16])
    return _k_nibbles(blocks[:, 16:]), scales, mins, _half(blocks, 0), -_half(blocks, 2)


def _q5_k(blocks: Tensor) -> Parts:
    """d, dmin, 12 bytes of scales and mins, 32 of high bits, 128 of low ones."""
    scales, mins = _k_scales(blocks[:, 4:16])
    codes = _k_nibbles(blocks[:, 48:]) | _planes(blocks[:, 16:48], 1).flatten(1) << 4
    return codes, scales, mins, _half(blocks, 0), -_half(blocks, 2)


def _q6_k(blocks: Tensor) -> Parts:
    """128 bytes of low bits, 64 of high ones, 16 signed scales, d. Each 64 bytes of low bits and 32 of high ones hold
    four runs of 32 weights."""
    low = _planes(blocks[:, :128].reshape(-1, 64), 4).reshape(-1, SUPER)
    high = _planes(blocks[:, 128:192].reshape(-1, 32), 2).reshape(-1, SUPER)
    return low | high << 4, blocks[:, 192:208].contiguous().view(torch.int8), None, _half(blocks, 208)


def _iq4_xs(blocks: Tensor) -> Parts:
    """d, 2 bytes of high bits of scales, 4 of low ones, 128 of codes, as of IQ4_NL."""
    low = _planes(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    high = _planes(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).view(-1, SUPER)
    return codes, (low | high << 4).view(torch.int8) - 32, None, _half(blocks, 0)


def _mxfp4(blocks: Tensor) -> Parts:
    """An exponent, 16 bytes of codes."""
    return _nibbles(blocks[:, 1:]), half_powers(blocks[:, :1]), None


def half_powers(exponents: Tensor) -> Tensor:
    """Numbers of e8m0 (uint8) / 2, in float32. That of 255 is NaN."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 128)
    return powers.masked_fill(exponents == 255, torch.nan)


_UNPACKERS: Mapping[Type, Callable[[Tensor], Parts]] = MappingProxyType(
    {
        Type.Q4_0: _q4_0,
        Type.Q4_1: _q4_1,
        Type.Q5_0: _q5_0,
        Type.Q5_1: _q5_1,
        Type.Q8_0: _q8_0,
        Type.Q2_K: _q2_k,
        Type.Q3_K: _q3_k,
        Type.Q4_K: _q4_k,
        Type.Q5_K: _q5_k,
        Type.Q6_K: _q6_k,
        Type.IQ4_NL: _q4_0,
        Type.IQ4_XS: _iq4_xs,
        Type.MXFP4: _mxfp4,
    }
)
