"""Llama 3.2 Vision (Mllama): Llama, and layers that attend to images, which texts bypass. A model that was saved as a
text model has no place for them."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap
from penstock_server.weights.location import Location, Strip

NUM_IMAGE_TOKENS = 8  # at the end of the token table; the head has no row for them
_IMAGE_LAYER_NAMES = {
    "image_layers.{number}.attention_norm": "model.layers.{number}.input_layernorm",
    "image_layers.{number}.attention.q": "model.layers.{number}.cross_attn.q_proj",
    "image_layers.{number}.attention.k": "model.layers.{number}.cross_attn.k_proj",
    "image_layers.{number}.attention.v": "model.layers.{number}.cross_attn.v_proj",
    "image_layers.{number}.attention.q_norm": "model.layers.{number}.cross_attn.q_norm",
    "image_layers.{number}.attention.k_norm": "model.layers.{number}.cross_attn.k_norm",
    "image_layers.{number}.attention.output": "model.layers.{number}.cross_attn.o_proj",
    "image_layers.{number}.attention_gate": "model.layers.{number}.cross_attn_attn_gate",
    "image_layers.{number}.mlp_norm": "model.layers.{number}.post_attention_layernorm",
    "image_layers.{number}.mlp.gate": "model.layers.{number}.mlp.gate_proj",
    "image_layers.{number}.mlp.up": "model.layers.{number}.mlp.up_proj",
    "image_layers.{number}.mlp.down": "model.layers.{number}.mlp.down_proj",
    "image_layers.{number}.mlp_gate": "model.layers.{number}.cross_attn_mlp_gate",
}


def mllama(config: Config) -> tuple[ModelSpec, NameMap]:
    """With images. `config` also has the id of the image token."""
    spec, names = mllama_text(config)
    layer = llama.llama_layer(_with_defaults(config))
    attention = replace(layer.plain_attention, rope=None, mask=AttentionMask(part="source"))
    layer = replace(layer, attention=replace(attention, qk_norm=QkNormSpec(layer.norm)))
    numbers = sorted({number for number in _of_images(config) if 0 <= number < llama.num_layers(config)})
    places = [sum(kept < number for kept in names.layers) for number in numbers]
    if not places:
        raise config.refuse("cross_attention_layers is empty, so no layer attends to images")
    if places[-1] == spec.num_layers:
        raise config.refuse(f"cross_attention_layers is {numbers}; the last layer must be another one")
    token_id, num_tokens = config.require("image_token_id", int), spec.vocab_size + NUM_IMAGE_TOKENS
    if not 0 <= token_id < num_tokens:
        raise config.refuse(f"image_token_id is {token_id}, must be below {num_tokens}")
    found = {
        ours.format(number=place): theirs.format(number=number)
        for place, number in enumerate(numbers)
        for ours, theirs in _IMAGE_LAYER_NAMES.items()
    }
    names |= {**found, "image_token": Location("model.embed_tokens", strip=Strip(token_id, 1, num_tokens))}
    spec = replace(spec, image_layers=tuple((place, layer) for place in places))
    return spec, replace(names, ignored=())  # all layers are used


def mllama_text(config: Config) -> tuple[ModelSpec, NameMap]:
    config = _with_defaults(config)
    num, of_images = llama.num_layers(config), _of_images(config)
    kept = tuple(index for index in range(num) if index not in of_images)
    if not kept:
        raise config.refuse("every layer attends to images")
    spec = llama.llama_model(config, "mllama_text_model", (llama.llama_layer(config),) * len(kept))
    rows = Strip(0, spec.vocab_size, spec.vocab_size + NUM_IMAGE_TOKENS)
    names = llama.NAMES | {"embedding": Location("model.embed_tokens", strip=rows)}
    numbers = "|".join(map(str, of_images)) or "none"
    ignored = (*names.ignored, rf"model\.layers\.({numbers})\..*")
    return spec, replace(names, ignored=ignored, layers=kept)


def _with_defaults(config: Config) -> Config:
    return config.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0)


def _of_images(config: Config) -> list[int]:
    given = config.integers("cross_attention_layers")
    return list(range(3, 40, 5)) if given is None else given
