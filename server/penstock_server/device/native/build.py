"""Chooses among the builds of the native CPU kernels: one for each instruction set and data type."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_server.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from penstock_kernels import Isa

NATIVE_PACKAGE = "penstock_kernels"


@dataclass(frozen=True, slots=True)
class NativeBuild:
    """The native kernels of one instruction set and data type."""

    isa: Isa
    dtype: torch.dtype
    module: Any  # the extension module

    def kernels(self, num_threads: int | None = None) -> Any:
        """A kernel context that runs on torch's own OpenMP threads, by default on all of them."""
        import torch

        return self.module.Kernels(num_threads or torch.get_num_threads(), _libgomp(), self.isa.may_use_amx)

    def __str__(self) -> str:
        return f"{self.isa.name} in {_name(self.dtype)}"


@cache
def find_build(device: torch.device, dtype: torch.dtype, cpu_isa: str = "") -> NativeBuild | None:
    """The kernels for tensors of this dtype on this device: the fastest that run here, or those of `cpu_isa`. None:
    no CPU, or none are installed. Raises ConfigError if `cpu_isa` cannot be used."""
    if device.type != "cpu":
        return None
    if importlib.util.find_spec(NATIVE_PACKAGE) is None:
        if cpu_isa:
            raise ConfigError(f"--cpu-isa {cpu_isa} cannot be used: {NATIVE_PACKAGE} is not installed")
        return None
    import penstock_kernels

    names = []
    for isa in penstock_kernels.runnable(_name(dtype)):
        if cpu_isa in ("", isa.name):
            build = NativeBuild(isa, dtype, penstock_kernels.load(isa, _name(dtype)))
            # The system may refuse AMX to a process although the CPU has it.
            if not isa.may_use_amx or build.kernels(1).uses_amx:
                return build
            continue
        names.append(isa.name)
    if not cpu_isa:
        return None
    found = ", ".join(reversed(names)) or "none"
    raise ConfigError(f"--cpu-isa {cpu_isa} cannot be used: the kernels for {_name(dtype)} that run here are {found}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _libgomp() -> str | None:
    """The path of the libgomp that torch runs on; None if torch uses another OpenMP."""
    import torch

    return next((str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))), None)
