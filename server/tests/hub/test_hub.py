"""Hub downloads: only the files needed, resumed, pinned to a commit, and served from the cache when offline."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import mixtral_file
from hf_xet import XetAuthenticationError, XetObjectNotFoundError
from hub_server import SHA, Hub, running
from huggingface_hub.errors import LocalEntryNotFoundError
from penstock_server.errors import ConfigError
from penstock_server.hub.disk import check_room, write_errors
from penstock_server.hub.download import hub_weights, wanted_files
from penstock_server.hub.retry import DEFAULT_RETRIES, Passing, Retries, transfer_errors
from penstock_server.weights.folder import choose_weights
from penstock_server.weights.gguf.selection import Reference
from safetensors.torch import load_file
from tiny_models import make_model, save_model

PACKAGES = str(Path(__file__).parents[2])
SHARD = "model-00002-of-00005.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sharded Llama with many files that serving does not need."""
    folder = save_model(make_model("llama"), tmp_path_factory.mktemp("model"), "60KB")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = ("README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "modeling_tiny.py")
    others += ("original/params.json", "onnx/model.onnx", "tokenizer.json", "stray.safetensors", "training_args.bin")
    return {**found, **{name: name.encode() * 100 for name in others}}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running(Hub(dict(files))) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def preparing(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock_server.prepare", "--model-id", "someone/tiny", *arguments],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
            "PYTHONPATH": PACKAGES,
            **hub.environment,
            "HF_HOME": str(home),
            "PENSTOCK_HUB_RETRIES": "0",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Returns (its JSON, empty on failure; its stderr)."""
    answer, said = process.communicate()
    assert process.returncode == (0 if answer else 1), said
    return json.loads(answer or "{}"), said


def prepare(hub: Hub, home: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """Returns (its JSON, empty on failure; its stderr)."""
    return result(preparing(hub, home, *arguments, **environment))


def error(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    return lines[0]


def test_only_needed_files_are_downloaded_and_only_once(hub: Hub, home: Path) -> None:
    prepared, said = prepare(hub, home)
    folder = Path(prepared["folder"])
    assert folder == home / "hub" / "models--someone--tiny" / "snapshots" / SHA
    assert (prepared["sha"], prepared["pipeline_tag"]) == (SHA, "text-generation")
    shards = {name for name in hub.files if name.startswith("model-")}
    assert len(shards) > 2
    small = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert {path.name for path in folder.iterdir()} == small | shards
    assert all((folder / name).read_bytes() == hub.files[name] for name in shards)
    assert "files of someone/tiny" in said
    hub.gets.clear()
    again, said = prepare(hub, home)
    assert (again, hub.gets, said) == (prepared, [], "")


def test_a_broken_connection_is_resumed(hub: Hub, home: Path) -> None:
    weights = os.urandom(24 << 20)
    hub.files = {"config.json": b"{}", "model.safetensors": weights}
    hub.break_after["model.safetensors"] = 15 << 20
    prepared, _ = prepare(hub, home)
    assert (Path(prepared["folder"]) / "model.safetensors").read_bytes() == weights
    first, second = [asked for fetched, asked in hub.gets if fetched == "model.safetensors"]
    assert (first, second) == (None, f"bytes={10 << 20}-")  # the library writes pieces of 10 MiB


def test_an_interrupted_download_fetches_only_missing_files(hub: Hub, home: Path) -> None:
    folder = Path(prepare(hub, home)[0]["folder"])
    (folder / SHARD).resolve().unlink()
    (folder / SHARD).unlink()
    hub.status = 503
    _, said = prepare(hub, home)
    assert f"the hub answered 503 Service Unavailable; the cache has a part of commit {SHA}\n" in said
    assert f"weight files that its index names, e.g. {SHARD}" in error(said)
    hub.status = 200
    hub.gets.clear()
    assert Path(prepare(hub, home)[0]["folder"]) == folder
    assert hub.gets == [(SHARD, None)]
    assert (folder / SHARD).read_bytes() == hub.files[SHARD]


def test_a_repository_without_a_shard_is_refused_before_the_download(hub: Hub, home: Path) -> None:
    del hub.files[SHARD]
    _, said = prepare(hub, home)
    assert error(said) == f"error: someone/tiny lacks 1 of 5 weight files that its index names, e.g. {SHARD}"
    assert [name for name, _ in hub.gets] == ["model.safetensors.index.json"]


def test_a_failing_hub_is_reported_when_the_cache_is_empty(hub: Hub, home: Path) -> None:
    hub.status = 503
    _, said = prepare(hub, home)
    assert error(said) == "error: someone/tiny is not in the cache, and the hub answered 503 Service Unavailable"
    _, said = prepare(hub, home, PENSTOCK_HUB_RETRIES="-1")
    assert error(said) == "error: PENSTOCK_HUB_RETRIES is '-1', must be a number from 0 to 1000"


def test_failures_that_pass_are_retried(hub: Hub, home: Path) -> None:
    hub.failures = {"api": [503, 429], "config.json": [500], SHARD: [429, 502]}
    prepared, said = prepare(hub, home, PENSTOCK_HUB_RETRIES="3")
    assert (Path(prepared["folder"]) / SHARD).read_bytes() == hub.files[SHARD]
    assert not any(hub.failures.values())
    # The library retries some of them itself.
    assert re.search(r"^the hub answered \d+ [A-Z][A-Za-z ]+; retry 1 of 3 in 0 s$", said, re.MULTILINE), said
    assert len([name for name, _ in hub.gets if name == SHARD]) == 1, "what has arrived is not fetched again"


XET = """
import shutil
from pathlib import Path
import huggingface_hub.file_download as library

PLACE = Path(__file__).parent

def xet_get(*, incomplete_path, **others):
    first, *rest = (PLACE / "errors").read_text().splitlines() or [""]
    if not first:
        shutil.copyfile(PLACE / "weights", incomplete_path)
        return
    (PLACE / "errors").write_text("\\n".join(rest))
    raise eval(first)

library.xet_get = xet_get
"""


def test_failures_of_xet_are_retried_and_named(hub: Hub, home: Path, tmp_path: Path) -> None:
    """The repository is in Xet storage, with a stand-in for hf_xet that fails as often as it is told to."""
    hub.xet.add(SHARD)
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "sitecustomize.py").write_text(XET)
    (stand_in / "weights").write_bytes(hub.files[SHARD])
    errors, path = stand_in / "errors", f"{PACKAGES}{os.pathsep}{stand_in}"
    errors.write_text("RuntimeError('CAS service error: connection reset')")
    _, said = prepare(hub, home, PYTHONPATH=path)
    failure = "the transfer from the hub failed (CAS service error: connection reset)"
    assert error(said) == f"error: someone/tiny is not in the cache, and {failure}"
    errors.write_text("RuntimeError('write failed: No space left on device (os error 28)')")
    assert "is full: someone/tiny does not fit, No space left on device; make room" in error(
        prepare(hub, home, PYTHONPATH=path)[1]
    )
    errors.write_text("OSError('CAS service error')")
    prepared, said = prepare(hub, home, PYTHONPATH=path, PENSTOCK_HUB_RETRIES="1")
    assert "the transfer from the hub failed (CAS service error); retry 1 of 1 in 1 s\n" in said
    assert (Path(prepared["folder"]) / SHARD).read_bytes() == hub.files[SHARD]
    assert not [name for name, _ in hub.gets if name == SHARD]


@pytest.mark.parametrize("failure", [RuntimeError, OSError, ValueError, XetAuthenticationError, XetObjectNotFoundError])
def test_an_error_of_a_transfer_may_pass(failure: type[Exception]) -> None:
    with pytest.raises(Passing, match=r"the transfer from the hub failed \(two lines\)"), transfer_errors():
        raise failure("two\nlines")


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.EIO, "I/O error"), ConfigError("x"), NotImplementedError("x"), LocalEntryNotFoundError("x")],
)
def test_an_error_that_is_none_of_a_transfer_is_left_as_it_is(failure: Exception) -> None:
    with pytest.raises(type(failure)) as caught, transfer_errors():
        raise failure
    assert caught.value is failure


def test_a_file_that_arrives_allows_new_retries() -> None:
    retries = Retries()
    failure = Passing("the hub answered 503", wait_s=0)
    assert [retries.wait(failure) for _ in range(DEFAULT_RETRIES + 1)] == [True] * DEFAULT_RETRIES + [False]
    retries.reset()
    assert retries.wait(failure)


def test_a_full_disk_leaves_nothing_half_written(hub: Hub, home: Path) -> None:
    hub.files["model-00001-of-00005.safetensors"] = os.urandom(3 << 20)
    limit = [
        sys.executable,
        "-c",
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20,) * 2)",
    ]
    limit[-1] += "; os.execv(sys.executable, [sys.executable, '-m', 'penstock_server.prepare', *sys.argv[1:]])"
    environment = {**os.environ, "PYTHONPATH": PACKAGES, **hub.environment, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    run = [*limit, "--model-id", "someone/tiny"]
    said = subprocess.run(run, env=environment, capture_output=True, text=True, check=False).stderr
    assert error(said) == (
        f"error: the disk of the hub's cache {home}/hub is full: someone/tiny does not fit, File too large; "
        "make room, mount a larger volume there, or set HF_HOME to a folder on a larger disk"
    )
    repository = home / "hub" / "models--someone--tiny"
    arrived = {hashlib.sha1(data).hexdigest() for data in hub.files.values()}
    assert {path.name for path in (repository / "blobs").iterdir()} < arrived
    assert not (repository / "snapshots" / SHA / "model-00001-of-00005.safetensors").exists()
    assert "is not in the cache" in error(prepare(hub, home, HF_HUB_OFFLINE="1")[1])
    folder = Path(prepare(hub, home)[0]["folder"])
    assert (folder / "model-00001-of-00005.safetensors").read_bytes() == hub.files["model-00001-of-00005.safetensors"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system, as root has it")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_fills_up_during_a_download_ends_it(hub: Hub, small_disk: Path) -> None:
    home, name = small_disk / "home", "model-00001-of-00005.safetensors"
    hub.files[name] = os.urandom(3 << 20)
    hub.holds[name] = threading.Event()
    process = preparing(hub, home)
    wait_until_held(hub, home, process, name)
    with (small_disk / "other").open("wb", buffering=0) as other, suppress(OSError):
        while True:
            other.write(bytes(4096))
    hub.holds.pop(name).set()
    _, said = result(process)
    assert error(said) == (
        f"error: the disk of the hub's cache {home}/hub is full: someone/tiny does not fit, No space left on device; "
        "make room, mount a larger volume there, or set HF_HOME to a folder on a larger disk"
    )
    repository = home / "hub" / "models--someone--tiny"
    arrived = {hashlib.sha1(data).hexdigest() for data in hub.files.values()}
    assert {path.name for path in (repository / "blobs").iterdir()} < arrived
    (small_disk / "other").unlink()
    folder = Path(prepare(hub, home)[0]["folder"])
    assert (folder / name).read_bytes() == hub.files[name]


def test_a_download_without_room_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=3 * 10**9)
    monkeypatch.setattr("penstock_server.hub.disk.shutil.disk_usage", lambda path: free)
    check_room(tmp_path / "not" / "there", "a/b", 3 * 10**9)
    with pytest.raises(ConfigError, match=r"a/b needs 5\.00 GB more, 3\.00 GB are free; make room"):
        check_room(tmp_path / "not" / "there", "a/b", 5 * 10**9)


@pytest.mark.parametrize(("number", "message"), [(errno.EACCES, "chown -R"), (errno.EROFS, "mount it writable")])
def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path, number: int, message: str) -> None:
    expected = f"{tmp_path}.* user {os.geteuid()} .*{message}.*HF_HOME"
    with pytest.raises(ConfigError, match=expected), write_errors(tmp_path / "hub", "a/b"):
        raise OSError(number, os.strerror(number))


def wait_until_held(hub: Hub, home: Path, process: subprocess.Popen[str], held: str) -> None:
    """Until all files have arrived but `held`, which has begun."""
    blobs = home / "hub" / "models--someone--tiny" / "blobs"
    names = [name for name in hub.files if name.startswith("model-") and name != held]
    names += ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]
    others = {hashlib.sha1(hub.files[name]).hexdigest() for name in names}

    def is_held() -> bool:
        found = {path.name for path in blobs.glob("*")}
        return others <= found and len(found) == len(others) + 1

    while not is_held():
        assert process.poll() is None, result(process)
        time.sleep(0.02)


def test_a_killed_download_is_completed_and_its_rest_removed(hub: Hub, home: Path) -> None:
    hub.holds[SHARD] = threading.Event()
    process = preparing(hub, home)
    blobs = home / "hub" / "models--someone--tiny" / "blobs"
    wait_until_held(hub, home, process, SHARD)
    process.kill()
    process.communicate()
    (unfinished,) = blobs.glob("*.incomplete")
    assert "is not in the cache" in error(prepare(hub, home, HF_HUB_OFFLINE="1")[1])
    hub.holds.pop(SHARD).set()
    hub.gets.clear()
    os.utime(unfinished, (0, 0))
    folder = Path(prepare(hub, home)[0]["folder"])
    assert (folder / SHARD).read_bytes() == hub.files[SHARD]
    assert {name for name, _ in hub.gets if name.startswith("model-")} == {SHARD}
    assert not unfinished.exists()


def test_two_servers_on_one_cache_download_each_file_once(hub: Hub, home: Path) -> None:
    both = [preparing(hub, home), preparing(hub, home)]
    first, second = (result(process)[0] for process in both)
    assert first == second
    names = [name for name, _ in hub.gets]
    assert sorted(names) == sorted({path.name for path in Path(first["folder"]).iterdir()})


def test_a_repository_with_pickles_only_is_converted(hub: Hub, home: Path) -> None:
    model = make_model("llama")
    pickled = io.BytesIO()
    torch.save(model.state_dict(), pickled)
    hub.files = {name: data for name, data in hub.files.items() if not name.endswith((".safetensors", ".index.json"))}
    hub.files["pytorch_model.bin"] = pickled.getvalue()
    del hub.files["tokenizer.json"]  # not a real one
    prepared, _ = prepare(hub, home)
    (weights,) = map(Path, prepared["weights"])
    assert home / "penstock" in weights.parents
    assert set(load_file(weights)) <= set(model.state_dict())
    assert {name for name, _ in hub.gets} >= {"pytorch_model.bin", "config.json"}


def test_an_adapter_is_served_with_its_base_and_its_own_tokenizer(hub: Hub, home: Path, tmp_path: Path) -> None:
    base = save_model(make_model("llama"), tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    (base / "tokenizer_config.json").write_text("{}")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "revision": None}
    hub.files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": b"x"}
    prepared, said = prepare(hub, home)
    folder = Path(prepared["folder"])
    assert (prepared["model_id"], prepared["sha"]) == ("someone/tiny", SHA)
    assert f"someone/tiny is an adapter: serving its base {base} with it" in said
    assert (folder / "default-adapter" / "adapter_model.safetensors").read_bytes() == b"x"
    assert [Path(path).name for path in prepared["weights"]] == ["model.safetensors", "adapter_model.safetensors"]
    assert (folder / "tokenizer_config.json").resolve() == (base / "tokenizer_config.json").resolve()
    hub.files |= {"tokenizer.json": b"{}", "chat_template.jinja": b"own"}
    folder = Path(prepare(hub, home / "other")[0]["folder"])
    assert (folder / "chat_template.jinja").read_text() == "own"
    assert not (folder / "tokenizer_config.json").exists(), "of another tokenizer"


def test_an_adapter_without_its_base_is_refused_by_both_names(hub: Hub, home: Path) -> None:
    config: dict[str, Any] = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    hub.files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.bin": b"x"}
    assert error(prepare(hub, home)[1]).startswith("error: someone/tiny is an adapter of org/base: there is no folder")
    hub.files["adapter_config.json"] = b"{}"
    said = error(prepare(hub, home / "other")[1])
    assert "adapter_config.json names no base_model_name_or_path" in said


def test_adapters_are_downloaded_with_the_model(hub: Hub, home: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, data in hub.files.items():
        if "/" not in name:
            (model / name).write_bytes(data)
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    hub.files = {**files, "README.md": b"x", "optimizer.pt": b"x", "adapter_model.bin": b"x"}
    wanted = ["--model-id", str(model), "--adapter", "someone/tiny", "--adapter", f"someone/tiny@{SHA}"]
    prepared, _ = prepare(hub, home, *wanted)
    folder = home / "hub" / "models--someone--tiny" / "snapshots" / SHA
    assert prepared["adapters"] == dict.fromkeys(["someone/tiny", f"someone/tiny@{SHA}"], str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    hub.gets.clear()
    hub.status = 503
    assert prepare(hub, home, *wanted)[0] == prepared, "the cache is used while the hub fails"
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert prepare(hub, home, "--only-adapter", "someone/tiny", **environment)[0] == str(folder)
    hub.status = 200
    assert "has no revision law" in error(prepare(hub, home, *wanted[:2], "--adapter", "someone/tiny@law")[1])
    assert prepare(hub, home, "--only-adapter", "someone/tiny")[0] == str(folder)
    del hub.files["adapter_model.safetensors"]
    pickled, _ = prepare(hub, home / "pickled", *wanted)
    assert {path.name for path in Path(pickled["adapters"]["someone/tiny"]).iterdir()} == {
        "adapter_config.json",
        "adapter_model.bin",
    }
    del hub.files["adapter_model.bin"]
    said = error(prepare(hub, home / "other", *wanted)[1])
    assert said.endswith("is not a LoRA adapter: it holds no adapter_model.safetensors")


def test_the_cache_is_used_without_a_connection(hub: Hub, home: Path) -> None:
    prepared, _ = prepare(hub, home)
    offline = {**prepared, "pipeline_tag": None}
    assert prepare(hub, home, HF_HUB_OFFLINE="1") == (offline, "")
    assert prepare(hub, home, HF_ENDPOINT="http://127.0.0.1:9")[0] == offline
    hub.status = 503
    assert prepare(hub, home, "--revision", "main")[0] == offline
    assert prepare(hub, home, "--revision", SHA, HF_HUB_OFFLINE="1")[0] == offline
    _, said = prepare(hub, home, "--revision", "other", HF_HUB_OFFLINE="1")
    assert error(said) == "error: someone/tiny at revision other is not in the cache, and HF_HUB_OFFLINE is set"


def test_an_incomplete_snapshot_is_refused_offline(hub: Hub, home: Path) -> None:
    folder = Path(prepare(hub, home)[0]["folder"])
    (folder / SHARD).unlink()
    _, said = prepare(hub, home, HF_HUB_OFFLINE="1")
    assert f"lacks 1 of 5 weight files that its index names, e.g. {SHARD}" in error(said)


def test_code_is_downloaded_only_with_trust_remote_code(hub: Hub, home: Path) -> None:
    assert not (Path(prepare(hub, home)[0]["folder"]) / "modeling_tiny.py").exists()
    assert (Path(prepare(hub, home, "--trust-remote-code")[0]["folder"]) / "modeling_tiny.py").exists()


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
def test_the_token_comes_from_the_environment_or_its_file(variable: str, hub: Hub, home: Path) -> None:
    hub.token = "hf_secret"
    _, said = prepare(hub, home)
    assert error(said) == (
        "error: there is no folder and no model someone/tiny on the hub; if it is private, set HF_TOKEN"
    )
    environment = {variable: "hf_secret"}
    if variable == "file":
        home.mkdir(exist_ok=True)
        (home / "token").write_text("hf_secret\n")
        environment = {}
    prepared, said = prepare(hub, home, **environment)
    assert prepared["sha"] == SHA
    assert "hf_secret" not in said


def test_errors_of_the_hub_name_the_remedy(hub: Hub, home: Path) -> None:
    _, said = prepare(hub, home, "--revision", "nothing")
    assert error(said) == "error: someone/tiny has no revision nothing"
    hub.gated = True
    _, said = prepare(hub, home)
    assert error(said) == "error: someone/tiny is gated: accept its terms on the hub and set HF_TOKEN"


def test_the_cache_layout_of_older_tgi_images_is_used(hub: Hub, home: Path) -> None:
    prepare(hub, home)
    (home / "hub" / "models--someone--tiny").rename(home / "models--someone--tiny")
    hub.gets.clear()
    prepared, _ = prepare(hub, home)
    assert Path(prepared["folder"]).parents[1] == home / "models--someone--tiny"
    assert hub.gets == []
    volume = home.parent / "volume"
    given = prepare(hub, home, HUGGINGFACE_HUB_CACHE=str(volume))[0]
    assert Path(given["folder"]).parents[1] == volume / "models--someone--tiny"


def unread(name: str) -> str:
    raise AssertionError(f"{name} was read")


def index(*names: str) -> Any:
    return lambda name: json.dumps({"weight_map": {str(i): file for i, file in enumerate(names)}})


def test_weights_of_one_format_are_chosen() -> None:
    everything = ["model.safetensors", "pytorch_model.bin", "x.gguf", "consolidated.safetensors", "config.json"]
    assert choose_weights("x", everything, unread).names == ("model.safetensors",)
    assert choose_weights("x", everything[1:], unread).names == ("pytorch_model.bin",)
    assert choose_weights("x", everything[2:], unread).names == ("x.gguf",)
    sharded = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    choice = choose_weights("x", [*sharded, "optimizer.pt"], index(*sharded[:2]))
    assert (choice.kind, choice.names) == ("bin", tuple(sharded[:2]))
    for names in (["adapter_model.bin", "training_args.bin", "consolidated.00.pth"], ["config.json"]):
        with pytest.raises(ConfigError, match="holds no weights"):
            choose_weights("x", names, unread)
    with pytest.raises(ConfigError, match="several GGUF models"):
        choose_weights("x", ["a.gguf", "b.gguf"], unread)


WHOLE, PICKLE = "model.safetensors", "pytorch_model.bin"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PICKLES = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


@pytest.mark.parametrize(
    ("there", "indexed", "chosen", "is_used"),
    [
        ([WHOLE], SHARDS, [WHOLE], False),
        ([WHOLE, SHARDS[1]], SHARDS, [WHOLE], False),
        ([WHOLE, *SHARDS], SHARDS, [WHOLE], False),
        ([WHOLE], (), [WHOLE], False),  # damaged
        ([SHARDS[0].replace("safetensors", "gguf").replace("2.", "1.")], SHARDS, ["model-00001-of-00001.gguf"], False),
        ([WHOLE, "mtp.safetensors"], (WHOLE, "mtp.safetensors"), [WHOLE, "mtp.safetensors"], True),
        (["a.safetensors"], SHARDS, ["a.safetensors"], False),
        ([PICKLE], SHARDS, [PICKLE], False),
        ([PICKLE], PICKLES, [PICKLE], False),
        ([*PICKLES], PICKLES, [*PICKLES], True),
    ],
)
def test_an_index_of_other_files_is_not_used(
    there: list[str], indexed: tuple[str, ...], chosen: list[str], is_used: bool
) -> None:
    """As in transformers, a whole file comes first."""
    stem = PICKLE if indexed == PICKLES else WHOLE
    choice = choose_weights("x", [*there, f"{stem}.index.json"], index(*indexed))
    assert list(choice.names) == sorted(chosen)
    assert (choice.weight_map is not None, bool(choice.note)) == (is_used, not is_used)


def test_an_index_of_the_whole_file_is_not_mentioned() -> None:
    assert choose_weights("x", [WHOLE, f"{WHOLE}.index.json"], index(WHOLE)).note == ""


@pytest.mark.parametrize("there", [[], [SHARDS[0]], [WHOLE]])
def test_an_index_whose_files_are_missing_is_refused(there: list[str]) -> None:
    indexed = (*there, *SHARDS) if WHOLE in there else SHARDS
    with pytest.raises(ConfigError, match=r"lacks \d of \d weight files that its index names, e.g. model-0000"):
        choose_weights("x", [*there, f"{WHOLE}.index.json"], index(*indexed))


def test_files_of_other_formats_are_not_fetched() -> None:
    names = ["a.gguf", "README.md", "additional_chat_templates/tool_use.jinja", "onnx/tool_use.jinja", "x.py", "a/b.py"]
    assert wanted_files("x/y", names, unread) == ["a.gguf", "additional_chat_templates/tool_use.jinja"]
    of_images = ["vision-lora/adapter_config.json", "vision-lora/adapter_model.safetensors"]
    others = ["vision-lora/vocab.json", "speech-lora/adapter_model.safetensors"]
    assert wanted_files("x/y", ["a.gguf", *of_images, *others], unread) == ["a.gguf", *of_images]
    assert wanted_files("x/y", names, unread, with_code=True)[1:] == [
        "a/b.py",
        "additional_chat_templates/tool_use.jinja",
        "x.py",
    ]
    names = ["model.safetensors", "pytorch_model.bin.index.json", "tokenizer.model", "chat_template.jinja"]
    assert wanted_files("x/y", names, unread) == ["chat_template.jinja", "model.safetensors", "tokenizer.model"]


def test_the_files_in_which_quantizers_describe_a_checkpoint_are_fetched() -> None:
    weights, files = "gptq_model-4bit-128g.safetensors", ["quant_config.json", "quantize_config.json"]
    assert wanted_files("x/y", ["README.md", weights, *files], unread) == sorted([weights, *files])
    assert wanted_files("x/y", [weights, *files], unread, with_weights=False) == files


def test_the_modules_of_sentence_transformers_are_fetched() -> None:
    modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    modules += ["3_Dense/config.json", "3_Dense/pytorch_model.bin"]
    others = ["2_Dense/pytorch_model.bin", "onnx/config.json", "onnx/model.safetensors", "1_Pooling/old/config.json"]
    assert wanted_files("x/y", ["model.safetensors", *modules, *others], unread) == [*modules, "model.safetensors"]


def test_a_weights_folder_replaces_the_weights_of_the_hub(hub: Hub, home: Path, tmp_path: Path) -> None:
    weights = save_model(make_model("llama"), tmp_path / "weights", "1GB")
    (weights / "tokenizer.json").write_text("not this one")
    answer, _ = prepare(hub, home, "--weights", str(weights))
    folder = Path(answer["folder"])
    assert (folder / "model.safetensors").resolve() == weights / "model.safetensors"
    assert (folder / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    assert not any(".safetensors" in name for name, _ in hub.gets), "neither weights nor their index were fetched"
    assert sorted(path.name for path in folder.glob("*.safetensors*")) == ["model.safetensors"]
    again, _ = prepare(hub, home, "--weights", str(weights), HF_HUB_OFFLINE="1")
    assert again["folder"] == answer["folder"]


@pytest.mark.parametrize(("there", "reason"), [(False, "there is no folder"), (True, "holds no weights")])
def test_an_invalid_weights_folder_is_refused(hub: Hub, home: Path, tmp_path: Path, there: bool, reason: str) -> None:
    weights = tmp_path / "weights"
    if there:
        weights.mkdir()
    answer, said = prepare(hub, home, "--weights", str(weights))
    assert not answer
    assert reason in said


QUANTIZATIONS = [f"tiny-{name}.gguf" for name in ("BF16", "Q4_K_M", "Q8_0", "UD-Q4_K_XL")]
SPLIT = [f"Q6_K/tiny-Q6_K-0000{number}-of-00002.gguf" for number in (1, 2)]
REPOSITORY = ["README.md", "config.json", "imatrix.gguf", "mmproj-tiny-f16.gguf", *QUANTIZATIONS, *SPLIT]


@pytest.mark.parametrize(
    ("reference", "chosen"),
    [
        ("someone/tiny", ["tiny-Q4_K_M.gguf"]),
        ("someone/tiny:Q8_0", ["tiny-Q8_0.gguf"]),
        ("someone/tiny:q8_0", ["tiny-Q8_0.gguf"]),
        ("someone/tiny:Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("someone/tiny:UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("someone/tiny:Q6_K", SPLIT),
        ("someone/tiny/tiny-BF16.gguf", ["tiny-BF16.gguf"]),
        (f"someone/tiny/{SPLIT[0]}", SPLIT),
    ],
)
def test_one_gguf_model_of_a_repository_is_chosen_by_quantization_or_file(reference: str, chosen: list[str]) -> None:
    parsed = Reference.parse(reference)
    assert parsed.repository == "someone/tiny"
    assert list(hub_weights(parsed, REPOSITORY, unread).names) == chosen


@pytest.mark.parametrize(
    ("reference", "names", "message"),
    [
        (
            "a/b:Q2_K",
            REPOSITORY,
            r"a/b has no GGUF model of quantization Q2_K; it has Q6_K/tiny-Q6_K.gguf, tiny-BF16.gguf",
        ),
        ("a/b/x.gguf", REPOSITORY, "a/b has no GGUF model x.gguf; it has "),
        ("a/b:Q4", REPOSITORY, "a/b has no GGUF model of quantization Q4; it has "),
        (
            "a/b",
            ["x-Q8_0.gguf", "x-Q6_K.gguf"],
            "a/b holds several GGUF models: x-Q6_K.gguf, x-Q8_0.gguf; name one as ",
        ),
        ("a/b", ["x-Q4_K_M.gguf", "other-Q8_0.gguf"], "a/b holds several GGUF models: other-Q8_0.gguf, x-Q4_K_M.gguf"),
        ("a/b:Q6_K", SPLIT[:1], "a/b lacks 1 of 2 weight files that their numbering implies"),
        ("a/b", ["mmproj-x-f16.gguf"], "a/b holds no weights"),
        ("a/b:Q8_0", ["mmproj-x-Q8_0.gguf"], "a/b has no GGUF model of quantization Q8_0; it has none"),
    ],
)
def test_a_reference_to_no_gguf_model_or_to_several_is_refused(reference: str, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hub_weights(Reference.parse(reference), names, unread)


def test_a_projector_is_no_second_model() -> None:
    for projector in ("mmproj-model-f16.gguf", "x.mmproj.gguf", "x-mmproj-BF16.gguf", "mmproj.gguf"):
        assert choose_weights("x", ["x-Q8_0.gguf", projector], unread).names == ("x-Q8_0.gguf",)


def test_a_quantization_is_downloaded_alone_and_found_again_offline(hub: Hub, home: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    paths = {f"x-{kind}.gguf": mixtral_file(local / f"x-{kind}.gguf", kind) for kind in ("Q8_0", "F16")}
    hub.files = {"config.json": b"{}", **{name: path.read_bytes() for name, path in paths.items()}}
    for _ in range(2):
        prepared, _ = prepare(hub, home, "--model-id", "someone/tiny:q8_0")
        assert (prepared["model_id"], prepared["sha"]) == ("someone/tiny:q8_0", SHA)
        (link,) = Path(prepared["folder"]).glob("*.gguf")
        assert link.resolve().read_bytes() == hub.files["x-Q8_0.gguf"]
    assert {name for name, _ in hub.gets} == {"x-Q8_0.gguf"}
    offline, _ = prepare(hub, home, "--model-id", "someone/tiny:Q8_0", HF_HUB_OFFLINE="1")
    assert offline["folder"] == prepared["folder"]
    _, said = prepare(hub, home, "--model-id", "someone/tiny")
    assert "someone/tiny holds several GGUF models: x-F16.gguf, x-Q8_0.gguf" in error(said)
    prepared, _ = prepare(hub, home, "--model-id", f"{local}:Q8_0")
    assert next(Path(prepared["folder"]).glob("*.gguf")).resolve() == paths["x-Q8_0.gguf"]
