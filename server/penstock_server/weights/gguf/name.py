"""Where GGUF files keep our parameters. Their names are the same for nearly every architecture, and so are ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock_server.weights.gguf import t5
from penstock_server.weights.gguf.decoder import num_layers
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.location import EACH, Location, Strip

# Ours, without .weight or .bias or whole → GGUF's, with {i} for the layer.
NAMES = {
    "embedding": "token_embd",
    "embedding_norm": "token_embd_norm",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{i}.attn_norm",
    "attention.q": "blk.{i}.attn_q",
    "attention.k": "blk.{i}.attn_k",
    "attention.v": "blk.{i}.attn_v",
    "attention.q_norm": "blk.{i}.attn_q_norm",
    "attention.k_norm": "blk.{i}.attn_k_norm",
    "attention.output": "blk.{i}.attn_output",
    "attention.sinks": "blk.{i}.attn_sinks.weight",
    "attention.q_a": "blk.{i}.attn_q_a",
    "attention.q_b": "blk.{i}.attn_q_b",
    "attention.kv_a": "blk.{i}.attn_kv_a_mqa",
    "attention.kv_norm": "blk.{i}.attn_kv_a_norm",
    "attention.kv_b": "blk.{i}.attn_kv_b",
    "attention_post_norm": "blk.{i}.post_attention_norm",
    "mlp_norm": "blk.{i}.ffn_norm",
    "mlp.gate": "blk.{i}.ffn_gate",
    "mlp.up": "blk.{i}.ffn_up",
    "mlp.down": "blk.{i}.ffn_down",
    "mlp.alpha_p": "blk.{i}.xielu_alpha_p",
    "mlp.alpha_n": "blk.{i}.xielu_alpha_n",
    "mlp.router": "blk.{i}.ffn_gate_inp",
    "mlp.router.correction": "blk.{i}.exp_probs_b.bias",
    "mlp.experts.gate": "blk.{i}.ffn_gate_exps",
    "mlp.experts.up": "blk.{i}.ffn_up_exps",
    "mlp.experts.down": "blk.{i}.ffn_down_exps",
    "mlp.shared.gate": "blk.{i}.ffn_gate_shexp",
    "mlp.shared.up": "blk.{i}.ffn_up_shexp",
    "mlp.shared.down": "blk.{i}.ffn_down_shexp",
    "mlp.shared_gate": "blk.{i}.ffn_gate_inp_shexp",
    "mlp_post_norm": "blk.{i}.post_ffw_norm",
}
# Architectures with other names.
OWN_NAMES = {
    "dbrx": {"mlp_norm": "blk.{i}.attn_output_norm"},
    "deepseek2": {"attention.q_norm": "blk.{i}.attn_q_a_norm"},
    "gpt-oss": {"mlp_norm": "blk.{i}.post_attention_norm"},
    "seed_oss": {"mlp_norm": "blk.{i}.post_attention_norm"},
    "t5": t5.NAMES,
}
# Falcon 40B has two norms side by side, and GGUF calls the attention's the second.
SECOND_NORM = {"attention_norm": "blk.{i}.attn_norm_2", "mlp_norm": "blk.{i}.attn_norm"}
LAYER = re.compile(r"(encoder\.|)layers\.(\d+)\.")


class GgufNames:
    """A `Locator` for one file: what is fused in one file is not in another of the same architecture."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], metadata: Metadata) -> None:
        self.shapes = shapes
        self.metadata = metadata
        self.names = NAMES | OWN_NAMES.get(metadata.architecture, {})
        if "blk.0.attn_norm_2.weight" in shapes:
            self.names |= SECOND_NORM

    @property
    def ignored(self) -> tuple[str, ...]:
        # The tables of rope's scaling are in the configuration; layers behind the model's own are a draft model; the
        # first T5 carries a bias that its code does not use.
        drafts = range(num_layers(self.metadata), self.metadata.integer("block_count"))
        tables = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"dec\.blk\.0\.cross_attn_rel_b\.weight")
        return (*tables, *(rf"blk\.{index}\..*" for index in drafts))

    def locate(self, parameter: str) -> Location:
        """layers.3.attention.q.weight → blk.3.attn_q.weight, or a strip of blk.3.attn_qkv.weight."""
        layer = LAYER.match(parameter)
        own = LAYER.sub(r"\1", parameter, count=1)
        stem, _, suffix = own.rpartition(".")
        prefix = f"blk.{layer[2]}" if layer else ""
        # An unknown parameter keeps its name; the loader will say that the file lacks it.
        pattern = self.names.get(own) or f"{self.names.get(stem, stem)}.{suffix}"
        name = pattern.replace("blk.{i}", prefix)
        if name in self.shapes and not (stem == "mlp.up" and self._is_gated_up(name, prefix)):
            return Location(name)
        return self._apart(name) or self._fused(stem, prefix, suffix) or Location(name)

    def _apart(self, name: str) -> Location | None:
        """A tensor for each expert, as the first files of Mixtral have."""
        of_each = name.replace("_exps.", f".{EACH}.")
        return Location(of_each) if of_each != name and of_each.replace(EACH, "0") in self.shapes else None

    def _fused(self, stem: str, prefix: str, suffix: str) -> Location | None:
        """A strip of the tensor that holds q, k and v, or gate and up."""
        room, _, key = stem.partition(".")
        if room == "attention" and key in ("q", "k", "v"):
            name, parts = f"{prefix}.attn_qkv.{suffix}", self._attention_widths()
        elif room == "mlp" and key in ("gate", "up"):
            width = self.metadata.integer("feed_forward_length")
            name, parts = f"{prefix}.ffn_up.{suffix}", [("gate", width), ("up", width)]
        else:
            return None
        if name not in self.shapes:
            return None
        place = [part for part, _ in parts].index(key)
        widths = [width for _, width in parts]
        return Location(name, strip=Strip(sum(widths[:place]), widths[place], sum(widths)))

    def _is_gated_up(self, name: str, prefix: str) -> bool:
        """Whether `ffn_up` holds the gates too: Phi-3, GLM."""
        return f"{prefix}.ffn_gate.weight" not in self.shapes and self.shapes[name][0] == 2 * self.metadata.integer(
            "feed_forward_length"
        )

    def _attention_widths(self) -> list[tuple[str, int]]:
        metadata = self.metadata
        num_heads = metadata.integer("attention.head_count")
        num_kv_heads = metadata.integer("attention.head_count_kv", num_heads)
        key = metadata.integer("attention.key_length", metadata.integer("embedding_length") // num_heads)
        value = metadata.integer("attention.value_length", key)
        return [("q", num_heads * key), ("k", num_kv_heads * key), ("v", num_kv_heads * value)]
