"""Combines a hub model with weights from another folder: in a cached folder that links to both."""

from __future__ import annotations

from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.host.model_cache import content_key, made_folder
from penstock_server.weights.folder import find_weights, is_weight_or_index

# Part of every folder's key. Increment it when the same files give other links.
LAYOUT_VERSION = 1


def with_weights(folder: Path, weights: Path, name: str) -> Path:
    """The cached folder with the weights and index of `weights`, and all other files of `folder`.

    Raises ConfigError when `weights` is not a folder, or lacks weights.
    """
    if not weights.is_dir():
        raise ConfigError(
            f"there is no folder {weights}; --weights-cache-override must name the folder with the weights"
        )
    chosen = {path.name: path for path in find_weights(weights).paths}
    chosen |= {path.name: path for path in weights.glob("*.index.json")}
    links = {path.name: path for path in folder.iterdir() if not is_weight_or_index(path.name)}
    links |= {file_name: path.resolve() for file_name, path in chosen.items()}

    def write(made: Path) -> None:
        for file_name, path in links.items():
            (made / file_name).symlink_to(path.absolute())

    return made_folder(f"{name}-weights", content_key(LAYOUT_VERSION, sorted(links.values())), write)
