"""The builds of the native kernels that this machine runs, for tests."""

from __future__ import annotations

import importlib.util

import torch
from penstock_server.device.native.build import NATIVE_PACKAGE, NativeBuild, find_build
from penstock_server.device.native.ops import NativeOps

CPU = torch.device("cpu")
BUILD = find_build(CPU, torch.bfloat16)
"""The one that is served with. None: there is none."""


def build() -> NativeBuild:
    """`BUILD`, in tests that are marked `native`."""
    assert BUILD is not None
    return BUILD


def native_ops(num_threads: int | None = None) -> NativeOps:
    return NativeOps(build(), num_threads)


def all_builds() -> list[NativeBuild]:
    """Builds for every instruction set and data type."""
    if importlib.util.find_spec(NATIVE_PACKAGE) is None:
        return []
    import penstock_kernels

    chosen = [
        find_build(CPU, dtype, isa.name)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for isa in penstock_kernels.runnable(str(dtype).removeprefix("torch."))
        if not isa.may_use_amx or dtype == torch.bfloat16
    ]
    return [build for build in chosen if build is not None]
