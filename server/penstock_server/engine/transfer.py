"""A step's copies between host and device: all its arrays to the device in one copy, all its results back in another.

On a GPU only page-locked memory is copied without waiting for the device. Every copy has a buffer of its own from
torch's allocator of such memory, which records an event behind the copy and reuses the buffer only after that event. So
any number of steps may be in flight. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Put = Callable[[Array], Tensor]
"""An array → its tensor on the device. The contents may arrive later; see `Upload.add`."""

_NO_MEMORY = torch.empty(0, dtype=torch.uint8)
_ALIGNMENT_BYTES = 16  # Triton compiles another kernel for tensors that are not aligned to it


class Upload:
    """Arrays on their way to the device: `add` all of them, then `start`."""

    def __init__(self, device: torch.device, memory: Tensor | None = None, expected_bytes: int = 1024) -> None:
        """memory: [bytes] uint8 on the device, which the arrays are copied into; None: new memory of the expected size.
        It is enlarged if necessary."""
        self._is_needed = is_needed(device)
        self._arrays: list[tuple[int, Array]] = []
        if memory is None:
            memory = torch.empty(expected_bytes, dtype=torch.uint8, device=device) if self._is_needed else _NO_MEMORY
        self.memory = memory
        self.num_bytes = 0  # used so far

    def add(self, array: Array) -> Tensor:
        """The array's tensor on the device. It may be sliced at once, and read by what is launched after `start`. The
        array must not change before."""
        if not self._is_needed:
            # PERF: on a CPU, even a `to` without effect lets other threads take the interpreter lock.
            return torch.from_numpy(array)
        offset = self.num_bytes
        self._arrays.append((offset, array))
        self.num_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self.num_bytes > len(self.memory):
            self.memory.resize_(2 * self.num_bytes)  # tensors that were made before follow
        return self.memory[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)

    def start(self) -> None:
        """Copies everything, without waiting for the device."""
        if not self._arrays:
            return
        host, contents = page_locked(self.num_bytes)
        for offset, array in self._arrays:
            contents[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self._arrays.clear()
        self.memory[: self.num_bytes].copy_(host, non_blocking=True)


def upload(array: Array, device: torch.device) -> Tensor:
    """One array on the device, without waiting for it."""
    alone = Upload(device)
    tensor = alone.add(array)
    alone.start()
    return tensor


class Download:
    """Tensors on their way to the host: `add` all of them, then `start`, then `wait` for any."""

    def __init__(self, device: torch.device) -> None:
        self._is_needed = is_needed(device)
        self._tensors: list[Tensor] = []
        self._num_bytes = 0
        self._host: Array | None = None
        self._copied: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Fetched:
        """What `wait` returns after `start`. The tensor must not change before."""
        self._tensors.append(tensor)
        self._num_bytes += tensor.nbytes
        return Fetched(self, len(self._tensors) - 1, self._num_bytes - tensor.nbytes)

    def start(self) -> None:
        """Copies everything, in the order of the device's work."""
        if not self._is_needed or not self._tensors:
            return
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in self._tensors]
        host, self._host = page_locked(self._num_bytes)
        host.copy_(parts[0] if len(parts) == 1 else torch.cat(parts), non_blocking=True)
        self._copied = record_event()

    def wait(self, index: int, offset: int) -> Array:
        """The tensor that was added as the `index`-th, at this offset in bytes. Waits for the device."""
        tensor = self._tensors[index]
        if self._copied is None or self._host is None:
            return tensor.numpy()
        self._copied.synchronize()
        return self._host[offset : offset + tensor.nbytes].view(_NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A tensor that is being copied to the host."""

    download: Download
    index: int
    offset: int

    def wait(self) -> Array:
        """Its contents. Waits for the device."""
        return self.download.wait(self.index, self.offset)


Fetch = Callable[[Tensor], Fetched]
"""`Download.add`"""


def is_needed(device: torch.device) -> bool:
    """Whether the device does not read the host's memory."""
    return device.type != "cpu"


def page_locked(num_bytes: int) -> tuple[Tensor, Array]:
    """[num_bytes] uint8 on the host, as a tensor and as an array of the same memory."""
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return memory, memory.numpy()


def record_event(*, timed: bool = False) -> torch.cuda.Event:
    """Behind the work that was given to the device so far. timed: its time can be read."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record()
    return event


_TORCH_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
_NUMPY_DTYPES = {theirs: ours for ours, theirs in _TORCH_DTYPES.items()}
