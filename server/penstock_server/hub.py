"""Downloads the files of a hub model that serving needs into the Hugging Face cache. Imports no torch.

The library keeps finished files and resumes interrupted ones. Without a connection, or with HF_HUB_OFFLINE=1, the cache
is used as it is.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
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
from penstock_server.progress import Progress
from penstock_server.weights.folder import choose_weights

SMALL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
DEFAULT_REVISION = "main"
WATCH_S = 1.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A revision of a model in the cache."""

    folder: Path
    sha: str | None
    pipeline_tag: str | None


def download(
    model_id: str, revision: str | None = None, with_code: bool = False, with_weights: bool = True
) -> Snapshot:
    """Downloads the missing files, or uses the cache when the hub cannot be reached.

    with_code: also the checkpoint's Python files. with_weights: whether to download weights.
    Raises ConfigError when the model does not exist, is not accessible, or has no supported weights.
    """
    return online_or_cached(model_id, revision, lambda: _download(model_id, revision, with_code, with_weights))


def online_or_cached(model_id: str, revision: str | None, fetch: Callable[[], Result]) -> Result | Snapshot:
    """The result of `fetch`, or the cached snapshot when the hub is offline or fails. Raises ConfigError."""
    disable_progress_bars()
    with hub_errors(model_id, revision):
        try:
            return fetch()
        except OfflineModeIsEnabled:
            return cached(model_id, revision, "HF_HUB_OFFLINE is set")
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code < 500:
                raise
            return cached(model_id, revision, f"the hub answered {error}")
        except (HTTPError, ConnectionError, TimeoutError) as error:
            return cached(model_id, revision, f"the hub cannot be reached ({error})")


def _download(model_id: str, revision: str | None, with_code: bool, with_weights: bool) -> Snapshot:
    info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    # All files come from this commit, even if the branch moves during the download.
    commit = info.sha or revision
    cache = hub_cache(model_id)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}

    def read(name: str) -> str:
        return Path(hf_hub_download(model_id, name, revision=commit, cache_dir=cache)).read_text(encoding="utf-8")

    names = wanted_files(model_id, sizes, read, with_code, with_weights)
    repository = cache / repository_name(model_id)
    with _watched(model_id, repository, names, sum(sizes[name] for name in names), commit):
        folder = snapshot_download(model_id, revision=commit, allow_patterns=names, cache_dir=cache)
    if info.sha is not None:
        _remember(repository, revision or DEFAULT_REVISION, info.sha)
    return Snapshot(Path(folder), info.sha, info.pipeline_tag)


@contextmanager
def hub_errors(model_id: str, revision: str | None) -> Iterator[None]:
    """Converts errors of the hub to ConfigErrors with the remedy."""
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{model_id!r} is neither an existing file or folder nor a valid hub id: {error}") from error
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
    except (HTTPError, OSError) as error:
        raise ConfigError(f"{model_id} cannot be fetched from the hub: {error}") from error


def wanted_files(
    model_id: str,
    names: Collection[str],
    read: Callable[[str], str],
    with_code: bool = False,
    with_weights: bool = True,
) -> list[str]:
    """Selects the files to download: configuration, tokenizer, chat templates, modules and one copy of the weights.

    read: returns the text of a file; only an index is read. with_code: also select Python files.
    """
    top = [name for name in names if "/" not in name]
    weights = choose_weights(model_id, top, read).names if with_weights else ()
    suffixes = (*SMALL_FILE_SUFFIXES, ".py") if with_code else SMALL_FILE_SUFFIXES
    # An index of another format would name files that are not downloaded.
    small = [name for name in top if name.endswith(suffixes) and not _is_other_index(name, weights)]
    templates = [name for name in names if re.fullmatch(r"additional_chat_templates/[^/]+\.jinja", name)]
    # Of sentence-transformers, the weights of a Dense module too: they are no part of the model's own.
    modules = [name for name in names if re.fullmatch(r"\d+_\w+/(config\.json|model\.safetensors)", name)]
    pickles = [name for name in names if re.fullmatch(r"\d+_\w+/pytorch_model\.bin", name)]
    modules += [name for name in pickles if f"{name.partition('/')[0]}/model.safetensors" not in modules]
    code = [name for name in names if with_code and "/" in name and name.endswith(".py")]
    return sorted({*small, *templates, *modules, *code, *weights})


def _is_other_index(name: str, weights: Collection[str]) -> bool:
    suffix = name.removesuffix(".index.json")
    return suffix != name and not any(weight.endswith(Path(suffix).suffix) for weight in weights)


def hub_cache(model_id: str) -> Path:
    """The cache folder for the model.

    COMPAT: TGI's images up to 2.2 kept models in /data, later ones in /data/hub. A volume may have either layout.
    """
    older = Path(constants.HF_HOME).expanduser()
    is_given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    newer = Path(constants.HF_HUB_CACHE).expanduser()
    name = repository_name(model_id)
    return older if not is_given and (older / name).is_dir() and not (newer / name).exists() else newer


def repository_name(model_id: str) -> str:
    """The name of the model's folder in the cache."""
    return "models--" + model_id.replace("/", "--")


def cached(model_id: str, revision: str | None, why: str) -> Snapshot:
    """The cached snapshot of a branch, tag or commit; it may be incomplete. Raises ConfigError when there is none.

    why: the reason for using the cache, for the message.
    """
    repository = hub_cache(model_id) / repository_name(model_id)
    name = revision or DEFAULT_REVISION
    reference = repository / "refs" / name
    sha = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name
    folder = repository / "snapshots" / sha
    if not folder.is_dir():
        revision_part = f" at revision {revision}" if revision else ""
        raise ConfigError(f"{model_id}{revision_part} is not in the cache, and {why}")
    return Snapshot(folder, sha, None)


def _remember(repository: Path, revision: str, sha: str) -> None:
    """Records the commit of a branch for offline use, as the library does for its own downloads."""
    reference = repository / "refs" / revision
    if revision == sha or (reference.is_file() and reference.read_text(encoding="utf-8") == sha):
        return
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        unfinished = reference.with_name(f".{reference.name}.{os.getpid()}")
        unfinished.write_text(sha, encoding="utf-8")
        unfinished.replace(reference)
    except OSError:
        return  # a read-only cache can still be served from


@contextmanager
def _watched(model_id: str, repository: Path, names: list[str], total_bytes: int, commit: str | None) -> Iterator[None]:
    """Reports the progress of the download from the bytes on disk, independent of the library's transfer method."""
    snapshot = repository / "snapshots" / str(commit)
    missing = [name for name in names if not (snapshot / name).exists()]
    if not missing:
        yield
        return
    before = _blob_bytes(repository)
    ended = threading.Event()

    def watch(progress: Progress) -> None:
        while not ended.wait(WATCH_S):
            progress.reach(_blob_bytes(repository) - before)

    what = f"downloading {len(missing)} of {len(names)} files of {model_id}"
    with Progress(what, total_bytes) as progress:
        thread = threading.Thread(target=watch, args=[progress], daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            progress.done_bytes = _blob_bytes(repository) - before


def _blob_bytes(repository: Path) -> int:
    total = 0
    for path in (repository / "blobs").glob("*"):
        try:
            status = path.stat()
        except OSError:
            continue  # renamed meanwhile
        total += min(status.st_size, status.st_blocks * 512)  # sparse: parts may be written out of order
    return total
