"""`--speculate` on the real binary: the bits of a server without it, in fewer steps, also across a worker's death."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import byte_model
import pytest
import torch
from binary import Server, launch, start
from client import ask, events
from drafts import interrupted, token_ids, wait_for_right_drafts
from fault.probe import metric, wait_until
from safetensors.torch import save_file

pytestmark = pytest.mark.native

CODE = "def add(first, second):\n    total = first + second\n    return total\n\n"
COPY = f"Repeat the code exactly.\n\n{CODE * 3}"
MEDUSA_PROMPT = "The heads know"
LIST = "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"
SCHEMA = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "second": {"type": "string"}, "total": {"enum": ["small", "large"]}},
    "required": ["first", "second", "total"],
    "additionalProperties": False,
}
GREEDY = {"inputs": COPY, "parameters": {"max_new_tokens": 60, "details": True, "top_n_tokens": 2}}
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 1, "temperature": 0.6},
    {"do_sample": True, "seed": 2, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    {"do_sample": True, "seed": 3, "typical_p": 0.9, "watermark": True},
    {"repetition_penalty": 1.2},
    {"do_sample": True, "seed": 4, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"stop": ["total", "\n\n"], "min_tokens": 5},
    {"logit_bias": {"28": 3.0}, "top_n_tokens": 3},
    {"grammar": {"type": "regex", "value": "[0-9, ]{20,40}"}},
    {"grammar": {"type": "json", "value": SCHEMA}, "repetition_penalty": 1.1, "top_n_tokens": 2},
    {"grammar": {"type": "json", "value": SCHEMA}, "do_sample": True, "seed": 5},
]
REQUESTS = [GREEDY] + [
    {"inputs": inputs, "parameters": {"max_new_tokens": 40, "details": True, **parameters}}
    for inputs in (COPY, LIST)
    for parameters in PARAMETERS
]
TOLD = {"inputs": COPY, "parameters": {"max_new_tokens": 24, "details": True, "return_drafts": True}}
ASKED = {"messages": [{"role": "user", "content": COPY}], "max_tokens": 24, "temperature": 0}
COMPLETED = {"prompt": COPY, "max_tokens": 24, "temperature": 0, "return_drafts": True}
CHATTED = {**ASKED, "ignore_eos": True, "return_drafts": True}
RESPONDED = {"model": "tgi", "input": COPY, "max_output_tokens": 24, "temperature": 0}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
# Requests to every route that says what an answer cost.
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", TOLD),
    ("/generate_stream", {**TOLD, "stream": True}),
    ("/", TOLD),
    ("/invocations", TOLD),
    ("/v1/completions", COMPLETED),
    ("/v1/completions", {**COMPLETED, **STREAMED}),
    ("/v1/chat/completions", CHATTED),
    ("/v1/chat/completions", {**CHATTED, **STREAMED}),
    ("/v1/messages", {"model": "tgi", **ASKED}),
    ("/v1/messages", {"model": "tgi", **ASKED, "stream": True}),
    ("/v1/responses", RESPONDED),
    ("/v1/responses", {**RESPONDED, "stream": True}),
]


@pytest.fixture(scope="module")
def speculating() -> Iterator[Server]:
    recent = ["--speculate-recent-tokens", "4000"]
    server = start("--speculate", "8", *recent, "--max-batch-total-tokens", "8000")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[int]]]:
    """With heads that know one greedy text of the model, and that text."""
    folder, heads = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("heads")
    model, tokenizer = byte_model.save(folder, 256, None)
    prompt = tokenizer.encode(MEDUSA_PROMPT).ids
    text = byte_model.greedy(model, tokenizer, MEDUSA_PROMPT, 40)
    with torch.inference_mode():
        outputs = model.model(torch.tensor([[*prompt, *text]])).last_hidden_state[0, len(prompt) - 1 : -1]
    tensors = {}
    for head in range(3):
        following = torch.eye(256)[text[head + 1 :]]
        # [vocab, hidden]: exact, because there are fewer outputs than dimensions.
        # Times 100: the heads are certain.
        tensors[f"{head}.1.weight"] = (100 * torch.linalg.pinv(outputs[: len(following)]) @ following).T.contiguous()
        tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"] = torch.zeros(48, 48), torch.zeros(48)
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    drafts = ["--speculate", "3", "--speculative-model", str(heads)]
    pool = ["--max-batch-total-tokens", "256"]  # tokens of one sequence at its longest
    server = start("--model-id", str(folder), "--dtype", "float32", *drafts, *pool)
    yield server, text
    assert server.stop() == 0


def test_medusa_heads_that_know_the_text_save_steps_and_change_no_token(medusa: tuple[Server, list[int]]) -> None:
    server, text = medusa
    parameters = {"max_new_tokens": 40, "details": True, "ignore_eos": True}
    body = {"inputs": MEDUSA_PROMPT, "parameters": parameters}
    details = wait_for_right_drafts(server, body)
    assert [token["id"] for token in details["tokens"]] == text
    # The heads know nothing of another text: their drafts are wrong, and its tokens are the same.
    other = {**body, "inputs": "Another text"}
    drafted = ask(server, "/generate", other).json["details"]["tokens"]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda request: ask(server, "/generate", request).json, [body, other] * 4))
    assert [each["details"]["tokens"] for each in together] == [details["tokens"], drafted] * 4


def test_preemption_and_shared_prefixes_change_no_token_of_drafts(medusa: tuple[Server, list[int]]) -> None:
    """The pool holds one of two answers to a prompt, of one request, so that they run together."""
    server, text = medusa
    sampled = {"max_new_tokens": 200, "details": True, "ignore_eos": True, "do_sample": True, "top_k": 1}

    def answers(**parameters: Any) -> list[Any]:
        body = {"inputs": MEDUSA_PROMPT, "parameters": {**sampled, **parameters}}
        details = ask(server, "/generate", body).json["details"]
        return [details["tokens"], *(each["tokens"] for each in details.get("best_of_sequences") or ())]

    (alone,) = answers()
    assert [token["id"] for token in alone[: len(text)]] == text
    names = "penstock_preemptions", "penstock_prefix_hit_tokens"
    before = [metric(server, name) for name in names]
    assert answers(best_of=2) == [alone] * 2
    assert all(metric(server, name) > old for name, old in zip(names, before, strict=True))


def test_a_worker_s_death_changes_no_token_of_medusa_heads(medusa: tuple[Server, list[int]]) -> None:
    server, text = medusa
    # Two such answers fit into the pool.
    parameters = {"max_new_tokens": 110, "details": True, "ignore_eos": True}
    request = {"inputs": MEDUSA_PROMPT, "parameters": parameters}
    undisturbed = [token["id"] for token in answer(server, request)[1]["tokens"]]
    assert undisturbed[: len(text)] == text
    assert [token_ids(stream) for stream in interrupted(server, [request] * 2)] == [undisturbed] * 2


def test_heads_without_weights_are_refused_before_ready(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    process = launch("--speculate", "3", "--speculative-model", str(tmp_path))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"--speculative-model {tmp_path}: {tmp_path} holds no weights" in output


def answer(server: Server, request: dict[str, Any]) -> Any:
    """The text and its details, which a server without drafts must equal."""
    found = ask(server, "/generate", request).json
    found["details"].pop("draft_tokens", None)
    return found["generated_text"], found["details"]


def test_answers_are_the_bits_of_a_server_without_drafts(server: Server, speculating: Server) -> None:
    expected = [answer(server, request) for request in REQUESTS]
    assert [answer(speculating, request) for request in REQUESTS] == expected
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda request: answer(speculating, request), REQUESTS))
    assert together == expected


def test_a_grammar_forces_drafts_without_the_flag(server: Server) -> None:
    """Requests are not told of them: how many there are depends on what else the steps compute."""
    request = {
        "inputs": COPY,
        "parameters": {"max_new_tokens": 60, "details": True, "grammar": {"type": "json", "value": SCHEMA}},
    }
    before = metric(server, "penstock_accepted_draft_tokens")
    text, details = answer(server, request)

    def has_forced_tokens() -> bool:
        found = ask(server, "/generate", request).json
        assert (found["generated_text"], found["details"]) == (text, details)
        return metric(server, "penstock_accepted_draft_tokens") > before

    wait_until(has_forced_tokens, "forced tokens are verified")


def test_every_right_draft_saves_a_step(speculating: Server) -> None:
    """How many there are depends on the times of steps, which decide how many drafts pay."""
    names = 'tgi_batch_inference_success{method="decode"}', "penstock_draft_tokens", "penstock_accepted_draft_tokens"

    def has_right_drafts() -> bool:
        before = [metric(speculating, name) for name in names]
        details = ask(speculating, "/generate", GREEDY).json["details"]
        steps, drafts, accepted = (metric(speculating, name) - old for name, old in zip(names, before, strict=True))
        assert details["generated_tokens"] == 60
        assert accepted <= drafts
        assert details.get("draft_tokens", {"verified": 0, "accepted": 0}) == {"verified": drafts, "accepted": accepted}
        assert steps + accepted <= 62  # the step that ended the request before may be counted late
        return accepted > 0

    wait_until(has_right_drafts, "drafts are right")


def told(answer: Any) -> tuple[dict[str, int], list[dict[str, int]]]:
    """The draft tokens of an answer, or of a stream's last event that counts them, and its drafts."""
    found = [each.get("response", each) for each in (answer if isinstance(answer, list) else [answer])]
    drafts = [draft for each in found for choice in each.get("choices", ()) for draft in choice.get("drafts", ())]
    last = next(each for each in reversed(found) if each.get("details") or each.get("usage"))
    if details := last.get("details"):
        return details.get("draft_tokens", {"verified": 0, "accepted": 0}), details.get("drafts", [])
    usage = last["usage"]
    counts = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    accepted = counts.get("accepted_prediction_tokens", 0)
    return {"verified": accepted + counts.get("rejected_prediction_tokens", 0), "accepted": accepted}, drafts


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_route_tells_of_its_drafts(speculating: Server, path: str, body: dict[str, Any]) -> None:
    """How many there are depends on the times of steps; the request is made until there are some."""
    names = "penstock_draft_tokens", "penstock_accepted_draft_tokens"

    def has_drafts() -> bool:
        before = [metric(speculating, name) for name in names]
        answer = events(speculating, path, body) if "stream" in body else ask(speculating, path, body).json
        verified, accepted = (metric(speculating, name) - old for name, old in zip(names, before, strict=True))
        counts, drafts = told(answer)
        assert counts == {"verified": verified, "accepted": accepted}
        if "return_drafts" in str(body):
            assert sum(draft["verified"] for draft in drafts) == verified
            assert sum(draft["accepted"] for draft in drafts) == accepted
            ends = [draft["token_index"] + draft["accepted"] for draft in drafts]
            assert all(end < draft["token_index"] for end, draft in zip(ends, drafts[1:], strict=False))
            assert all(end <= 24 for end in ends)
        return verified > 0

    wait_until(has_drafts, "steps verify drafts")


def test_a_worker_s_death_changes_no_token(speculating: Server) -> None:
    parameters = {"max_new_tokens": 120, "details": True, "ignore_eos": True}
    sampled = {**parameters, "do_sample": True, "seed": 9}
    requests = [{"inputs": COPY, "parameters": each} for each in (parameters, sampled)]
    undisturbed = [answer(speculating, request)[1]["tokens"] for request in requests]
    streams = interrupted(speculating, requests)
    assert [[event["token"] for event in stream.events] for stream in streams] == undisturbed
