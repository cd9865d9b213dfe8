"""API keys, logprobs against transformers, and watermarks against the detector."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from binary import Server, start
from client import ask
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from openai import AuthenticationError, OpenAI
from reference_model import model_folder, reference

pytestmark = pytest.mark.xdist_group("reference")  # transformers loads the model once for both files

KEYS = ("first-key-of-two", "Second_Key.2")
TEXT = "The river was wide and slow, and on its banks the children of the village played until it was dark."
# bf16 logits of the usual magnitude are 0.125 apart, and a logprob is a difference of logits.
TOLERANCE = 0.3


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Accepts two API keys and returns prompt logprobs. With inputs of 16 bits, because those of 8, the default, are
    further from the reference than its tolerance."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(KEYS) + "\n")
    path.chmod(0o600)
    running = start("--api-key-file", str(path), "--enable-prefill-logprobs", "--activation-bits", "16")
    yield running
    assert running.stop() == 0
    assert not [line for line in running.lines for key in KEYS if key in line]


@pytest.fixture
def openai(keyed: Server) -> OpenAI:
    return OpenAI(base_url=f"{keyed.url}/v1", api_key=KEYS[0], max_retries=0)


def generate(keyed: Server, inputs: str, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
    return ask(keyed, "/generate", body, authorization=f"Bearer {KEYS[1]}").json


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_accepted_from_every_client(keyed: Server, key: str) -> None:
    openai = OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0)
    assert openai.completions.create(model="tgi", prompt="Hello", max_tokens=2).usage.completion_tokens == 2
    assert (
        InferenceClient(base_url=keyed.url, token=key)
        .chat_completion([{"role": "user", "content": "Hello"}], max_tokens=2)
        .choices
    )
    assert InferenceClient(keyed.url, token=key).text_generation("Hello", max_new_tokens=2)


@pytest.mark.parametrize("key", ["wrong", KEYS[0].upper(), KEYS[0][:-1], f"{KEYS[0]},{KEYS[1]}"])
def test_a_wrong_key_gets_401_in_every_client(keyed: Server, key: str) -> None:
    with pytest.raises(HfHubHTTPError) as refused:
        InferenceClient(keyed.url, headers={"authorization": f"Bearer {key}"}).text_generation("Hello")
    assert refused.value.response.status_code == 401
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0).completions.create(model="tgi", prompt="Hello")


def test_without_a_key_only_health_routes_answer(keyed: Server) -> None:
    for path in ("/", "/generate", "/generate_stream", "/tokenize", "/invocations", "/vertex", "/v1/completions"):
        assert ask(keyed, path, {}).status == 401, path
    for path in ("/health", "/ping", "/"):
        assert ask(keyed, path).status == 200


def reference_logprobs(token_ids: list[int]) -> Any:
    """[positions, vocabulary]: logprobs of the token after each position."""
    import torch

    model, _ = reference()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


@pytest.mark.timeout(600)
def test_logprobs_of_prompt_and_answer_equal_transformers(keyed: Server) -> None:
    details = generate(keyed, TEXT, max_new_tokens=16, decoder_input_details=True, top_n_tokens=5)["details"]
    prefill, tokens = details["prefill"], details["tokens"]
    _, tokenizer = reference()
    assert [token["id"] for token in prefill] == tokenizer(TEXT)["input_ids"]
    assert "".join(token["text"] for token in prefill) == TEXT
    assert prefill[0]["logprob"] is None
    expected = reference_logprobs([token["id"] for token in prefill + tokens])
    for position, token in enumerate([*prefill[1:], *tokens]):
        assert token["logprob"] == pytest.approx(expected[position, token["id"]].item(), abs=TOLERANCE), token
    for position, (token, tops) in enumerate(zip(tokens, details["top_tokens"], strict=True), len(prefill) - 1):
        logprobs = [top["logprob"] for top in tops]
        assert len(tops) >= 5
        assert tops[0]["id"] == token["id"]
        assert logprobs == sorted(logprobs, reverse=True)
        assert logprobs[0] == pytest.approx(expected[position].max().item(), abs=TOLERANCE)
        worst = expected[position].topk(5).values[-1].item()
        for top in tops:
            assert top["logprob"] == pytest.approx(expected[position, top["id"]].item(), abs=TOLERANCE)
            assert expected[position, top["id"]].item() >= worst - TOLERANCE


@pytest.mark.timeout(600)
def test_logprobs_of_an_echoed_prompt_equal_transformers(openai: OpenAI) -> None:
    scored = openai.completions.create(model="tgi", prompt=TEXT, echo=True, max_tokens=0, logprobs=2).choices[0]
    assert scored.text == TEXT
    _, tokenizer = reference()
    token_ids = tokenizer(TEXT)["input_ids"]
    expected = reference_logprobs(token_ids)
    assert scored.logprobs.token_logprobs[0] is None
    assert len(scored.logprobs.token_logprobs) == len(token_ids)
    for position, logprob in enumerate(scored.logprobs.token_logprobs[1:]):
        assert logprob == pytest.approx(expected[position, token_ids[position + 1]].item(), abs=TOLERANCE)
    assert "".join(scored.logprobs.tokens) == TEXT


def detect(token_ids: list[int]) -> int:
    """Exit status of the detector: 0 if watermarked, 1 if not."""
    command = [sys.executable, "-m", "penstock_server.watermark", str(model_folder()), "--ids"]
    return subprocess.run(command, input=json.dumps(token_ids), text=True, capture_output=True, timeout=60).returncode


def test_a_watermark_is_detected_if_and_only_if_it_was_requested(keyed: Server) -> None:
    for is_marked in (True, False):
        answer = generate(keyed, TEXT, max_new_tokens=120, ignore_eos=True, do_sample=True, seed=3, watermark=is_marked)
        token_ids = [token["id"] for token in answer["details"]["tokens"]]
        assert detect(token_ids) == (0 if is_marked else 1)
