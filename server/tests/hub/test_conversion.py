"""PyTorch pickles are converted once and atomically, and no code in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock_server.errors import ConfigError
from penstock_server.host import model_cache as cache_module
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.prepare import prepare
from penstock_server.weights import conversion
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tiny_models import make_model
from torch import Tensor


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama whose weights are one .bin file."""
    model = make_model("llama")
    folder = tmp_path / "my model"
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "tokenizer.json").write_text("{}")
    torch.save({"step": 3}, folder / "training_args.bin")
    return folder


def load(folder: str) -> None:
    load_model(LoadOptions(Path(folder), torch.float32, torch.device("cpu"), 16), RankGroup())


def save_sharded(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    names = [f"pytorch_model-{i + 1:05}-of-{len(shards):05}.bin" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        torch.save(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_pickle_becomes_safetensors_with_the_same_tensors(folder: Path, cache: Path, capsys: Any) -> None:
    state = torch.load(folder / "pytorch_model.bin")
    made = Path(prepare(str(folder)).folder)
    assert "converting" in capsys.readouterr().err
    assert made.parent == cache
    assert made.name.startswith("my-model-")
    converted = load_file(made / "model.safetensors")
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name], state[name]) for name in state)
    assert (made / "tokenizer.json").resolve() == folder / "tokenizer.json"
    assert not (made / "pytorch_model.bin").exists()
    load(str(made))


def test_a_pickle_is_converted_again_only_when_it_changes(folder: Path, capsys: Any) -> None:
    first = prepare(str(folder)).folder
    capsys.readouterr()
    assert prepare(str(folder)).folder == first
    assert capsys.readouterr().err == ""
    torch.save(make_model("llama-tied").state_dict(), folder / "pytorch_model.bin")
    assert prepare(str(folder)).folder != first


def test_links_to_other_files_follow_the_model_folder(folder: Path) -> None:
    made = Path(prepare(str(folder)).folder)
    (folder / "chat_template.jinja").write_text("new")
    (folder / "tokenizer.json").unlink()
    assert Path(prepare(str(folder)).folder) == made
    assert (made / "chat_template.jinja").read_text() == "new"
    assert not (made / "tokenizer.json").is_symlink()


def test_large_checkpoints_are_sharded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_model("llama").state_dict()
    names = list(state)
    save_sharded(folder, [{name: state[name] for name in part} for part in (names[:11], names[11:])])
    monkeypatch.setattr(conversion, "MAX_SHARD_BYTES", 40_000)
    made = Path(prepare(str(folder)).folder)
    files = sorted(path.name for path in made.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    weight_map = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == state.keys()
    load(str(made))


def test_views_and_shared_storages_are_written_in_full(tmp_path: Path) -> None:
    big = torch.arange(600.0).view(20, 30)
    tensors = {
        "transposed": big.T,
        "strided": big[::2, 5:9],
        "tied": big,
        "twin": big,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": big.to(torch.bfloat16),
        "flags": big > 7,
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    path = Path(prepare(str(tmp_path)).folder) / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_pickles_older_than_torch_1_6_are_converted(folder: Path) -> None:
    state = make_model("llama").state_dict()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    load(prepare(str(folder)).folder)


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch /tmp/penstock-was-here",)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: torch.save({"x": Malicious()}, path),
            r"contains code \((posix|os)\.system\), which is never",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps(Malicious())),
            r"contains code|is damaged or contains more than tensors",
        ),
        (lambda path: torch.save({"model": {"x": torch.zeros(1)}, "epoch": 3}, path), "'model' is a dict"),
        (lambda path: torch.save([torch.zeros(1)], path), "holds a list, not a state dict"),
        (lambda path: torch.save({}, path), "no tensors found"),
        (lambda path: torch.save({"x": torch.zeros(2, 2).to_sparse()}, path), "tensor x is sparse"),
        (lambda path: torch.save({"x": torch.zeros(2, dtype=torch.complex64)}, path), "x is of type complex64"),
        (truncate, "is truncated or damaged"),
        (lambda path: path.write_bytes(b""), "is truncated: it has 0 bytes"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "is damaged|is truncated"),
    ],
)
def test_anything_but_a_state_dict_is_refused_and_leaves_nothing(
    damage: Callable[[Path], object], message: str, folder: Path, cache: Path
) -> None:
    damage(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=message) as raised:
        prepare(str(folder))
    assert "\n" not in str(raised.value)
    assert not list(cache.iterdir())
    assert not Path("/tmp/penstock-was-here").exists()


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save_sharded(folder, [{"x": torch.zeros(1)}, {"x": torch.zeros(1)}])
    index = folder / "pytorch_model.bin.index.json"
    weight_map = {"x": "pytorch_model-00001-of-00002.bin", "y": "pytorch_model-00002-of-00002.bin"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="tensor x is in two files"):
        prepare(str(folder))


def test_a_disk_without_room_is_reported_before_anything_is_written(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ConfigError, match=r"has no room for 0\.\d GB: 0\.0 GB are free; make room, or set HF_HOME"):
        prepare(str(folder))
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("os.fsync", OSError(28, "No space left on device")),
        ("safetensors.torch.save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    ],
)
def test_a_disk_that_fills_up_is_reported_and_leaves_nothing(
    function: str, error: Exception, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))

    def fail_once(*arguments: object) -> None:
        if next(calls) == 0:
            raise error

    monkeypatch.setattr(function, fail_once)
    with pytest.raises(ConfigError, match="has no room"):
        prepare(str(folder))
    assert not list(cache.iterdir())


def test_leftovers_of_a_killed_process_are_removed(folder: Path, cache: Path) -> None:
    made = Path(prepare(str(folder)).folder)
    shutil.rmtree(made)
    left = cache / f".unfinished-{made.name}"
    left.mkdir()
    (left / "0.part").write_bytes(b"half")
    (left / "stray").mkdir()
    assert Path(prepare(str(folder)).folder) == made
    assert list(cache.iterdir()) == [made]
    assert not (made / "stray").exists()


def test_concurrent_processes_make_one_folder(folder: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "penstock_server.prepare", "--model-id", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {json.loads(process.communicate(timeout=200)[0])["folder"] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(found) == 1
    assert list(cache.iterdir()) == [Path(found.pop())]
