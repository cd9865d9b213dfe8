"""The configuration of T5 in GGUF files, and where they keep its parameters: the only encoder–decoder that GGUF names.

Not in files: the distance of the last bucket, which all published models have from the defaults, and the activation,
which llama.cpp takes from whether there are gates.
"""

from __future__ import annotations

from typing import Any

from penstock_server.weights.gguf.metadata import Metadata

LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.output": "attn_o",
    "cross_norm": "cross_attn_norm",
    "cross.q": "cross_attn_q",
    "cross.k": "cross_attn_k",
    "cross.v": "cross_attn_v",
    "cross.output": "cross_attn_o",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
SIDES = {"": "dec", "encoder.": "enc"}
NAMES = {
    **{
        f"{ours}{name}": f"{theirs}.blk.{{i}}.{own}"
        for ours, theirs in SIDES.items()
        for name, own in LAYER_NAMES.items()
    },
    **{f"{ours}relative_bias": f"{theirs}.blk.0.attn_rel_b" for ours, theirs in SIDES.items()},
    **{f"{ours}norm": f"{theirs}.output_norm" for ours, theirs in SIDES.items()},
}


def t5(metadata: Metadata) -> dict[str, Any]:
    num_layers = metadata.integer("block_count")
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": metadata.integer("embedding_length"),
        "d_kv": metadata.integer("attention.key_length"),
        "d_ff": metadata.integer("feed_forward_length"),
        "num_layers": num_layers,
        "num_decoder_layers": metadata.integer("decoder_block_count", num_layers),
        "num_heads": metadata.integer("attention.head_count"),
        "n_positions": metadata.integer("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "relative_attention_num_buckets": metadata.integer("attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if metadata.has("dec.blk.0.ffn_gate.weight") else "relu",
        "decoder_start_token_id": metadata.integer("decoder_start_token_id", 0),
    }
