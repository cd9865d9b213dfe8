"""Devices of Triton kernels, and the launch of kernels. This module does not import Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device, for people. None: they can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    # Triton compiles a launcher for each kernel, which includes Python's header.
    if (compiler := os.environ.get("CC")) is not None:
        if shutil.which(compiler) is None:
            return f'Triton needs a C compiler, and CC is "{compiler}", which is no program; install it or correct CC'
    elif not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler, and there is no gcc or clang; install one or set CC"
    header = python_header()
    if not header.exists():
        return f"Triton needs the header {header}, which is not there; install Python's development files (python3-dev)"
    if torch.cuda.is_available() and (found := capability(device)) < MIN_CAPABILITY:
        return f"the device's compute capability is {found[0]}.{found[1]}, at least 8.0 is needed"
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) of another device, and of a GPU that is not there."""
    has_one = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if has_one else (0, 0)


def python_header() -> Path:
    # On Debian, `posix_local` is the scheme of what administrators install.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_path("include", scheme)) / "Python.h"


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply 8-bit floats."""
    return capability(device) >= (8, 9)


def shares_accumulators(device: torch.device) -> bool:
    """Whether the products of an unrolled chain are added up in one place.

    Triton before 3.9 gives each of them an accumulator of its own in the tensor memory of compute capability 10. Eight
    accumulators with more than 64 columns exceed its 512 columns, and Triton then compiles the kernel to a trap and
    refuses to launch it.
    """
    return capability(device)[0] != 10 or _triton_version() >= (3, 9)


@cache
def _triton_version() -> tuple[int, int]:
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def launch(function: Any, grid: tuple[int, int], **arguments: Any) -> None:
    """Enqueues a kernel on the current stream. An empty grid is none."""
    if all(grid):
        runner: Callable[..., object] = function[grid]
        runner(**arguments)
