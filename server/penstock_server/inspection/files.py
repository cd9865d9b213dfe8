"""What is known of a model's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_server.weights.wrapper import note_on, unwrapped

if TYPE_CHECKING:
    from penstock_server.weights.location import Locator


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The type and shape of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class ModelFiles:
    """A model's small files in a folder, and facts about its weights."""

    name: str
    folder: Path | None = None  # None: there are no files to inspect
    origin: str = ""
    kind: str = ""  # the format of the weights
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each weight file
    tensors: Mapping[str, StoredTensor] | None = None  # by the names that the loader uses; None: unknown
    metadata: dict[str, str] = field(default_factory=dict)  # metadata of safetensors files that are not downloaded
    locator: Locator | None = None  # for formats with their own tensor names
    problems: list[str] = field(default_factory=list)  # reasons why the model cannot be served
    notes: list[str] = field(default_factory=list)

    def hold(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Sets `tensors`, by their names in the files. Raises ConfigError if wrappers of training left two tensors with
        one name."""
        self.tensors = {plain: tensors[name] for name, plain in unwrapped(tensors).items()}
        self.notes += [note] if (note := note_on(tensors)) else []
