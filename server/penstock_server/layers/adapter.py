"""Sites of a model that LoRA adapters change: the layers that adapters add low-rank products to.

Layers register their sites while they are loaded. The embedding is a site too: where a linear layer multiplies by A, it
looks a column of A up. A site is this rank's part of one module of the base model, or of
several that are fused along their outputs. Where the ranks split outputs (with `Shard.exact`: always), each holds all
of A and its rows of B, and two ranks compute the bits of one. Where they split inputs, each holds its columns of A and
all of B, and what they add is summed with their products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock_server.attention.interface import StepAdapters
from penstock_server.kernels.native_build import NativeBuild
from penstock_server.kernels.native_ops import NativeOps
from penstock_server.layers.linear import Linear
from penstock_server.layers.step import StepContext
from penstock_server.weights.adapter import Change, Module, StoredWeight
from penstock_server.weights.loader import Parameter
from penstock_server.weights.location import EACH, Locator

if TYPE_CHECKING:
    from penstock_server.kernels.triton_low_rank import DeviceAdapter, LowRankSum


@dataclass(frozen=True, slots=True)
class SitePart:
    """Adjacent output columns of a site that belong to one module. An adapter changes them by one module only."""

    module: str
    rows: Tensor  # rows of the module's outputs, on this rank
    first_column: int
    inputs: range  # input features of the module, on this rank
    is_transposed: bool = False  # the columns are the module's inputs, and its outputs `rows` are what is read
    is_embedding: bool = False  # its inputs are token ids
    expert: int | None = None  # the expert, for a module that is a parameter of all experts

    @property
    def columns(self) -> range:
        return range(self.first_column, self.first_column + len(self.inputs if self.is_transposed else self.rows))

    def down(self, change: Change) -> Tensor:
        """A, as the site applies it: [rank, features that it reads on this rank]"""
        return self._rows_of(change).t() if self.is_transposed else self._inputs_of(change)

    def up(self, change: Change) -> Tensor:
        """B, as the site applies it: [columns, rank]"""
        return self._inputs_of(change).t() if self.is_transposed else self._rows_of(change)

    def _rows_of(self, change: Change) -> Tensor:
        return (change.up if self.expert is None else change.up[self.expert])[self.rows]

    def _inputs_of(self, change: Change) -> Tensor:
        down = change.down if self.expert is None else change.down[self.expert]
        return down[:, self.inputs.start : self.inputs.stop]


@dataclass(frozen=True, slots=True)
class OwnAdapter:
    """An adapter that belongs to the model, and is loaded with its weights. Sequences that name no adapter have it: all
    of them, or those with images."""

    folder: Path
    rank: int
    is_of_images: bool


@dataclass(frozen=True, slots=True, eq=False)
class NativeAdapter:
    """An adapter for the native kernels."""

    packed: Any  # products of all sites; A of the embedding's site is the identity
    embedding: Tensor | None  # [tokens, rank] what it looks up instead; None: the embedding is not changed


AddAdapters = Callable[[Tensor, Tensor, StepAdapters], None]
"""Adds to a layer's product with x [rows, in_features], y [rows, columns], what the rows' adapters add. The embedding's
x are token ids [rows]."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A layer with what adapters add to it, where programs are interpreted. Implements `Linear`."""

    linear: Linear
    sum: LowRankSum

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def native(self) -> object | None:
        return None

    def __call__(self, x: Tensor, step: StepContext | None) -> Tensor:
        y = self.linear(x, step)
        if step is not None:
            add_adapters(self.sum, x, y, step)
        return y


def add_adapters(low_rank: LowRankSum, x: Tensor, y: Tensor, step: StepContext) -> None:
    """Adds to y what the adapters of the step's rows add, as of `LowRankSum.add`."""
    if step.adapters is not None:
        _add_on_device(low_rank, x, y, step.adapters)


def _add_on_device(low_rank: LowRankSum, x: Tensor, y: Tensor, adapters: StepAdapters) -> None:
    assert adapters.tables is not None, "only GPUs interpret programs with adapters"
    low_rank.add(x, y, adapters.of_tokens, adapters.tables)


class AdapterSites:
    """All sites of a model on one rank."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        locators: Sequence[Locator],
        max_loaded: int,
        max_rank: int,
        stored: Callable[[str], StoredWeight],
        own: OwnAdapter | None = None,
    ) -> None:
        """locators: the names that transformers gives to the model's modules, followed by `.weight`, and those that
        other versions of it gave them. max_loaded: the most adapters at a time, of at most this rank, beside `own`.
        stored: a layer's weight in the checkpoint."""
        self._stored = stored
        self.max_loaded = max_loaded
        self.max_rank = max_rank
        self.own = own
        self._parameters = parameters
        self._locators = locators
        self._sites: list[list[SitePart]] = []
        self.modules: dict[str, Module] = {}
        """Modules that adapters can change, by all their names."""
        self.elements_per_rank = 0
        """Elements of an adapter that changes everything but experts, on this rank, per rank of its products."""
        self.expert_elements_per_rank = 0
        """Elements of its changes of experts."""

    def add(self, *names: str, order: Tensor | None = None) -> int:
        """Registers the site of layers with these names, which are fused along their outputs. Returns its number.
        order: of the outputs, if they are reordered; those of a module stay together."""
        parts: list[SitePart] = []
        column = 0
        for module, group in groupby(names, self._module):
            rows: list[range] = []
            first_column = column
            inputs = range(0)
            for name in group:
                rows, inputs = rows + self._rows(name), self._inputs(name)
                column = first_column + sum(map(len, rows))
            indices = torch.cat([torch.arange(each.start, each.stop) for each in rows])
            if order is not None:
                indices = indices[order[first_column:column].cpu() - first_column]
            parts.append(SitePart(module, indices, first_column, inputs))
            self.elements_per_rank += len(inputs) + column - first_column
        self._sites.append(parts)
        return len(self._sites) - 1

    def add_heads(self, name: str, num_heads: int, num_key_columns: int) -> tuple[range, range]:
        """Registers the projection from the latent of latent attention. The outputs of each of the heads on this rank
        are keys and then values. Keys are absorbed into the queries, which are multiplied by the transposed projection.
        Returns the sites of the heads' keys, and of their values."""
        module = self._module(name)
        rows = torch.cat([torch.arange(each.start, each.stop) for each in self._rows(name)])
        inputs = self._inputs(name)
        heads = rows.unflatten(0, (num_heads, -1))
        first = len(self._sites)
        for is_key in (True, False):
            for head in heads:
                its_rows = head[:num_key_columns] if is_key else head[num_key_columns:]
                self._sites.append([SitePart(module, its_rows, 0, inputs, is_transposed=is_key)])
                self.elements_per_rank += len(its_rows) + len(inputs)
        return range(first, first + num_heads), range(first + num_heads, first + 2 * num_heads)

    def add_experts(self, of_each: Sequence[Sequence[SitePart]]) -> int:
        """Registers a site of each of these parts, and returns the first one's number. Parts of all experts' parameters
        have the columns of those of single experts, of which an adapter has none then."""
        first = len(self._sites)
        for parts in of_each:
            self._sites.append(list(parts))
            sizes = [(part.expert is None, len(part.inputs) + len(part.columns)) for part in parts]
            self.expert_elements_per_rank += max(
                sum(size for kind, size in sizes if kind is is_apart) for is_apart in (True, False)
            )
        return first

    def located(self, parameter: str, expert: int | None = None) -> list[str]:
        """The names of a parameter's tensor, or of one expert's, in the name maps that have it."""
        names: dict[str, None] = {}
        for locator in self._locators:
            with suppress(KeyError):
                name = locator.locate(parameter).name
                if (EACH in name) is (expert is not None):
                    names[name.replace(EACH, str(expert))] = None
        return list(names)

    def register(self, names: Sequence[str], module: Module) -> str:
        """Adds a module by all its names, and returns the one that it has here."""
        self.modules |= dict.fromkeys(names, module)
        return module.name

    def add_embedding(self) -> int:
        """Registers the token embedding, of which each rank has all of A and B."""
        num_tokens, size = self._parameters["embedding.weight"].shape
        stored = self._stored("embedding")
        module = self._register("embedding", size, num_tokens, is_embedding=True, stored=stored)
        self._sites.append([SitePart(module, torch.arange(size), 0, range(num_tokens), is_embedding=True)])
        self.elements_per_rank += size + num_tokens
        return len(self._sites) - 1

    def add_head(self, weight: str) -> int:
        """Registers the output head. weight: the layer that has its weight, which is the embedding if the head is tied:
        adapters of the two are independent, as in PEFT."""
        parameter = self._parameters[f"{weight}.weight"]
        num_tokens, in_features = parameter.shape
        module = self._register("head", num_tokens, in_features, stored=self._stored(weight))
        mine = range(num_tokens) if parameter.part is None else parameter.part.range
        self._sites.append([SitePart(module, torch.arange(mine.start, mine.stop), 0, range(in_features))])
        self.elements_per_rank += in_features + len(mine)
        return len(self._sites) - 1

    def add_natively(self, site: int, ops: NativeOps) -> AddAdapters:
        """What adapters add at a site that is not in a native stack."""
        looks_up = self._sites[site][0].is_embedding

        def add(x: Tensor, y: Tensor, adapters: StepAdapters) -> None:
            if looks_up:
                if all(adapter.embedding is None for adapter in adapters.loaded):
                    return
                x = self._looked_up(x, y.dtype, adapters)
            ops.adapt(site, x, y, [adapter.packed for adapter in adapters.loaded], adapters.of_tokens)

        return add

    def add_on_device(self, site: int, device: torch.device) -> AddAdapters:
        """The same on a GPU."""
        low_rank = self.sum_at(range(site, site + 1), device)
        if not self._sites[site][0].is_embedding:
            return partial(_add_on_device, low_rank)
        (num_tokens,) = (len(part.inputs) for part in self._sites[site])

        def add(x: Tensor, y: Tensor, adapters: StepAdapters) -> None:
            assert adapters.tables is not None
            low_rank.add_looked_up(x, num_tokens, y, adapters.of_tokens, adapters.tables)

        return add

    def _looked_up(self, token_ids: Tensor, dtype: torch.dtype, adapters: StepAdapters) -> Tensor:
        """[rows, max_rank]: A of each row's adapter at its token."""
        found = torch.zeros((len(token_ids), self._widest_rank), dtype=dtype)
        for index, adapter in enumerate(adapters.loaded):
            if adapter.embedding is not None:
                rows = (adapters.of_tokens == index).nonzero()[:, 0]
                found[rows, : adapter.embedding.shape[1]] = adapter.embedding[token_ids[rows]]
        return found

    def sum_at(self, sites: range, device: torch.device) -> LowRankSum:
        """On a GPU, what adapters add to a layer at this site, or to as many layers as there are sites."""
        from penstock_server.kernels.triton_low_rank import LowRankSum

        first_part = sum(len(parts) for parts in self._sites[: sites.start])
        columns = [part.columns for site in sites for part in self._sites[site]]
        max_loaded = self.max_loaded + (self.own is not None)
        return LowRankSum.of(first_part, columns, self._widest_rank, max_loaded, device)

    def sums_of_experts(self, first: int, device: torch.device) -> tuple[LowRankSum, LowRankSum]:
        """On a GPU, what adapters add to both products of experts, whose sites begin at `first`."""
        from penstock_server.kernels.triton_low_rank import LowRankSum

        first_part = sum(len(parts) for parts in self._sites[:first])
        gate_up, down = ([part.columns for part in parts] for parts in self._sites[first : first + 2])
        num_parts, max_loaded = len(gate_up) + len(down), self.max_loaded + (self.own is not None)
        given = (self._widest_rank, max_loaded, device, num_parts)
        return LowRankSum.of(first_part, gate_up, *given), LowRankSum.of(first_part + len(gate_up), down, *given)

    def pack_on_device(self, changes: Mapping[str, Change], dtype: torch.dtype, device: torch.device) -> DeviceAdapter:
        """An adapter for the layers on a GPU. changes: by module, in this dtype."""
        from penstock_server.kernels.triton_low_rank import DeviceAdapter, PlainPart

        def packed(part: SitePart) -> PlainPart | None:
            change = changes.get(part.module)
            return None if change is None else PlainPart(part.down(change), part.up(change), change.scale)

        return DeviceAdapter.pack([packed(part) for parts in self._sites for part in parts], dtype, device)

    def pack(self, changes: Mapping[str, Change], build: NativeBuild) -> NativeAdapter:
        """An adapter for the native kernels. changes: by module, in the dtype of the kernels."""
        embedding = None
        sites: list[list[tuple[Tensor, Tensor, int, float]]] = []
        for parts in self._sites:
            sites.append([])
            for part in parts:
                change = changes.get(part.module)
                if change is None:
                    continue
                down = part.down(change)
                if part.is_embedding:
                    embedding = down.t().contiguous()
                    down = torch.eye(len(down), self._widest_rank, dtype=down.dtype)
                sites[-1].append((down.contiguous(), part.up(change).t().contiguous(), part.first_column, change.scale))
        return NativeAdapter(build.module.Adapter(sites), embedding)

    @property
    def _widest_rank(self) -> int:
        return self.max_rank if self.own is None else max(self.max_rank, self.own.rank)

    def _module(self, name: str) -> str:
        """The module of a layer."""
        parameter, location = self._parameters[f"{name}.weight"], self._locators[0].locate(f"{name}.weight")
        assert EACH not in location.name, "a site is one layer"
        shape = location.tensor_shape(parameter.shape)
        out_features, in_features = reversed(shape) if location.transposed else shape
        return self._register(name, out_features, in_features)

    def _register(self, name: str, out_features: int, in_features: int, **kind: Any) -> str:
        """Adds the module of a layer, and returns its name."""
        block, _, layer = name.rpartition(".")
        stored = [*self.located(f"{name}.weight"), *self.located(f"{block}.modules.{layer}.weight")]
        names = [each.removesuffix(".weight") for each in stored]
        return self.register(names, Module(names[0], out_features, in_features, **kind))

    def _rows(self, name: str) -> list[range]:
        """The rows of its module that this rank's part of a layer consists of."""
        parameter, location = self._parameters[f"{name}.weight"], self._locators[0].locate(f"{name}.weight")
        part = parameter.part
        assert location.dim == 0
        assert part is None or part.view is None, "a site is split along its outputs or its inputs"
        rows = part.range if part is not None and part.dim == 0 else range(parameter.shape[0])
        return [rows] if location.strip is None else list(location.strip.runs(rows))

    def _inputs(self, name: str) -> range:
        """The inputs of its module that this rank's part of a layer has."""
        parameter = self._parameters[f"{name}.weight"]
        part = parameter.part
        return part.range if part is not None and part.dim == 1 else range(parameter.shape[1])
