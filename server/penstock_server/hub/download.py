"""Downloads the files of a hub model that serving needs into the Hugging Face cache. Imports no torch.

INVARIANT: a file under its final name is complete: the library writes to another name and renames. It resumes a broken
connection; a new process downloads only the missing files. Without a connection, or with HF_HUB_OFFLINE=1, the cache is
used as it is.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
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
from penstock_server.host.progress import Progress
from penstock_server.hub.disk import check_room, remove_abandoned, write_errors
from penstock_server.hub.retry import Passing, Retries, as_passing, transfer_errors
from penstock_server.weights.folder import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    IMAGE_ADAPTER,
    Choice,
    choose_weights,
    find_gguf,
    find_model,
)
from penstock_server.weights.gguf.selection import Reference, choose_gguf

SMALL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
DEFAULT_REVISION = "main"
WATCH_S = 1.0
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
Result = TypeVar("Result")
Read = Callable[[str], str]  # the name of a file → its text


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A revision of a model in the cache."""

    folder: Path
    sha: str | None
    pipeline_tag: str | None


def download(
    reference: Reference, revision: str | None = None, with_code: bool = False, with_weights: bool = True
) -> Snapshot:
    """Downloads the missing files, or uses the cache when the hub cannot be reached.

    reference: a model of a repository. with_code: also the checkpoint's Python files. with_weights: whether to download
    weights.
    Raises ConfigError when the model does not exist, is not accessible, or has no supported weights.
    """
    model_id = reference.repository
    if reference.is_of_gguf:
        # The file has all that the model needs.
        return online_or_cached(
            model_id,
            revision,
            lambda: _download(model_id, revision, lambda names, read: list(hub_weights(reference, names, read).names)),
            is_complete=lambda folder: _has_gguf(folder, reference),
        )
    return online_or_cached(
        model_id,
        revision,
        lambda: _download(
            model_id, revision, lambda names, read: wanted_files(model_id, names, read, with_code, with_weights)
        ),
        is_complete=lambda folder: _is_complete(folder, with_weights),
    )


def hub_weights(reference: Reference, names: Collection[str], read: Read) -> Choice:
    """The weights that a reference names, among the names of its repository's files. Raises ConfigError."""
    if reference.is_of_gguf:
        return Choice("gguf", choose_gguf(reference.repository, names, reference))
    # Repositories of split GGUF files have a folder for each quantization.
    own = [name for name in names if "/" not in name or (name.count("/") == 1 and name.endswith(".gguf"))]
    return choose_weights(reference.repository, own, read)


def _has_gguf(folder: Path, reference: Reference) -> bool:
    try:
        return bool(find_gguf(folder, reference))
    except ConfigError:
        return False


def download_adapter(adapter_id: str, revision: str | None = None) -> Snapshot:
    """Downloads the missing files of a LoRA adapter, or uses the cache when the hub cannot be reached.

    Raises ConfigError when it does not exist, is not accessible, or lacks one of the files.
    """
    snapshot = online_or_cached(
        adapter_id,
        revision,
        lambda: _download(adapter_id, revision, lambda names, _: _adapter_files(adapter_id, names)),
        is_complete=_is_adapter,
    )
    _adapter_files(adapter_id, [path.name for path in snapshot.folder.iterdir()])
    return snapshot


def _is_adapter(folder: Path) -> bool:
    has_weights = any((folder / name).exists() for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE))
    return has_weights and (folder / ADAPTER_CONFIG).exists()


def _adapter_files(adapter_id: str, names: Collection[str]) -> list[str]:
    weights = next((name for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE) if name in names), None)
    for name, has_it in ((ADAPTER_CONFIG, ADAPTER_CONFIG in names), (ADAPTER_WEIGHTS, weights is not None)):
        if not has_it:
            raise ConfigError(f"{adapter_id} is not a LoRA adapter: it holds no {name}")
    return [ADAPTER_CONFIG, str(weights)]


def online_or_cached(
    model_id: str,
    revision: str | None,
    fetch: Callable[[], Result],
    is_complete: Callable[[Path], bool] = lambda folder: True,
) -> Result | Snapshot:
    """The result of `fetch`, or the cached snapshot when the hub is offline or fails.

    is_complete: whether a cached snapshot can be used at once. Otherwise `fetch` is tried again first, because it
    continues where it failed. Raises ConfigError.
    """
    disable_progress_bars()
    retries, num_files = Retries(), _num_blobs(model_id)
    with hub_errors(model_id, revision), write_errors(hub_cache(model_id), model_id):
        while True:
            try:
                return fetch()
            except OfflineModeIsEnabled:
                return cached(model_id, revision, "HF_HUB_OFFLINE is set")
            except (HTTPError, OSError) as error:
                failure = as_passing(error)
                if failure is None:
                    raise
            snapshot = _find_cached(model_id, revision)
            if snapshot is not None and is_complete(snapshot.folder):
                print(f"{failure}; using commit {snapshot.sha} from the cache", file=sys.stderr, flush=True)
                return snapshot
            if (arrived := _num_blobs(model_id)) > num_files:
                num_files = arrived
                retries.reset()
            if not retries.wait(failure):
                snapshot = cached(model_id, revision, str(failure))
                print(f"{failure}; the cache has a part of commit {snapshot.sha}", file=sys.stderr, flush=True)
                return snapshot


def _num_blobs(model_id: str) -> int:
    """The number of finished files in the cache."""
    return sum(1 for path in _repository(model_id).glob("blobs/*") if path.suffix != ".incomplete")


def _is_complete(folder: Path, with_weights: bool) -> bool:
    try:
        return not with_weights or bool(find_model(folder).paths)
    except ConfigError:
        return False


def _download(model_id: str, revision: str | None, choose: Callable[[Collection[str], Read], list[str]]) -> Snapshot:
    """choose: the files to download, of those that there are; it may read an index."""
    info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    # All files come from this commit, even if the branch moves during the download.
    commit = info.sha or revision
    cache = hub_cache(model_id)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}

    def read(name: str) -> str:
        with transfer_errors():
            path = hf_hub_download(model_id, name, revision=commit, cache_dir=cache)
        return Path(path).read_text(encoding="utf-8")

    names = choose(sizes, read)
    repository = cache / repository_name(model_id)
    snapshot = repository / "snapshots" / str(commit)
    if missing := [name for name in names if not (snapshot / name).exists()]:
        remove_abandoned(repository)
        check_room(repository, model_id, sum(sizes[name] for name in missing))
        with transfer_errors(), _watched(model_id, repository, sizes, names, missing):
            folder = Path(snapshot_download(model_id, revision=commit, allow_patterns=names, cache_dir=cache))
        # When the hub fails in between, the library may return what is there.
        if missing := [name for name in names if not (folder / name).exists()]:
            raise Passing(f"the hub did not give {missing[0]}")
    else:
        folder = snapshot
    if info.sha is not None:
        _remember(repository, revision or DEFAULT_REVISION, info.sha)
    return Snapshot(folder, info.sha, info.pipeline_tag)


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
    read: Read,
    with_code: bool = False,
    with_weights: bool = True,
) -> list[str]:
    """Selects the files to download: configuration, tokenizer, chat templates, modules and one copy of the weights.

    read: returns the text of a file; only an index is read. with_code: also select Python files.
    """
    top = [name for name in names if "/" not in name]
    weights = hub_weights(Reference(model_id), names, read).names if with_weights else ()
    suffixes = (*SMALL_FILE_SUFFIXES, ".py") if with_code else SMALL_FILE_SUFFIXES
    # An index of another format would name files that are not downloaded.
    small = [name for name in top if name.endswith(suffixes) and not _is_other_index(name, weights)]
    templates = [name for name in names if re.fullmatch(r"additional_chat_templates/[^/]+\.jinja", name)]
    # Files of sentence-transformers; the weights of a Dense module too, which are no part of the model's own.
    modules = [name for name in names if re.fullmatch(r"\d+_\w+/(config\.json|model\.safetensors)", name)]
    pickles = [name for name in names if re.fullmatch(r"\d+_\w+/pytorch_model\.bin", name)]
    modules += [name for name in pickles if f"{name.partition('/')[0]}/model.safetensors" not in modules]
    of_images = [f"{IMAGE_ADAPTER}/{name}" for name in ADAPTER_FILES]
    adapters = [name for name in of_images if with_weights and name in names]
    code = [name for name in names if with_code and "/" in name and name.endswith(".py")]
    return sorted({*small, *templates, *modules, *adapters, *code, *weights})


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
    snapshot = _find_cached(model_id, revision)
    if snapshot is None:
        revision_part = f" at revision {revision}" if revision else ""
        raise ConfigError(f"{model_id}{revision_part} is not in the cache, and {why}")
    return snapshot


def _find_cached(model_id: str, revision: str | None) -> Snapshot | None:
    repository = _repository(model_id)
    name = revision or DEFAULT_REVISION
    reference = repository / "refs" / name
    sha = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name
    folder = repository / "snapshots" / sha
    return Snapshot(folder, sha, None) if folder.is_dir() else None


def _repository(model_id: str) -> Path:
    return hub_cache(model_id) / repository_name(model_id)


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
def _watched(
    model_id: str, repository: Path, sizes: Mapping[str, int], names: list[str], missing: list[str]
) -> Iterator[None]:
    """Reports the progress of the download from the bytes on disk, independent of the library's transfer method."""
    total_bytes = sum(sizes[name] for name in missing)
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
