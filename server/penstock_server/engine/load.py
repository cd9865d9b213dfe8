"""What a rank loads, and a model that is loaded before the worker's process exists."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from penstock_server.device import ACTIVATION_BITS
from penstock_server.device.attention import preferred_block_tokens
from penstock_server.device.native.build import find_build
from penstock_server.engine.device import choose_device, choose_dtype, choose_kv_dtype, choose_num_threads
from penstock_server.host import nvidia
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig

logger = logging.getLogger(__name__)

_TASKS = Path("/proc/self/task")
_THREADS_END_S = 10.0  # OpenMP's threads end soon after the thread that started them


class LoadModel(Protocol):
    """Loads a prepared model folder; `penstock_server.models.load_model` outside of tests."""

    def __call__(self, options: LoadOptions, group: RankGroup) -> CausalModel: ...


def load_model(options: LoadOptions, group: RankGroup) -> CausalModel:
    from penstock_server import models

    return models.load_model(options, group)


def load_options(config: LoadConfig, device: torch.device) -> LoadOptions:
    """What the config means on this device. Raises ConfigError for what cannot be served."""
    dtype = choose_dtype(config.dtype, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype)
    block_tokens = config.block_tokens or preferred_block_tokens(
        device, dtype, kv_dtype, config.attention, deterministic=config.deterministic
    )
    # Without native kernels on a CPU, no drafts are verified, so nothing is loaded that makes them.
    verifies_drafts = device.type != "cpu" or find_build(device, dtype, config.cpu_isa) is not None
    return LoadOptions(
        config.model_path,
        dtype,
        device,
        block_tokens,
        trust_remote_code=config.trust_remote_code,
        attention=config.attention,
        deterministic=config.deterministic,
        cpu_isa=config.cpu_isa,
        kv_dtype=kv_dtype,
        dequantize=config.dequantize,
        quantize=config.quantize,
        activation_bits=config.activation_bits or ACTIVATION_BITS,
        max_adapters=config.max_adapters,
        max_adapter_rank=config.max_adapter_rank,
        drafts_with_mtp=config.drafts_with_mtp and config.speculative_model is None and verifies_drafts,
    )


@dataclass(frozen=True, slots=True)
class Preloaded:
    """A model on a CPU, in the process that workers are forked from, so that they share the pages of its weights.

    INVARIANT: the process has one thread again, as `ForkServer` needs.
    """

    options: LoadOptions
    model: CausalModel

    @classmethod
    def of(cls, config: LoadConfig) -> Preloaded | None:
        """None if each worker must load the model itself: on a GPU, through transformers, whose threads stay, or with
        another number of threads than this process has. Raises what loading the model raises."""
        from penstock_server.models import is_described

        if nvidia.DRIVER.exists() or not _TASKS.exists() or not is_described(config.model_path):
            return None
        options = load_options(config, choose_device(config.device, 0))
        if options.device.type != "cpu":
            return None
        if (num_threads := choose_num_threads(config, 1)) != torch.get_num_threads():
            logger.info(
                "each worker loads the model: this process has %d threads (OMP_NUM_THREADS), a worker %d",
                torch.get_num_threads(),
                num_threads,
            )
            return None

        def read() -> CausalModel:
            with torch.inference_mode():
                return load_model(options, RankGroup.join(0, 1, "", "gloo", None))

        try:
            model = _on_a_thread(read)
        finally:
            has_one_thread = _has_one_thread()
        if not has_one_thread:
            logger.warning("each worker loads the model: threads of this process stay after loading it")
            return None
        return cls(options, model)

    def load_model(self, options: LoadOptions, group: RankGroup) -> CausalModel:
        """This model, if these are its options. Implements `LoadModel`."""
        if options == self.options and group.num_ranks == 1:
            return self.model
        return load_model(options, group)


def _on_a_thread(job: Callable[[], CausalModel]) -> CausalModel:
    """OpenMP's threads end with the thread that started them."""
    with ThreadPoolExecutor(1, "preload") as thread:
        return thread.submit(job).result()


def _has_one_thread() -> bool:
    """Waits until this process has one thread. False: it keeps others."""
    deadline = time.monotonic() + _THREADS_END_S
    while len(list(_TASKS.iterdir())) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return threading.active_count() == 1
