"""The configuration of T5, the only encoder–decoder model that GGUF supports.

GGUF files lack two of T5's settings. The distance of the last bucket is the default in all published models. The
activation follows, as in llama.cpp, from whether there are gates.
"""

from __future__ import annotations

from typing import Any

from penstock_server.weights.gguf.metadata import Metadata


def t5(metadata: Metadata) -> dict[str, Any]:
    """T5's `config.json`."""
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
