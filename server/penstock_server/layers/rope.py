"""Rotary position embedding: the tables of cosines and sines, with the scalings that models are published with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequency i of rotary_dim / 2 is theta^(-2i / rotary_dim), then scaled as `kind` says."""

    kind: str  # "default", "linear", "llama3"
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_tokens: int = 8192


def rope_tables(spec: RopeSpec, max_position_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_position_tokens, rotary_dim / 2], float32."""
    angles = torch.outer(torch.arange(max_position_tokens, dtype=torch.float32), inverse_frequencies(spec))
    return angles.cos().to(device), angles.sin().to(device)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[rotary_dim / 2], float32."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    assert spec.kind == "llama3"
    return _llama3(frequencies, spec)


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
