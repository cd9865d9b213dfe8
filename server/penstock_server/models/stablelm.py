"""StableLM: Llama with LayerNorms and rope in a part of each head; in the 12B, attention and MLP are parallel."""

from __future__ import annotations

from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap
from penstock_server.weights.location import Location

ATTENTION = "model.layers.{i}.self_attn"
NAMES = llama.NAMES | {
    "layers.{i}.attention.q_norm": Location(f"{ATTENTION}.q_layernorm.norms.{{e}}"),
    "layers.{i}.attention.k_norm": Location(f"{ATTENTION}.k_layernorm.norms.{{e}}"),
}


def stablelm(config: Config) -> tuple[ModelSpec, NameMap]:
    eps = config.get("layer_norm_eps", 1e-5)
    norm = NormSpec("layer", eps, bias=True)
    attention = llama.llama_attention(
        config,
        default_partial=config.get("rope_pct", 0.25),
        qkv_bias=config.get("use_qkv_bias", False),
        qk_norm=QkNormSpec(NormSpec("layer", eps), over="heads") if config.get("qk_layernorm", False) else None,
    )
    mlp = MlpSpec(config.require("intermediate_size", int), config.activation())
    is_parallel = config.get("use_parallel_residual", False)
    layer = LayerSpec(attention, mlp, norm, parallel=is_parallel, shares_norm=is_parallel)
    return llama.llama_model(config, "stablelm", (layer,) * llama.num_layers(config)), NAMES
