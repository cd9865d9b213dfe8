"""Builds `rope_parameters` of a Hugging Face configuration from GGUF metadata. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from penstock_server.weights.gguf.metadata import Metadata, shortest_float32

# Llama 3's rope scaling is stored only as a table of divisors. Meta published two factors, both with these constants.
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_TOKENS = 1.0, 4.0, 8192


def rope_parameters(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Raises ConfigError for an unsupported scaling."""
    theta = metadata.number("rope.freq_base", 10000.0)
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    common: dict[str, Any] = {"rope_theta": theta}
    if rotary_dim != head_dim:
        common["partial_rotary_factor"] = rotary_dim / head_dim
    if metadata.has("rope_factors_long.weight"):
        return {**common, **_longrope(metadata, rotary_dim)}
    if metadata.has("rope_freqs.weight"):
        return {**common, **_llama3(metadata, rotary_dim, theta)}
    # COMPAT: as in llama.cpp, a factor without a kind is linear, and 0 is none.
    kind = metadata.model("rope.scaling.type", "linear")
    if kind == "linear":
        # Files older than `rope.scaling` store the factor under another key.
        old_factor = metadata.number("rope.scale_linear", 0.0)
        factor = metadata.number("rope.scaling.factor", old_factor)
        return {**common, **(_linear(metadata, factor) if factor not in (0.0, 1.0) else {"rope_type": "default"})}
    if kind == "yarn":
        return {**common, **_yarn(metadata)}
    if kind != "none":
        if kind == "longrope":
            raise metadata.error(
                "rope scaling 'longrope' needs the tensors rope_factors_long.weight and rope_factors_short.weight"
            )
        raise metadata.error(f"rope scaling {kind!r} is not supported; supported: none, linear, llama3, longrope, yarn")
    return {**common, "rope_type": "default"}


def _linear(metadata: Metadata, factor: float) -> dict[str, Any]:
    """A file's context length includes the scaling, as in llama.cpp, unless the file states the original length."""
    original = metadata.integer(
        "rope.scaling.original_context_length", int(metadata.integer("context_length") / factor)
    )
    return {"rope_type": "linear", "factor": factor, "original_max_position_embeddings": original}


def _yarn(metadata: Metadata) -> dict[str, Any]:
    parameters = {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        # COMPAT: as in llama.cpp, a file without it was trained for the whole context length.
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        ),
    }
    optional = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "attention_factor": "rope.scaling.yarn_attn_factor",
    }
    given = {name: metadata.number(key) for name, key in optional.items() if metadata.model(key) is not None}
    return parameters | given | _yarn_magnitudes(metadata)


def _yarn_magnitudes(metadata: Metadata) -> dict[str, Any]:
    """DeepSeek's `mscale` and `mscale_all_dim`, of which GGUF stores only the second."""
    log_multiplier = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not log_multiplier:
        return {}
    # COMPAT: deepseek2 files store a tenth of it, and their models use the same value for both.
    if metadata.architecture == "deepseek2":
        all_dims = round(10 * log_multiplier, 6)
        return {"mscale": all_dims, "mscale_all_dim": all_dims}
    return {"mscale": 1.0, "mscale_all_dim": log_multiplier}


def _longrope(metadata: Metadata, rotary_dim: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    for name in ("long", "short"):
        table = metadata.floats(f"rope_factors_{name}.weight", rotary_dim // 2)
        parameters[f"{name}_factor"] = [shortest_float32(value) for value in table]
    if metadata.model("rope.scaling.attn_factor") is not None:
        parameters["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return parameters


def _llama3(metadata: Metadata, rotary_dim: int, theta: float) -> dict[str, Any]:
    """Recovers the parameters from the table of divisors. A table with other constants is used as it is."""
    table = metadata.floats("rope_freqs.weight", rotary_dim // 2)
    factor = shortest_float32(max(table))
    expected = _llama3_divisors(rotary_dim, theta, factor)
    if any(not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(table, expected, strict=True)):
        divisors = [shortest_float32(value) for value in table]
        length = metadata.integer("context_length")
        names = ("short_factor", "long_factor")
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": length,
            "attention_factor": 1.0,
            **dict.fromkeys(names, divisors),
        }
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_TOKENS,
    }


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> list[float]:
    """The divisor of each rope frequency."""
    low = LLAMA3_ORIGINAL_TOKENS / LLAMA3_LOW_FREQ_FACTOR
    high = LLAMA3_ORIGINAL_TOKENS / LLAMA3_HIGH_FREQ_FACTOR
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(factor)
        else:
            smooth = (LLAMA3_ORIGINAL_TOKENS / wavelength - LLAMA3_LOW_FREQ_FACTOR) / (
                LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR
            )
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
