"""Build backend: compiles the crate once for each instruction set and data type, and lets maturin package all builds.

maturin compiles the portable kernels for bfloat16 itself. PENSTOCK_KERNELS chooses the others: "here" (the default) is
what this machine runs, "all" what its architecture has; else names such as "avx2/float16", separated by spaces.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import maturin
from maturin import get_requires_for_build_editable, get_requires_for_build_wheel, prepare_metadata_for_build_wheel

__all__ = [
    "build_editable",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable

CRATE = Path(__file__).resolve().parent
PYTHON = CRATE / "python"
PACKAGE = PYTHON / "penstock_kernels"

sys.path.insert(0, str(PYTHON))
from penstock_kernels.isa import DTYPES, ISAS, Isa  # noqa: E402


def chosen(text: str) -> list[tuple[Isa, str]]:
    """The builds of PENSTOCK_KERNELS. Raises SystemExit for an unknown name."""
    builds = {f"{isa.name}/{dtype}": (isa, dtype) for isa in ISAS if not isa.may_use_amx for dtype in DTYPES}
    if text in ("here", "all"):
        is_x86 = platform.machine() == "x86_64"
        names = [name for name, (isa, _) in builds.items() if isa.is_here or (text == "all" and is_x86)]
    else:
        names = text.split()
    if unknown := [name for name in names if name not in builds]:
        raise SystemExit(
            f'PENSTOCK_KERNELS is "{text}", must be here, all, or some of {", ".join(builds)}: {unknown[0]}'
        )
    return [builds[name] for name in names if name != "portable/bfloat16"]


def compile_kernels() -> None:
    """Write the extension modules of the chosen builds into the package, and remove others."""
    for old in PACKAGE.glob("*/*/native.*.so"):
        old.unlink()
    for isa, dtype in chosen(os.environ.get("PENSTOCK_KERNELS", "here")):
        folder = PACKAGE / isa.folder / dtype
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(compiled(isa, dtype), folder / "native.abi3.so")


def compiled(isa: Isa, dtype: str) -> Path:
    """The compiled library. The flags are those of this crate only, so its dependencies are compiled once."""
    flags = ["--cfg", f'element="{DTYPES[dtype]}"', "-C", "strip=symbols"]
    if isa.features:
        flags += ["-C", "target-feature=" + ",".join(f"+{feature}" for feature in isa.features)]
    print(f"compiling the kernels for {isa.name} in {dtype}", file=sys.stderr, flush=True)
    cargo = [
        "cargo",
        "rustc",
        "--release",
        "--locked",
        "--quiet",
        "--lib",
        "--crate-type",
        "cdylib",
        "--features",
        "python",
    ]
    command = [*cargo, "--message-format", "json-render-diagnostics", "--", *flags]
    output = subprocess.run(command, cwd=CRATE, stdout=subprocess.PIPE, check=True).stdout
    messages = map(json.loads, output.splitlines())
    artifacts = [each["filenames"] for each in messages if each["reason"] == "compiler-artifact"]
    return Path(artifacts[-1][0])


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    compile_kernels()
    return maturin.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    compile_kernels()
    return maturin.build_editable(directory, settings, metadata)
