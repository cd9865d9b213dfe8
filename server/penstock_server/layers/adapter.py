"""Where LoRA adapters change a model: its sites, which are the linear layers that adapters add low-rank products to.

Layers register their sites while they are loaded. A site is this rank's part of one module of the base model, or of
several that are fused along their outputs. The ranks split outputs only (`Shard.exact`), so each rank holds all of A
and its rows of B, and two ranks compute the bits of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from penstock_server.kernels.native_build import NativeBuild
from penstock_server.weights.adapter import Change
from penstock_server.weights.loader import Parameter
from penstock_server.weights.location import EACH, Locator


@dataclass(frozen=True, slots=True)
class _Part:
    """Adjacent output columns of a site that belong to one module."""

    module: str
    rows: Tensor  # of the module's outputs, on this rank
    first_column: int


class AdapterSites:
    """All sites of a model on one rank."""

    def __init__(self, parameters: Mapping[str, Parameter], locator: Locator) -> None:
        """locator: the names that transformers gives to the model's modules, followed by `.weight`."""
        self._parameters = parameters
        self._locator = locator
        self._sites: list[list[_Part]] = []
        self.modules: dict[str, tuple[int, int]] = {}
        """The modules that adapters can change, with their output and input features."""
        self.elements_per_rank = 0
        """What an adapter that changes everything holds on this rank, per rank of its products."""

    def add(self, *names: str, order: Tensor | None = None) -> int:
        """Registers the site of layers with these names, which are fused along their outputs. Returns its number.
        order: of the outputs, if they are reordered; those of a module stay together."""
        parts: list[_Part] = []
        column = 0
        for module, group in groupby(names, self._module):
            rows: list[range] = []
            first_column = column
            for name in group:
                rows += self._rows(name)
                column = first_column + sum(map(len, rows))
            indices = torch.cat([torch.arange(each.start, each.stop) for each in rows])
            if order is not None:
                indices = indices[order[first_column:column].cpu() - first_column]
            parts.append(_Part(module, indices, first_column))
            _, in_features = self.modules[module]
            self.elements_per_rank += in_features + column - first_column
        self._sites.append(parts)
        return len(self._sites) - 1

    def pack(self, changes: Mapping[str, Change], build: NativeBuild) -> Any:
        """An adapter for the native kernels. changes: by module, in the dtype of the kernels."""
        sites = [
            [
                (change.down.contiguous(), change.up[part.rows].t().contiguous(), part.first_column, change.scale)
                for part in parts
                if (change := changes.get(part.module)) is not None
            ]
            for parts in self._sites
        ]
        return build.module.Adapter(sites)

    def _module(self, name: str) -> str:
        """The module of a layer."""
        parameter, location = self._parameters[f"{name}.weight"], self._locator.locate(f"{name}.weight")
        assert EACH not in location.name, "a site is one layer"
        module = location.name.removesuffix(".weight")
        shape = location.tensor_shape(parameter.shape)
        self.modules[module] = (shape[1], shape[0]) if location.transposed else (shape[0], shape[1])
        return module

    def _rows(self, name: str) -> list[range]:
        """The rows of its module that this rank's part of a layer consists of."""
        parameter, location = self._parameters[f"{name}.weight"], self._locator.locate(f"{name}.weight")
        part = parameter.part
        assert location.dim == 0
        assert part is None or (part.dim == 0 and part.view is None), "sites are split along their outputs"
        rows = range(parameter.shape[0]) if part is None else part.range
        return [rows] if location.strip is None else list(location.strip.runs(rows))
