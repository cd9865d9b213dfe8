"""Fetches a model from the Hugging Face hub into its cache: only the files that serving needs. Imports no torch.

Without a connection, or with HF_HUB_OFFLINE=1, what the cache holds is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from penstock_server.errors import ConfigError
from penstock_server.weights.folder import UNSUPPORTED_BIN, is_weight_name

SMALL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True, slots=True)
class Snapshot:
    folder: Path
    sha: str | None
    pipeline_tag: str | None


def download(model_id: str, revision: str | None = None) -> Snapshot:
    """Raises ConfigError when there is no such model, it is not open to us, or it has no weights that can be read."""
    disable_progress_bars()
    try:
        info = HfApi().model_info(model_id, revision=revision)
        names = wanted_files(model_id, [sibling.rfilename for sibling in info.siblings or []])
        folder = snapshot_download(model_id, revision=revision, allow_patterns=names)
        return Snapshot(Path(folder), info.sha, info.pipeline_tag)
    except HFValidationError as error:
        raise ConfigError(
            f"{model_id!r} is neither a file or folder that exists nor a name on the hub: {error}"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(f"{model_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no folder and no model {model_id} on the hub; if it is private, set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model_id} has no revision {revision}") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"the hub refused to give {model_id}: {error}") from error
    except OfflineModeIsEnabled:
        return _cached(model_id, revision, "HF_HUB_OFFLINE is set")
    except (HTTPError, OSError) as error:
        return _cached(model_id, revision, f"the hub cannot be reached ({error})")


def wanted_files(model_id: str, names: Iterable[str]) -> list[str]:
    """Of all files of a repository: configuration, tokenizer, and one copy of the weights."""
    names = list(names)
    top = [name for name in names if "/" not in name]
    templates = [name for name in names if name.startswith("additional_chat_templates/") and name.endswith(".jinja")]
    weights = [name for name in top if is_weight_name(name)]
    ggufs = [name for name in top if name.endswith(".gguf")]
    if not weights and len(ggufs) > 1:
        raise ConfigError(
            f"{model_id} holds several GGUF files; download one ({', '.join(sorted(ggufs))}) and give its path"
        )
    if not weights and not ggufs:
        if any(name.endswith((".bin", ".pt", ".pth")) for name in top):
            raise ConfigError(f"{model_id} holds its weights only {UNSUPPORTED_BIN}")
        raise ConfigError(f"{model_id} holds no weights: no *.safetensors and no *.gguf file")
    small = [name for name in top if name.endswith(SMALL_FILE_SUFFIXES)]
    return sorted(small + templates + (weights or ggufs))


def _cached(model_id: str, revision: str | None, why: str) -> Snapshot:
    try:
        folder = Path(snapshot_download(model_id, revision=revision, local_files_only=True))
    except OSError as error:
        raise ConfigError(f"{model_id} is not in the cache, and {why}") from error
    return Snapshot(folder, folder.name, None)
