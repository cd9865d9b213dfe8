"""Conversions of 8-bit floating point in Triton, by integer arithmetic: GPUs of compute capability 8.0 and Triton's
interpreter have no others. A number is held as its bits, int8. FORMAT: "e4m3fn" or "e5m2"."""

import triton
import triton.language as tl


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """float32 → the bits of the nearest number, ties to even. Numbers beyond the range become the largest; NaN stays
    NaN."""
    if FORMAT == "e4m3fn":
        mantissa_bits: tl.constexpr = 3
        bias: tl.constexpr = 7
        largest: tl.constexpr = 448.0
    else:
        tl.static_assert(FORMAT == "e5m2")
        mantissa_bits: tl.constexpr = 2
        bias: tl.constexpr = 15
        largest: tl.constexpr = 57344.0
    dropped: tl.constexpr = 23 - mantissa_bits
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), largest)
    whole = size.to(tl.int32, bitcast=True)
    whole += (1 << (dropped - 1)) - 1 + ((whole >> dropped) & 1)
    normal = (whole >> dropped) - ((127 - bias) << mantissa_bits)
    # The last bit of 2**shift is worth the least subnormal number, so the sum with it is rounded to a multiple of that.
    shift: tl.constexpr = 24 - bias - mantissa_bits
    subnormal = (size + 2.0**shift).to(tl.int32, bitcast=True) - ((127 + shift) << 23)
    code = tl.where(size < 2.0 ** (1 - bias), subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def decode(bits, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """The number in dtype, exactly, but e4m3fn divided by 256: as float16 reads its bits, whose exponent has one bit
    more. The caller multiplies by 256 where that costs nothing."""
    wide = bits.to(tl.int16)
    if FORMAT == "e5m2":
        half = wide << 8
    else:
        half = (wide << 7) & ~0x4000  # the sign was extended into the exponent's first bit
        half = tl.where((wide & 0x7F) == 0x7F, 0x7E00, half)  # NaN
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(dtype)
