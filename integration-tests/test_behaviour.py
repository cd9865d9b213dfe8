"""Behaviour that TGI's own integration tests verify, and further behaviour that clients rely on."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from binary import Server
from client import ask
from openai import BadRequestError, InternalServerError, OpenAI

QUESTION = [{"role": "user", "content": "Name a colour of the rainbow, and why you like it."}]
SCHEMA = {
    "type": "object",
    "properties": {"activity": {"enum": ["cycling", "walking"]}, "animals": {"type": "integer", "maximum": 99}},
    "required": ["activity", "animals"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"model": "tgi", "max_tokens": 12, "temperature": 0}
TIMES = ("total", "validation", "queue", "inference")


@pytest.fixture
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def generate(server: Server, inputs: str, **parameters: Any) -> dict[str, Any]:
    answer = ask(server, "/generate", {"inputs": inputs, "parameters": {"details": True, **parameters}})
    assert answer.status == 200, answer.text
    return answer.json


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


@pytest.mark.native
def test_a_list_of_prompts_gets_the_answers_of_single_prompts(openai: OpenAI) -> None:
    prompts = ["The sun is", "def add(a, b):", "One, two,", "Paris is"]
    together = openai.completions.create(**GREEDY, prompt=prompts)
    alone = [openai.completions.create(**GREEDY, prompt=prompt) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.total_tokens == sum(answer.usage.total_tokens for answer in alone)

    for with_usage in (False, True):
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        texts, usages, ended = [""] * 4, [], []
        for chunk in openai.completions.create(**GREEDY, prompt=prompts, stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ended += [choice.index] if choice.finish_reason else []
            usages += [(len(chunk.choices), chunk.usage)] if chunk.usage else []
        assert texts == [choice.text for choice in together.choices]
        assert sorted(ended) == [0, 1, 2, 3]
        assert usages == ([(0, together.usage)] if with_usage else [])


def test_all_schema_formats_give_the_same_answer(server: Server, openai: OpenAI) -> None:
    formats = [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "activity", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "activity", "schema": SCHEMA, "strict": True}},
    ]
    asked = {**GREEDY, "max_tokens": 60, "messages": [{"role": "user", "content": "I saw 3 dogs while cycling."}]}
    answers = [openai.chat.completions.create(**asked, response_format=given) for given in formats]
    (text,) = {answer.choices[0].message.content for answer in answers}
    assert set(json.loads(text)) == {"activity", "animals"}
    chunks = openai.chat.completions.create(**asked, response_format=formats[0], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    either = openai.chat.completions.create(**asked, response_format=formats[0], tools=[tool]).choices[0].message
    assert either.tool_calls or set(json.loads(either.content)) == {"activity", "animals"}
    byte = r"(25[0-5]|2[0-4]\d|[01]?\d\d?)"
    address = generate(
        server, "My address is", max_new_tokens=20, grammar={"type": "regex", "value": rf"({byte}\.){{3}}{byte}"}
    )
    assert [0 <= int(part) <= 255 for part in address["generated_text"].split(".")] == [True] * 4


def test_a_final_assistant_message_is_continued_on_request_only(openai: OpenAI) -> None:
    begun = {"role": "assistant", "content": "The capital of France is the city of"}
    messages = [{"role": "user", "content": "What is the capital of France?"}, begun]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = openai.chat.completions.create(**GREEDY, messages=messages, extra_body=options)
    assert answer.choices[0].message.content.lstrip().startswith("Paris")
    for options in ({}, {"continue_final_message": False}):
        new_turn = openai.chat.completions.create(**GREEDY, messages=messages, extra_body=options)
        assert new_turn.usage.prompt_tokens > answer.usage.prompt_tokens


def test_every_chunk_has_a_usage_key_and_only_the_last_one_has_a_value(server: Server, openai: OpenAI) -> None:
    plain = openai.chat.completions.create(**GREEDY, messages=QUESTION)
    for with_usage in (False, True):
        body = {**GREEDY, "messages": QUESTION, "stream": True, "stream_options": {"include_usage": with_usage}}
        answer = ask(server, "/v1/chat/completions", body)
        *lines, done = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        assert done == b"[DONE]"
        chunks = [json.loads(line) for line in lines]
        if with_usage:
            last = chunks.pop()
            assert last["choices"] == []
            assert last["usage"]["total_tokens"] == plain.usage.total_tokens
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == plain.choices[0].finish_reason


def test_all_parameters_together_are_reproducible_and_keep_the_stop_string(server: Server) -> None:
    parameters = {
        "best_of": 1,
        "decoder_input_details": False,
        "do_sample": True,
        "frequency_penalty": 0.1,
        "max_new_tokens": 40,
        "repetition_penalty": 1.2,
        "return_full_text": True,
        "seed": 42,
        "stop": ["."],
        "temperature": 0.5,
        "top_k": 10,
        "top_n_tokens": 5,
        "top_p": 0.9,
        "truncate": 5,
        "typical_p": 0.9,
        "watermark": True,
    }
    answer = generate(server, "A test request of many words about the weather", **parameters)
    details = answer["details"]
    assert details["seed"] == 42
    assert details["finish_reason"] == "stop_sequence"
    assert answer["generated_text"].startswith("A test request of many words about the weather")
    assert answer["generated_text"].endswith(".")
    assert len(details["top_tokens"]) == details["generated_tokens"] == len(details["tokens"])
    assert generate(server, "A test request of many words about the weather", **parameters) == answer
    # With `truncate` the model sees only the last tokens of the prompt.
    other = generate(server, "Something else about the weather", **{**parameters, "truncate": 3})
    assert ids(generate(server, "many words about the weather", **{**parameters, "truncate": 3})) == ids(other)


@pytest.mark.native
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 11}], ids=["greedy", "seeded"])
def test_concurrent_identical_requests_have_one_answer(server: Server, sampling: dict[str, Any]) -> None:
    def generate_again(_: int) -> dict[str, Any]:
        return generate(server, "The three things that matter most are", max_new_tokens=24, **sampling)

    alone = generate_again(0)
    with ThreadPoolExecutor(12) as clients:
        assert all(answer == alone for answer in clients.map(generate_again, range(12)))
    assert alone["details"]["seed"] == sampling.get("seed")


def test_every_route_reports_times_in_headers(server: Server) -> None:
    for path, body in (
        ("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}),
        ("/v1/chat/completions", {**GREEDY, "messages": QUESTION}),
        ("/v1/completions", {**GREEDY, "prompt": "Hello"}),
    ):
        response = ask(server, path, body)
        answer, headers = response.json, response.headers
        times_ms = {name: int(headers[f"x-{name}-time"]) for name in TIMES}
        assert times_ms["total"] >= times_ms["inference"] > 0
        assert int(headers["x-time-per-token"]) > 0
        assert headers["x-compute-type"]
        assert int(headers["x-compute-characters"]) > 0
        if "usage" in answer:
            assert int(headers["x-prompt-tokens"]) == answer["usage"]["prompt_tokens"]
            assert int(headers["x-generated-tokens"]) == answer["usage"]["completion_tokens"]


@pytest.mark.native
def test_a_cached_prompt_gives_the_same_tokens(openai: OpenAI) -> None:
    story = " ".join(f"On day {n} it rained in town number {n * 7}." for n in range(60))
    prompt = f"{time.time_ns()} {story}"
    first = openai.completions.create(**GREEDY, prompt=prompt, logprobs=3)
    second = openai.completions.create(**GREEDY, prompt=prompt, logprobs=3)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens // 2
    assert second.choices == first.choices
    longer = openai.completions.create(**GREEDY, prompt=prompt + " And then")
    assert longer.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.native
def test_the_first_of_n_choices_equals_the_single_choice_of_that_seed(server: Server, openai: OpenAI) -> None:
    asked = {"model": "tgi", "messages": QUESTION, "max_tokens": 16, "temperature": 1.1, "seed": 5}
    three, again = (openai.chat.completions.create(**asked, n=3).choices for _ in range(2))
    (one,) = openai.chat.completions.create(**asked).choices
    assert three == again
    assert three[0] == one
    assert [choice.index for choice in three] == [0, 1, 2]
    assert len({choice.message.content for choice in three}) == 3
    best = generate(server, "Once", do_sample=True, best_of=2, max_new_tokens=8)["details"]
    assert len(best["best_of_sequences"]) == 1
    mean = [sum(t["logprob"] for t in d["tokens"]) / len(d["tokens"]) for d in (best, *best["best_of_sequences"])]
    assert mean[0] >= mean[1]


def test_a_request_ends_at_its_timeout(server: Server, openai: OpenAI) -> None:
    begin = time.monotonic()
    with pytest.raises(InternalServerError, match="timeout") as raised:
        openai.completions.create(
            model="tgi", prompt="Hello", max_tokens=8000, extra_body={"timeout": 0.5, "ignore_eos": True}
        )
    assert raised.value.status_code == 504
    assert time.monotonic() - begin > 0.4
    parameters = {"max_new_tokens": 8000, "timeout": 0.5, "ignore_eos": True}
    answer = ask(server, "/generate", {"inputs": "Hello", "parameters": parameters})
    assert (answer.status, answer.json["error_type"]) == (504, "timeout")


def test_priority_changes_no_token_and_has_limits(server: Server, openai: OpenAI) -> None:
    asked = {**GREEDY, "prompt": "The sea is"}
    answers = [openai.completions.create(**asked, extra_body={"priority": n}) for n in (-100, 0, 100)]
    assert len({answer.choices[0].text for answer in answers}) == 1
    with pytest.raises(BadRequestError, match="priority"):
        openai.completions.create(**asked, extra_body={"priority": 101})
