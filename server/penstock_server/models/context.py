"""The rope's parameters in a `config.json`, merged as transformers merges them, and the length of sequences that they
allow. Imports no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_server.models.config import Config

logger = logging.getLogger(__name__)

ORIGINAL = "original_max_position_embeddings"
# Our own key in the parameters of dynamic scaling: sequences are long by default, because a flag asks for them.
LENGTHENED = "lengthened"
# The kinds whose factor multiplies the original length. Longrope and Llama 3's scaling come with a
# max_position_embeddings that is the long one.
_LENGTHENING = ("dynamic", "linear", "yarn")
# COMPAT: its max_position_embeddings is the long one with linear scaling, too.
_ALREADY_LONG = ("gemma3_text",)
# transformers' `max_position_embeddings` of files without the key.
DEFAULT_TOKENS = {
    model_type: tokens
    for tokens, model_types in {
        2048: (
            "deepseek_v2 dots1 exaone4 exaone_moe gpt_neo gpt_neox granite granitemoe granitemoehybrid "
            "granitemoeshared hunyuan_v1_dense hunyuan_v1_moe llama nanochat olmo olmo2 olmo3 opt phi"
        ),
        4096: "arcee deepseek_v3 helium nemotron nemotron_h olmoe phi3 stablelm starcoder2",
        8192: "cohere cohere2 cohere2_moe falcon_h1 gemma gemma2 jais2",
        16384: "persimmon",
        32768: "internlm3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next smollm3",
        65536: "apertus olmo_hybrid",
        128000: "lfm2 lfm2_moe",
        131072: (
            "cwm ernie4_5 ernie4_5_moe gemma3_text glm glm4 glm4_moe gpt_oss hy_v3 llama4_text mimo_v2_flash minimax "
            "ministral mistral mixtral mllama_text_model phimoe solar_open"
        ),
        196608: "minimax_m2",
        202752: "glm4_moe_lite",
        262144: "bamba jamba ministral3",
        524288: "seed_oss",
    }.items()
    for model_type in model_types.split()
}
# In models with a rope for each type of layer, `rope_scaling` concerns only this type, except for ModernBERT.
_SCALED_TYPE = "full_attention"


def rope_parameters(config: Config, layer_type: str | None = None) -> Config:
    """The parameters of the rope, from `rope_parameters` (transformers 5) or `rope_scaling`. They may lack `rope_theta`
    and what else has keys of its own in older files. layer_type: the layer's type, if parameters differ between types.

    COMPAT: a `rope_scaling` beside `rope_parameters`, as model cards say to add it, replaces them, as in transformers.
    In models with a rope for each type of layer, it is added to the parameters.
    """
    given, scaling = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    if layer_type is None:
        found = scaling or given
        if any(isinstance(value, dict) for value in found.values()):
            raise config.refuse("rope parameters that differ between layers are not supported for this architecture")
        return config.part(found)
    if any(not isinstance(value, dict | None) for value in given.values()):
        raise config.refuse(f"rope_parameters must have an object for each type of layer, not {given!r}")
    is_scaled = layer_type == _SCALED_TYPE or config.values.get("model_type") == "modernbert"
    return config.part({**(given.get(layer_type) or {}), **(scaling if is_scaled else {})})


def warn_of_losses(config: Config, rope: Config, theta: float) -> None:
    """Says which parameters have no effect because `rope_parameters` and `rope_scaling` are both given. rope: as of
    `rope_parameters`. theta: what is used."""
    given, scaling = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    if not given or not scaling:
        return
    lost = given.get("rope_theta")
    if lost and lost != theta:
        logger.warning(
            "%s: rope_scaling replaces rope_parameters, as in transformers, so theta is %s and not the rope_theta %s "
            "of rope_parameters; write rope_theta into rope_scaling to keep it",
            config.path,
            theta,
            lost,
        )
    kind = scaling.get("type")
    if kind and scaling.items() <= rope.values.items() and rope_kind(rope.values) != rope_kind({"type": kind}):
        logger.warning(
            "%s: the type %r of rope_scaling has no effect beside the rope_type %r, as in transformers; "
            "write rope_type",
            config.path,
            kind,
            rope_kind(rope.values),
        )


def stated_tokens(config: Config) -> int:
    """`max_position_embeddings`, or transformers' default for models of the type."""
    default = DEFAULT_TOKENS.get(str(config.values.get("model_type")))
    key = "max_position_embeddings"
    return config.require(key, int) if default is None else config.get(key, default)


def rope_kind(parameters: dict[str, Any]) -> Any:
    """The kind of scaling: the current spelling `rope_type`, or `type`."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    # COMPAT: former names of longrope in the files of Phi 3.
    return "longrope" if kind == "su" or (kind == "yarn" and "long_factor" in parameters) else kind


def scalings(config: Config) -> set[Any]:
    """The kinds of scaling that the configuration names."""
    # COMPAT: with an `alpha`, Hunyuan's dynamic scaling is a larger theta.
    return {rope_kind(rope.values) for rope in _ropes(config) if "alpha" not in rope.values} - {"default"}


def original_tokens(config: Config, rope: Config) -> int:
    """The length that the model was trained for, before its rope was scaled."""
    return _given_original(config, rope) or stated_tokens(config)


def max_position_tokens(config: Config) -> int:
    """The longest sequence that the model can compute: `max_position_embeddings`, or the original length times the
    factor of YaRN, linear and dynamic scaling where that is longer, as in vLLM."""
    stated = longest = stated_tokens(config)
    for rope in _ropes(config):
        if rope_kind(rope.values) not in _LENGTHENING:
            continue
        original = _given_original(config, rope)
        if original is None and config.values.get("model_type") in _ALREADY_LONG:
            continue
        longest = max(longest, int((original or stated) * rope.get("factor", 1.0)))
    return longest


def default_position_tokens(config: Config) -> int:
    """The longest sequence that is served unless longer ones are asked for. It is shorter than the longest possible one
    with dynamic scaling, which changes the frequencies of all texts once texts may be longer than
    `max_position_embeddings`."""
    changes_all = any(
        rope_kind(rope.values) == "dynamic" and not rope.get(LENGTHENED, False) for rope in _ropes(config)
    )
    return stated_tokens(config) if changes_all else max_position_tokens(config)


def _ropes(config: Config) -> list[Config]:
    """The parameters of every rope of the model."""
    given = _object(config, "rope_parameters")
    kinds = [key for key, value in given.items() if isinstance(value, dict)]
    return [rope_parameters(config, kind) for kind in kinds] or [rope_parameters(config)]


def _given_original(config: Config, rope: Config) -> int | None:
    """COMPAT: the key of the model's own has precedence, as in transformers. Layer types have one each."""
    has_types = any(isinstance(value, dict) for value in _object(config, "rope_parameters").values())
    outer = None if has_types else config.optional_int(ORIGINAL)
    return outer or rope.optional_int(ORIGINAL)


def _object(config: Config, key: str) -> dict[str, Any]:
    value = config.values.get(key)
    if value is not None and not isinstance(value, dict):
        raise config.refuse(f"{key} must be an object, not {value!r}")
    return value or {}
