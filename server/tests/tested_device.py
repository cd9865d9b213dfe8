"""The device that tests of models and kernels run on: PENSTOCK_TEST_DEVICE, by default the CPU.

Triton's kernels run there compiled, on a GPU, or in Triton's interpreter, on a CPU (TRITON_INTERPRET=1, which the root
conftest.py sets).
"""

from __future__ import annotations

import importlib.util
import os

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
