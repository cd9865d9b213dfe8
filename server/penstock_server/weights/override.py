"""A model of the hub whose weights lie in a folder of their own: a folder in the cache with links to both."""

from __future__ import annotations

from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.model_cache import content_key, made_folder
from penstock_server.weights.folder import find_weights, is_weight_or_index

# Part of every folder's key: raise it when what is linked from the same files changes.
LAYOUT_VERSION = 1


def with_weights(folder: Path, weights: Path, name: str) -> Path:
    """The files of `folder` that are no weights, and the weights (and their index) of the other.

    Raises ConfigError when `weights` is no folder or holds no complete model's weights.
    """
    if not weights.is_dir():
        raise ConfigError(
            f"there is no folder {weights}; --weights-cache-override names the one that holds the weights"
        )
    chosen = {path.name: path for path in find_weights(weights).paths}
    chosen |= {path.name: path for path in weights.glob("*.index.json")}
    links = {path.name: path for path in folder.iterdir() if not is_weight_or_index(path.name)}
    links |= {file_name: path.resolve() for file_name, path in chosen.items()}

    def write(made: Path) -> None:
        for file_name, path in links.items():
            (made / file_name).symlink_to(path.absolute())

    return made_folder(f"{name}-weights", content_key(LAYOUT_VERSION, sorted(links.values())), write)
