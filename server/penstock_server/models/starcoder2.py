"""StarCoder2: Mistral with LayerNorms, biases in every layer, and an ungated MLP."""

from __future__ import annotations

from penstock_server.device.attention.interface import AttentionMask
from penstock_server.layers.norm import NormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

NAMES = llama.NAMES | {
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.c_fc",
    "layers.{i}.mlp.down": "model.layers.{i}.mlp.c_proj",
}


def starcoder2(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(hidden_act="gelu_pytorch_tanh", num_key_value_heads=2)
    bias = config.get("use_bias", True)
    attention = llama.llama_attention(
        config, qkv_bias=bias, output_bias=bias, mask=AttentionMask(window=config.window())
    )
    norm = NormSpec("layer", config.get("norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(attention, llama.llama_mlp(config, gated=False, bias=bias), norm)
    return llama.llama_model(config, "starcoder2", (layer,) * llama.num_layers(config), tied=True), NAMES
