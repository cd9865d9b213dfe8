"""Selects the operators that a model runs on. The native package is optional: without it torch computes everything."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from penstock_server.kernels.ops import Ops

logger = logging.getLogger(__name__)


def choose_ops(device: torch.device, dtype: torch.dtype, activation_bits: int = 16, cpu_isa: str = "") -> Ops:
    """The fastest operators that this machine supports. activation_bits: as of `NativeOps`; cpu_isa, ConfigError: as of
    `find_build`."""
    from penstock_server.kernels.native_build import find_build
    from penstock_server.kernels.torch_ops import TorchOps

    if (build := find_build(device, dtype, cpu_isa)) is not None:
        from penstock_server.kernels.native_ops import NativeOps

        logger.info("operators: native (%s)", build)
        return NativeOps(build, activation_bits=activation_bits)
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
