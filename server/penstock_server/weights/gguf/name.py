"""Maps our parameter names to GGUF's tensor names. Both are the same for nearly all architectures."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock_server.weights.gguf.decoder import mlp_widths, num_layers
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.location import EACH, Location, Strip, fused

# Parameters of a layer: our names, without .weight or .bias unless the suffix differs → GGUF's, without `blk.{i}.`.
LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.output": "attn_output",
    "attention.net.z": "attn_gate",
    "attention.net.a": "ssm_alpha",
    "attention.net.b": "ssm_beta",
    "attention.net.a_log": "ssm_a",
    "attention.net.conv": "ssm_conv1d",
    "attention.net.steps": "ssm_dt",
    **{f"attention.net.{name}_norm": f"ssm_{name}_norm" for name in ("dt", "b", "c")},
    "attention.net.skip": "ssm_d",
    "attention.net.dt_bias": "ssm_dt.bias",
    "attention.net.norm": "ssm_norm",
    "attention.net.output": "ssm_out",
    "attention.sinks": "attn_sinks.weight",
    "attention.q_a": "attn_q_a",
    "attention.q_b": "attn_q_b",
    "attention.kv_a": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.kv_b": "attn_kv_b",
    "attention_post_norm": "post_attention_norm",
    "cross_norm": "cross_attn_norm",
    "cross.q": "cross_attn_q",
    "cross.k": "cross_attn_k",
    "cross.v": "cross_attn_v",
    "cross.output": "cross_attn_o",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.alpha_p": "xielu_alpha_p",
    "mlp.alpha_n": "xielu_alpha_n",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.correction": "exp_probs_b.bias",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
    "mlp.shared.gate": "ffn_gate_shexp",
    "mlp.shared.up": "ffn_up_shexp",
    "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
    "mlp_post_norm": "post_ffw_norm",
}
# Parameters outside the layers.
OTHER_NAMES = {
    "embedding": "token_embd",
    "embedding_norm": "token_embd_norm",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "relative_bias": "blk.0.attn_rel_b",
}
KIMI_NET = {
    **{f"attention.net.{name}": f"attn_{name}" for name in "qkv"},
    **{f"attention.net.conv.{name}": f"ssm_conv1d_{name}" for name in "qkv"},
    "attention.net.a.down": "ssm_f_a",
    "attention.net.a": "ssm_f_b",
    "attention.net.z.down": "ssm_g_a",
    "attention.net.z": "ssm_g_b",
    "attention.net.output": "attn_output",
}
SHORT_CONVOLUTION = {"attention.net.conv": "shortconv.conv", "attention.net.output": "shortconv.out_proj"}
# Architectures with other names for some parameters of a layer.
ARCHITECTURE_NAMES = {
    "dbrx": {"mlp_norm": "attn_output_norm"},
    "deepseek2": {"attention.q_norm": "attn_q_a_norm"},
    "kimi-linear": {"attention.q_norm": "attn_q_a_norm", **KIMI_NET},
    "lfm2": SHORT_CONVOLUTION,
    "lfm2moe": SHORT_CONVOLUTION,
    "falcon-h1": {"mlp_norm.weight": "ffn_norm"},
    "nemotron_h": {"mlp_norm": "attn_norm"},
    "nemotron_h_moe": {"mlp_norm": "attn_norm"},
    "glm4moe": {"mlp_norm": "post_attention_norm"},
    "gpt-oss": {"mlp_norm": "post_attention_norm"},
    "qwen35": {"mlp_norm": "post_attention_norm"},
    "qwen35moe": {"mlp_norm": "post_attention_norm"},
    "qwen3next": {"mlp_norm": "post_attention_norm"},
    "seed_oss": {"mlp_norm": "post_attention_norm"},
    "t5": {"attention.output": "attn_o"},
}
# Architectures with another name for the norm behind the layers.
NORM_NAMES = {architecture: {"norm": "token_embd_norm"} for architecture in ("lfm2", "lfm2moe")}
# Falcon 40B has two norms side by side, and GGUF gives the attention's the name of the second.
SECOND_NORM = {"attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
PARAMETER = re.compile(r"(encoder\.|)(?:layers\.(\d+)\.|)(.*)")
# Parameters outside the layers of which T5's encoder and decoder each have their own.
SIDE_NAMES = ("norm", "relative_bias")


class GgufLocator:
    """Locates the parameters in one file. Files of the same architecture differ in which tensors they fuse."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], metadata: Metadata) -> None:
        self.shapes = shapes
        self.metadata = metadata
        self.layer_names = LAYER_NAMES | ARCHITECTURE_NAMES.get(metadata.architecture, {})
        self.other_names = OTHER_NAMES | NORM_NAMES.get(metadata.architecture, {})
        if "blk.0.attn_norm_2.weight" in shapes:
            self.layer_names |= SECOND_NORM

    @property
    def ignored(self) -> tuple[str, ...]:
        # The configuration holds rope's tables. Layers after the model's own are for multi-token prediction. T5's first
        # version stores a bias that its code does not use.
        extra_layers = range(num_layers(self.metadata), self.metadata.integer("block_count"))
        tables = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"dec\.blk\.0\.cross_attn_rel_b\.weight")
        return (*tables, *(rf"blk\.{index}\..*" for index in extra_layers))

    def locate(self, parameter: str) -> Location:
        """layers.3.attention.q.weight → blk.3.attn_q.weight, or a strip of blk.3.attn_qkv.weight."""
        found = PARAMETER.fullmatch(parameter)
        assert found is not None
        side, layer, own = found.groups()
        own = own.replace("beside.net.", "attention.net.")  # a net has the same names beside attention
        names = self.other_names if layer is None else self.layer_names
        stem, _, suffix = own.rpartition(".")
        # An unknown parameter keeps its name; the loader reports that the file lacks it.
        tensor = names.get(own) or f"{names.get(stem, stem)}.{suffix}"
        prefix = "" if layer is None else f"blk.{layer}."
        if self.metadata.architecture == "t5" and (layer is not None or stem in SIDE_NAMES):
            prefix = f"{'enc' if side else 'dec'}.{prefix}"
        name = prefix + tensor
        if name in self.shapes and not (stem == "mlp.up" and self._holds_gate_and_up(name, prefix)):
            return Location(name)
        return self._per_expert(name) or self._fused(stem, prefix, suffix) or Location(name)

    def _per_expert(self, name: str) -> Location | None:
        """A tensor for each expert, as in the first files of Mixtral."""
        of_each = name.replace("_exps.", f".{EACH}.")
        return Location(of_each) if of_each != name and of_each.replace(EACH, "0") in self.shapes else None

    def _fused(self, stem: str, prefix: str, suffix: str) -> Location | None:
        """A strip of the tensor that holds q, k and v, or gate and up, or the inputs of a layer that keeps a state."""
        block, _, key = stem.rpartition(".")
        of_short = f"{prefix}shortconv.in_proj.{suffix}"
        if block == "attention.net" and of_short in self.shapes and key in ("b", "c", "x"):
            widths = dict.fromkeys(("b", "c", "x"), self.metadata.integer("embedding_length"))
            return fused(block, of_short, widths)[stem]
        if f"{prefix}ssm_x.weight" in self.shapes and block in ("attention.net", "attention.net.rates"):
            return self._of_mamba(prefix, suffix).get(stem)
        if f"{prefix}ssm_in.weight" in self.shapes and block in ("attention.net", "attention.net.conv"):
            return self._of_mamba2(block, prefix, suffix).get(stem)
        if block == "attention.net" and key in ("b", "a"):
            return fused(block, f"{prefix}ssm_ba.{suffix}", *self._net_rates())[stem]
        if block in ("attention.net", "attention.net.conv"):
            name = "ssm_conv1d" if block.endswith(".conv") else "attn_qkv"
            return fused(block, f"{prefix}{name}.{suffix}", self._net_widths()).get(stem)
        if block == "attention" and key in ("q", "k", "v"):
            name, widths = f"{prefix}attn_qkv.{suffix}", self._attention_widths()
        elif block == "mlp" and key in ("gate", "up"):
            width = self.metadata.integer("feed_forward_length")
            name, widths = f"{prefix}ffn_up.{suffix}", {"gate": width, "up": width}
        else:
            return None
        if name not in self.shapes:
            return None
        offset = sum(list(widths.values())[: list(widths).index(key)])
        return Location(name, strip=Strip(offset, widths[key], sum(widths.values())))

    def _holds_gate_and_up(self, name: str, prefix: str) -> bool:
        """Whether `ffn_up` holds gate and up, as for Phi-3 and GLM."""
        width = max(mlp_widths(self.metadata), default=0)
        return f"{prefix}ffn_gate.weight" not in self.shapes and self.shapes[name][0] == 2 * width

    def _of_mamba(self, prefix: str, suffix: str) -> dict[str, Location]:
        """The strips of the projections of a layer of Mamba."""
        channels, keys = self.metadata.integer("ssm.inner_size"), self.metadata.integer("ssm.state_size")
        rates = {"dt": self.metadata.integer("ssm.time_step_rank"), "b": keys, "c": keys}
        mixed = fused("attention.net", f"{prefix}ssm_in.{suffix}", {"x": channels, "z": channels})
        return mixed | fused("attention.net.rates", f"{prefix}ssm_x.{suffix}", rates)

    def _of_mamba2(self, block: str, prefix: str, suffix: str) -> dict[str, Location]:
        """The strips of the projection, or of the convolution, of a layer of Mamba 2."""
        keys = self.metadata.integer("ssm.group_count") * self.metadata.integer("ssm.state_size")
        values, num_heads = self.metadata.integer("ssm.inner_size"), self.metadata.integer("ssm.time_step_rank")
        convolved = {"x": values, "b": keys, "c": keys}
        if block.endswith(".conv"):
            return fused(block, f"{prefix}ssm_conv1d.{suffix}", convolved)
        return fused(block, f"{prefix}ssm_in.{suffix}", {"z": values, **convolved, "dt": num_heads})

    def _net_rates(self) -> tuple[dict[str, int], int]:
        """The rows of the two numbers of each head of a gated delta network, and the key heads by which they are
        stored."""
        num_heads = self.metadata.integer("ssm.time_step_rank")
        return {"b": num_heads, "a": num_heads}, self.metadata.integer("ssm.group_count")

    def _net_widths(self) -> dict[str, int]:
        """The rows of a gated delta network's q, k and v."""
        keys = self.metadata.integer("ssm.group_count") * self.metadata.integer("ssm.state_size")
        return {"q": keys, "k": keys, "v": self.metadata.integer("ssm.inner_size")}

    def _attention_widths(self) -> dict[str, int]:
        """The rows of q, k and v."""
        metadata = self.metadata
        num_heads = metadata.integer("attention.head_count")
        num_kv_heads = metadata.integer("attention.head_count_kv", num_heads)
        key = metadata.integer("attention.key_length", metadata.integer("embedding_length") // num_heads)
        value = metadata.integer("attention.value_length", key)
        return {"q": num_heads * key, "k": num_kv_heads * key, "v": num_kv_heads * value}
