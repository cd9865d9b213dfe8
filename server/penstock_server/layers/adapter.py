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

from penstock_server.device.attention.interface import StepAdapters
from penstock_server.device.native.build import NativeBuild
from penstock_server.device.native.ops import NativeOps
from penstock_server.device.ops import Ops
from penstock_server.layers.step import AddAdapters
from penstock_server.weights.adapter import Change, Module, StoredWeight
from penstock_server.weights.loader import Parameter
from penstock_server.weights.location import EACH, Locator

if TYPE_CHECKING:
    from penstock_server.device.triton.low_rank import DeviceAdapter, LowRankSum


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


class AdapterSites:
    """All sites of a model on one rank."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        locators: Sequence[Locator],
        max_loaded: int,
        max_rank: int,
        stored: Callable[[str], StoredWeight],
        ops: Ops,
        device: torch.device,
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
        self._ops = ops
        self._device = device
        self._sites: list[list[SitePart]] = []
        self.adders: dict[int, AddAdapters] = {}
        """What adapters add to the product of a layer, by its site, or by the first of its heads' sites."""
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
        return self._add_product([parts])

    def add_heads(self, name: str, num_heads: int, num_key_columns: int) -> tuple[range, range]:
        """Registers the projection from the latent of latent attention. The outputs of each of the heads on this rank
        are keys and then values. Keys are absorbed into the queries, which are multiplied by the transposed projection.
        Returns the sites of the heads' keys, and of their values."""
        module = self._module(name)
        rows = torch.cat([torch.arange(each.start, each.stop) for each in self._rows(name)])
        inputs = self._inputs(name)
        heads = rows.unflatten(0, (num_heads, -1))
        self.elements_per_rank += len(rows) + 2 * num_heads * len(inputs)
        keys = self._add_product([[SitePart(module, head[:num_key_columns], 0, inputs, True)] for head in heads])
        values = self._add_product([[SitePart(module, head[num_key_columns:], 0, inputs)] for head in heads])
        return range(keys, keys + num_heads), range(values, values + num_heads)

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
        self.elements_per_rank += size + num_tokens
        return self._add_product([[SitePart(module, torch.arange(size), 0, range(num_tokens), is_embedding=True)]])

    def add_head(self, weight: str) -> int:
        """Registers the output head. weight: the layer that has its weight, which is the embedding if the head is tied:
        adapters of the two are independent, as in PEFT."""
        parameter = self._parameters[f"{weight}.weight"]
        num_tokens, in_features = parameter.shape
        module = self._register("head", num_tokens, in_features, stored=self._stored(weight))
        mine = range(num_tokens) if parameter.part is None else parameter.part.range
        self.elements_per_rank += in_features + len(mine)
        return self._add_product([[SitePart(module, torch.arange(mine.start, mine.stop), 0, range(in_features))]])

    def _add_product(self, sites: Sequence[list[SitePart]]) -> int:
        """Registers the sites of one product: of a layer, or of a layer's heads. Returns the first one's number."""
        first = len(self._sites)
        if isinstance(self._ops, NativeOps):
            self.adders[first] = partial(self._add_natively, self._ops, first)
        else:
            self.adders[first] = self._on_device(sites)
        self._sites += sites
        return first

    def _add_natively(self, ops: NativeOps, site: int, x: Tensor, y: Tensor, adapters: StepAdapters) -> None:
        """An `AddAdapters` at a site outside of native stacks."""
        if self._sites[site][0].is_embedding:
            if all(adapter.embedding is None for adapter in adapters.loaded):
                return
            x = self._looked_up(x, y.dtype, adapters)
        ops.adapt(site, x, y, [adapter.packed for adapter in adapters.loaded], adapters.of_tokens)

    def _on_device(self, sites: Sequence[list[SitePart]]) -> AddAdapters:
        """What adapters add on a GPU at the sites that are registered next."""
        low_rank, part = self._sum(len(self._sites), [part.columns for parts in sites for part in parts]), sites[0][0]
        add = partial(low_rank.add_looked_up, len(part.inputs)) if part.is_embedding else low_rank.add

        def add_adapters(x: Tensor, y: Tensor, adapters: StepAdapters) -> None:
            assert adapters.tables is not None, "on GPUs, steps have the tables of their adapters"
            add(x, y, adapters.of_tokens, adapters.tables)

        return add_adapters

    def _looked_up(self, token_ids: Tensor, dtype: torch.dtype, adapters: StepAdapters) -> Tensor:
        """[rows, max_rank]: A of each row's adapter at its token."""
        found = torch.zeros((len(token_ids), self._widest_rank), dtype=dtype)
        for index, adapter in enumerate(adapters.loaded):
            if adapter.embedding is not None:
                rows = (adapters.of_tokens == index).nonzero()[:, 0]
                found[rows, : adapter.embedding.shape[1]] = adapter.embedding[token_ids[rows]]
        return found

    def sums_of_experts(self, first: int) -> tuple[LowRankSum, LowRankSum]:
        """On a GPU, what adapters add to both products of experts, whose sites begin at `first`."""
        gate_up, down = ([part.columns for part in parts] for parts in self._sites[first : first + 2])
        num_parts = len(gate_up) + len(down)
        return self._sum(first, gate_up, num_parts), self._sum(first + 1, down, num_parts)

    def _sum(self, site: int, columns: Sequence[range], expert_parts: int = 0) -> LowRankSum:
        """columns, expert_parts: as of `LowRankSum.of`."""
        from penstock_server.device.triton.low_rank import LowRankSum

        first_part = sum(map(len, self._sites[:site]))
        max_loaded = self.max_loaded + (self.own is not None)
        return LowRankSum.of(first_part, columns, self._widest_rank, max_loaded, self._device, expert_parts)

    def kernel_sizes(self) -> tuple[int, int]:
        """The rank that an adapter of the highest rank takes in memory, and the bytes of the kernels' workspace."""
        if isinstance(self._ops, NativeOps):
            return self.max_rank, 0
        from penstock_server.device.triton.low_rank import TILE_RANKS, WORKSPACE_BYTES

        return -(-self.max_rank // TILE_RANKS) * TILE_RANKS, WORKSPACE_BYTES

    def pack(self, changes: Mapping[str, Change], dtype: torch.dtype) -> NativeAdapter | DeviceAdapter:
        """An adapter for the kernels. changes: by module, in this dtype, which is the model's."""
        if isinstance(self._ops, NativeOps):
            return self._pack_natively(changes, self._ops.build)
        from penstock_server.device.triton.low_rank import DeviceAdapter, PlainPart

        def packed(part: SitePart) -> PlainPart | None:
            change = changes.get(part.module)
            return None if change is None else PlainPart(part.down(change), part.up(change), change.scale)

        return DeviceAdapter.pack([packed(part) for parts in self._sites for part in parts], dtype, self._device)

    def _pack_natively(self, changes: Mapping[str, Change], build: NativeBuild) -> NativeAdapter:
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
