"""GGUF models in several files: the model that they are in one, or a message what does not fit."""

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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def split_model(folder: Path) -> Path:
    """Mixtral's tensors in three files, the metadata in the first."""
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
    """As it is in the file, where q and k are interleaved."""
    info = checkpoint.tensors[name]
    if len(info.shape) == 1:
        return checkpoint.matrices.vector(info).numpy()
    tensor = torch.empty(info.shape)
    checkpoint.matrices.read(info, None, tensor)
    return tensor.numpy()


def test_a_model_in_several_files_is_the_one_in_one(tmp_path: Path) -> None:
    whole = split_model(tmp_path)
    text = prompts(1, [17], 131)[0]
    first = gguf_folder(tmp_path / "model-00001-of-00003.gguf")
    assert torch.equal(logits_of(first, text), logits_of(gguf_folder(whole), text))
    # As the hub's cache has them: links to files with names of their own.
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number in (1, 2, 3):
        name = f"model-{number:05}-of-00003.gguf"
        (snapshot / name).symlink_to((tmp_path / name).rename(tmp_path / f"blob{number}"))
    of_snapshot = gguf_folder(snapshot / "model-00001-of-00003.gguf")
    assert torch.equal(logits_of(of_snapshot, text), logits_of(gguf_folder(whole), text))
    assert find_weights(snapshot).kind == "gguf"
    assert [path.name for path in find_weights(snapshot).paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def test_files_of_a_split_model_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    split_model(tmp_path)
    first, second, third = (tmp_path / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3))
    with pytest.raises(ConfigError, match="is file 2 of 3 of a model; give the first"):
        read_header(second)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ConfigError, match="which is in another file of the model too"):
        read_header(first)
    third.unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's 3 files, e\.g\. model-00003-of-00003\.gguf"):
        read_header(first)
    third.write_bytes(kept[:-200])
    with pytest.raises(ConfigError, match=r"00003-of-00003\.gguf is truncated"):
        GgufCheckpoint(first)
    with pytest.raises(ConfigError, match=r"must be named x-00001-of-00003\.gguf"):
        read_header(first.rename(tmp_path / "other.gguf"))
