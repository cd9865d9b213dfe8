"""Models that read images: their text model is one of our decoders, under other tensor names."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.models.config import Config
from penstock_server.models.interface import LoadOptions
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.vision.family import FAMILIES, ImageFamily, TextLayout
from penstock_server.vision.tower import VisionTower

Build = Callable[[Config], tuple[ModelSpec, NameMap]]

# Text models that are others under another name.
_SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}


def read_config(folder: Path) -> Any:
    """The configuration as transformers completes it. Raises ConfigError if transformers rejects it."""
    from penstock_server.models.support import FOREIGN_ERRORS, transformers

    try:
        return transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except FOREIGN_ERRORS as error:
        raise Config.read(folder).refuse(f"transformers rejects it: {error}") from error


def build(config: Config, text_models: dict[str, Build]) -> tuple[ModelSpec, NameMap]:
    """Raises ConfigError if the text model is not one of `text_models`."""
    model_type = config.require("model_type", str)
    whole = read_config(config.path.parent)
    text = whole.get_text_config()
    values = {**text.to_dict(), "tie_word_embeddings": whole.tie_word_embeddings}
    text_type = _SAME.get(text.model_type, text.model_type)
    if text_type not in text_models:
        supported = ", ".join(sorted(text_models))
        raise config.refuse(
            f"its text model is of type {text.model_type!r}, which is not supported; supported: {supported}"
        )
    spec, names = text_models[text_type](Config(values, config.path))
    family = FAMILIES[model_type]
    first, *others = (_moved(names, layout, family) for layout in family.layouts)
    if family.has_grid:
        sections = values["rope_parameters"].get("mrope_section")
        if not isinstance(sections, list) or len(sections) != 3:
            raise config.refuse(f"mrope_section must be a list of three numbers, not {sections!r}")
        spec = replace(spec, layers=tuple(_with_sections(layer, tuple(sections)) for layer in spec.layers))
    return replace(spec, architecture=model_type, reads_images=True), replace(first, alternatives=tuple(others))


def _with_sections(layer: LayerSpec, sections: tuple[int, ...]) -> LayerSpec:
    attention = layer.plain_attention
    assert attention.rope is not None
    return replace(layer, attention=replace(attention, rope=replace(attention.rope, sections=sections)))


def _moved(names: NameMap, layout: TextLayout, family: ImageFamily) -> NameMap:
    """The names of the text model in a checkpoint that also holds what images are encoded with."""

    def move(name: str) -> str:
        body = name.removeprefix(names.prefix)
        return f"{layout.rest}{name}" if body == name else f"{layout.body}{body}"

    prefix = re.escape(names.prefix)
    ignored = (
        re.escape(layout.body) + pattern.removeprefix(prefix)
        if pattern.startswith(prefix)
        else re.escape(layout.rest) + pattern
        for pattern in names.ignored
    )
    moved = {
        key: move(found) if isinstance(found, str) else replace(found, name=move(found.name))
        for key, found in names.names.items()
    }
    return NameMap(moved, (*ignored, *family.tower), prefix=layout.body)


def load_images(options: LoadOptions) -> ImageEncoder:
    """What encodes the images of the model in `options.folder`. Raises ConfigError."""
    folder = options.folder
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ConfigError(f"{folder} holds no preprocessor_config.json, which says how images become pixel values")
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("models that read images need Pillow: pip install 'penstock[transformers]'")
    config = read_config(folder)
    family = FAMILIES[config.model_type]
    tower = VisionTower.load(folder, config, family, options.dtype, options.device)
    return ImageEncoder(folder, config, family, tower)
