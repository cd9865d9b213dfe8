"""The rotary embedding of a `config.json`, in the spellings of transformers 5 and of earlier versions."""

from __future__ import annotations

import math

from penstock_server.layers.rope import RopeSpec, yarn_magnitude
from penstock_server.models.config import Config
from penstock_server.models.context import original_tokens, rope_kind, rope_parameters, stated_tokens, warn_of_losses

KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def read_rope(
    config: Config,
    head_dim: int,
    *,
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
    theta_key: str = "rope_theta",
    layer_type: str | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """From `rope_parameters` (transformers 5), or `rope_scaling` and keys of the configuration itself. Raises
    ConfigError for kinds of scaling that are not supported.

    theta_key: the configuration's own key of theta. layer_type: as of `rope_parameters`.
    """
    rope = rope_parameters(config, layer_type)
    theta = rope.get("rope_theta", config.get(theta_key, default_theta))
    warn_of_losses(config, rope, theta)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", default_partial))
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise config.refuse(f"rope over {rotary_dim} of a head's {head_dim} elements is not possible; it must be even")
    kind = rope_kind(rope.values)
    if kind == "default":
        return RopeSpec("default", theta, rotary_dim, interleaved=interleaved)
    if kind == "linear":
        return RopeSpec("linear", theta, rotary_dim, factor=_factor(rope), interleaved=interleaved)
    if kind == "dynamic":
        return _dynamic(config, rope, theta, rotary_dim, interleaved)
    if kind == "llama3":
        return RopeSpec(
            "llama3",
            theta,
            rotary_dim,
            factor=_factor(rope),
            low_freq_factor=rope.require("low_freq_factor", float),
            high_freq_factor=rope.require("high_freq_factor", float),
            original_max_tokens=original_tokens(config, rope),
            interleaved=interleaved,
        )
    if kind == "yarn":
        return _yarn(config, rope, theta, rotary_dim, interleaved)
    if kind == "longrope":
        return _longrope(config, rope, theta, rotary_dim, interleaved)
    raise config.refuse(f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}")


def _factor(rope: Config) -> float:
    factor = rope.require("factor", float)
    if not 0 < factor < math.inf:
        raise rope.refuse(f"factor of rope scaling must be above 0, not {factor}")
    return factor


def _dynamic(config: Config, rope: Config, theta: float, rotary_dim: int, interleaved: bool) -> RopeSpec:
    """COMPAT: transformers changes the frequencies with the length of each text that is longer than
    `max_position_embeddings`. Cached keys are shared by prompts of any length, so they must be rotated in one way: by
    the frequencies for the longest sequence that is served (docs/adr/rope-and-context.md).
    """
    if rotary_dim < 4:
        raise config.refuse(f"dynamic rope scaling needs at least 4 rotated elements of a head, not {rotary_dim}")
    longest = stated_tokens(config)
    factor = _factor(rope)
    return RopeSpec("dynamic", theta, rotary_dim, factor=factor, original_max_tokens=longest, interleaved=interleaved)


def _yarn(config: Config, rope: Config, theta: float, rotary_dim: int, interleaved: bool) -> RopeSpec:
    original, longest = original_tokens(config, rope), stated_tokens(config)
    # Without a factor, it is the ratio of the lengths that are given.
    factor = longest / original if rope.values.get("factor") is None and longest > original else _factor(rope)
    mscale, mscale_all_dim = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    magnitude = yarn_magnitude(factor)
    if mscale and mscale_all_dim:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return RopeSpec(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_max_tokens=original,
        # COMPAT: 0 means the default, and null does not truncate, as in transformers.
        beta_fast=rope.get("beta_fast", 0.0) or 32.0,
        beta_slow=rope.get("beta_slow", 0.0) or 1.0,
        truncate=rope.get("truncate", "truncate" not in rope.values),
        magnitude=rope.get("attention_factor", magnitude),
        interleaved=interleaved,
    )


def _longrope(config: Config, rope: Config, theta: float, rotary_dim: int, interleaved: bool) -> RopeSpec:
    """COMPAT: transformers chooses between short and long factors by the length of each text. Cached keys are shared by
    prompts of any length, so they must be rotated in one way: by the factors for the longest sequence that is served,
    as in vLLM. Phi-3.5-MoE states the magnitudes as `short_mscale` and `long_mscale`; here each belongs to its factors,
    as in the publisher's code, while transformers 5 selects the magnitude by the text's length and always the short
    factors.
    """
    original, longest = original_tokens(config, rope), stated_tokens(config)
    factor = rope.get("factor", longest / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    magnitude = rope.get("attention_factor", magnitude)
    return RopeSpec(
        "longrope",
        theta,
        rotary_dim,
        original_max_tokens=original,
        short_factors=_factors(config, rope, "short_factor", rotary_dim),
        long_factors=_factors(config, rope, "long_factor", rotary_dim),
        magnitude=rope.get("short_mscale", magnitude),
        long_magnitude=rope.get("long_mscale", magnitude),
        interleaved=interleaved,
    )


def _factors(config: Config, rope: Config, key: str, rotary_dim: int) -> tuple[float, ...]:
    factors = rope.values.get(key)
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        raise config.refuse(f"{key} of rope scaling must be a list of {rotary_dim // 2} numbers, not {factors!r}")
    return tuple(float(value) for value in factors)
