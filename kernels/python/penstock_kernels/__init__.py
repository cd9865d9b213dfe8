"""Native CPU kernels of Penstock: an extension module for each instruction set and data type."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from penstock_kernels.isa import ISAS, Isa, fastest_first

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["ISAS", "Isa", "load", "runnable"]


def runnable(dtype: str) -> list[Isa]:
    """The instruction sets whose kernels for "bfloat16", "float16" or "float32" are installed and run here, the fastest
    first."""
    return [isa for isa in fastest_first() if _is_installed(isa, dtype)]


def load(isa: Isa, dtype: str) -> ModuleType:
    """Kernels that are `runnable`."""
    return importlib.import_module(_module(isa, dtype))


def _module(isa: Isa, dtype: str) -> str:
    return f"{__name__}.{isa.folder}.{dtype}.native"


def _is_installed(isa: Isa, dtype: str) -> bool:
    try:
        return importlib.util.find_spec(_module(isa, dtype)) is not None
    except ModuleNotFoundError:  # its folder
        return False
