"""Compares a model's tensors with the model that its config.json describes, and states what each rank would hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock_server.device import choose_ops
from penstock_server.device.quantized import Kept
from penstock_server.engine.device import choose_device, choose_dtype
from penstock_server.engine.memory import MIN_TOKEN_BYTES, MemoryMeter, Share, usable_bytes
from penstock_server.engine.memory import Memory as DeviceMemory
from penstock_server.errors import ConfigError
from penstock_server.inspection.files import ModelFiles, StoredTensor
from penstock_server.inspection.quantization import Quantized, quantized
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.mamba import MambaSpec
from penstock_server.layers.shard import Shard
from penstock_server.layers.short_conv import ShortConvSpec
from penstock_server.models import is_described
from penstock_server.models.config import Config
from penstock_server.models.fallback import outline
from penstock_server.models.foreign import transformers
from penstock_server.models.interface import LoadOptions
from penstock_server.models.layer import ATTENTION_PARTS
from penstock_server.models.parameters import parameters
from penstock_server.models.pooling import foreign_pooling, read_pooling
from penstock_server.models.registry import read_spec
from penstock_server.models.spec import ModelSpec
from penstock_server.models.stage import served_in, stage_of
from penstock_server.models.tie import IsSame, fit, same_in
from penstock_server.parallel import RankGroup, Stage
from penstock_server.vision.family import FAMILIES
from penstock_server.vision.tower import tower_dtype
from penstock_server.weights.folder import ADAPTER_WEIGHTS, IMAGE_ADAPTER, find_weights
from penstock_server.weights.format import open_checkpoint
from penstock_server.weights.loader import expected_shapes, is_zero, mismatches, shortened, unused_biases
from penstock_server.weights.location import Locator
from penstock_server.weights.safetensors_file import LOADABLE, SafetensorsCheckpoint
from penstock_server.weights.safetensors_header import ITEM_BYTES, read_header

BLOCK_TOKENS = 16  # to count the memory of a model that transformers runs
_SERVES = {"embed": "embeddings", "rerank": "reranking"}


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank would hold."""

    num_heads: int
    num_kv_heads: int
    first_layer: int
    num_layers: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int = 0  # what its layers keep of each running sequence instead of keys and values
    snapshot_bytes: int = 0  # what a cached prefix keeps of it
    free_bytes: int = 0  # on its device, before anything is loaded
    fitting_tokens: int = 0  # tokens of KV cache that fit into the memory that the weights leave


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model would be loaded."""

    architecture: str
    max_position_tokens: int
    max_source_tokens: int  # the encoder's share of max_position_tokens; 0: the model has no encoder
    dtype: str
    device: str
    ranks: tuple[RankShare, ...]
    quantization: str = ""  # for people; empty: the weights are not quantized
    serves: str = "generation"  # or "embeddings", "reranking"
    reads_images: bool = False
    vocab_size: int = 0  # tokens with an embedding
    default_position_tokens: int | None = None  # without --max-total-tokens; None: max_position_tokens


def lay_out(
    files: ModelFiles,
    folder: Path,
    num_ranks: int,
    dtype_name: str,
    memory_fraction: float,
    *,
    num_stages: int = 1,
    deterministic: bool = False,
    trust_remote_code: bool = False,
) -> Layout | None:
    """Returns None when the folder's config.json describes no supported model. Adds all errors to `files.problems`.
    num_ranks: of each of the pipeline's stages."""
    problems = files.problems
    try:
        if not is_described(folder):
            device = choose_device("", 0)
            options = LoadOptions(
                folder,
                choose_dtype(dtype_name, device),
                device,
                BLOCK_TOKENS,
                trust_remote_code=trust_remote_code,
                deterministic=deterministic,
            )
            return lay_out_foreign(files, options, RankGroup(0, num_ranks, stage=Stage(0, num_stages)), memory_fraction)
        spec, names = read_spec(folder)
        spec = served_in(spec, Stage(0, num_stages))
        found = quantized(files, folder)
        tensors = files.tensors if found is None else found.tensors
        device = choose_device("", 0)
        dtype = choose_dtype(dtype_name, device)
        if tensors is not None:
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            fitted = fit(spec, names, files.locator, shapes, _same_tables(folder))
            spec, locator = fitted.spec, fitted.locator
            files.notes += [fitted.note] if fitted.note else []
            layout = WeightLayout(Shard.of(spec.hidden_size, spec.vocab_size, RankGroup()))
            table = parameters(spec, layout)
            expected = expected_shapes(table, locator)
            zeros = _zeros(files, folder, unused_biases(tensors, expected))
            shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in zeros}
            problems += mismatches(shapes, expected, locator.ignored)
            problems += [] if found is not None else _unloadable(tensors, expected)
        memory = MemoryMeter(device).measure()
        ops = choose_ops(device, dtype, deterministic=deterministic)
        if deterministic:
            files.notes.append(f"a token has the same bits in every batch on this {device.type} (--deterministic)")
        exact = device.type == "cpu" or deterministic
        if found is not None and not ops.kept.any:
            found = found.dequantized()
        kept = None if found is None else (found, locator, ops.kept)
        image_bytes = _image_bytes(spec, tensors or {}, folder, dtype, device)
        # The first ranks are the last stage.
        stages = [Stage(index, num_stages) for index in reversed(range(num_stages))]
        groups = [RankGroup(rank, num_ranks, stage=stage) for stage in stages for rank in range(num_ranks)]
        shares = [_share(spec, group, exact, dtype, kept, image_bytes) for group in groups]
    except ConfigError as error:
        problems.append(str(error))
        return None
    # On a CPU the ranks share one memory; each GPU has its own.
    sharing = len(shares) if device.type == "cpu" else 1
    weights = [share.weight_bytes for share in shares]
    total_weights = sum(weights) if sharing > 1 else max(weights)
    left = DeviceMemory(memory.total, memory.available - total_weights, 0)
    usable = usable_bytes(left, Share(memory_fraction, sharing))
    ranks = tuple(
        replace(
            share, free_bytes=memory.available, fitting_tokens=usable // (share.kv_bytes_per_token or MIN_TOKEN_BYTES)
        )
        for share in shares
    )
    serves = "generation" if spec.pooling is None else _SERVES[spec.pooling.task]
    name = str(dtype).removeprefix("torch.")
    quantization = "" if found is None else found.describe()
    return Layout(
        spec.architecture,
        spec.max_position_tokens,
        spec.max_source_tokens,
        name,
        device.type,
        ranks,
        quantization,
        serves,
        spec.reads_images,
        spec.vocab_size,
        spec.default_position_tokens,
    )


def _zeros(files: ModelFiles, folder: Path, biases: set[str]) -> set[str]:
    """The `unused_biases` that are zeros; all of them if they cannot be read yet, which a note says."""
    if not biases:
        return biases
    try:
        checkpoint = SafetensorsCheckpoint(find_weights(folder).paths) if files.kind == "safetensors" else None
    except ConfigError:
        checkpoint = None  # not downloaded
    if checkpoint is None:
        files.notes.append(
            f"{len(biases)} biases belong to layers that have none in this model: {shortened(biases)}; the model is "
            "refused at start if they are not zeros"
        )
        return biases
    zeros = {name for name in biases if is_zero(checkpoint, name)}
    checkpoint.close()
    return zeros


def _same_tables(folder: Path) -> IsSame | None:
    """Compares tables in the files; None if they are not downloaded or not converted."""
    try:
        checkpoint, _ = open_checkpoint(folder)
    except ConfigError:
        return None
    return same_in(checkpoint)


def lay_out_foreign(files: ModelFiles, options: LoadOptions, group: RankGroup, memory_fraction: float) -> Layout:
    """The layout of a model that transformers runs. Raises the ConfigError of loading it."""
    folder, device = options.folder, options.device
    if read_pooling(folder) is not None:
        raise foreign_pooling(folder)
    weights = None
    if files.tensors is not None and files.kind == "safetensors":
        weights = {
            name: torch.empty(tensor.shape, dtype=LOADABLE.get(tensor.dtype, torch.uint8), device="meta")
            for name, tensor in files.tensors.items()
        }
    found = outline(options, group, weights)
    files.notes.append(f"transformers {transformers().__version__} runs this model, slower and on one rank")
    if not found.is_complete:
        files.notes.append("only loading shows whether it runs over the paged cache: a layer depends on values")
    memory = MemoryMeter(device).measure()
    left = DeviceMemory(memory.total, memory.available - found.weight_bytes, 0)
    fitting = usable_bytes(left, Share(memory_fraction, 1)) // (found.kv_bytes_per_token or MIN_TOKEN_BYTES)
    rank = RankShare(
        found.num_heads,
        found.num_kv_heads,
        0,
        found.num_layers,
        found.weight_bytes,
        found.kv_bytes_per_token,
        free_bytes=memory.available,
        fitting_tokens=fitting,
    )
    architecture = Config.read(folder).require("model_type", str)
    return Layout(
        architecture,
        found.max_position_tokens,
        0,
        str(options.dtype).removeprefix("torch."),
        device.type,
        (rank,),
        vocab_size=found.vocab_size,
        default_position_tokens=found.default_position_tokens,
    )


def _unloadable(tensors: Mapping[str, StoredTensor], expected: Iterable[str]) -> list[str]:
    """A message when weights are of a safetensors type that the loader does not convert to floats."""
    names = [
        name for name in expected if name in tensors and tensors[name].dtype in ITEM_BYTES.keys() - LOADABLE.keys()
    ]
    if not names:
        return []
    types = ", ".join(sorted({tensors[name].dtype for name in names}))
    return [
        f"{len(names)} weights are of type {types}, which cannot be loaded: {shortened(names)}; "
        f"{', '.join(LOADABLE)} can"
    ]


def _image_bytes(
    spec: ModelSpec, tensors: Mapping[str, StoredTensor], folder: Path, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes of the vision tower, and of the adapter that prompts with images use."""
    if not spec.reads_images:
        return 0
    family = FAMILIES[spec.architecture]
    of_tower = re.compile("|".join(family.tower))
    num_tower_weights = sum(math.prod(tensor.shape) for name, tensor in tensors.items() if of_tower.fullmatch(name))
    num_adapter_weights = 0
    path = folder / IMAGE_ADAPTER / ADAPTER_WEIGHTS
    if family.has_adapter and path.is_file():
        num_adapter_weights = sum(math.prod(place.shape) for place in read_header(path).values())
    return num_tower_weights * tower_dtype(dtype, device).itemsize + num_adapter_weights * dtype.itemsize


def _share(
    spec: ModelSpec,
    group: RankGroup,
    exact: bool,
    dtype: torch.dtype,
    kept: tuple[Quantized, Locator, Kept] | None,
    image_bytes: int,
) -> RankShare:
    """What a rank would hold, without its memory. exact: as of `Shard`.
    kept: the quantized weights, if there are any, and which of them the operators take. image_bytes: of the weights
    that every rank needs for images."""
    shard = Shard.of(spec.hidden_size, spec.vocab_size, group, exact)
    table = parameters(spec, WeightLayout(shard))
    layers, held = stage_of(spec, table, group.stage)
    table = {name: parameter for name, parameter in table.items() if name in held}
    weights = image_bytes + sum(math.prod(each.local_shape) * each.dtype_in(dtype).itemsize for each in table.values())
    if kept is not None:
        found, locator, kept_by_ops = kept
        weights -= found.saved_bytes(table, locator, dtype, kept_by_ops)
    attention = [part for index in layers for part in spec.layers[index].memories]
    attention = attention[:1] if spec.is_encoder else attention  # the layers of an encoder take turns in one cache
    parts = [(ATTENTION_PARTS[type(each)], each) for each in attention]
    kv_numbers = sum(part.kv_elements_per_token(each, shard) for part, each in parts)
    states = [layout for part, each in parts for layout in part.state_layouts(each, shard)]
    with_kv = [each for part, each in parts if part.kv_elements_per_token(each, shard)]
    with_heads = [each for each in (*with_kv, *attention) if not isinstance(each, ShortConvSpec | MambaSpec)]
    heads = [shard.heads(each.num_heads, each.num_kv_heads) for each in with_heads[:1]]
    kv_bytes = kv_numbers * dtype.itemsize
    return RankShare(
        sum(len(each.mine) for each in heads),
        sum(len(each.my_kv) for each in heads),
        layers.start,
        len(layers),
        weights,
        kv_bytes,
        sum(layout.slot_bytes for layout in states),
        sum(layout.snapshot_bytes for layout in states),
    )
