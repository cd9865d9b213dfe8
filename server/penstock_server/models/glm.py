"""GLM 4: Llama with interleaved rope in half of each head; `glm4` has norms before and after each part."""

from __future__ import annotations

from penstock_server.layers.mlp import MlpSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement
from penstock_server.weights.location import fused

LAYER = "model.layers.{i}"


def glm(config: Config) -> tuple[ModelSpec, NameMap]:
    spec, mlp = _glm(config, "glm", NormPlacement.PRE)
    return spec, _names(mlp)


def glm4(config: Config) -> tuple[ModelSpec, NameMap]:
    spec, mlp = _glm(config, "glm4", NormPlacement.BOTH)
    names = _names(mlp)
    around = {
        "layers.{i}.attention_post_norm": f"{LAYER}.post_self_attn_layernorm",
        "layers.{i}.mlp_post_norm": f"{LAYER}.post_mlp_layernorm",
    }
    return spec, names | around


def _glm(config: Config, architecture: str, placement: NormPlacement) -> tuple[ModelSpec, MlpSpec]:
    config = config.with_defaults(
        head_dim=128, num_key_value_heads=2, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7
    )
    attention = llama.llama_attention(config, qkv_bias=config.get("attention_bias", True), interleaved=True)
    mlp = llama.llama_mlp(config)
    layer = LayerSpec(attention, mlp, llama.rms_norm(config), placement=placement)
    return llama.llama_model(config, architecture, (layer,) * llama.num_layers(config)), mlp


def _names(mlp: MlpSpec) -> NameMap:
    gate_up = fused("layers.{i}.mlp", f"{LAYER}.mlp.gate_up_proj", mlp.widths)
    return llama.NAMES | gate_up
