"""Reads from a model folder whether its model generates tokens, or makes one vector of a sequence: an embedding, or the
score of a reranker. The files are those of sentence-transformers and transformers. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from penstock_server.errors import ConfigError
from penstock_server.models.config import Config
from penstock_server.protocol.config import Dense, Pooling

# Encoders without a decoder, whose outputs can only be pooled.
ENCODERS = ("bert", "modernbert", "nomic_bert", "roberta", "xlm-roberta")
_CLASSIFIER = "ForSequenceClassification"
_MODES: dict[str, Literal["cls", "mean", "last"]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_DENSE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_DENSE_ACTIVATIONS: dict[str, Literal["identity", "tanh"]] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "identity",
}


def read_pooling(folder: Path) -> Pooling | None:
    """None: the model generates tokens, or the folder has no config.json. Raises ConfigError when it asks for something
    that is not supported."""
    if not (folder / "config.json").is_file():
        return None
    config = Config.read(folder)
    architectures = config.values.get("architectures") or []
    if any(str(name).endswith(_CLASSIFIER) for name in architectures):
        return _reranker(config)
    if (folder / "modules.json").is_file():
        return _embedder(folder, config)
    if config.get("model_type", "") in ENCODERS:
        return Pooling("embed", "mean")  # as sentence-transformers does without modules.json
    return None


def _reranker(config: Config) -> Pooling:
    labels = config.values.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1:
        raise config.refuse(f"it classifies into {num_labels} labels; only rerankers, which have one label, are served")
    if config.get("model_type", "") == "modernbert":
        return Pooling("rerank", _mode(config, config.get("classifier_pooling", "cls")))
    return Pooling("rerank", "cls" if config.get("model_type", "") in ENCODERS else "last")


def _embedder(folder: Path, config: Config) -> Pooling:
    outputs: Literal["cls", "mean", "last"] = "mean"
    is_normalized, max_tokens = False, None
    dense: list[Dense] = []
    path = folder / "modules.json"
    for module in _read(path):
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = folder / str(module.get("path", ""))
        if kind == "Transformer":
            max_tokens = _max_tokens(place)
        elif kind == "Pooling":
            outputs = _outputs(_config(place))
        elif kind == "Dense":
            if is_normalized:
                raise ConfigError(f"{path}: a Dense module behind Normalize is not supported")
            dense.append(_dense(place))
        elif kind == "Normalize":
            is_normalized = True
        else:
            supported = "Transformer, Pooling, Dense, Normalize"
            raise ConfigError(f"{path}: module {kind!r} is not supported; supported: {supported}")
    # The keys that vLLM reads.
    dimensions = config.values.get("matryoshka_dimensions") or ()
    if not all(isinstance(each, int) and each > 0 for each in dimensions):
        raise config.refuse(f"matryoshka_dimensions must be a list of positive numbers, not {dimensions!r}")
    is_matryoshka = config.get("is_matryoshka", bool(dimensions))
    return Pooling("embed", outputs, is_normalized, is_matryoshka, tuple(dimensions), max_tokens, tuple(dense))


def _dense(folder: Path) -> Dense:
    config = _config(folder)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key, "sentence_embedding") != "sentence_embedding":
            raise config.refuse(f"{key} {config.values[key]!r} is not supported; supported: 'sentence_embedding'")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _DENSE_ACTIVATIONS:
        supported = ", ".join(_DENSE_ACTIVATIONS)
        raise config.refuse(f"activation_function {activation!r} is not supported; supported: {supported}")
    weights = next((folder / name for name in _DENSE_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{folder} holds no {' and no '.join(_DENSE_WEIGHTS)}; a Dense module needs one of them")
    sizes = config.require("in_features", int), config.require("out_features", int)
    return Dense(weights, *sizes, config.get("bias", True), _DENSE_ACTIVATIONS[activation])


def _outputs(config: Config) -> Literal["cls", "mean", "last"]:
    """Mode in the Pooling module's configuration, which names it or has a flag for each mode."""
    if not config.get("include_prompt", True):
        raise config.refuse("include_prompt is false, which is not supported")
    modes = [config.get("pooling_mode", "")] if "pooling_mode" in config.values else []
    flags = [key for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True]
    modes += [_FLAGS.get(flag, flag) for flag in flags]
    if len(modes) != 1:
        raise config.refuse(f"exactly one pooling mode must be set, not {len(modes)}: {', '.join(modes)}")
    return _mode(config, modes[0])


def _mode(config: Config, name: str) -> Literal["cls", "mean", "last"]:
    if name not in _MODES:
        raise config.refuse(f"pooling mode {name!r} is not supported; supported: {', '.join(_MODES)}")
    return _MODES[name]


def _max_tokens(folder: Path) -> int | None:
    try:
        return Config.of_file(folder / "sentence_bert_config.json").optional_int("max_seq_length")
    except FileNotFoundError:
        return None


def _config(folder: Path) -> Config:
    """Configuration of a module."""
    try:
        return Config.of_file(folder / "config.json")
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no config.json, but modules.json names this folder") from None


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path} is not a list of modules")
    return modules


def foreign_pooling(folder: Path) -> ConfigError:
    """The error for a folder that asks for vectors of a model that transformers runs."""
    return ConfigError(f"{folder}: embedding models and rerankers of this model type are not supported")
