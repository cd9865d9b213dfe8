"""Tensors that GGUF files keep in several pieces or in the metadata. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock_server.weights.gguf.decoder import num_layers
from penstock_server.weights.gguf.header import TensorInfo
from penstock_server.weights.gguf.metadata import Metadata

# llama.cpp's converter gives vectors of Mamba 2 and of Kimi Linear several dimensions. Mamba has a rate for each
# element of a state.
VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight", *(f".ssm_conv1d_{name}.weight" for name in "qkv"))


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """The matrix that expands a latent to keys and values: for each head its key rows, then its value rows."""

    info: TensorInfo  # [heads * (key + value), latent]
    keys: TensorInfo  # [heads, latent, key]: transposed, because llama.cpp applies it to the queries
    values: TensorInfo  # [heads, value, latent]


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor with one number, from the metadata."""

    info: TensorInfo  # [1]
    value: float


def stored_tensors(metadata: Metadata) -> dict[str, TensorInfo]:
    """The tensors that are used as stored, with their shapes in Hugging Face's models."""
    tensors = {}
    for name, info in metadata.header.tensors.items():
        if name.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))  # llama.cpp's converter drops dimensions of size 1
        if name.endswith(VECTORS) and not (name.endswith(".ssm_a") and info.shape[-1] > 1):
            info = replace(info, shape=(math.prod(info.shape),))
        if name.endswith(CONVOLUTIONS):
            info = replace(info, shape=(math.prod(info.shape[:-1]), 1, info.shape[-1]))
        if not name.endswith((".attn_k_b.weight", ".attn_v_b.weight")):
            tensors[name] = info
    return tensors


def derived_tensors(metadata: Metadata) -> dict[str, LatentExpansion | Constant]:
    """The tensors made from pieces or metadata, by name. Raises ConfigError when pieces do not match."""
    found: list[LatentExpansion | Constant] = [*_latent_expansions(metadata), *_constants(metadata)]
    return {tensor.info.name: tensor for tensor in found}


def _latent_expansions(metadata: Metadata) -> Iterator[LatentExpansion]:
    """Newer files split the matrix in two tensors, older files store it whole, and some do both."""
    tensors = metadata.header.tensors
    for name, keys in tensors.items():
        joined = name.replace(".attn_k_b.", ".attn_kv_b.")
        if joined == name or joined in tensors:
            continue
        values = tensors.get(name.replace(".attn_k_b.", ".attn_v_b."))
        if values is None or not len(keys.shape) == len(values.shape) == 3:
            raise metadata.error(f"{name} has no matching attn_v_b tensor with three dimensions")
        (heads, latent, key), (value_heads, value, value_latent) = keys.shape, values.shape
        if (heads, latent) != (value_heads, value_latent):
            raise metadata.error(f"{name} is {list(keys.shape)} and does not match {values.name}, {list(values.shape)}")
        shape = (heads * (key + value), latent)
        yield LatentExpansion(replace(values, name=joined, shape=shape), keys, values)


def _constants(metadata: Metadata) -> Iterator[Constant]:
    """The learned parameters of Apertus' activation, xIELU."""
    for name in ("alpha_p", "alpha_n"):
        values = metadata.get(f"xielu.{name}")
        if values is None:
            continue
        if len(values) != num_layers(metadata):
            raise metadata.error(f"xielu.{name} has {len(values)} numbers for {num_layers(metadata)} layers")
        for index, value in enumerate(values):
            yield Constant(TensorInfo(f"blk.{index}.xielu_{name}", (1,), 0, 0), value)
