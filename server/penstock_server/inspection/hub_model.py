"""Inspects a model on the hub: fetches its small files, and only the headers of its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from penstock_server.hub.download import (
    Snapshot,
    hub_cache,
    hub_weights,
    online_or_cached,
    repository_name,
    wanted_files,
)
from penstock_server.hub.retry import transfer_errors
from penstock_server.inspection.files import ModelFiles, StoredTensor
from penstock_server.inspection.local_model import inspect_folder, inspect_gguf
from penstock_server.weights.folder import find_gguf
from penstock_server.weights.gguf.selection import Reference


def inspect_hub(files: ModelFiles, reference: Reference, revision: str | None, *, with_code: bool = False) -> None:
    """Fills `files`, from the local snapshot when it is complete or the hub cannot be reached. with_code: as of
    `find_model`.

    Raises ConfigError when there is no such model.
    """
    inspect = partial(_inspect, files, reference, revision, with_code=with_code)
    snapshot = online_or_cached(reference.repository, revision, inspect)
    if snapshot is None:
        return
    if reference.is_of_gguf:
        inspect_gguf(files, find_gguf(snapshot.folder, reference)[0])
    else:
        inspect_folder(files, snapshot.folder, f"from the hub, commit {snapshot.sha}, in the cache")


def _inspect(files: ModelFiles, reference: Reference, revision: str | None, *, with_code: bool) -> Snapshot | None:
    """Returns the snapshot in the cache when it is complete; otherwise fills `files`."""
    model_id = reference.repository
    info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    commit, cache = info.sha, hub_cache(model_id)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}

    def read(name: str) -> str:
        with transfer_errors():
            path = hf_hub_download(model_id, name, revision=commit, cache_dir=cache)
        return Path(path).read_text(encoding="utf-8")

    choice = hub_weights(reference, sizes, read)
    names = list(choice.names) if reference.is_of_gguf else wanted_files(model_id, sizes, read, with_code=with_code)
    folder = cache / repository_name(model_id) / "snapshots" / str(commit)
    if small := [name for name in names if name not in choice.names]:
        with transfer_errors():
            snapshot_download(model_id, revision=commit, allow_patterns=small, cache_dir=cache)
        files.folder = folder
    if all((folder / name).is_file() for name in names):
        return Snapshot(folder, commit, info.pipeline_tag)
    files.origin = f"on the hub, commit {commit}"
    files.kind = choice.kind
    files.notes += [choice.note] if choice.note else []
    files.sizes = {name: sizes[name] for name in choice.names}
    if choice.kind == "safetensors":
        headers = [HfApi().parse_safetensors_file_metadata(model_id, file, revision=commit) for file in choice.names]
        files.hold(
            {
                name: StoredTensor(str(tensor.dtype), tuple(tensor.shape))
                for header in headers
                for name, tensor in header.tensors.items()
            }
        )
        files.metadata = {key: value for header in headers for key, value in header.metadata.items()}
    else:
        files.notes.append(f"the tensors of {choice.kind} files can only be inspected after the download")
    return None
