"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` beside the tensors (`adapter_file`).

An adapter changes modules of the base model, by the names that transformers gives them: y += scale · B(A(x)). What is
saved for training only is ignored. Whatever else changes the result is refused by name, so no adapter is applied in
part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.weights.adapter_file import open_adapter
from penstock_server.weights.checkpoint import Checkpoint, Part
from penstock_server.weights.folder import ADAPTER_CONFIG as CONFIG_NAME
from penstock_server.weights.format import open_checkpoint
from penstock_server.weights.loader import Parameter, shortened
from penstock_server.weights.location import Location, Locator
from penstock_server.weights.memory import PIECE_BYTES

PREFIX = "base_model.model."  # starts tensor names: PEFT's wrappers around the base model; published ones may lack it
OF_LINEAR = (".lora_A.weight", ".lora_B.weight")
OF_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
COPY = ".base_layer.weight"
# Between a module's name and the tensors of one of its parameters, for each parameter behind it that is changed too.
NESTED = ".base_layer"
MAX_CONFIG_BYTES = 1 << 20
# How far a row of a quantized base may be from the same row of the copy that PEFT saves, relative to its length.
# Rows that were initialized again are farther away.
MAX_ROW_ERROR = 0.5
MERGE = "merge the adapter into its base with peft (merge_and_unload), and serve the result"
# Keys that say how an adapter was trained or initialized. Every other key that is set must be one that is read here.
_OF_TRAINING = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "monteclora_config",
        "peft_version",
        "qalora_group_size",
        "revision",
        "task_type",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)
# Limits of a regular expression in `target_modules`: characters and repetitions.
_MAX_PATTERN = 4096
_MAX_REPETITIONS = 6
# What an adapter can hold that is no product of A and B of a module.
_NOT_LOW_RANK = {
    "modules_to_save": "whole modules",
    "trainable_token_indices": "tokens with embeddings of their own",
}
# Initializations that take a part of the base's weights into the adapter, so it fits the changed base only.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in the base's checkpoint."""

    folder: Path
    location: Location
    shape: tuple[int, int]

    @classmethod
    def of(cls, folder: Path, locator: Locator, parameters: Mapping[str, Parameter], layer: str) -> StoredWeight:
        """The weight of a layer, in the checkpoint of a prepared folder."""
        num_rows, num_columns = parameters[f"{layer}.weight"].shape
        return cls(folder, locator.locate(f"{layer}.weight"), (num_rows, num_columns))


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the base that adapters can change, or a parameter of all experts of a layer, which is
    [num_experts, out_features, in_features]."""

    name: str
    out_features: int
    in_features: int  # the number of tokens for an embedding
    num_experts: int | None = None
    swaps: bool = False  # for experts: A belongs to the outputs and B to the inputs
    part_of: str = ""  # for one expert: the parameter of all experts that contains it
    is_embedding: bool = False
    stored: StoredWeight | None = None  # for embedding and head, whose weight PEFT saves with the adapter

    @property
    def suffixes(self) -> tuple[str, str]:
        """Suffixes of the names of its tensors A and B."""
        return OF_EMBEDDING if self.is_embedding else OF_LINEAR

    @property
    def parameter_suffix(self) -> str:
        """Between its name and that of the parameter that an adapter changes."""
        return ".weight" if self.num_experts is None else ""

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of its tensors A and B."""
        ranks = rank * (self.num_experts or 1)
        sizes = (self.out_features, self.in_features) if self.swaps else (self.in_features, self.out_features)
        return (ranks, sizes[0]), (sizes[1], ranks)

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The two factors of its change, as of `Change`, in tensors of these shapes."""
        if self.num_experts is None:
            return a, b
        # PEFT has the ranks of one expert together in A, and the experts of one rank in B.
        down = a.unflatten(0, (self.num_experts, -1))
        up = b.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        return (up.transpose(1, 2), down.transpose(1, 2)) if self.swaps else (down, up)


@dataclass(frozen=True, slots=True)
class _Changed:
    """A module that an adapter changes."""

    name: str  # one of the names that adapters may give it
    stem: str  # stem of its tensors' names


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter adds to a module's output: scale · up(down(x)). An embedding's x has a 1 at the token. Factors of
    all experts have these as a first dimension."""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [out_features, rank]
    scale: float


def highest_rank(folder: Path) -> int:
    """Highest rank of an adapter's products. Raises ConfigError if its config is damaged or not supported."""
    return _Config.read(folder).highest_rank


def read_adapter(folder: Path, modules: Mapping[str, Module], max_rank: int, dtype: torch.dtype) -> dict[str, Change]:
    """The changes of an adapter, by the names of their modules. modules: those that adapters can change, by the names
    that adapters may give them. Raises ConfigError if the adapter is damaged, was made for another base, or needs what
    is not supported."""
    with _opened(folder) as (config, path, checkpoint):
        return {
            modules[each.name].name: _change(checkpoint, config, path, each, modules[each.name], max_rank, dtype)
            for each in _changed_modules(checkpoint, config, path, modules)
        }


def check_adapter(folder: Path, modules: Mapping[str, Module], max_rank: int) -> list[Module]:
    """The modules that an adapter changes. Refuses it as `read_adapter` does, by the names and shapes of its tensors,
    which it does not read."""
    with _opened(folder) as (config, path, checkpoint):
        changed = _changed_modules(checkpoint, config, path, modules)
        for each in changed:
            _check_shapes(checkpoint, config, path, each, modules[each.name], max_rank)
    return [modules[each.name] for each in changed]


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[_Config, Path, Checkpoint]]:
    config = _Config.read(folder)
    path, checkpoint = open_adapter(folder)
    try:
        yield config, path, checkpoint
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    finally:
        checkpoint.close()


def _changed_modules(
    checkpoint: Checkpoint, config: _Config, path: Path, modules: Mapping[str, Module]
) -> list[_Changed]:
    """The modules that the tensors belong to, each with both of its tensors."""
    prefix = PREFIX if any(name.startswith(PREFIX) for name in checkpoint.names()) else ""
    found: dict[str, set[str]] = {}  # by what is between prefix and suffix
    for tensor in checkpoint.names():
        suffix = next((suffix for suffix in (*OF_LINEAR, *OF_EMBEDDING, COPY) if tensor.endswith(suffix)), None)
        if suffix is None or not tensor.startswith(prefix):
            raise ConfigError(
                f"{path}: tensor {tensor} is not supported; A and B of LoRA are, and copies of the base's embedding "
                f"and head beside them; {MERGE}"
            )
        found.setdefault(tensor.removeprefix(prefix).removesuffix(suffix), set()).add(suffix)
    if not found:
        raise ConfigError(f"{path} holds no tensors")
    changed = config.changed(found, prefix, modules)
    names = [each.name for each in changed]
    if unknown := set(names) - modules.keys():
        raise ConfigError(
            f"{path} changes {len(unknown)} modules that the base model does not have, or that adapters cannot change "
            f"here: {shortened(unknown)}; they change linear layers and experts of the text model, its embedding and "
            "its head"
        )
    for each, suffixes in zip(changed, found.values(), strict=True):
        module = modules[each.name]
        for missing in set(module.suffixes) - suffixes:
            raise ConfigError(f"{path} lacks the tensor {each.stem}{missing}")
        for other in suffixes - {*module.suffixes, *([COPY] if module.stored else [])}:
            raise ConfigError(f"{path}: tensor {each.stem}{other} does not belong to a module of this kind")
        if COPY in suffixes and module.stored is not None:
            _check_copy(checkpoint, f"{each.stem}{COPY}", path, module.stored)
    if len({modules[name].name for name in names}) < len(names):
        raise ConfigError(f"{path} changes a module under two names: {shortened(names)}")
    if twice := {modules[name].part_of for name in names} & {modules[name].name for name in names}:
        raise ConfigError(
            f"{path} changes experts twice, one by one and by a parameter of all of them: {shortened(twice)}; {MERGE}"
        )
    config.check_complete(names, modules)
    return changed


def _check_copy(checkpoint: Checkpoint, tensor: str, path: Path, stored: StoredWeight) -> None:
    """Refuses a copy of a weight of the base that is not this base's."""
    num_rows, num_columns = stored.shape
    other = f"{path}: tensor {tensor} is not the weight of this base"
    if checkpoint.shape(tensor) != stored.shape:
        raise ConfigError(
            f"{other}: its shape is {list(checkpoint.shape(tensor))}, not {list(stored.shape)}; if the vocabulary was "
            f"changed, {MERGE}"
        )
    base, _ = open_checkpoint(stored.folder)
    try:
        step = max(1, PIECE_BYTES // (4 * num_columns)) if stored.location.has_independent_rows(base) else num_rows
        for first in range(0, num_rows, step):
            rows = range(first, min(num_rows, first + step))
            copied, expected = (torch.empty(len(rows), num_columns) for _ in range(2))
            Location(tensor).read(checkpoint, stored.shape, Part(0, rows), copied)
            stored.location.read(base, stored.shape, Part(0, rows), expected)
            wrong = (copied - expected).norm(dim=1) > MAX_ROW_ERROR * expected.norm(dim=1)
            if wrong.any():
                row = first + int(wrong.nonzero()[0])
                raise ConfigError(f"{other}: the row of token {row} differs; {MERGE}")
    finally:
        base.close()


def _change(
    checkpoint: Checkpoint,
    config: _Config,
    path: Path,
    changed: _Changed,
    module: Module,
    max_rank: int,
    dtype: torch.dtype,
) -> Change:
    rank = _check_shapes(checkpoint, config, path, changed, module, max_rank)
    matrices = [torch.empty(shape, dtype=dtype) for shape in module.shapes(rank)]
    for suffix, matrix in zip(module.suffixes, matrices, strict=True):
        checkpoint.read(f"{changed.stem}{suffix}", None, matrix)
    return Change(*module.factors(*matrices), config.scale(changed.name, rank))


def _check_shapes(
    checkpoint: Checkpoint,
    config: _Config,
    path: Path,
    changed: _Changed,
    module: Module,
    max_rank: int,
) -> int:
    """The rank of a module's change, whose tensors must have the shapes that it implies."""
    rank = config.rank(changed.name)
    if rank > max_rank:
        raise ConfigError(
            f"{path}: the rank of {changed.name} is {rank}, at most {max_rank} is allowed; raise --max-lora-rank"
        )
    for suffix, expected in zip(module.suffixes, module.shapes(rank), strict=True):
        tensor = f"{changed.stem}{suffix}"
        if (shape := checkpoint.shape(tensor)) != expected:
            raise ConfigError(
                f"{path}: tensor {tensor} has shape {list(shape)}, but base model and {CONFIG_NAME} imply "
                f"{list(expected)}; was the adapter trained on another base?"
            )
    return rank


class _Config:
    """A checked `adapter_config.json`."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self._values = values
        self._path = path
        if values.get("peft_type") != "LORA":
            raise self._refuse(f"peft_type is {values.get('peft_type')!r}, must be 'LORA'")
        if values.get("use_dora"):
            raise self._refuse("use_dora is set: DoRA adapters are not supported")
        for key, what in _NOT_LOW_RANK.items():
            if values.get(key):
                raise self._refuse(f"{key} is {values[key]!r}: {what} are not supported; {MERGE}")
        if values.get("bias", "none") != "none":
            raise self._refuse(f"bias is {values['bias']!r}, must be 'none': trained biases are not supported")
        for key in values.keys() - _OF_TRAINING - _READ:
            if values[key]:
                raise self._refuse(f"{key} is {values[key]!r}, which is not supported")
        initialized = str(values.get("init_lora_weights", "")).lower()
        if initialized.startswith(_CHANGES_BASE):
            raise self._refuse(
                f"init_lora_weights is {initialized!r}, which changes the base's weights; convert the adapter to plain "
                "LoRA with peft (path_initial_model_for_weight_conversion)"
            )
        self._parameters = values.get("target_parameters") or []
        if not isinstance(self._parameters, list) or not all(isinstance(each, str) for each in self._parameters):
            raise self._refuse(f"target_parameters is {self._parameters!r}, must be a list of names of parameters")
        self._rank = self._positive("r", values.get("r"))
        self._alpha = self._number("lora_alpha", values.get("lora_alpha", self._rank))
        self._ranks = {key: self._positive("rank_pattern", value) for key, value in self._pattern("rank_pattern")}
        self._alphas = {key: self._number("alpha_pattern", value) for key, value in self._pattern("alpha_pattern")}

    @classmethod
    def read(cls, folder: Path) -> _Config:
        path = folder / CONFIG_NAME
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{folder} is not a LoRA adapter: cannot read {CONFIG_NAME} ({error.strerror})"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a JSON object")
        return cls(values, path)

    @property
    def highest_rank(self) -> int:
        return max([self._rank, *self._ranks.values()])

    def rank(self, module: str) -> int:
        name = self._key(module)
        return next((rank for key, rank in self._ranks.items() if _ends_with(name, key)), self._rank)

    def scale(self, module: str, rank: int) -> float:
        name = self._key(module)
        alpha = next((alpha for key, alpha in self._alphas.items() if _ends_with(name, key)), self._alpha)
        return alpha / (rank**0.5 if self._values.get("use_rslora") else rank)

    def _key(self, module: str) -> str:
        """What patterns name: the module, or its weight if that is changed as a parameter."""
        weight = f"{module}.weight"
        return weight if self._is_target_parameter(weight) else module

    def changed(self, names: Iterable[str], prefix: str, modules: Mapping[str, Module]) -> list[_Changed]:
        """The modules that tensors of these names after the prefix change. PEFT names parameters by the module that has
        them: wrappers of it are in each other, in its order of its parameters, the last one outside."""
        parameters: dict[str, list[str]] = {}
        for name, module in modules.items():
            if module.num_experts is not None and self._is_target_parameter(name):
                parameters.setdefault(name.rpartition(".")[0], []).append(name)
        found: list[_Changed] = []
        for name in names:
            owner = name
            while owner.endswith(NESTED):
                owner = owner.removesuffix(NESTED)
            depth = (len(name) - len(owner)) // len(NESTED)
            its_own = parameters.get(owner, [])
            parameter = its_own[-1 - depth] if depth < len(its_own) else name
            found.append(_Changed(parameter, f"{prefix}{name}"))
        return found

    def check_complete(self, found: list[str], modules: Mapping[str, Module]) -> None:
        """Refuses an adapter that lacks a module which its config names."""
        for target in self._parameters:
            if not any(_ends_with(f"{name}{module.parameter_suffix}", target) for name, module in modules.items()):
                raise self._refuse(
                    f"target_parameters has {target!r}, which the base model does not have, or adapters cannot change "
                    f"here; {MERGE}"
                )
        if self._values.get("layers_to_transform") not in (None, []) or self._values.get("exclude_modules"):
            return  # a part of the layers or modules: the tensors tell
        # Targets may name the projections of experts as well as those of dense layers, and then mean the latter only.
        has_single_experts = any(modules[name].part_of for name in found)
        named = {
            module.name
            for name, module in modules.items()
            if self._is_target_parameter(f"{name}{module.parameter_suffix}")
            or (self._is_target(name) and (has_single_experts or not module.part_of) and module.num_experts is None)
        }
        if missing := named - {modules[name].name for name in found}:
            raise ConfigError(
                f"{self._path.parent} lacks the tensors of {len(missing)} modules that {CONFIG_NAME} "
                f"names: {shortened(missing)}"
            )

    def _is_target_parameter(self, parameter: str) -> bool:
        return any(_ends_with(parameter, target) for target in self._parameters)

    def _is_target(self, module: str) -> bool:
        """Whether the config names a module: by the end of its name, or by a regular expression for all of it."""
        targets = self._values.get("target_modules")
        if isinstance(targets, list):
            return any(_ends_with(module, str(target)) for target in targets)
        if not isinstance(targets, str) or _may_be_slow(targets):
            return False  # the tensors tell
        try:
            return re.fullmatch(targets, module) is not None
        except (re.error, RecursionError) as error:
            raise self._refuse(f"target_modules is {targets!r}, which is no regular expression: {error}") from error

    def _pattern(self, key: str) -> Iterator[tuple[str, Any]]:
        values = self._values.get(key) or {}
        if not isinstance(values, dict):
            raise self._refuse(f"{key} must be an object, not {values!r}")
        for name, value in values.items():
            name = name.removeprefix("^").removeprefix(r".*\.")  # the latter as PEFT writes it for experts
            if not re.fullmatch(r"[\w.]+", name):
                raise self._refuse(f"{key} has the regular expression {name!r}; names of modules are supported")
            yield name, value

    def _positive(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refuse(f"{key} is {value!r}, must be a number of at least 1")
        return value

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not -1e6 < value < 1e6:
            raise self._refuse(f"{key} is {value!r}, must be a number between -1e6 and 1e6")
        return float(value)

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}")


def _may_be_slow(pattern: str) -> bool:
    """Whether a match could take long, during which the worker's other threads stand still: a repeated group takes
    exponential time, and each other repetition as many steps as a name has characters, for each step of those before.
    The patterns that trainers write have up to five repetitions."""
    num_repetitions = sum(pattern.count(sign) for sign in "*+{")
    return (
        len(pattern) > _MAX_PATTERN or num_repetitions > _MAX_REPETITIONS or re.search(r"\)[*+{]", pattern) is not None
    )


def _ends_with(module: str, name: str) -> bool:
    """Whether a module has this name, or is below others."""
    return module == name or module.endswith(f".{name}")
