"""A model's tensors held against what its config.json describes, and what each rank would hold. Computes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock_server.engine.device import choose_device, choose_dtype
from penstock_server.engine.memory import Memory as DeviceMemory
from penstock_server.engine.memory import MemoryMeter, Share, usable_bytes
from penstock_server.errors import ConfigError
from penstock_server.inspection.source import Source, StoredTensor
from penstock_server.layers.shard import Shard
from penstock_server.models.layer import ATTENTION_PARTS
from penstock_server.models.parameters import parameters
from penstock_server.models.registry import read_spec
from penstock_server.models.spec import ModelSpec
from penstock_server.parallel import RankGroup
from penstock_server.weights.loader import NameSource
from penstock_server.weights.safetensors_header import ITEM_BYTES

FLOATS = ("F64", "F32", "F16", "BF16")
NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank would hold."""

    num_heads: int
    num_kv_heads: int
    weight_bytes: int
    kv_bytes_per_token: int
    free_bytes: int  # of its device, before anything is loaded
    fitting_tokens: int  # of KV cache beside the weights


@dataclass(frozen=True, slots=True)
class Layout:
    """A model as it would be loaded."""

    architecture: str
    max_position_tokens: int
    max_source_tokens: int  # of these, in a model with an encoder; 0: it has none
    dtype: str
    device: str
    ranks: tuple[RankShare, ...]


def lay_out(source: Source, folder: Path, num_ranks: int, dtype_name: str, memory_fraction: float) -> Layout | None:
    """None when the folder's config.json describes no model that is known. What is wrong is added to the problems."""
    tensors, problems = source.tensors, source.problems
    try:
        spec, names = read_spec(folder)
        device = choose_device("", 0)
        dtype = choose_dtype(dtype_name, device)
        if tensors is not None:
            sources = source.own_names or names.fitted(tensors)
            spec = spec.fitted(sources, tensors)
            problems += misfits(tensors, _wanted(spec, sources), sources.ignored)
        memory = MemoryMeter(device).measure()
        ranks = [_share(spec, RankGroup(rank, num_ranks), dtype, device) for rank in range(num_ranks)]
    except ConfigError as error:
        problems.append(str(error))
        return None
    # On a CPU the ranks share one memory; of GPUs each has its own.
    sharing = num_ranks if device.type == "cpu" else 1
    total_weights = (
        sum(weights for *_, weights, _ in ranks) if sharing > 1 else max(weights for *_, weights, _ in ranks)
    )
    left = DeviceMemory(memory.total, memory.available - total_weights, 0)
    usable = usable_bytes(left, Share(memory_fraction, sharing))
    shares = tuple(
        RankShare(heads, kv_heads, weights, kv_bytes, memory.available, usable // kv_bytes)
        for heads, kv_heads, weights, kv_bytes in ranks
    )
    max_source_tokens = 0 if spec.encoder is None else spec.encoder.max_source_tokens
    name = str(dtype).removeprefix("torch.")
    return Layout(spec.architecture, spec.max_position_tokens, max_source_tokens, name, device.type, shares)


def misfits(
    tensors: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], ignored: Iterable[str]
) -> list[str]:
    """Every way in which the checkpoint is not the model that its configuration describes."""
    problems = []
    patterns = [re.compile(pattern) for pattern in ignored]
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and not any(p.fullmatch(name) for p in patterns)]
    if missing:
        problems.append(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {_some(missing)}")
    if extra:
        problems.append(f"the checkpoint holds {len(extra)} tensors that the model has no place for: {_some(extra)}")
    there = [name for name in wanted if name in tensors]
    wrong = [name for name in there if tensors[name].shape != wanted[name]]
    for name in wrong[:NAMES_SHOWN]:
        shape = list(tensors[name].shape)
        problems.append(f"tensor {name} has shape {shape}, but config.json makes it {list(wanted[name])}")
    if len(wrong) > NAMES_SHOWN:
        problems.append(f"{len(wrong) - NAMES_SHOWN} more tensors have other shapes than config.json makes them")
    no_floats = [name for name in there if tensors[name].dtype in ITEM_BYTES.keys() - set(FLOATS)]
    if no_floats:
        kinds = sorted({tensors[name].dtype for name in no_floats})
        problems.append(
            f"{len(no_floats)} weights are of type {', '.join(kinds)}, which cannot be loaded: {_some(no_floats)}; "
            f"{', '.join(FLOATS)} can"
        )
    return problems


def _wanted(spec: ModelSpec, names: NameSource) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors by name, and the shapes that they must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters(spec, Shard.of(spec.hidden_size, spec.vocab_size, RankGroup())).items():
        source = names.source(name)
        shapes |= dict.fromkeys(source.names(parameter.shape), source.tensor_shape(parameter.shape))
    return shapes


def _share(spec: ModelSpec, group: RankGroup, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int, int]:
    """(query heads and KV heads of a layer, weight bytes, KV bytes a token)"""
    shard = Shard.of(spec.hidden_size, spec.vocab_size, group, exact=device.type == "cpu")
    table = parameters(spec, shard)
    weights = sum(math.prod(each.local_shape) * each.dtype_in(dtype).itemsize for each in table.values())
    attention = [layer.attention for layer in spec.layers]
    kv_numbers = sum(ATTENTION_PARTS[type(each)].cached_numbers(each, shard) for each in attention)
    heads = shard.heads(attention[0].num_heads, attention[0].num_kv_heads)
    return len(heads.mine), len(heads.my_kv), weights, kv_numbers * dtype.itemsize


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more
