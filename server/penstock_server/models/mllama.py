"""Llama 3.2 Vision (Mllama) as a text model: Llama without the layers that attend to images, which texts bypass."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap
from penstock_server.models.vision import moved
from penstock_server.vision.family import TextLayout
from penstock_server.weights.location import Location, Strip

NUM_IMAGE_TOKENS = 8  # at the end of the token table; the head has no row for them
LAYOUTS = (TextLayout("language_model.model.", "language_model."), TextLayout("model.language_model."))
TOWER = (r"(model\.)?(vision_model|multi_modal_projector)\..*",)


def mllama(config: Config) -> tuple[ModelSpec, NameMap]:
    """Of a checkpoint that also reads images."""
    text = config.values.get("text_config") or {}
    if not isinstance(text, dict):
        raise config.refuse(f"text_config must be an object, not {text!r}")
    spec, names = mllama_text(Config({**config.values, **text}, config.path))
    first, *others = (moved(names, layout, TOWER) for layout in LAYOUTS)
    return replace(spec, architecture="mllama"), replace(first, alternatives=tuple(others))


def mllama_text(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0)
    num = llama.num_layers(config)
    given = config.values.get("cross_attention_layers")
    of_images = list(range(3, 40, 5)) if given is None else given
    if not isinstance(of_images, list) or not all(isinstance(index, int) for index in of_images):
        raise config.refuse(f"cross_attention_layers must be a list of integers, not {of_images!r}")
    kept = tuple(index for index in range(num) if index not in of_images)
    if not kept:
        raise config.refuse("every layer attends to images")
    spec = llama.llama_model(config, "mllama_text_model", (llama.llama_layer(config),) * len(kept))
    rows = Strip(0, spec.vocab_size, spec.vocab_size + NUM_IMAGE_TOKENS)
    names = llama.NAMES | {"embedding": Location("model.embed_tokens", strip=rows)}
    numbers = "|".join(map(str, of_images)) or "none"
    ignored = (*names.ignored, rf"model\.layers\.({numbers})\..*")
    return spec, replace(names, ignored=ignored, layers=kept)
