"""Serves a LoRA adapter as a model: its base, with the adapter for every request that names none. Imports no torch.

COMPAT: TGI merges such an adapter into its base. Here it stays beside the base, which may be quantized, and other
adapters for the base can be named too.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.host.model_cache import content_key, made_folder
from penstock_server.weights.folder import ADAPTER_CONFIG, DEFAULT_ADAPTER

# Part of every folder's key. Increment it when the same files give other links.
LAYOUT_VERSION = 1
# Trainers save the tokenizer and the chat template with an adapter, which may differ from the base's.
_TOKENIZER = "tokenizer.json"
_OF_TEXT = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges")


def base_of(folder: Path) -> tuple[str, str | None]:
    """The base that an adapter's config names, and its revision. Raises ConfigError if it names none."""
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path} names no base_model_name_or_path: give the base as --model-id, and this folder to --lora-adapters"
        )
    return base, revision if isinstance(revision, str) else None


def adapted_folder(base: Path, adapter: Path, name: str) -> Path:
    """The cached folder with links to a prepared base's files, and to the adapter that it is served with.

    The tokenizer and chat template are the adapter's if it has a tokenizer, as in TGI. Raises ConfigError if the cache
    cannot be written.
    """
    links = {path.name: path for path in base.iterdir()}
    if DEFAULT_ADAPTER in links:
        raise ConfigError(
            f"{adapter} is an adapter of an adapter, which is not supported; merge the first one with peft"
        )
    if (adapter / _TOKENIZER).is_file():
        links = {file: path for file, path in links.items() if not file.startswith(_OF_TEXT)}
        links |= {path.name: path for path in adapter.iterdir() if path.name.startswith(_OF_TEXT)}
    links[DEFAULT_ADAPTER] = adapter

    def write(made: Path) -> None:
        for file, path in links.items():
            (made / file).symlink_to(path.absolute())

    files = [*links.values(), *(path for path in adapter.iterdir() if path.is_file())]
    return made_folder(f"{name}-adapted", content_key(LAYOUT_VERSION, sorted(files)), write)
