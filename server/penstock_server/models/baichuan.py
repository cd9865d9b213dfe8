"""Baichuan 1 and 2: Llama with q, k and v one behind the other; ALiBi instead of rope in the 13B; 2 has a head whose
rows are of length one."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.attention.interface import Alibi
from penstock_server.models import llama
from penstock_server.models.alibi import alibi_slopes
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import fused

BAICHUAN2_VOCAB_SIZE = 125696


def baichuan(config: Config) -> tuple[ModelSpec, NameMap]:
    # COMPAT: one model type for four models. The 13B, which have no limit of positions, say model_max_length alone;
    # the second generation has another vocabulary and a weight of the z-loss.
    has_rope = config.values.get("max_position_embeddings") is not None
    is_second = "z_loss_weight" in config.values or config.require("vocab_size", int) == BAICHUAN2_VOCAB_SIZE
    config = config.with_defaults(max_position_embeddings=config.get("model_max_length", 4096))
    attention = llama.llama_attention(config)
    if not has_rope:
        attention = replace(attention, rope=None, alibi=Alibi(alibi_slopes(attention.num_heads)))
    layer = LayerSpec(attention, llama.llama_mlp(config), llama.rms_norm(config))
    spec = llama.llama_model(config, "baichuan", (layer,) * llama.num_layers(config))
    qkv = fused("layers.{i}.attention", "model.layers.{i}.self_attn.W_pack", attention.widths)
    names = replace(llama.NAMES, names={**llama.NAMES.names, **qkv})
    return replace(spec, head=replace(spec.head, is_normalized=is_second)), names
