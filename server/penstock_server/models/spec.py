"""What a decoder is made of, as data: architectures read a `ModelSpec` from config.json, one decoder runs them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_server.errors import ConfigError
from penstock_server.layers.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder: token embedding, layers of attention and MLP each behind an RMSNorm, a final norm, a head."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_position_tokens: int
    tied_head: bool
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"config.json: {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: {self.num_heads} attention heads are not a multiple of {self.num_kv_heads} KV heads"
            )

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class NameMap:
    """What a checkpoint calls our parameters, with {i} for the layer, and which of its tensors are never needed."""

    names: Mapping[str, str]
    ignored: tuple[str, ...] = field(default=())  # regular expressions that match whole names

    def checkpoint_name(self, parameter: str) -> str:
        """layers.3.attention.q.weight → model.layers.3.self_attn.q_proj.weight"""
        layer, stem = split_layer(parameter)
        stem, _, suffix = stem.rpartition(".")
        return f"{self.names[stem]}.{suffix}".replace("{i}", str(layer))


def split_layer(parameter: str) -> tuple[int | None, str]:
    """layers.3.mlp.up.weight → (3, layers.{i}.mlp.up.weight); names outside the layers come back with None."""
    parts = parameter.split(".")
    if parts[0] != "layers":
        return None, parameter
    return int(parts[1]), ".".join(["layers", "{i}", *parts[2:]])
