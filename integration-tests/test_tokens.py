"""Tokens that not every file of a model names: added tokens, ends of turns, and tokens without an embedding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from binary import TIMEOUT_S, Server, start
from byte_model import save_tokenizer

ROWS = 259
EOS, USER, END, EXTRA = "</s>", "<|user|>", "<|own end|>", "<|extra|>"
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }} {{ m.content }}<|own end|>\n{% endfor %}"
    "{{ eos_token if not add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes END often. Only tokenizer_config.json knows its added tokens, and EXTRA has no embedding."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    flags = {**dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), "special": True}
    added = {str(256 + index): {"content": text, **flags} for index, text in enumerate((EOS, USER, END, EXTRA))}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 256}
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=ROWS, max_position_embeddings=256, initializer_range=0.3, **sizes, **ids)
    )
    with torch.no_grad():
        model.lm_head.weight[258] *= 4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = start("--model-id", str(folder), "--dtype", "float32", "--standby", "off")
    yield server
    server.stop()


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)


def test_tokens_of_the_tokenizer_config_are_whole_and_a_chat_ends_with_what_its_template_writes(
    server: Server, folder: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = greedy_ids(model, prompt, 40)
    end = ids.index(258) + 1  # neither generation_config.json nor tokenizer_config.json says that END ends a turn
    body = {"model": "x", "messages": chat, "max_tokens": 40, "temperature": 0}
    answer = post(server, "/v1/chat/completions", **body).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", end)
    ignored = post(server, "/v1/chat/completions", **body, ignore_eos=True).json()
    assert ignored["usage"]["completion_tokens"] == 40
    # A text that is no chat goes on.
    text = tokenizer.decode(prompt)
    answer = post(server, "/generate", inputs=text, parameters={"max_new_tokens": end + 1, "details": True}).json()
    assert [token["id"] for token in answer["details"]["tokens"]] == ids[: end + 1]


def greedy_ids(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    generated: list[int] = out[0].tolist()
    return generated[len(prompt) :]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "x", "prompt": [5, 6, 259], "max_tokens": 2}),
        ("/v1/completions", {"model": "x", "prompt": f"a{EXTRA}", "max_tokens": 2}),
        ("/v1/completions", {"model": "x", "prompt": "a", "max_tokens": 2, "logit_bias": {"259": 1}}),
        ("/v1/completions", {"model": "x", "prompt": "a", "max_tokens": 2, "stop_token_ids": [259]}),
        ("/v1/completions", {"model": "x", "prompt": "a", "max_tokens": 2, "allowed_token_ids": [259]}),
        ("/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": EXTRA}], "max_tokens": 2}),
        ("/v1/responses", {"model": "x", "input": EXTRA, "max_output_tokens": 16}),
        ("/v1/messages", {"model": "x", "messages": [{"role": "user", "content": EXTRA}], "max_tokens": 2}),
        ("/generate", {"inputs": f"a{EXTRA}", "parameters": {"max_new_tokens": 2}}),
    ],
)
def test_a_token_without_an_embedding_is_refused_by_its_id(server: Server, path: str, body: dict[str, Any]) -> None:
    refused = post(server, path, **body)
    assert refused.status_code in (400, 422), refused.text
    assert "259" in refused.text
    assert "ids" in refused.text


def test_the_tokenizer_is_larger_than_the_embedding_is_said_once_and_costs_nothing_else(server: Server) -> None:
    warnings = [line for line in server.lines if '"WARN"' in line and "embeddings" in line]
    assert len(warnings) == 1
    assert f"260 tokens, but the model has {ROWS} embeddings" in warnings[0]
    assert EXTRA in warnings[0]
    # A word that the model cannot write is forbidden already, and has a text.
    body = {"prompt": "a", "max_tokens": 2, "bad_words": [EXTRA]}
    assert post(server, "/v1/completions", model="x", **body).status_code == 200
    assert post(server, "/detokenize", tokens=[259]).json()["prompt"] == EXTRA
