"""Selects the operators that a model runs on. The native package is optional: without it torch computes everything."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from penstock_server.kernels.ops import Ops

logger = logging.getLogger(__name__)

NATIVE_PACKAGE = "penstock_kernels"


def may_be_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether native kernels for this device and dtype are installed. Whether this CPU supports them is not checked."""
    import torch

    return device.type == "cpu" and dtype == torch.bfloat16 and importlib.util.find_spec(NATIVE_PACKAGE) is not None


def choose_ops(device: torch.device, dtype: torch.dtype, activation_bits: int = 16) -> Ops:
    """The fastest operators that this machine supports. activation_bits: as of `NativeOps`."""
    from penstock_server.kernels.torch_ops import TorchOps

    if may_be_native(device, dtype):
        from penstock_server.kernels import native_ops

        if native_ops.available():
            logger.info("operators: native")
            return native_ops.NativeOps(activation_bits=activation_bits)
    if device.type == "cuda":
        from penstock_server.kernels import triton_device

        reason = triton_device.unavailable_reason(device)
        if reason is None:
            from penstock_server.kernels.triton_ops import TritonOps

            logger.info("operators: triton")
            return TritonOps(device, dtype)
        logger.warning("operators: torch, which is slow, because Triton kernels cannot be used: %s", reason)
        return TorchOps()
    logger.info("operators: torch")
    return TorchOps()
