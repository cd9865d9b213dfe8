"""Every supported `model_type` of `config.json`: how its spec is built and what its checkpoints call the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock_server.models import llama
from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap


@dataclass(frozen=True, slots=True)
class Architecture:
    build_spec: Callable[[Config], ModelSpec]
    names: NameMap


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(llama.llama, llama.NAMES),
    "mistral": Architecture(llama.mistral, llama.NAMES),
    "qwen2": Architecture(llama.qwen2, llama.NAMES),
}


def read_spec(folder: Path) -> tuple[ModelSpec, NameMap]:
    """Raises ConfigError when the folder's model is of no supported architecture, or asks for something that is not."""
    config = Config.read(folder)
    model_type = config.require("model_type", str)
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise config.refuse(f"model type {model_type!r} is not supported; supported: {supported}")
    return architecture.build_spec(config), architecture.names
