"""A rank's device, dtype and threads: as asked, or chosen from what the machine has."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from penstock_server.device.attention.fp8 import FP8_DTYPES
from penstock_server.device.native.build import find_build
from penstock_server.engine.memory import mib
from penstock_server.errors import ConfigError, FullMemoryError
from penstock_server.host.background import use_device
from penstock_server.host.nvidia import DRIVER as NVIDIA_DRIVER
from penstock_server.protocol.config import LoadConfig, Node

logger = logging.getLogger(__name__)

BFLOAT16_CAPABILITY = (8, 0)  # Ampere; Volta and Turing lack it
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_SERVE_ON_CPU = 'To serve on the CPU, set CUDA_VISIBLE_DEVICES=""'
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(name: str, rank: int) -> torch.device:
    """The device asked for; else this rank's GPU; else the CPU, if no GPU was meant to be used. Raises ConfigError."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not name:
        if num_gpus == 0:
            _check_no_gpu_is_meant()
            return torch.device("cpu")
        if rank >= num_gpus:
            advice = f"use at most {num_gpus} shards, or make more GPUs visible (CUDA_VISIBLE_DEVICES, docker's --gpus)"
            if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
                advice = "a process sees one MIG instance, so use one shard (--num-shard 1), or GPUs without MIG"
            raise ConfigError(
                f"rank {rank} has no GPU: torch sees {num_gpus} here, and each rank needs one of its own; {advice}"
            )
        return torch.device("cuda", rank)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device is "{name}", must be "cpu" or "cuda:N"') from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device is "{name}", must be "cpu" or "cuda:N"')
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        if num_gpus == 0:
            _check_no_gpu_is_meant()
        raise ConfigError(f'device is "{name}", but torch sees {num_gpus} GPUs here')
    return device


def device_name(device: torch.device) -> str:
    """The model of a GPU; empty for another device, and for a GPU that is not there."""
    has_one = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if has_one else ""


def libraries(device: torch.device) -> str:
    """The libraries that compute on the device, with their versions, and torch's instruction set on a CPU: another
    version or set may give other bits."""
    found = [f"torch {torch.__version__}"]
    if device.type == "cpu":
        found[0] += f" with {torch.backends.cpu.get_cpu_capability()}"
    for package in ("triton", "flash-attn") if device.type == "cuda" else ():
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def check_device_on_node(device: torch.device, node: Node | None) -> None:
    """Raises ConfigError if a rank on a node would run on a GPU although it must not, or on a CPU although it must."""
    if node is None or node.uses_gpu == (device.type == "cuda"):
        return
    place = node.listen[0]
    if node.uses_gpu:
        raise ConfigError(f"ranks run on GPUs with --unencrypted-gpus, but {place} has none that torch sees")
    raise ConfigError(
        f"ranks on nodes run on CPUs, but {place} has GPUs; set CUDA_VISIBLE_DEVICES= there, or, on a private network, "
        "start the server and its nodes with --unencrypted-gpus"
    )


@cache
def _log_once(message: str) -> None:
    """Log a message once in this process and the workers that are forked from it later."""
    logger.info("%s", message)


def _check_no_gpu_is_meant() -> None:
    """Raises ConfigError if torch sees no GPU, although CUDA_VISIBLE_DEVICES names one, or the machine has an NVIDIA
    driver and CUDA_VISIBLE_DEVICES does not hide its GPUs: a server on the CPU would be a surprise."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        _log_once(f'CUDA_VISIBLE_DEVICES is "{visible}", so the model runs on the CPU')
        return
    if not NVIDIA_DRIVER.exists():
        if visible is None:
            _log_once(f"there is no NVIDIA driver ({NVIDIA_DRIVER}), so the model runs on the CPU")
            return
        raise ConfigError(
            f'CUDA_VISIBLE_DEVICES is "{visible}", but there is no NVIDIA driver ({NVIDIA_DRIVER}); install it, or '
            f"give the container its GPUs (docker's --gpus). {_SERVE_ON_CPU}"
        )
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a build with it"
    elif visible is not None:
        reason = f'CUDA_VISIBLE_DEVICES is "{visible}", which names none of them; `nvidia-smi -L` lists them'
    else:
        try:
            torch.cuda.init()
            reason = "the driver lists none; `nvidia-smi` shows what it sees"
        except RuntimeError as error:
            reason = (
                f"{_first_line(error)}. torch {torch.__version__} is built for CUDA {torch.version.cuda}: install a "
                "driver for it, or a torch for the CUDA of your driver (`nvidia-smi` shows both versions)"
            )
    raise ConfigError(f"this machine has an NVIDIA driver, but torch sees no GPU: {reason}. {_SERVE_ON_CPU}")


def open_device(device: torch.device) -> None:
    """Make it the current device of this thread, and use it for the first time. Raises ConfigError if that fails."""
    if device.type != "cuda":
        return
    try:
        _check_compiled_for(device)
        use_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"{device} cannot be used: {_first_line(error)}; `nvidia-smi` shows which processes use it, and in which "
            "mode it is"
        ) from error


def _check_compiled_for(device: torch.device) -> None:
    """Raises ConfigError if torch has no code for this GPU."""
    capability, compiled = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if compiled and not any(_runs_on(name, capability) for name in compiled):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, for which "
            f"torch {torch.__version__} has no code, only for {', '.join(compiled)}; install a build of torch that has"
        )


def _runs_on(compiled: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for a target, as `sm_90`, runs on a device: machine code on later minor versions of its
    major version (unless it is specific to one, as `sm_90a`), and what the driver compiles, as `compute_90`, on all
    later ones."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", compiled)
    if match is None:
        return False
    target = int(match[2]), int(match[3])
    if match[4]:
        return capability == target
    return capability >= target and (match[1] == "compute" or capability[0] == target[0])


@contextmanager
def naming_full_memory(device: torch.device, what: str, advice: str) -> Iterator[None]:
    """Turns a GPU's lack of memory into a FullMemoryError: what was being done, what is used and free, what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        # Outside of torch's own allocator, as for a graph, the driver reports it.
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _CUDA_OUT_OF_MEMORY:
            raise
        free, total = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
        raise FullMemoryError(
            f"{device} has too little memory for {what}: of {mib(total)}, this rank used {mib(mine)}, other processes "
            f"used {mib(max(0, total - free - mine))}, and {mib(free)} were free; {advice}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype asked for; else bfloat16 if the machine computes in it, natively or by torch; else float16 on a GPU and
    float32 on a CPU. Raises ConfigError for an unknown dtype, and for bfloat16 on a GPU that lacks it."""
    if name and name not in DTYPES:
        raise ConfigError(f'dtype is "{name}", must be one of {", ".join(DTYPES)}')
    if device.type == "cuda":
        # Not `is_bf16_supported`, which is true for emulation too.
        capability = torch.cuda.get_device_capability(device)
        if name == "bfloat16" and capability < BFLOAT16_CAPABILITY:
            raise ConfigError(
                f"dtype is bfloat16, but {torch.cuda.get_device_name(device)} has compute capability {capability[0]}."
                f"{capability[1]}, and computes in bfloat16 from {BFLOAT16_CAPABILITY[0]}.{BFLOAT16_CAPABILITY[1]} on; "
                "use --dtype float16, or leave --dtype out"
            )
        return DTYPES[name] if name else torch.bfloat16 if capability >= BFLOAT16_CAPABILITY else torch.float16
    if name:
        return DTYPES[name]
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
    """The CPU threads asked for; else OMP_NUM_THREADS, which a node sets for its ranks; else this rank's share of the
    cores that the process may use."""
    on_node = int(given) if (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() else 0
    return config.num_threads or on_node or max(1, usable_cores() // world_size)


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
