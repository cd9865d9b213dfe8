"""Tensors that Hugging Face's models have and GGUF files hold in other pieces, or in the metadata. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock_server.weights.gguf.decoder import num_layers
from penstock_server.weights.gguf.header import TensorInfo
from penstock_server.weights.gguf.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Unfolding:
    """What unfolds a latent into keys and values: each head's key rows, then its value rows."""

    info: TensorInfo  # [heads * (key + value), latent]
    keys: TensorInfo  # [heads, latent, key]: turned, since llama.cpp applies it to the queries
    values: TensorInfo  # [heads, value, latent]


@dataclass(frozen=True, slots=True)
class Constant:
    """A single number of the metadata."""

    info: TensorInfo  # [1]
    value: float


def stored_tensors(metadata: Metadata) -> dict[str, TensorInfo]:
    """The file's own, with shapes as their models have them, and without the parts of what is derived."""
    tensors = {}
    for name, info in metadata.header.tensors.items():
        if name.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))  # a dimension of 1 is dropped by llama.cpp's converter
        if not name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
            tensors[name] = info
    return tensors


def derived_tensors(metadata: Metadata) -> dict[str, Unfolding | Constant]:
    """By name. Raises ConfigError when the parts of one do not fit together."""
    found: list[Unfolding | Constant] = [*_unfoldings(metadata), *_constants(metadata)]
    return {tensor.info.name: tensor for tensor in found}


def _unfoldings(metadata: Metadata) -> Iterator[Unfolding]:
    """Newer files have two tensors, older ones the one that we use, some both."""
    tensors = metadata.header.tensors
    for name, keys in tensors.items():
        joined = name.replace(".attn_k_b.", ".attn_kv_b.")
        if joined == name or joined in tensors:
            continue
        values = tensors.get(name.replace(".attn_k_b.", ".attn_v_b."))
        if values is None or not len(keys.shape) == len(values.shape) == 3:
            raise metadata.refuse(f"{name} is without a tensor of each head's values beside it")
        (heads, latent, key), (value_heads, value, value_latent) = keys.shape, values.shape
        if (heads, latent) != (value_heads, value_latent):
            raise metadata.refuse(f"{name} is {list(keys.shape)} and does not fit {values.name}, {list(values.shape)}")
        shape = (heads * (key + value), latent)
        yield Unfolding(replace(values, name=joined, shape=shape), keys, values)


def _constants(metadata: Metadata) -> Iterator[Constant]:
    """The learned numbers of Apertus' activation."""
    for name in ("alpha_p", "alpha_n"):
        values = metadata.get(f"xielu.{name}")
        if values is None:
            continue
        if len(values) != num_layers(metadata):
            raise metadata.refuse(f"xielu.{name} has {len(values)} numbers for {num_layers(metadata)} layers")
        for index, value in enumerate(values):
            yield Constant(TensorInfo(f"blk.{index}.xielu_{name}", (1,), 0, 0), value)
