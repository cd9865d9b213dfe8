"""Build backend: generates the Python side of the worker protocol, then calls maturin, which has no hook for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import maturin
from maturin import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent

prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable


def generate_protocol() -> None:
    """Generate server/penstock_server/pb from proto/worker.proto. The `=` makes imports in it package-relative."""
    from grpc_tools import protoc

    package = ROOT / "server" / "penstock_server" / "pb"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text('"""Generated from proto/worker.proto."""\n')
    arguments = [
        "protoc",
        f"-Ipenstock_server/pb={ROOT / 'proto'}",
        f"--python_out={ROOT / 'server'}",
        f"--pyi_out={ROOT / 'server'}",
        f"--grpc_python_out={ROOT / 'server'}",
        str(ROOT / "proto" / "worker.proto"),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed on proto/worker.proto")


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    generate_protocol()
    return maturin.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    generate_protocol()
    return maturin.build_editable(directory, settings, metadata)


def build_sdist(directory: str, settings: dict[str, Any] | None = None) -> str:
    generate_protocol()
    return maturin.build_sdist(directory, settings)


if __name__ == "__main__":
    generate_protocol()
