"""EXAONE 4: norms after attention and MLP, and per head. In models with sliding windows, the layers with full attention
have no rope."""

from __future__ import annotations

from dataclasses import replace

from penstock_server.attention.interface import AttentionMask
from penstock_server.layers.qk_norm import QkNormSpec
from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.olmo import POST_NAMES
from penstock_server.models.spec import LayerSpec, ModelSpec, NameMap, NormPlacement


def exaone4(config: Config) -> tuple[ModelSpec, NameMap]:
    config = config.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    norm = llama.rms_norm(config)
    attention = llama.llama_attention(config, qk_norm=QkNormSpec(norm))
    full = LayerSpec(attention, llama.llama_mlp(config), norm, placement=NormPlacement.POST)
    kinds = {"full_attention": full}
    default = ["full_attention"] * llama.num_layers(config)
    if config.values["sliding_window"] is not None:
        sliding = replace(full, attention=replace(attention, mask=AttentionMask(config.window())))
        kinds = {"full_attention": replace(full, attention=replace(attention, rope=None)), "sliding_attention": sliding}
        pattern = config.values.get("sliding_window_pattern", 4)
        # A pattern of letters comes with layer_types.
        if isinstance(pattern, int):
            default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(len(default))]
    types = config.layer_types(default)
    if any(kind not in kinds for kind in types):
        raise config.refuse("layer_types contain sliding_attention, but sliding_window is null")
    return llama.llama_model(config, "exaone4", tuple(kinds[kind] for kind in types)), POST_NAMES
