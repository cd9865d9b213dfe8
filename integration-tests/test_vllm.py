"""The openai client with what vLLM's users put into `extra_body`, and vLLM's routes."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest
from binary import Server, start
from client import ask
from openai import BadRequestError, OpenAI

QUESTION = [{"role": "user", "content": "Is the sky blue? Describe it."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["blue", "red"]}, "number": {"type": "integer", "maximum": 9}},
    "required": ["colour", "number"],
}


@pytest.fixture
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def answer(openai: OpenAI, **extra: object) -> str:
    chat = openai.chat.completions.create(
        model="tgi", messages=QUESTION, max_tokens=60, temperature=0, extra_body=extra
    )
    content = chat.choices[0].message.content
    assert content is not None
    return content


@pytest.mark.parametrize("fields", [{"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}])
def test_a_schema_is_enforced_under_each_name(openai: OpenAI, fields: dict[str, object]) -> None:
    found = json.loads(answer(openai, **fields))
    assert found["colour"] in ("blue", "red")
    assert isinstance(found["number"], int)
    assert found["number"] <= 9


def test_choices_and_patterns_are_enforced(openai: OpenAI) -> None:
    assert answer(openai, guided_choice=["maybe", "certainly"]) in ("maybe", "certainly")
    assert answer(openai, structured_outputs={"regex": "[0-9]{3}"}).isdigit()
    assert answer(openai, guided_grammar='start: "x" /[ab]/') in ("xa", "xb")
    compact = {"json": SCHEMA, "disable_any_whitespace": True}
    assert not set(answer(openai, structured_outputs=compact)) & set(" \n")


def test_what_is_not_supported_is_refused_by_name(openai: OpenAI) -> None:
    for field, value in {"use_beam_search": True, "guided_grammar": 'root ::= "a" b'}.items():
        with pytest.raises(BadRequestError) as refused:
            answer(openai, **{field: value})
        assert refused.value.param == field


def test_token_ids_are_those_of_the_tokenizer(server: Server, openai: OpenAI) -> None:
    text = "The sky is"
    tokenized = ask(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert ask(server, "/detokenize", {"tokens": tokenized["tokens"]}).json == {"prompt": text}
    assert tokenized["max_model_len"] == openai.models.list().data[0].to_dict()["max_model_len"]

    ids = {"return_token_ids": True}
    plain = openai.completions.create(model="tgi", prompt=text, max_tokens=8, temperature=0, extra_body=ids)
    choice = plain.choices[0].to_dict()
    assert choice["prompt_token_ids"] == tokenized["tokens"]
    assert ask(server, "/detokenize", {"tokens": choice["token_ids"]}).json == {"prompt": choice["text"]}
    stream = openai.completions.create(
        model="tgi", prompt=tokenized["tokens"], max_tokens=8, temperature=0, stream=True, extra_body=ids
    )
    assert [id for chunk in stream for id in chunk.choices[0].to_dict()["token_ids"]] == choice["token_ids"]
    chat = ask(server, "/tokenize", {"messages": QUESTION}).json
    answered = openai.chat.completions.create(model="tgi", messages=QUESTION, max_tokens=1)
    assert answered.usage is not None
    assert answered.usage.prompt_tokens == chat["count"]


def test_a_salt_separates_cached_prompts(openai: OpenAI) -> None:
    prompt = "Salt and pepper. " * 20

    def cached(salt: str) -> int:
        fields = {"cache_salt": salt}
        usage = openai.completions.create(model="tgi", prompt=prompt, max_tokens=1, extra_body=fields).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("first") > 0, cached("first") > 0, cached("second") > 0] == [False, True, False]


def test_every_chunk_can_have_the_usage_so_far(openai: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = openai.completions.create(
        model="tgi", prompt="Water", max_tokens=5, temperature=0, stream=True, extra_body={"stream_options": options}
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == [1, 2, 3, 4, 5, 5]


# Grammars and regular expressions of the same texts.
GBNF = {
    r"""
    # A word that may take the letters of what follows.
    root ::= word "end" [.!]
    word ::= [a-z]+
    """: r"[a-z]+end[.!]",
    r"""
    root ::= sum
    sum ::= product ("+" product){0,2}
    product ::= factor | factor "*" factor
    factor ::= [1-9] | "(" sum-of-two ")"
    sum-of-two ::= [1-9] "-" [1-9]
    """: r"(F(\*F)?)(\+F(\*F)?){0,2}".replace("F", r"([1-9]|\([1-9]-[1-9]\))"),
    r"""root ::= ( "\u00e9" | [^\x00-\x7F] ){2} "\"\\" ("" | "x" | )""": r'[^\x00-\x7F]{2}"\\x?',
    r"""
    root  ::= "{" ws "\"name\":" ws string "}"
    string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\nt]){1,12} "\""
    ws ::= | " " ws
    """: r'\{ *"name": *"([^"\\\x00-\x1F]|\\["\\nt]){1,12}"\}',
}


@pytest.mark.parametrize("gbnf", GBNF)
def test_gbnf_is_enforced(openai: OpenAI, gbnf: str) -> None:
    matched = 0
    for seed in range(6):  # a word may be as long as the answer
        chat = openai.chat.completions.create(
            model="tgi", messages=QUESTION, max_tokens=100, seed=seed, extra_body={"guided_grammar": gbnf}
        )
        if chat.choices[0].finish_reason == "stop":
            matched += 1
            assert re.fullmatch(GBNF[gbnf], chat.choices[0].message.content or ""), chat.choices[0].message.content
    assert matched


def test_a_tag_in_text_is_followed_by_its_schema(openai: OpenAI) -> None:
    """The tag begins with a word that the model writes by itself."""
    schema = {"type": "integer", "minimum": 0, "maximum": 99}
    structures = [{"begin": " is[", "schema": schema, "end": "]"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": [" is"]}
    for fields in {"response_format": tag}, {"structured_outputs": {"structural_tag": json.dumps(tag)}}:
        text = answer(openai, **fields)
        tags = re.findall(r" is\[[0-9]{1,2}\]", text)
        assert tags
        assert len(tags) >= text.count(" is") - 1, f"the last one may be cut off: {text}"


def test_tokens_and_words_can_be_excluded(server: Server, openai: OpenAI) -> None:
    free = answer(openai)
    words = [word for word in ("sky", "blue", "Yes") if word in free]
    assert words
    assert not any(word in answer(openai, bad_words=words) for word in words)
    tokenized = ask(server, "/tokenize", {"prompt": "no no", "add_special_tokens": False}).json
    allowed = tokenized["tokens"]
    assert answer(openai, allowed_token_ids=allowed).replace("no", "").strip() == ""
    # Both hold: the grammar ends the answer.
    assert answer(openai, allowed_token_ids=allowed, guided_regex="(no)( no)*").split(" ")[0] == "no"
    with pytest.raises(BadRequestError, match="leave no token"):
        answer(openai, allowed_token_ids=allowed, guided_choice=["yes"])


def test_excluded_tokens_stay_so_after_a_worker_s_death() -> None:
    running = start()
    client = OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0)
    extra = {"bad_words": ["the", "blue", "light"], "ignore_eos": True}
    options: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "max_tokens": 120, "temperature": 0}
    expected = client.chat.completions.create(**options, extra_body=extra).choices[0].message.content
    text = ""
    for number, chunk in enumerate(client.chat.completions.create(**options, extra_body=extra, stream=True)):
        text += chunk.choices[0].delta.content or ""
        if number == 20:
            os.kill(running.worker_pids()[0], signal.SIGKILL)
    assert text == expected
    assert running.stop() == 0


def test_logprobs_can_name_tokens_by_their_ids(openai: OpenAI) -> None:
    chat = openai.chat.completions.create(
        model="tgi",
        messages=QUESTION,
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    )
    (choice,) = chat.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    named = [token.token for token in choice.logprobs.content]
    assert named == [f"token_id:{token_id}" for token_id in choice.model_extra["token_ids"]]
