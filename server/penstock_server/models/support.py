"""Whether a model type is served by our decoder, by the fallback to transformers, or not, and why not.

It reads no weights. For model types without a native builder it asks the installed transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.models.foreign import FOREIGN_ERRORS, transformers, with_integers
from penstock_server.models.registry import ARCHITECTURES, ENCODERS
from penstock_server.vision.family import FAMILIES

NATIVE, FALLBACK = "native", "fallback"
CODE_KEY = "AutoModelForCausalLM"  # in auto_map: the checkpoint's own class
_PAGED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layer types of transformers that do not concern attention.
_FEED_FORWARD_LAYERS = {"dense", "sparse"}


def support_of(model_type: str, config: Mapping[str, Any]) -> str:
    """NATIVE, FALLBACK, or else the reason why the model is not served. config: the parsed config.json.

    Raises ConfigError if the answer needs transformers and it is not installed.
    """
    if model_type in ARCHITECTURES or model_type in ENCODERS or model_type in FAMILIES:
        return NATIVE
    if config.get("quantization_config"):
        return f"model type {model_type!r} is served unquantized only, and this checkpoint is quantized"
    if config.get("is_encoder_decoder") or model_type in _mapping("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
        return (
            f"model type {model_type!r} is an encoder-decoder model that is not supported natively; `penstock models` "
            "lists those that are"
        )
    model_class = builtin_class(model_type)
    if model_class is not None:
        return _refusal_of(model_type, model_class, config) or FALLBACK
    if CODE_KEY in (config.get("auto_map") or {}):
        return (
            f"model type {model_type!r} is run by the checkpoint's own Python code, which is executed only with "
            "--trust-remote-code"
        )
    if model_type in _mapping("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        readers = ", ".join(sorted(FAMILIES))
        return f"model type {model_type!r} reads images in a way that is not supported; supported: {readers}"
    return (
        f"model type {model_type!r} is neither supported nor a causal language model of the installed transformers "
        f"{transformers().__version__}; `penstock models` lists the types that are"
    )


def _refusal_of(model_type: str, model_class: Any, config: Mapping[str, Any]) -> str | None:
    """`refusal` for a config.json, completed with the defaults of transformers."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        config_class = transformers().CONFIG_MAPPING[model_type]
        filled = config_class(**with_integers(config_class, values)).to_dict()
    except FOREIGN_ERRORS as error:
        return f"model type {model_type!r} has a configuration that transformers rejects: {error}"
    return refusal(model_type, model_class, filled)


def refusal(model_type: str, model_class: Any, config: Mapping[str, Any]) -> str | None:
    """Why a class of transformers cannot run over our cache, judged by the class and its complete configuration; None:
    it may."""
    text = config.get("text_config") or {}
    layers = set(config.get("layer_types") or text.get("layer_types") or ())
    others = sorted(layers - _PAGED_LAYERS - _FEED_FORWARD_LAYERS)
    if model_class._is_stateful:
        return (
            f"model type {model_type!r} keeps a state between tokens that no native model has; `penstock models` lists "
            "those that are served"
        )
    if others:
        return f"model type {model_type!r} has layers that are not plain attention: {', '.join(others)}"
    if not (model_class.is_backend_compatible() and model_class._can_set_attn_implementation()):
        return (
            f"model type {model_type!r} does not use transformers' attention interface, so it cannot use the paged "
            "cache"
        )
    return None


def builtin_class(model_type: str) -> Any | None:
    """The class of transformers for causal models of this type; None: there is none."""
    names = _mapping("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type)
    if names is None:
        return None
    name = names if isinstance(names, str) else names[0]
    try:
        return getattr(transformers(), name)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"model type {model_type!r} cannot be loaded by transformers: {error}") from error


def _mapping(name: str) -> Mapping[str, Any]:
    transformers()
    mapping: Mapping[str, Any] = getattr(importlib.import_module("transformers.models.auto.modeling_auto"), name)
    return mapping
