"""Where Triton kernels run, and how they are launched. This module does not import Triton."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
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
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return f"the device's compute capability is {capability[0]}.{capability[1]}, at least 8.0 is needed"
    return None


def python_header() -> Path:
    # On Debian, `posix_local` is the scheme of what administrators install.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_path("include", scheme)) / "Python.h"


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply 8-bit floats."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 9)


def launch(function: Any, grid: tuple[int, int], **arguments: Any) -> None:
    """Enqueues a kernel on the current stream. An empty grid is none."""
    if all(grid):
        runner: Callable[..., object] = function[grid]
        runner(**arguments)
