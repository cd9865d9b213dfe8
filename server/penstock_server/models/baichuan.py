"""Baichuan 1 and 2: Llama with fused q, k and v. The 13B models have ALiBi instead of rope; Baichuan 2 normalizes the
rows of its head."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.device.attention.interface import Alibi
from penstock_server.models import llama
from penstock_server.models.alibi import alibi_slopes
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

BAICHUAN2_VOCAB_SIZE = 125696


def baichuan(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: four models share one model type. The 13B models have model_max_length and no max_position_embeddings;
    # Baichuan 2 has another vocabulary size and z_loss_weight.
    has_rope = config.values.get("max_position_embeddings") is not None
    is_second = "z_loss_weight" in config.values or config.require("vocab_size", int) == BAICHUAN2_VOCAB_SIZE
    config = config.with_defaults(max_position_embeddings=config.get("model_max_length", 4096))
    attention = llama.llama_attention(config)
    if not has_rope:
        attention = replace(attention, rope=None, alibi=Alibi(alibi_slopes(attention.num_heads)))
    layer = LayerSpec(attention, llama.llama_mlp(config), llama.rms_norm(config))
    spec = llama.llama_model(config, "baichuan", (layer,) * llama.num_layers(config))
    qkv = fused("layers.{i}.attention", "model.layers.{i}.self_attn.W_pack", attention.widths)
    names = llama.NAMES | qkv
    return replace(spec, head=replace(spec.head, is_normalized=is_second)), names
