"""The real binary with two LoRA adapters of random weights for the embedded model, and one that cannot be loaded."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from binary import Server, start
from client import ask
from fault.probe import health, metric, wait_until
from safetensors.torch import save_file
from test_worker_death import TOKENS, Stream, ranks

pytestmark = pytest.mark.native

LAYERS, HIDDEN, KV, INNER = 30, 576, 192, 1536  # of the embedded model
SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PROMPTS = ["A long story:", "The capital of France is", "def fibonacci(n):"]
ADAPTERS = (None, "one", "two")


def make_adapter(folder: Path, seed: int, rank: int = 8, hidden: int = HIDDEN) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (out_features, in_features) in SIZES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            in_features += hidden - HIDDEN
            shapes = {"lora_A": (rank, in_features), "lora_B": (out_features, rank)}
            for matrix, shape in shapes.items():
                tensors[f"{name}.{matrix}.weight"] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [module.rpartition(".")[2] for module in SIZES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def request(prompt: str, adapter: str | None) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS, "adapter_id": adapter}}


REQUESTS = [request(prompt, adapter) for prompt in PROMPTS for adapter in ADAPTERS]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapters")
    one, two = make_adapter(folder / "one", 1), make_adapter(folder / "two", 2, rank=5)
    bad = make_adapter(folder / "bad", 3, hidden=512)
    server = start("--lora-adapters", f"one={one},two={two},bad={bad}", "--served-model-name", "base")
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def alone(adapted: Server) -> list[tuple]:
    return [Stream(adapted, each).result() for each in REQUESTS]


def test_adapters_and_base_answer_in_one_batch_as_they_do_alone(adapted: Server, alone: list[tuple]) -> None:
    streams = [Stream(adapted, each) for each in REQUESTS]
    assert [stream.result() for stream in streams] == alone
    for of_prompt in zip(*[iter(alone)] * len(ADAPTERS), strict=True):
        assert len({text for _, text in of_prompt}) == len(ADAPTERS), "adapters change the answer"


def test_a_worker_that_is_killed_takes_no_adapter_from_its_sequences(adapted: Server, alone: list[tuple]) -> None:
    wait_until(lambda: health(adapted) == 200)
    restarts = metric(adapted, "penstock_worker_restarts")
    streams = [Stream(adapted, each) for each in REQUESTS]
    wait_until(lambda: sum(len(stream.events) > TOKENS // 4 for stream in streams) >= 3)
    os.kill(ranks(adapted)[-1], signal.SIGKILL)
    assert [stream.result() for stream in streams] == alone
    assert metric(adapted, "penstock_worker_restarts") == restarts + 1


def test_an_adapter_of_another_base_fails_its_own_requests(adapted: Server, alone: list[tuple]) -> None:
    wait_until(lambda: health(adapted) == 200)
    stream = Stream(adapted, REQUESTS[1])
    answer = ask(adapted, "/generate", request("Hi", "bad"))
    assert answer.status == 424
    assert "was the adapter trained on another base?" in answer.json["error"]
    assert stream.result() == alone[1]


def test_adapters_are_models_of_openai_s_routes(adapted: Server) -> None:
    models = {model["id"]: model["parent"] for model in ask(adapted, "/v1/models").json["data"]}
    assert models == {"base": None, "one": "base", "two": "base", "bad": "base"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0, "model": "one"}
    answer = ask(adapted, "/v1/chat/completions", body).json
    assert answer["model"] == "one"
    base = ask(adapted, "/v1/chat/completions", {**body, "model": "base"}).json
    assert answer["choices"][0]["message"]["content"] != base["choices"][0]["message"]["content"]
    assert ask(adapted, "/generate", request("Hi", "law")).status == 422
