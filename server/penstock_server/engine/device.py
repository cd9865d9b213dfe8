"""A rank's device, dtype and threads: as asked, or chosen from what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from penstock_server.config import LoadConfig
from penstock_server.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(name: str, rank: int) -> torch.device:
    """The device asked for; else this rank's GPU; else the CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not name:
        return torch.device("cuda", rank % num_gpus) if num_gpus else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device is "{name}", must be "cpu" or "cuda:N"') from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device is "{name}", must be "cpu" or "cuda:N"')
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f'device is "{name}", but torch sees {num_gpus} GPUs here')
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype asked for; else bfloat16 if the machine computes in it; else float16 on a GPU and float32 on a CPU."""
    if name:
        if name not in DTYPES:
            raise ConfigError(f'dtype is "{name}", must be one of {", ".join(DTYPES)}')
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def choose_num_threads(config: LoadConfig, world_size: int) -> int:
    """The CPU threads asked for; else this rank's share of the cores that the process may use."""
    return config.num_threads or max(1, usable_cores() // world_size)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores in the affinity mask; fewer if the control group's CPU quota is smaller."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except OSError:
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cores
    if quota in ("max", "-1"):
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


class HostCopy:
    """A tensor's copy on the host. The copy starts at once, in the order of the device's work; `wait` returns it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # Only pinned memory is copied without waiting for the device.
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> npt.NDArray[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.numpy()
