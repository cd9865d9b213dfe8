"""A rank's device, dtype and threads: as asked, or chosen from what the machine has."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from penstock_server.attention.fp8 import FP8_DTYPES
from penstock_server.config import LoadConfig
from penstock_server.engine.memory import mib
from penstock_server.errors import ConfigError
from penstock_server.kernels.native_build import find_build

logger = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/dev/nvidiactl")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(name: str, rank: int) -> torch.device:
    """The device asked for; else this rank's GPU; else the CPU, if no GPU was meant to be used. Raises ConfigError."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not name:
        if num_gpus == 0:
            _check_no_gpu_is_meant()
            return torch.device("cpu")
        if rank >= num_gpus:
            raise ConfigError(
                f"rank {rank} has no GPU: torch sees {num_gpus} here, and each rank needs one of its own; "
                f"use at most {num_gpus} shards, or make more GPUs visible (CUDA_VISIBLE_DEVICES, docker's --gpus)"
            )
        return torch.device("cuda", rank)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device is "{name}", must be "cpu" or "cuda:N"') from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device is "{name}", must be "cpu" or "cuda:N"')
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f'device is "{name}", but torch sees {num_gpus} GPUs here')
    return device


def _check_no_gpu_is_meant() -> None:
    """Raises ConfigError if the machine has an NVIDIA driver and CUDA_VISIBLE_DEVICES does not hide its GPUs, but torch
    sees none: a server on the CPU would be a surprise."""
    if not NVIDIA_DRIVER.exists():
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        logger.info('CUDA_VISIBLE_DEVICES is "%s", so the model runs on the CPU', visible)
        return
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a build with it"
    elif visible is not None:
        reason = f'CUDA_VISIBLE_DEVICES is "{visible}", which names none of them; `nvidia-smi -L` lists them'
    else:
        try:
            torch.cuda.init()
            reason = "the driver lists none; `nvidia-smi` shows what it sees"
        except RuntimeError as error:
            reason = _first_line(error)
    raise ConfigError(
        f"this machine has an NVIDIA driver, but torch sees no GPU: {reason}. To serve on the CPU, set "
        'CUDA_VISIBLE_DEVICES=""'
    )


def open_device(device: torch.device) -> None:
    """Make it the default of this process, and use it for the first time. Raises ConfigError if that fails."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    supported = [re.fullmatch(r"sm_(\d+)(\d)[a-z]?", name) for name in torch.cuda.get_arch_list()]
    least = min(((int(match[1]), int(match[2])) for match in supported if match), default=(0, 0))
    if (major, minor) < least:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; torch {torch.__version__} "
            f"supports {least[0]}.{least[1]} and later"
        )
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"{device} cannot be used: {_first_line(error)}; `nvidia-smi` shows which processes use it, and in which "
            "mode it is"
        ) from error


@contextmanager
def naming_full_memory(device: torch.device, what: str, advice: str) -> Iterator[None]:
    """Turns a GPU's lack of memory into a ConfigError: what was being done, what is used and free, what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
        raise ConfigError(
            f"{device} has too little memory for {what}: of {mib(total)}, this rank used {mib(mine)}, other processes "
            f"used {mib(max(0, total - free - mine))}, and {mib(free)} were free; {advice}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype asked for; else bfloat16 if the machine computes in it, natively or by torch; else float16 on a GPU and
    float32 on a CPU."""
    if name:
        if name not in DTYPES:
            raise ConfigError(f'dtype is "{name}", must be one of {", ".join(DTYPES)}')
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    has_bf16 = find_build(device, torch.bfloat16) is not None or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def choose_kv_dtype(name: str) -> torch.dtype | None:
    """The fp8 dtype of stored keys and values; None: the model's. Raises ConfigError."""
    if name in ("", "auto"):
        return None
    if name not in FP8_DTYPES:
        raise ConfigError(f'kv_cache_dtype is "{name}", must be one of auto, {", ".join(FP8_DTYPES)}')
    return FP8_DTYPES[name]


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


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array's copy on a device; on a CPU the array itself. The host does not wait: the copy comes after the work
    that was given to the device before."""
    tensor = torch.from_numpy(array)
    # PERF: on a CPU, even a `to` without effect lets other threads take the interpreter lock. On a GPU, only pinned
    # memory is copied without waiting for the device; torch keeps and reuses it.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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
