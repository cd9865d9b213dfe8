"""The instruction set that the tests' native kernels use: CPU_ISA, which `pytest --cpu-isa` sets and the binary reads.
By default it is the fastest that this CPU has."""

from __future__ import annotations

import os


def use_tested_isa() -> None:
    """Hide the instruction sets that are faster than the tested one from this process, as on a CPU without them. Raises
    ValueError if it is not here, ImportError if there are no native kernels."""
    name = os.environ.get("CPU_ISA", "")
    if name in ("", "auto"):
        return
    import penstock_kernels

    here = penstock_kernels.fastest_first()
    names = [isa.name for isa in here]
    if name not in names:
        raise ValueError(f"instruction set {name} is not here, {', '.join(names)} are")
    penstock_kernels.fastest_first = lambda: here[names.index(name) :]
