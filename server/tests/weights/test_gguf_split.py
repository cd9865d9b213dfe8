"""GGUF models in several files equal the same model in one file, and inconsistent files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import logits_of, mixtral_file, write_gguf
from penstock_server.errors import ConfigError
from penstock_server.weights.folder import find_weights
from penstock_server.weights.gguf.checkpoint import GgufCheckpoint
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.header import read_header
from tiny_models import prompts

pytestmark = pytest.mark.usefixtures("model_cache")


def split_model(folder: Path) -> Path:
    """Writes Mixtral to three files, with the metadata in the first. Returns the path of the same model in one file."""
    header = read_header(whole := mixtral_file(folder / "whole.gguf"))
    checkpoint = GgufCheckpoint(whole)
    names = sorted(header.tensors)
    for number in range(3):
        tensors = {name: stored(checkpoint, name) for name in names[number::3]}
        metadata = dict(header.metadata) if number == 0 else {"general.architecture": "llama"}
        metadata |= {"split.count": 3, "split.no": number}
        path = folder / f"model-{number + 1:05}-of-00003.gguf"
        write_gguf(path, metadata, tensors)
    return whole


def stored(checkpoint: GgufCheckpoint, name: str) -> np.ndarray:
    """The tensor as stored, with interleaved q and k."""
    info = checkpoint.tensors[name]
    if len(info.shape) == 1:
        return checkpoint.matrices.vector(info).numpy()
    tensor = torch.empty(info.shape)
    checkpoint.matrices.read(info, None, tensor)
    return tensor.numpy()


def test_a_model_in_several_files_equals_the_model_in_one(tmp_path: Path) -> None:
    whole = split_model(tmp_path)
    text = prompts(1, [17], 131)[0]
    first = gguf_folder(tmp_path / "model-00001-of-00003.gguf")
    assert torch.equal(logits_of(first, text), logits_of(gguf_folder(whole), text))
    # As in the hub's cache: links to files with other names.
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.gguf"
        (snapshot / name).symlink_to((tmp_path / name).rename(tmp_path / f"blob{number}"))
    of_snapshot = gguf_folder(snapshot / "model-00001-of-00003.gguf")
    assert torch.equal(logits_of(of_snapshot, text), logits_of(gguf_folder(whole), text))
    assert find_weights(snapshot).kind == "gguf"
    assert [path.name for path in find_weights(snapshot).paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def test_inconsistent_files_of_a_split_model_are_refused(tmp_path: Path) -> None:
    split_model(tmp_path)
    first, second, third = (tmp_path / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    with pytest.raises(ConfigError, match="is file 2 of 3 of a model; give the first file"):
        read_header(second)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ConfigError, match="which another file of the model also holds"):
        read_header(first)
    third.unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's 3 files, e\.g\. model-00003-of-00003\.gguf"):
        read_header(first)
    third.write_bytes(kept[:-200])
    with pytest.raises(ConfigError, match=r"00003-of-00003\.gguf is truncated"):
        GgufCheckpoint(first)
    with pytest.raises(ConfigError, match=r"must be named x-00001-of-00003\.gguf"):
        read_header(first.rename(tmp_path / "other.gguf"))
