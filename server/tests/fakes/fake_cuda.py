"""A CUDA device without a GPU: tensors have a device, a dtype and a shape, but no data (torch's FakeTensorMode).

A step that runs here mixes no devices and waits for nothing: reading a device tensor on the host (`item`, `nonzero`,
an index by a boolean tensor) raises, because there is no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from late_device import LateEvent
from penstock_server.device.triton import device as triton_device
from penstock_server.engine import Engine, transfer
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Plan
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = torch.device("cuda", 0)

# Operators that launch nothing: they make views, allocate, or answer questions.
NO_LAUNCH = {"prim.device"} | {
    f"aten.{name}"
    for name in (
        *("alias", "chunk", "detach", "empty", "expand", "flatten", "new_empty", "permute", "reshape"),
        *("select", "slice", "split_with_sizes", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view"),
    )
}


@dataclass
class Launches:
    """What a step launches on the device, by name; and its copies from the host and to it."""

    kernels: Counter[str] = field(default_factory=Counter)
    num_uploads: int = 0
    num_downloads: int = 0

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    def add(self, name: str, arguments: Iterable[Any], result: torch.Tensor | None = None) -> None:
        """One launch. arguments: of a Triton kernel, by name, or of an operator of torch, with its result."""
        self.kernels[name] += 1


class Recorder(TorchDispatchMode):
    """Counts the operators that run on the device."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        if not isinstance(result, torch.Tensor) or name in NO_LAUNCH:
            return result
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
        kinds = {tensor.device.type for tensor in (*tensors, result)}
        if kinds == {"cpu"}:
            return result
        if len(kinds) > 1:
            assert name == "aten.copy_", f"{func} copies between the devices by itself"
            # A copy that blocks would wait for the device. (Memory that is not page-locked too: see `page_locked`.)
            assert (kwargs or {}).get("non_blocking") or any(arg is True for arg in args), f"{func} blocks"
            if result.device.type == "cuda":
                self._launches.num_uploads += 1
            else:
                self._launches.num_downloads += 1
            return result
        if name in ("aten.to", "aten._to_copy") and tensors[0].dtype == result.dtype:
            return result
        self._launches.add(name, args, result)
        return result


class FakeEvent(LateEvent):
    """Stands in for an event of CUDA that nothing keeps waiting."""

    def query(self) -> bool:
        return True


def record_eagerly(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """Stands in for `CudaRecorder`: repeats the function itself."""
    output = run()
    return lambda: output.copy_(run()), output


@contextmanager
def fake_cuda(launches: Launches | None = None) -> Iterator[Launches]:
    """Engines that are loaded and run inside have a fake GPU. Yields what they launch, operators of torch only while a
    Recorder is on."""
    launches = launches or Launches()
    mode = FakeTensorMode()
    from_numpy = torch.from_numpy

    def fake_from_numpy(array: npt.NDArray[Any]) -> torch.Tensor:
        # torch's own fake remembers the data, and copies it to a real device.
        with _disable_current_modes():
            tensor = from_numpy(array)
        return mode.from_tensor(tensor)

    def fake_page_locked(num_bytes: int) -> tuple[torch.Tensor, npt.NDArray[Any]]:
        return torch.empty(num_bytes, dtype=torch.uint8), np.zeros(num_bytes, np.uint8)

    def record_launch(function: Any, grid: tuple[int, int], **arguments: Any) -> None:
        devices = {value.device for value in arguments.values() if isinstance(value, torch.Tensor)}
        assert devices == {DEVICE}, devices
        if all(grid):
            launches.add(function.fn.__name__, arguments)

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(SafetensorsCheckpoint, "read", lambda self, name, part, out: None)
        patch.setattr("penstock_server.engine.engine.choose_device", lambda name, rank: DEVICE)
        patch.setattr("penstock_server.engine.engine.open_device", lambda device: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(triton_device, "multiplies_float8", lambda device: True)
        patch.setattr(torch, "from_numpy", fake_from_numpy)
        patch.setattr(transfer, "page_locked", fake_page_locked)
        for module in ("transfer", "engine"):
            patch.setattr(f"penstock_server.engine.{module}.record_event", FakeEvent)
        patch.setattr(triton_device, "launch", record_launch)
        patch.setattr("penstock_server.engine.start.CudaRecorder", lambda: record_eagerly)
        yield launches


def load(folder: Path, max_sequences: int = 8, **options: Any) -> Engine:
    """An engine of the checkpoint's shapes; call it inside of `fake_cuda`. options: of `LoadConfig`."""
    config = LoadConfig(folder, dtype="bfloat16", **options)
    # Values cannot be compared there: a head that is stored counts as the embedding's copy.
    with patch("penstock_server.models.tie.same_in", lambda checkpoint: lambda *tables: True):
        engine, _ = Engine.load(config)
    engine.warm_up(WarmUpConfig(64, max_sequences, 128, num_blocks=32, proven=True))
    return engine


def launched(loaded: tuple[Engine, Launches], plan: Plan) -> Launches:
    """What one step launches, which is not collected yet."""
    engine, launches = loaded
    launches.kernels.clear()
    launches.num_uploads = launches.num_downloads = 0
    with Recorder(launches):
        engine.launch(plan)
    return launches
