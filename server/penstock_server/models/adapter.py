"""The adapters that are loaded beside a model, on one rank."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from penstock_server.errors import ConfigError
from penstock_server.kernels.native_build import NativeBuild
from penstock_server.layers.adapter import AdapterSites
from penstock_server.plan import Adapter
from penstock_server.weights.adapter import read_adapter

logger = logging.getLogger(__name__)


class Adapters:
    """Loaded adapters, as the kernels know them. `load` and `unload` may be called on any thread while steps run: an
    adapter that is unloaded stays usable for sequences that hold it."""

    def __init__(self, sites: AdapterSites, build: NativeBuild, max_loaded: int, max_rank: int) -> None:
        self._sites = sites
        self._build = build
        self._max_loaded = max_loaded
        self._max_rank = max_rank
        self._loaded: dict[int, Any] = {}
        self.max_bytes = max_loaded * max_rank * sites.elements_per_rank * build.dtype.itemsize
        """What the most adapters of the highest rank take on this rank."""

    def load(self, adapter: Adapter) -> Any:
        """The adapter, read from its folder. Raises ConfigError if it cannot be used with this model."""
        began = time.perf_counter()
        with torch.inference_mode():
            changes = read_adapter(adapter.folder, self._sites.modules, self._max_rank, self._build.dtype)
            loaded = self._sites.pack(changes, self._build)
        self._loaded[adapter.id] = loaded
        # The router unloads adapters. More than it knows of may be here after it has lost a request.
        for oldest in list(self._loaded)[: -self._max_loaded]:
            self.unload(oldest)
        logger.info("loaded the adapter in %s in %.3f s", adapter.folder, time.perf_counter() - began)
        return loaded

    def unload(self, adapter_id: int) -> None:
        """Drops an adapter, if it is loaded."""
        self._loaded.pop(adapter_id, None)

    def get(self, adapter: Adapter) -> Any:
        """The adapter. It is loaded if only an earlier worker had loaded it: ConfigError as of `load`."""
        loaded = self._loaded.get(adapter.id)
        return self.load(adapter) if loaded is None else loaded


def refusal(reason: str) -> ConfigError:
    """Why a model cannot have adapters."""
    return ConfigError(f"LoRA adapters are not supported for this model on this device: {reason}; omit --lora-adapters")
