"""The CUDA stream on which a GPU encodes images, so that no step waits for a tower.

Steps run on the device's default stream. A kernel waits for all earlier kernels of its own stream, and for no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ImageStream:
    """Stream that one rank encodes images on. On a CPU, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Priority 0 is CUDA's lowest, and that of the default stream.
            self._stream = torch.cuda.Stream(device, priority=0)
            self._steps = torch.cuda.default_stream(device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread's work on the GPU goes to this stream. On exit, waits until it is done, so that steps may read
        its results at once."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._steps)  # weights were written there
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Lets steps read results, which may be freed at any time: their memory is used again only after the steps that
        were launched until then."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._steps)
