"""Rotary position embedding: the tables of cosines and sines, with the scalings that models are published with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequency i of rotary_dim / 2 is theta^(-2i / rotary_dim), then scaled as `kind` says."""

    kind: str  # "default", "linear", "llama3", "yarn", "longrope"
    theta: float
    rotary_dim: int  # the first so many numbers of a head are rotated
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's range of blended frequencies is rounded to whole ones
    short_factors: tuple[float, ...] = ()  # longrope: a divisor for every frequency, up to the original length
    long_factors: tuple[float, ...] = ()  # longrope: the same, where sequences may be longer
    magnitude: float = 1.0  # of the rotated vectors: multiplies cosines and sines
    long_magnitude: float | None = None  # longrope: the same, where sequences may be longer; None: no other
    interleaved: bool = False  # pairs are neighbours (GPT-J), not number i and number i + rotary_dim / 2


def rope_tables(spec: RopeSpec, max_position_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_position_tokens, rotary_dim / 2], float32."""
    frequencies = inverse_frequencies(spec, max_position_tokens)
    angles = torch.outer(torch.arange(max_position_tokens, dtype=torch.float32), frequencies)
    magnitude = spec.magnitude
    if spec.long_magnitude is not None and max_position_tokens > spec.original_max_tokens:
        magnitude = spec.long_magnitude
    return (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)


def fit_tables(spec: RopeSpec, tables: tuple[Tensor, Tensor], max_sequence_tokens: int) -> None:
    """Changes tables, in place, to what they are where no sequence is longer than that."""
    if spec.kind == "longrope":
        fitting = rope_tables(spec, max_sequence_tokens, tables[0].device)
        for table, values in zip(tables, fitting, strict=True):
            table[:max_sequence_tokens] = values


def inverse_frequencies(spec: RopeSpec, max_position_tokens: int) -> Tensor:
    """[rotary_dim / 2], float32, where no sequence is longer than that."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "longrope":
        factors = spec.long_factors if max_position_tokens > spec.original_max_tokens else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    if spec.kind == "yarn":
        return _yarn(frequencies, spec)
    assert spec.kind == "llama3"
    return _llama3(frequencies, spec)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotates neighbouring pairs of x [tokens, heads, head_dim] in place; cos, sin [max positions, rotary_dim / 2]."""
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    rotary = x[..., : 2 * cos.shape[-1]]
    even, odd = rotary[..., 0::2].float(), rotary[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    rotary.copy_(turned.flatten(-2))


def yarn_magnitude(scale: float, mscale: float = 1.0) -> float:
    """Yarn's correction of the attention's temperature (https://arxiv.org/abs/2309.00071, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Frequencies that turn seldom within the original length are stretched, those that turn often stay."""

    def dimension(num_turns: float) -> float:
        turns = spec.original_max_tokens / (num_turns * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    stretched = ((steps - low) / (high - low)).clamp(0, 1)
    return frequencies / spec.factor * stretched + frequencies * (1 - stretched)


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones stay, those between are blended (Llama 3.1 release)."""
    wavelengths = 2 * math.pi / frequencies
    smooth = (spec.original_max_tokens / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / spec.factor + smooth * frequencies
    scaled = torch.where(
        wavelengths > spec.original_max_tokens / spec.low_freq_factor, frequencies / spec.factor, blended
    )
    return torch.where(wavelengths < spec.original_max_tokens / spec.high_freq_factor, frequencies, scaled)
