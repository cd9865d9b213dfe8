"""The instruction sets and data types that the kernels are compiled for. The build backend loads this file too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""The crate's names in `cfg(element)` for torch's names of data types."""

_FLAGS = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
_AMX_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})


@dataclass(frozen=True)
class Isa:
    """An instruction set: rustc's names of what its kernels use beyond the architecture's baseline, and whether they
    may use AMX, which the same build asks the system for."""

    name: str
    features: tuple[str, ...] = ()
    may_use_amx: bool = False

    @property
    def folder(self) -> str:
        """The sub-package of its builds."""
        return "avx512_bf16" if self.may_use_amx else self.name.replace("-", "_")

    @property
    def is_here(self) -> bool:
        """Whether this CPU and this system have it."""
        needed = {_FLAGS.get(feature, feature) for feature in self.features}
        return cpu_flags() >= (needed | _AMX_FLAGS if self.may_use_amx else needed)


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_BF16 = (*_AVX512, "avx512vnni", "avx512bf16")

ISAS = (
    Isa("portable"),
    Isa("avx2", ("avx2", "fma", "f16c")),
    Isa("avx512", _AVX512),
    Isa("avx512-vnni", (*_AVX512, "avx512vnni")),
    Isa("avx512-bf16", _BF16),
    Isa("amx", _BF16, may_use_amx=True),
)
"""Instruction sets, from the slowest to the fastest on most CPUs."""


def fastest_first() -> list[Isa]:
    """The instruction sets of this CPU and this system."""
    order = list(reversed(ISAS))
    if _has_slow_bf16():
        place = [isa.name for isa in order].index("avx512-bf16")
        order[place], order[place + 1] = order[place + 1], order[place]
    return [isa for isa in order if isa.is_here]


def _has_slow_bf16() -> bool:
    """Whether `vdpbf16ps` multiplies slower than FMA does, as on Intel's cores since AMX: avx512_fp16 tells them from
    older ones.

    PERF: it takes two cycles, in which four FMA multiply twice as many numbers. Products in bf16 with FMA are as fast
    up to 8 rows, and 1.4 (16 rows) or 1.7 (32 rows) times as fast above (Emerald Rapids).
    """
    return cpu_vendor() == "GenuineIntel" and "avx512_fp16" in cpu_flags()


@cache
def cpu_flags() -> frozenset[str]:
    """The instructions of this CPU, as Linux calls them; none where it does not list them."""
    return frozenset(_cpuinfo("flags", "Features").split())


@cache
def cpu_vendor() -> str:
    """The maker of this CPU, as Linux calls it; empty where it does not say."""
    return _cpuinfo("vendor_id").strip()


def _cpuinfo(*names: str) -> str:
    """The first value with one of these names; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith(names)), "")
