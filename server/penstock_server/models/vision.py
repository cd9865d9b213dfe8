"""Models that read images: their text model is one of our decoders, under other tensor names."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.layers.adapter import OwnAdapter
from penstock_server.layers.attention import AttentionSpec
from penstock_server.models import foreign, granite, llama, mllama, moe, phi
from penstock_server.models.config import Config
from penstock_server.models.foreign import FOREIGN_ERRORS
from penstock_server.models.interface import LoadOptions
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.vision.family import FAMILIES, TextLayout, image_token_id
from penstock_server.vision.processor import own_processor
from penstock_server.vision.tower import VisionTower
from penstock_server.weights.adapter import highest_rank
from penstock_server.weights.folder import DEFAULT_ADAPTER, IMAGE_ADAPTER

logger = logging.getLogger(__name__)

Build = Callable[[Config], tuple[ModelSpec, NameMap]]

# Text models without a causal model of their type, or with more layers than it.
_TEXT_MODELS: dict[str, Build] = {
    "granite4_vision_text": granite.granite,
    "mllama_text_model": mllama.mllama,
    "phi4_multimodal": phi.phi3,
    "qwen2_5_vl_text": llama.qwen2,
    "qwen2_vl_text": llama.qwen2,
    "qwen3_vl_moe_text": moe.qwen3_vl_moe,
    "qwen3_vl_text": llama.qwen3,
}


def read_config(folder: Path) -> Any:
    """The configuration as transformers completes it. Raises ConfigError if transformers rejects it."""
    try:
        return foreign.read_config(folder)
    except FOREIGN_ERRORS as error:
        raise Config.read(folder).refuse(f"transformers rejects it: {error}") from error


def build(config: Config, text_models: dict[str, Build]) -> tuple[ModelSpec, NameMap]:
    """Raises ConfigError if the text model is not one of `text_models`."""
    model_type = config.require("model_type", str)
    whole = read_config(config.path.parent)
    text = whole.get_text_config()
    # Either configuration may lack it: Qwen's of the text, Mllama's of the whole.
    is_tied = (whole if hasattr(whole, "tie_word_embeddings") else text).tie_word_embeddings
    values = {**text.to_dict(), "tie_word_embeddings": is_tied, "image_token_id": image_token_id(whole)}
    family = FAMILIES[model_type]
    # What is true of prompts is not of the text model as it generates.
    if family.is_prompt_whole and values.pop("use_bidirectional_attention", True) is False:
        raise config.refuse("use_bidirectional_attention is false; prompts of this type are seen as a whole here")
    text_models = {**text_models, **_TEXT_MODELS}
    if text.model_type not in text_models:
        supported = ", ".join(sorted(text_models))
        raise config.refuse(
            f"its text model is of type {text.model_type!r}, which is not supported; supported: {supported}"
        )
    spec, names = text_models[text.model_type](Config(values, config.path))
    first, *others = (moved(names, layout, family.tower + family.unused) for layout in family.layouts)
    if family.has_grid:
        axes = _axes(config, values["rope_parameters"], family.sections)
        layers = tuple(_with_axes(config, layer, axes) for layer in spec.layers)
        mtp = None if spec.mtp is None else _with_axes(config, spec.mtp, axes)
        spec = replace(spec, layers=layers, mtp=mtp)
    if family.is_whole or family.is_prompt_whole:
        spec = replace(spec, layers=tuple(map(_seeing_spans, spec.layers)))
    if family.is_prompt_whole:
        # Tokens of a prompt attend to all of it in every layer, so a sequence is no longer than a layer's window.
        masks = [layer.plain_attention.mask for layer in spec.layers]
        windows = [mask.window for mask in masks if mask.window is not None]
        longest = min([spec.max_position_tokens, *windows])
        spec = replace(spec, max_position_tokens=longest, default_position_tokens=None)
    featured = tuple(layer for layer in family.features(whole) if layer)
    if featured and not 0 < featured[0] <= featured[-1] < spec.num_layers:
        raise config.refuse(f"image features for layer {featured[-1]} need more than {spec.num_layers} layers")
    if spec.image_layers:
        spec = replace(spec, max_image_states=_max_states(whole.vision_config))
    spec = replace(spec, architecture=model_type, reads_images=True, featured_layers=featured)
    return spec, replace(first, alternatives=tuple(others))


def _axes(config: Config, rope: dict[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    """`RopeSpec.axes`: frequencies by time, row and column in sections, or in turn while a section lasts. default: as
    of `ImageFamily.sections`."""
    sections = Config(rope, config.path).integers("mrope_section") or default or None
    if sections is None or len(sections) != 3:
        raise config.refuse(f"mrope_section must be a list of three numbers, not {sections!r}")
    if default or rope.get("mrope_interleaved", False):
        return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections)))
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def _with_axes(config: Config, layer: LayerSpec, axes: tuple[int, ...]) -> LayerSpec:
    """The layer, whose attention, if it has any, rotates by these axes."""
    attention = layer.attention
    if not isinstance(attention, AttentionSpec):
        return layer
    assert attention.rope is not None
    if len(axes) != attention.rope.rotary_dim // 2:
        raise config.refuse(f"mrope_section has {len(axes)} frequencies, must have {attention.rope.rotary_dim // 2}")
    return replace(layer, attention=replace(attention, rope=replace(attention.rope, axes=axes)))


def _max_states(vision: Any) -> int:
    """Most cross-attention states of an image: one per patch and one per tile."""
    num_states: int = vision.max_num_tiles * ((vision.image_size // vision.patch_size) ** 2 + 1)
    return num_states


def _seeing_spans(layer: LayerSpec) -> LayerSpec:
    attention = layer.plain_attention
    return replace(layer, attention=replace(attention, mask=replace(attention.mask, sees_spans=True)))


def moved(names: NameMap, layout: TextLayout, others: tuple[str, ...]) -> NameMap:
    """The names of the text model in a checkpoint that also holds what images are encoded with. others: regular
    expressions that match the whole names of all other tensors."""

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
    return replace(names.renamed(move), ignored=(*ignored, *others), prefix=layout.body, alternatives=(), copies=())


def own_adapter(folder: Path, spec: ModelSpec) -> OwnAdapter | None:
    """The adapter beside a model's weights that its sequences have, or those with images. None: they use the plain
    weights, as those of a model in which the adapter is merged. Raises ConfigError if it is damaged."""
    if (path := folder / DEFAULT_ADAPTER).is_dir():
        return OwnAdapter(path, highest_rank(path), is_of_images=False)
    if not spec.reads_images or not FAMILIES[spec.architecture].has_adapter:
        return None
    path = folder / IMAGE_ADAPTER
    if not path.is_dir():
        logger.warning("there is no %s, an adapter for images: prompts with images use the plain weights", path)
        return None
    return OwnAdapter(path, highest_rank(path), is_of_images=True)


def load_images(options: LoadOptions) -> ImageEncoder:
    """What encodes the images of the model in `options.folder`. Raises ConfigError."""
    folder = options.folder
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ConfigError(f"{folder} holds no preprocessor_config.json, which says how images become pixel values")
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "models that read images need Pillow: pip install '.[transformers]' in the source tree of Penstock"
        )
    # Refuses a bad file here: the process that reads images could not say why.
    own_processor(folder)
    config = read_config(folder)
    family = FAMILIES[config.model_type]
    tower = VisionTower.load(folder, config, family, options.dtype, options.device, options.cpu_isa)
    return ImageEncoder(folder, config, family, tower)
