"""Rotary position embedding: tables of cosines and sines, with the scalings that published models have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequency i of rotary_dim / 2 is theta^(-2i / rotary_dim), scaled as `kind` says."""

    kind: str  # "default", "linear", "dynamic", "llama3", "yarn", "longrope"; "none": nothing is rotated
    theta: float
    rotary_dim: int  # leading elements of a head that are rotated
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the range of blended frequencies is rounded to integers
    short_factors: tuple[float, ...] = ()  # longrope: a divisor per frequency, for sequences up to the original length
    long_factors: tuple[float, ...] = ()  # longrope: the same if sequences may be longer
    magnitude: float = 1.0  # factor of cosines and sines
    long_magnitude: float | None = None  # longrope: the same if sequences may be longer; None: `magnitude`
    is_backward: bool = False  # pairs are turned the other way (nanochat)
    interleaved: bool = False  # a pair is elements 2i and 2i + 1 (GPT-J), not i and i + rotary_dim / 2
    # For each frequency, which of an image token's positions it rotates by: 0 in time, 1 row, 2 column (M-RoPE); empty:
    # the token has one position for all.
    axes: tuple[int, ...] = ()


# The kinds whose frequencies depend on how long sequences may be.
_DEPENDENT = ("dynamic", "longrope")
# Rows that are computed with the tables. The others are computed once it is known how long sequences may be: Llama 4
# allows 10 million tokens, whose rows take 5 GB and are rarely needed. A CPU backs no page that is not written.
_FIRST_ROWS = 1 << 18
_PIECE_ROWS = 1 << 16  # computed at a time


def rope_tables(
    spec: RopeSpec, num_rows: int, device: torch.device, max_sequence_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_rows, rotary_dim / 2] float32, for sequences up to max_sequence_tokens; None: num_rows.
    Before `limit_tables`, rows after the first `_FIRST_ROWS` are uninitialized."""
    shape = (num_rows, spec.rotary_dim // 2)
    tables = torch.empty(shape, device=device), torch.empty(shape, device=device)
    _fill(spec, tables, range(min(num_rows, _FIRST_ROWS)), max_sequence_tokens or num_rows)
    return tables


def limit_tables(spec: RopeSpec, tables: tuple[Tensor, Tensor], max_sequence_tokens: int) -> None:
    """Makes the tables those for sequences up to this length, in place."""
    first = 0 if spec.kind in _DEPENDENT else _FIRST_ROWS
    _fill(spec, tables, range(first, max_sequence_tokens), max_sequence_tokens)


def _fill(spec: RopeSpec, tables: tuple[Tensor, Tensor], rows: range, max_sequence_tokens: int) -> None:
    frequencies = inverse_frequencies(spec, max_sequence_tokens)
    magnitude = spec.magnitude
    if spec.long_magnitude is not None and max_sequence_tokens > spec.original_max_tokens:
        magnitude = spec.long_magnitude
    for start in rows[::_PIECE_ROWS]:
        stop = min(start + _PIECE_ROWS, rows.stop)
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float32), frequencies)
        tables[0][start:stop] = angles.cos() * magnitude
        tables[1][start:stop] = angles.sin() * (-magnitude if spec.is_backward else magnitude)


def inverse_frequencies(spec: RopeSpec, max_sequence_tokens: int) -> Tensor:
    """[rotary_dim / 2] float32, for sequences up to this length."""
    if spec.kind == "none":
        return torch.zeros(spec.rotary_dim // 2)
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    theta = spec.theta * _dynamic_stretch(spec, max_sequence_tokens) if spec.kind == "dynamic" else spec.theta
    frequencies = 1.0 / (theta**exponents)
    if spec.kind in ("default", "dynamic"):
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "longrope":
        factors = spec.long_factors if max_sequence_tokens > spec.original_max_tokens else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    if spec.kind == "yarn":
        return _yarn(frequencies, spec)
    assert spec.kind == "llama3"
    return _llama3(frequencies, spec)


def _dynamic_stretch(spec: RopeSpec, max_sequence_tokens: int) -> float:
    """What dynamic NTK scaling multiplies theta with, for sequences up to this length."""
    longer = max(1.0, max_sequence_tokens / spec.original_max_tokens)
    return (spec.factor * longer - (spec.factor - 1)) ** (spec.rotary_dim / (spec.rotary_dim - 2))


def yarn_magnitude(scale: float, mscale: float = 1.0) -> float:
    """Yarn's correction of the attention's temperature (https://arxiv.org/abs/2309.00071, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Low frequencies are divided by the factor, high ones stay, those between are blended
    (https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension(num_turns: float) -> float:
        """The dimension whose frequency makes this many turns within the original length."""
        turns = spec.original_max_tokens / (num_turns * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(spec.rotary_dim // 2, dtype=torch.float32)
    scaled_share = ((steps - low) / (high - low)).clamp(0, 1)
    return frequencies / spec.factor * scaled_share + frequencies * (1 - scaled_share)


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Low frequencies are divided by the factor, high ones stay, those between are blended (the code of the Llama 3.1
    release)."""
    wavelengths = 2 * math.pi / frequencies
    smooth = (spec.original_max_tokens / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / spec.factor + smooth * frequencies
    scaled = torch.where(
        wavelengths > spec.original_max_tokens / spec.low_freq_factor, frequencies / spec.factor, blended
    )
    return torch.where(wavelengths < spec.original_max_tokens / spec.high_freq_factor, frequencies, scaled)
