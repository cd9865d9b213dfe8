"""Build backend: compiles the crate once for each instruction set and data type, and lets maturin package all builds.

maturin compiles the portable kernels for bfloat16 itself. PENSTOCK_KERNELS chooses the others: "here" (the default) is
what this machine runs, "all" what its architecture has; else names such as "avx2/float16", separated by spaces.

    python kernels/backend.py test [FILTER]   unit tests of every instruction set that this machine runs
    python kernels/backend.py lint            clippy for every instruction set, and for aarch64
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

AARCH64 = "aarch64-unknown-linux-gnu"

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


def flags(isa: Isa, dtype: str) -> list[str]:
    """What tells rustc about a build."""
    features = ",".join(f"+{feature}" for feature in isa.features)
    return ["--cfg", f'element="{DTYPES[dtype]}"', *(["-C", f"target-feature={features}"] if features else [])]


def compiled(isa: Isa, dtype: str) -> Path:
    """The compiled library. The flags are those of this crate only, so its dependencies are compiled once."""
    print(f"compiling the kernels for {isa.name} in {dtype}", file=sys.stderr, flush=True)
    cargo = ["cargo", "rustc", "--release", "--locked", "--quiet", "--lib", "--crate-type", "cdylib"]
    options = ["--features", "python", "--message-format", "json-render-diagnostics"]
    command = [*cargo, *options, "--", *flags(isa, dtype), "-C", "strip=symbols"]
    output = subprocess.run(command, cwd=CRATE, stdout=subprocess.PIPE, check=True).stdout
    messages = map(json.loads, output.splitlines())
    artifacts = [each["filenames"] for each in messages if each["reason"] == "compiler-artifact"]
    return Path(artifacts[-1][0])


def with_flags(isa: Isa, dtype: str, *command: str) -> None:
    """Run cargo for one build, with a target folder of its own. Raises CalledProcessError."""
    print(f"{isa.name} in {dtype}", file=sys.stderr, flush=True)
    folder = CRATE.parent / "target" / "isa" / f"{isa.name}-{dtype}"
    environment = {**os.environ, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags(isa, dtype))}
    options = ["--package", "penstock-kernels", "--locked", "--quiet", "--target-dir", str(folder)]
    subprocess.run(["cargo", command[0], *options, *command[1:]], cwd=CRATE, env=environment, check=True)


def representative(isas: list[Isa]) -> list[tuple[Isa, str]]:
    """Every instruction set in bfloat16; the other data types, whose kernels differ in few lines, with the fastest."""
    return [*((isa, "bfloat16") for isa in isas), (isas[-1], "float16"), (isas[-1], "float32")]


def unit_tests(arguments: list[str]) -> None:
    for isa, dtype in representative([isa for isa in ISAS if isa.is_here and not isa.may_use_amx]):
        with_flags(isa, dtype, "test", "--lib", *arguments)


def lint() -> None:
    """The flags are those of this crate only, so its dependencies are checked once."""
    folder = str(CRATE.parent / "target" / "lint")
    clippy = ["cargo", "clippy", "--package", "penstock-kernels", "--locked", "--quiet", "--all-targets"]
    for isa, dtype in representative([isa for isa in ISAS if not isa.may_use_amx]):
        options = ["--features", "python", "--target-dir", folder, "--", "-D", "warnings", *flags(isa, dtype)]
        subprocess.run([*clippy, *options], cwd=CRATE, check=True)
    installed = subprocess.run(
        ["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not (Path(installed) / "lib" / "rustlib" / AARCH64).exists():
        print(f"not checked for {AARCH64}: `rustup target add {AARCH64}` installs its library", file=sys.stderr)
        return
    # With the stable ABI, no Python of that architecture is needed.
    environment = {**os.environ, "PYO3_NO_PYTHON": "1"}
    for dtype in DTYPES:
        options = ["--features", "python", "--target", AARCH64, "--target-dir", folder, "--", "-D", "warnings"]
        subprocess.run([*clippy, *options, *flags(ISAS[0], dtype)], cwd=CRATE, env=environment, check=True)


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    compile_kernels()
    return maturin.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    compile_kernels()
    return maturin.build_editable(directory, settings, metadata)


if __name__ == "__main__":
    if sys.argv[1] == "test":
        unit_tests(sys.argv[2:])
    else:
        lint()
