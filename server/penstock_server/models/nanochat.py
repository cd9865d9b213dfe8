"""nanochat: norms without weights, also behind the embedding and behind a rope that turns the other way, and an ungated
MLP."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.layers.norm import NormSpec
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap

NAMES = llama.NAMES | {
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.fc1",
    "layers.{i}.mlp.down": "model.layers.{i}.mlp.fc2",
}


def nanochat(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(hidden_act="relu2", final_logit_softcapping=15.0)
    bias, eps = config.get("attention_bias", False), config.get("rms_norm_eps", 1e-6)
    attention = llama.llama_attention(config, qkv_bias=bias, output_bias=bias)
    assert attention.rope is not None
    attention = replace(
        attention,
        rope=replace(attention.rope, is_backward=True),
        qk_norm=QkNormSpec(NormSpec("rms", eps, unweighted_dim=attention.head_dim), is_after_rope=True),
    )
    norm = NormSpec("rms", eps, unweighted_dim=config.require("hidden_size", int))
    layer = LayerSpec(attention, llama.llama_mlp(config, gated=False), norm)
    spec = llama.llama_model(config, "nanochat", (layer,) * llama.num_layers(config))
    head = replace(spec.head, soft_cap=config.get("final_logit_softcapping", 0.0) or None)
    return replace(spec, embedding=replace(spec.embedding, norm=norm), head=head), NAMES
