"""A model on the hub, looked at from here: its small files are fetched, of its weights only the headers."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from penstock_server.hub import Snapshot, cached, hub_cache, hub_errors, wanted_files
from penstock_server.inspection.source import Source, StoredTensor
from penstock_server.weights.folder import choose_weights


def look_at_hub(source: Source, model_id: str, revision: str | None) -> Snapshot | None:
    """Fills the source; or gives the snapshot in the cache, when the hub is out of reach or all is there already.

    Raises ConfigError when there is no such model.
    """
    disable_progress_bars()
    with hub_errors(model_id, revision):
        try:
            return _look(source, model_id, revision)
        except OfflineModeIsEnabled:
            return cached(model_id, revision, "HF_HUB_OFFLINE is set")
        except HfHubHTTPError:
            raise
        except (HTTPError, ConnectionError, TimeoutError) as error:
            return cached(model_id, revision, f"the hub cannot be reached ({error})")


def _look(source: Source, model_id: str, revision: str | None) -> Snapshot | None:
    info = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    commit, cache = info.sha, hub_cache(model_id)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}

    def read(name: str) -> str:
        return Path(hf_hub_download(model_id, name, revision=commit, cache_dir=cache)).read_text(encoding="utf-8")

    names = wanted_files(model_id, sizes, read)
    choice = choose_weights(model_id, [name for name in sizes if "/" not in name], read)
    small = [name for name in names if name not in choice.names]
    if small:
        folder = Path(snapshot_download(model_id, revision=commit, allow_patterns=small, cache_dir=cache))
        if all((folder / name).is_file() for name in names):
            return Snapshot(folder, commit, info.pipeline_tag)
        source.folder = folder
    source.origin = f"on the hub, commit {commit}"
    source.kind = choice.kind
    source.files = {name: sizes[name] for name in choice.names}
    if choice.kind == "safetensors":
        source.tensors = {
            name: StoredTensor(str(tensor.dtype), tuple(tensor.shape))
            for file in choice.names
            for name, tensor in HfApi().parse_safetensors_file_metadata(model_id, file, revision=commit).tensors.items()
        }
    else:
        source.notes.append(f"{choice.kind} files cannot be looked into before they are downloaded")
    return None
