"""Selects the operators that a model runs on. The native package is optional: without it torch computes everything."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock_server.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock_server.device.ops import Ops

logger = logging.getLogger(__name__)

ACTIVATION_BITS = 8  # the default of what `NativeOps` multiplies quantized weights with


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    activation_bits: int = ACTIVATION_BITS,
    *,
    deterministic: bool = False,
    cpu_isa: str = "",
) -> Ops:
    """The fastest operators that this machine supports. activation_bits: as of `NativeOps`. deterministic: a row's bits
    must not depend on its batch; raises ConfigError where there are no such operators. cpu_isa, ConfigError: as of
    `find_build`."""
    from penstock_server.device.native.build import find_build
    from penstock_server.device.reference.ops import TorchOps

    if (build := find_build(device, dtype, cpu_isa)) is not None:
        from penstock_server.device.native.ops import NativeOps

        if deterministic:
            logger.info("deterministic: always so with the native operators on a CPU")
        logger.info("operators: native (%s)", build)
        return NativeOps(build, activation_bits=activation_bits)
    if device.type == "cuda":
        from penstock_server.device.triton import device as triton_device

        reason = triton_device.unavailable_reason(device)
        if reason is None and deterministic:
            from penstock_server.device.triton.invariant import InvariantOps

            logger.info("operators: triton, deterministic: matrix products use one order of sums for any batch")
            return InvariantOps(device, dtype)
        if reason is None:
            from penstock_server.device.triton.ops import TritonOps

            logger.info("operators: triton")
            return TritonOps(device, dtype)
        if deterministic:
            raise ConfigError(f"--deterministic needs Triton kernels, which cannot be used: {reason}")
        logger.warning("operators: torch, which is slow, because Triton kernels cannot be used: %s", reason)
        return TorchOps()
    if deterministic:
        raise ConfigError(
            "--deterministic needs the native operators on a CPU, and they are not available for "
            f"{str(dtype).removeprefix('torch.')} here: they compute in bfloat16, float16 and float32, and are the "
            "package penstock_kernels, which must be installed"
        )
    logger.info("operators: torch")
    return TorchOps()
