"""Inspects a model on the hub: fetches its small files, and only the headers of its weights."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from penstock_server.hub import Snapshot, hub_cache, online_or_cached, wanted_files
from penstock_server.hub_retry import transfer_errors
from penstock_server.inspection.files import ModelFiles, StoredTensor
from penstock_server.inspection.local_model import inspect_folder
from penstock_server.weights.folder import choose_weights


def inspect_hub(files: ModelFiles, model_id: str, revision: str | None) -> None:
    """Fills `files`, from the local snapshot when it is complete or the hub cannot be reached.

    Raises ConfigError when there is no such model.
    """
    snapshot = online_or_cached(model_id, revision, lambda: _inspect(files, model_id, revision))
    if snapshot is not None:
        inspect_folder(files, snapshot.folder, f"from the hub, commit {snapshot.sha}, in the cache")


def _inspect(files: ModelFiles, model_id: str, revision: str | None) -> Snapshot | None:
    """Returns the snapshot in the cache when it is complete; otherwise fills `files`."""
    info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    commit, cache = info.sha, hub_cache(model_id)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}

    def read(name: str) -> str:
        with transfer_errors():
            path = hf_hub_download(model_id, name, revision=commit, cache_dir=cache)
        return Path(path).read_text(encoding="utf-8")

    names = wanted_files(model_id, sizes, read)
    choice = choose_weights(model_id, [name for name in sizes if "/" not in name], read)
    small = [name for name in names if name not in choice.names]
    if small:
        with transfer_errors():
            folder = Path(snapshot_download(model_id, revision=commit, allow_patterns=small, cache_dir=cache))
        if all((folder / name).is_file() for name in names):
            return Snapshot(folder, commit, info.pipeline_tag)
        files.folder = folder
    files.origin = f"on the hub, commit {commit}"
    files.kind = choice.kind
    files.sizes = {name: sizes[name] for name in choice.names}
    if choice.kind == "safetensors":
        headers = [HfApi().parse_safetensors_file_metadata(model_id, file, revision=commit) for file in choice.names]
        files.tensors = {
            name: StoredTensor(str(tensor.dtype), tuple(tensor.shape))
            for header in headers
            for name, tensor in header.tensors.items()
        }
        files.metadata = {key: value for header in headers for key, value in header.metadata.items()}
    else:
        files.notes.append(f"the tensors of {choice.kind} files can only be inspected after the download")
    return None
