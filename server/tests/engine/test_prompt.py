"""Prompts and conversations as callers give them to `LLM`: what is sent, and what is refused with its index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from penstock import prompt
from penstock.client import _json

HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        (("a", [1, 2]), ["a", [1, 2]]),
        ([1, 2], [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([torch.tensor([1, 2]), range(3)], [[1, 2], [0, 1, 2]]),
        ({"prompt": "a"}, ["a"]),
        ([{"prompt": "a"}, {"prompt_token_ids": np.array([1, 2])}], ["a", [1, 2]]),
        ({"prompt": "a", "prompt_token_ids": [1, 2]}, [[1, 2]]),
        ({"prompt": "a", "prompt_token_ids": None}, ["a"]),
        ((text for text in "ab"), ["a", "b"]),
        ([], []),
    ],
)
def test_each_form_of_a_prompt_is_sent_as_a_text_or_as_token_ids(given: Any, sent: list[Any]) -> None:
    found = prompt.prompts(given)
    assert [one.error for one in found] == [None] * len(sent)
    assert [one.prompt for one in found] == sent
    assert all(type(part) is int for one in found if isinstance(one.prompt, list) for part in one.prompt)


def test_a_salt_of_a_prompt_is_a_field_of_its_request() -> None:
    (found,) = prompt.prompts({"prompt": "a", "cache_salt": "s"})
    assert (found.prompt, found.fields) == ("a", {"cache_salt": "s"})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "prompt 1: is None, must be a text, a list of token ids"),
        (float("nan"), "prompt 1: is nan, must be"),
        (7, "prompt 1: is 7 (int), must be"),
        ("", "prompt 1: is empty"),
        ([], "prompt 1: is empty"),
        (b"abc", "prompt 1: is b'abc' (bytes), must be"),
        ([1, "a"], "prompt 1: is [1, 'a'] (list), must be"),
        ([True, False], "prompt 1: is [True, False] (list), must be"),
        ({}, "prompt 1: has no keys, must have prompt or prompt_token_ids"),
        ({"text": "a"}, "prompt 1: has 'text', must have prompt or prompt_token_ids"),
        ({"prompt": None}, "prompt 1: has 'prompt', must have"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt 1: has multi_modal_data, which LLM does not support"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_refused_with_its_index(bad: Any, message: str) -> None:
    found = prompt.prompts(["a", bad, "b"])
    assert [one.error is None for one in found] == [True, False, True]
    assert str(found[1].error).startswith(message)


@pytest.mark.parametrize("given", [None, 7, b"abc", float("nan")])
def test_what_is_no_list_of_prompts_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="prompts is "):
        prompt.prompts(given)


def test_a_table_is_refused_instead_of_completing_the_names_of_its_columns() -> None:
    class Table(dict[str, Any]):
        def iterrows(self) -> None: ...

    with pytest.raises(TypeError, match="prompts is a table; give one of its columns"):
        prompt.prompts(Table(prompt=["a"]))


def test_conversations_are_lists_of_messages() -> None:
    assert [one.prompt for one in prompt.conversations([HI])] == [[HI]]
    assert [one.prompt for one in prompt.conversations([[HI], (HI, HI)])] == [[HI], [HI, HI]]
    bad = prompt.conversations([[HI], None, [], "Hi", [HI, "Hi"]])
    assert [str(one.error) for one in bad[1:]] == [
        "prompt 1: is None, must be a list of messages",
        "prompt 2: has no messages",
        "prompt 3: is 'Hi' (str), must be a list of messages",
        "prompt 4: message 1 is 'Hi' (str), must be a mapping with role and content",
    ]
    with pytest.raises(TypeError, match="for a text, use generate"):
        prompt.conversations("Hi")


def test_numbers_and_objects_of_libraries_are_sent_as_what_they_hold() -> None:
    class Answer:
        def model_dump(self, *, exclude_none: bool) -> Mapping[str, Any]:
            return {"role": "assistant", "content": "x"}

    body = {"top_k": np.int64(4), "temperature": np.float32(0.5), "stop_token_ids": np.array([1, 2]), "m": Answer()}
    assert _json(body) == (
        b'{"top_k": 4, "temperature": 0.5, "stop_token_ids": [1, 2], "m": {"role": "assistant", "content": "x"}}'
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan, must be a finite number"),
        ({"top_p": float("inf")}, "top_p is inf, must be a finite number"),
        ({"prompt": "\ud800"}, "a text has half of a surrogate pair"),
        ({"stop": object}, "<class 'object'> (type) cannot be sent as JSON"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match="^" + message.replace("(", r"\(").replace(")", r"\)")):
        _json(body)
