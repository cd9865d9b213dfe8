"""The adapters that are loaded beside a model, on one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock_server.device.native.ops import NativeOps
from penstock_server.device.ops import Ops
from penstock_server.errors import ConfigError
from penstock_server.layers.adapter import AdapterSites, OwnAdapter
from penstock_server.layers.step import AddAdapters
from penstock_server.models.spec import ModelSpec
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Adapter
from penstock_server.weights.adapter import check_adapter, read_adapter

logger = logging.getLogger(__name__)

_OWN_ID = (1 << 63) - 1  # the router gives its adapters smaller ones
NEUTRAL = Adapter(_OWN_ID - 1, Path())
"""Changes nothing. A step with it runs what a step with an adapter runs."""


class Adapters:
    """Loaded adapters, as the kernels know them. `load` and `unload` may be called on any thread while steps run: an
    adapter that is unloaded stays usable for sequences that hold it."""

    def __init__(self, sites: AdapterSites, dtype: torch.dtype) -> None:
        """dtype: the model's."""
        stored_rank, self._workspace_bytes = sites.kernel_sizes()
        self._bytes_per_element = sites.max_loaded * stored_rank * dtype.itemsize
        self._changes_experts = False
        self._sites = sites
        self._dtype = dtype
        self._neutral = sites.pack({}, dtype)
        self._loaded: dict[int, Any] = {}
        self.own: Adapter | None = None
        """The model's own, of sequences that name no adapter."""
        self.own_is_of_images = sites.own is not None and sites.own.is_of_images
        """Whether only sequences with images have it."""
        self.own_bytes = 0
        if sites.own is not None:
            self.own = Adapter(_OWN_ID, sites.own.folder)
            self._own = self._read(self.own, sites.own.rank)
            self.own_bytes = sites.own.rank * sites.elements_per_rank * dtype.itemsize

    @property
    def adders(self) -> Mapping[int, AddAdapters]:
        """What adapters add, by the site."""
        return self._sites.adders

    @property
    def max_bytes(self) -> int:
        """Memory of the most adapters of the highest rank on this rank. Experts count only once an adapter that changes
        them has been checked: of all experts, changes are many times those of all other layers."""
        elements = self._sites.elements_per_rank
        if self._changes_experts:
            elements += self._sites.expert_elements_per_rank
        return elements * self._bytes_per_element + self._workspace_bytes

    def check(self, folder: Path) -> None:
        """Raises ConfigError if the adapter in this folder cannot be used with this model. Reads no weights."""
        changed = check_adapter(folder, self._sites.modules, self._sites.max_rank)
        if any(module.num_experts is not None or module.part_of for module in changed):
            self._changes_experts = True

    def load(self, adapter: Adapter) -> Any:
        """The adapter, read from its folder. Raises ConfigError if it cannot be used with this model."""
        loaded = self._read(adapter, self._sites.max_rank)
        self._loaded[adapter.id] = loaded
        # The router unloads adapters. More than it knows of may be here after it has lost a request.
        for oldest in list(self._loaded)[: -self._sites.max_loaded]:
            self.unload(oldest)
        return loaded

    def unload(self, adapter_id: int) -> None:
        """Drops an adapter, if it is loaded."""
        self._loaded.pop(adapter_id, None)

    def get(self, adapter: Adapter) -> Any:
        """The adapter. It is loaded if only an earlier worker had loaded it: ConfigError as of `load`."""
        if adapter == self.own:
            return self._own
        if adapter == NEUTRAL:
            return self._neutral
        loaded = self._loaded.get(adapter.id)
        return self.load(adapter) if loaded is None else loaded

    def _read(self, adapter: Adapter, max_rank: int) -> Any:
        began = time.perf_counter()
        with torch.inference_mode():
            changes = read_adapter(adapter.folder, self._sites.modules, max_rank, self._dtype)
            loaded = self._sites.pack(changes, self._dtype)
        logger.info("loaded the adapter in %s in %.3f s", adapter.folder, time.perf_counter() - began)
        return loaded


def check_model(spec: ModelSpec, group: RankGroup, ops: Ops, own: OwnAdapter | None) -> None:
    """Raises ConfigError if a model cannot have adapters on these ranks, with these operators. own: the model's own."""
    if group.stage.size > 1:
        raise refusal("its layers are split into pipeline stages", own)
    if spec.pooling is not None or spec.encoder is not None or spec.is_encoder:
        raise refusal("only decoders have them")
    if not (ops.adds_adapters or isinstance(ops, NativeOps)):
        raise refusal(f"{ops.name} operators have no kernel for them", own)


def refusal(reason: str, own: OwnAdapter | None = None) -> ConfigError:
    """Why a model cannot have adapters. own: the model's own."""
    advice = "omit --lora-adapters" if own is None else f"this model needs the one in {own.folder}"
    return ConfigError(
        f"LoRA adapters are not supported for this model on this device: {reason}; {advice}, or merge the adapter into "
        "its base with peft (merge_and_unload)"
    )
