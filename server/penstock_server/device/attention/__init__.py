"""Selects the attention implementation of each layer at load, and prepares each step for all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock_server.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock_server.device.attention.interface import Attention, AttentionShape, StepBatch

logger = logging.getLogger(__name__)

# The candidates on each type of device, the fastest first.
_CANDIDATES = {"cpu": ("native", "reference"), "cuda": ("flash", "triton", "reference")}


class Implementation(Protocol):
    """A module of this package that implements `Attention`."""

    PREFERRED_BLOCK_TOKENS: int
    BATCH_DEPENDENCE: str  # why a row's bits depend on its batch, for people; empty: they do not

    def unavailable_reason(self, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> str | None:
        """Why it cannot run on this device in these data types, for people. None: it can."""
        ...

    def unsupported_reason(self, shape: AttentionShape) -> str | None:
        """Why it does not implement this shape, for people. None: it does."""
        ...

    def make(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        cpu_isa: str,
    ) -> Attention:
        """cpu_isa: of native kernels, as of `find_build`."""
        ...


def _implementation(name: str) -> Implementation:
    from penstock_server.device import flash
    from penstock_server.device.native import attention as native
    from penstock_server.device.reference import attention as reference
    from penstock_server.device.triton import attention as triton

    modules: dict[str, Implementation] = {"native": native, "flash": flash, "triton": triton, "reference": reference}
    if name not in modules:
        raise ConfigError(f'attention is "{name}", must be one of {", ".join(modules)}')
    return modules[name]


def choose_attention(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    name: str = "",
    *,
    deterministic: bool = False,
    cpu_isa: str = "",
) -> Attention:
    """The implementation called `name`, or the fastest that supports this shape on this device. Raises ConfigError if
    none can be used. kv_dtype: an fp8 dtype of stored keys and values; None: dtype. deterministic: a row's bits must
    not depend on its batch. cpu_isa: of native kernels, as of `find_build`."""
    chosen, implementation, reason = _choose(device, dtype, kv_dtype, name, shape, deterministic=deterministic)
    if chosen == "reference" and (device.type == "cuda" or kv_dtype is not None):
        logger.warning("attention of %s: reference, which is slow (%s)", shape, reason)
    else:
        level = logging.INFO if reason.startswith("not ") else logging.DEBUG  # a faster one was refused
        logger.log(level, "attention of %s: %s (%s)", shape, chosen, reason)
    return implementation.make(shape, device, dtype, kv_dtype, cpu_isa)


def preferred_block_tokens(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    name: str = "",
    *,
    deterministic: bool = False,
) -> int:
    """Tokens per KV block for the attention that most layers will get here. The parameters and ConfigError are as of
    `choose_attention`."""
    _, implementation, _ = _choose(device, dtype, kv_dtype, name, deterministic=deterministic)
    return implementation.PREFERRED_BLOCK_TOKENS


def _choose(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    name: str,
    shape: AttentionShape | None = None,
    *,
    deterministic: bool,
) -> tuple[str, Implementation, str]:
    """An implementation, and why it was chosen. shape: None for any."""
    refusals: list[str] = []
    for candidate in (name,) if name else _CANDIDATES[device.type]:
        implementation = _implementation(candidate)
        refusal = implementation.unavailable_reason(device, dtype, kv_dtype)
        if refusal is None and shape is not None:
            refusal = implementation.unsupported_reason(shape)
        if refusal is None and deterministic and implementation.BATCH_DEPENDENCE:
            refusal = f"{implementation.BATCH_DEPENDENCE} (--deterministic)"
        if refusal is None:
            reason = "as asked for" if name else "; ".join(refusals) or "the fastest"
            return candidate, implementation, reason
        refusals.append(f"not {candidate}: {refusal}")
    of_shape = "" if shape is None else f" for {shape}"
    if name:
        raise ConfigError(f"--attention {name} cannot be used{of_shape}: {refusal}; choose another one, or auto")
    raise ConfigError(f"no attention is deterministic{of_shape}: {'; '.join(refusals)}; leave --deterministic out")


class ModelAttention:
    """The attention of one model's layers: an implementation for each shape, and the metadata that they share."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        name: str = "",
        *,
        deterministic: bool = False,
        cpu_isa: str = "",
    ) -> None:
        """Parameters as of `choose_attention`. name: of the implementation; empty: the fastest for each shape."""
        self.kv_dtype = kv_dtype
        self._device = device
        self._dtype = dtype
        self._name = name
        self._deterministic = deterministic
        self._cpu_isa = cpu_isa
        self._by_shape: dict[AttentionShape, Attention] = {}

    def for_shape(self, shape: AttentionShape) -> Attention:
        """Layers of one shape share it. Raises ConfigError if the named implementation does not support it."""
        if shape not in self._by_shape:
            self._by_shape[shape] = choose_attention(
                shape,
                self._device,
                self._dtype,
                self.kv_dtype,
                self._name,
                deterministic=self._deterministic,
                cpu_isa=self._cpu_isa,
            )
        return self._by_shape[shape]

    @property
    def name(self) -> str:
        """The names of the implementations in use, for people."""
        return " and ".join(sorted(self._by_name))

    @property
    def is_recordable(self) -> bool:
        """Whether attention only enqueues device work, so that a graph can record it."""
        return self._by_name.keys() <= {"flash", "triton"}

    def prepare(self, batch: StepBatch) -> Mapping[str, Any]:
        """A step's metadata, by the name of the implementation that reads it."""
        return {name: attention.prepare(batch) for name, attention in self._by_name.items()}

    @property
    def _by_name(self) -> dict[str, Attention]:
        return {attention.name: attention for attention in self._by_shape.values()}
