"""vLLM's names of parameters, arguments and methods: the same meaning, or an error that names what to use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import penstock
import pytest
from penstock import GuidedDecodingParams, LoRARequest, SamplingParams
from penstock.call_name import METHODS, check


def fields(**given: Any) -> dict[str, Any]:
    return SamplingParams(**given).fields(is_chat=False)


def test_names_without_effect_and_neutral_values_are_accepted() -> None:
    assert fields(temperature=0.5, detokenize=False, spaces_between_special_tokens=True, output_kind=2) == {
        "temperature": 0.5
    }
    assert fields(best_of=1, use_beam_search=False, length_penalty=1.0, logits_processors=[], extra_args={}) == {}
    assert fields(n=3, best_of=3) == {"n": 3}


def test_older_names_of_constraints_mean_the_same() -> None:
    guided = GuidedDecodingParams(json=None, choice=["a", "b"], backend="xgrammar")
    assert fields(guided_decoding=guided) == fields(choice=["a", "b"]) == {"structured_outputs": {"choice": ["a", "b"]}}
    with pytest.raises(TypeError, match="guided_decoding is another name of structured_outputs"):
        fields(guided_decoding=guided, structured_outputs=guided)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"best_of": 3}, "best_of is no sampling parameter here: use n, with logprobs"),
        ({"use_beam_search": True}, "use_beam_search is no sampling parameter here: this server samples"),
        ({"length_penalty": 0.8}, "length_penalty is no sampling parameter here"),
        ({"logits_processors": [len]}, "logits_processors is no sampling parameter here: use logit_bias"),
        ({"extra_args": {"a": 1}}, "extra_args is no sampling parameter here"),
        ({"temprature": 1}, "unknown sampling parameter temprature; did you mean temperature?"),
    ],
)
def test_other_parameters_are_refused_with_what_to_use(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as refused:
        SamplingParams(**given)
    assert str(refused.value).startswith(message)


def test_parameters_can_be_changed_as_in_vllms_examples() -> None:
    params = SamplingParams()
    params.max_tokens = 5
    assert replace(params, seed=1).fields(is_chat=False) == {"max_tokens": 5, "seed": 1}
    with pytest.raises(AttributeError):
        params.max_token = 5  # type: ignore[attr-defined]


def test_arguments_of_calls_are_refused_with_what_to_use() -> None:
    check("argument", {"request_id": None, "tokenization_kwargs": {"a": 1}, "mm_processor_kwargs": {}}, ["prompts"])
    with pytest.raises(TypeError, match="request_id is no argument here: results have the order of the prompts"):
        check("argument", {"request_id": "a"}, ["prompts"])
    with pytest.raises(TypeError, match="unknown argument prompt; did you mean prompts\\?"):
        check("argument", {"prompt": "a"}, ["prompts"])


def test_an_adapter_is_named_by_a_text_or_vllms_class() -> None:
    assert [LoRARequest.name(one) for one in ("a", LoRARequest("b", 1, "/c"), None)] == ["a", "b", None]


@pytest.mark.parametrize("name", ["beam_search", "score", "classify"])
def test_methods_that_are_missing_say_what_to_use(name: str) -> None:
    for kind in (penstock.LLM, penstock.AsyncLLM):
        with pytest.raises(AttributeError, match=f"{kind.__name__} has no {name}; use {METHODS[name][:10]}"):
            getattr(kind.__new__(kind), name)


@pytest.mark.parametrize("name", ["BeamSearchParams", "PoolingParams", "TokensPrompt", "AsyncLLMEngine"])
def test_classes_that_are_missing_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"penstock has no {name}; use "):
        getattr(penstock, name)
