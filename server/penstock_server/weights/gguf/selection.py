"""Chooses one model among the GGUF files of a folder or repository, which often holds every quantization of it.

Imports no torch. A split model is one model. `mmproj` files (image projectors) and importance matrices are none.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from penstock_server.errors import ConfigError
from penstock_server.weights.series import NUMBERED, check_complete, series

DEFAULT_QUANTIZATION = "Q4_K_M"
_NO_MODEL = re.compile(r"(.*[-_.])?(mmproj|imatrix)([-_.].*)?\.gguf", re.IGNORECASE)
_MAX_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Reference:
    """A model of a repository: `owner/name`, `owner/name:QUANTIZATION` or `owner/name/FILE.gguf`."""

    repository: str
    quantization: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, model_id: str) -> Reference:
        """Parses a value of `--model-id`. COMPAT: both forms are vLLM's, the one with a colon is llama.cpp's too."""
        parts = model_id.split("/", 2)
        if len(parts) == 3:
            return cls("/".join(parts[:2]), file=parts[2])
        repository, colon, quantization = model_id.partition(":")
        if colon and not quantization:
            raise ConfigError(f"{model_id} names no quantization behind its colon")
        return cls(repository, quantization=quantization or None)

    @property
    def is_of_gguf(self) -> bool:
        """Whether it can only mean a GGUF file."""
        return self.quantization is not None or self.file is not None


def choose_gguf(where: str, names: Collection[str], reference: Reference | None = None) -> tuple[str, ...]:
    """The files of one model, among the names of a folder's or repository's files; no files if there are no GGUF models
    and the reference asks for none.

    where: the place, for messages. reference: which one; by default the only one, or that of `DEFAULT_QUANTIZATION`.
    Raises ConfigError if there is no such model, if several could be meant, or if a part of a split one is missing.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODEL.fullmatch(name.rpartition("/")[2]):
            models.setdefault(_without_number(name), []).append(name)
    if reference is not None and reference.file is not None:
        chosen = [model for model, files in models.items() if reference.file in files]
        if not chosen:
            raise ConfigError(f"{where} has no GGUF model {reference.file}; it has {_shown(models)}")
    elif reference is not None and reference.quantization is not None:
        chosen = _of_quantization(models, reference.quantization)
        if not chosen:
            raise ConfigError(
                f"{where} has no GGUF model of quantization {reference.quantization}; it has {_shown(models)}"
            )
    else:
        chosen = list(models) if len(models) < 2 else _default(models)
    if len(chosen) > 1 or (models and not chosen):
        raise ConfigError(
            f"{where} holds several GGUF models: {_shown(chosen or models)}; name one as --model-id: "
            f"{where}:QUANTIZATION or {where}/FILE.gguf"
        )
    if not chosen:
        return ()
    files = series(tuple(models[chosen[0]]))
    check_complete(where, files, names, "their numbering implies")
    return files


def _default(models: Collection[str]) -> list[str]:
    """The model of the default quantization, if all names begin as those of one model's quantizations do."""
    chosen = _of_quantization(models, DEFAULT_QUANTIZATION)
    if len(chosen) != 1:
        return chosen
    base = re.split(DEFAULT_QUANTIZATION, _file(chosen[0]), flags=re.IGNORECASE)[0]
    return chosen if all(_file(model).startswith(base) for model in models) else []


def _file(model: str) -> str:
    return model.rpartition("/")[2]


def _of_quantization(models: Collection[str], quantization: str) -> list[str]:
    """The models whose file names have the quantization as a part. One of Unsloth's dynamic quantizations, `UD-Q4_K_M`,
    is meant only if no plain one is there."""
    part = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?=[-./]|$)", re.IGNORECASE)
    found = [model for model in models if part.search(model)]
    plain = [model for model in found if not re.search(rf"\bUD-{re.escape(quantization)}", model, re.IGNORECASE)]
    return plain or found


def _without_number(name: str) -> str:
    stem = name[: -len(".gguf")]
    return re.sub(r"-\d{5}-of-\d{5}$", "", stem) if NUMBERED.fullmatch(name) else stem


def _shown(models: Collection[str]) -> str:
    names = [f"{name}.gguf" for name in models]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "none") + more
