"""Llama 3.2 Vision as a text model: the layers that attend to images have no place, and no tensor of theirs is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import SIZES
from penstock_server.errors import ConfigError
from penstock_server.models.registry import read_spec


def spec_of(folder: Path, **text: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": "mllama", "text_config": {**SIZES, **text}}))
    return read_spec(folder)


def test_layers_keep_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    spec, names = spec_of(tmp_path, num_hidden_layers=6)
    assert spec.num_layers == 5, "the fourth attends to images"
    assert not spec.reads_images
    for layout, prefix in ((names, "language_model.model"), (names.alternatives[0], "model.language_model")):
        stored = [layout.locate(f"layers.{layer}.mlp.up.weight").name for layer in range(5)]
        assert stored == [f"{prefix}.layers.{number}.mlp.up_proj.weight" for number in (0, 1, 2, 4, 5)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cross_attention_layers": [0, 1, 2]}, "every layer attends to images"),
        ({"cross_attention_layers": "1"}, "cross_attention_layers must be a list of integers, not '1'"),
    ],
)
def test_what_cannot_be_built_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(tmp_path, **values)
