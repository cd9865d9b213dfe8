"""`--speculative-model` with a model, on the real binary and two ranks: the tokens of a server without it, also under a
grammar, which ends the answer of a model without an EOS token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import byte_model
import pytest
import torch
from binary import Server, launch, start
from client import ask
from drafts import interrupted, token_ids
from fault.probe import metrics
from test_worker_death import Stream

pytestmark = pytest.mark.native

PROMPTS = ["The draft model is the model", "Another text", "A third one"]
NUM_TOKENS = 40
FORCED = ": what a schema forces, "
# Its last character is token 0.
REGEX = f"[a-m]{{6}}{FORCED}[n-z]{{6}}!"
CHOICES = ["abcdefghijklm"] * 6 + list(FORCED) + ["nopqrstuvwxyz"] * 6 + ["!"]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[list[int]], list[str]]]:
    """A server on two ranks whose model drafts for itself, and the model's greedy continuations of the prompts, and
    those that match `REGEX`."""
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = byte_model.save(folder, 256, None)
    texts = [byte_model.greedy(model, tokenizer, prompt, NUM_TOKENS) for prompt in PROMPTS]
    matching = [matching_text(model, tokenizer, prompt) for prompt in PROMPTS]
    flags = ["--dtype", "float32", "--num-shard", "2", "--speculate", "3", "--speculative-model", str(folder)]
    server = start("--model-id", str(folder), *flags)
    yield server, texts, matching
    assert server.stop() == 0


def matching_text(model: Any, tokenizer: Any, prompt: str) -> str:
    """The model's greedy continuation of a prompt, of the characters that `CHOICES` allows in each place."""
    text = prompt
    for choices in CHOICES:
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer.encode(text).ids])).logits[0, -1]
        text += max(choices, key=lambda character: float(logits[tokenizer.encode(character).ids[0]]))
    return text.removeprefix(prompt)


def request(prompt: str, **parameters: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True, "ignore_eos": True, **parameters}
    return {"inputs": prompt, "parameters": parameters}


def test_right_drafts_save_steps_and_change_no_token_alone_or_together(
    drafting: tuple[Server, list[list[int]], list[str]],
) -> None:
    server, texts, _ = drafting
    sampled = [request(prompt, do_sample=True, seed=3, temperature=0.5) for prompt in PROMPTS]
    requests = [request(prompt) for prompt in PROMPTS] + sampled

    def tokens(body: dict[str, Any]) -> Any:
        return ask(server, "/generate", body).json["details"]["tokens"]

    alone = [tokens(body) for body in requests]
    assert [[token["id"] for token in each] for each in alone[: len(texts)]] == texts
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(tokens, requests)) == alone
    found = metrics(server)
    assert found["vllm:spec_decode_num_accepted_tokens_total"] > 0, "a server's first steps measure what drafts cost"
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    accepted = [found[f'{per_position}{{position="{position}"}}'] for position in range(16)]
    assert sum(accepted) == found["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[3:] == [0] * 13
    assert accepted[0] <= found["vllm:spec_decode_num_drafts_total"]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == found["penstock_draft_tokens"]


def test_a_grammar_s_drafts_change_no_token_and_its_end_is_the_answer_s(
    drafting: tuple[Server, list[list[int]], list[str]],
) -> None:
    server, _, matching = drafting
    requests = [
        request(prompt, max_new_tokens=100, ignore_eos=False, grammar={"type": "regex", "value": REGEX})
        for prompt in PROMPTS
    ]
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda body: ask(server, "/generate", body).json, requests))
    assert [answer["generated_text"] for answer in answers] == matching
    ends = [(answer["details"]["finish_reason"], answer["details"]["generated_tokens"]) for answer in answers]
    assert ends == [("eos_token", len(CHOICES))] * 3
    streams = [Stream(server, body) for body in requests]
    assert [stream.result()[1] for stream in streams] == matching
    assert [stream.events[-1]["details"]["finish_reason"] for stream in streams] == ["eos_token"] * 3


def test_a_worker_s_death_changes_no_token(drafting: tuple[Server, list[list[int]], list[str]]) -> None:
    server, texts, _ = drafting
    requests = [request(prompt, max_new_tokens=160) for prompt in PROMPTS]
    details = [ask(server, "/generate", body).json["details"] for body in requests]
    undisturbed = [[token["id"] for token in each["tokens"]] for each in details]
    assert [each[:NUM_TOKENS] for each in undisturbed] == texts
    assert [token_ids(stream) for stream in interrupted(server, requests)] == undisturbed


def test_a_draft_model_of_another_vocabulary_is_refused_before_ready(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    byte_model.save(folder, 256, None)
    other = shutil.copytree(folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    process = launch("--model-id", str(folder), "--speculate", "3", "--speculative-model", str(other))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "has another vocabulary: 2 of the model's 256 tokens differ" in output
