"""The device that tests of models and kernels run on: PENSTOCK_TEST_DEVICE, by default the CPU.

Triton's kernels run there compiled, on a GPU, or in Triton's interpreter, on a CPU (TRITON_INTERPRET=1, which the root
conftest.py sets).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

DEVICE = torch.device(os.environ.get("PENSTOCK_TEST_DEVICE", "cpu"))


def triton_skip_reason() -> str | None:
    """Why Triton's kernels cannot run here. None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted != (DEVICE.type == "cpu"):
        return f"Triton's kernels are {'interpreted' if is_interpreted else 'compiled'}, and the device is {DEVICE}"
    return None


def has_triton_interpreter() -> bool:
    return DEVICE.type == "cpu" and triton_skip_reason() is None


@contextmanager
def one_order_of_sums() -> Iterator[None]:
    """Products in Triton's interpreter add in the order of features, as a GPU does. On some CPUs, the bits of numpy's
    products depend on an element's place in the tile."""

    def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for feature in range(a.shape[-1]):
            total += a[..., feature, None] * b[..., feature, None, :]
        return total

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(np, "matmul", matmul)
        yield
