"""Layers and parameters of each stage of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from penstock_server.errors import ConfigError
from penstock_server.models.spec import ModelSpec
from penstock_server.parallel import Stage, split_layers
from penstock_server.weights.loader import Parameter

_OF_LAST = ("norm", "head", "project_out")


def served_in(spec: ModelSpec, stage: Stage) -> ModelSpec:
    """What stages serve of a model: of one that reads images, its text model."""
    if stage.size == 1 or spec.image_layers:
        return spec
    return replace(spec, reads_images=False, featured_layers=())


def stage_of(spec: ModelSpec, table: Mapping[str, Parameter], stage: Stage) -> tuple[range, set[str]]:
    """The layers of a stage, and the names of its parameters among those of the whole model. Raises ConfigError for a
    model that cannot be split into stages.

    Stages have as equal numbers of weights as layers allow. The head counts as a part of the last stage, also if its
    weight is the token table, because every step reads it; of the table alone, a step reads a few rows.
    """
    if stage.size == 1:
        return range(spec.num_layers), set(table)
    if reason := _refusal(spec):
        raise ConfigError(f"--pipeline-parallel-size {stage.size} is not supported for this model: {reason}")
    costs = [0] * spec.num_layers
    for name, parameter in table.items():
        if name.startswith("layers."):
            costs[_layer(name)] += math.prod(parameter.shape)
    head = "embedding.weight" if spec.head.tied else "head.weight"
    layers = split_layers(costs, math.prod(table[head].shape), stage.size)[stage.index]

    def is_held(name: str) -> bool:
        part = name.partition(".")[0]
        if part == "layers":
            return _layer(name) in layers
        if part in _OF_LAST:
            return stage.is_last
        return stage.is_first or (stage.is_last and spec.head.tied and part == "embedding")

    return layers, set(filter(is_held, table))


def _refusal(spec: ModelSpec) -> str:
    if spec.encoder is not None or spec.is_encoder:
        return "it has an encoder"
    if spec.pooling is not None:
        return "its outputs are pooled"
    return "it has layers that attend to images" if spec.image_layers else ""


def _layer(name: str) -> int:
    return int(name.split(".", 2)[1])
