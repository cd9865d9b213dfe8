"""Structured output of the embedded model: every complete output matches its grammar, in any batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from grammar_driver import BLOCK_TOKENS, AnswerDriver
from grammar_walk import check_instance
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from late_device import LateEvent, make_late
from penstock_server.engine import Engine
from penstock_server.engine.sampler import Sampler
from penstock_server.engine.sampling import SAMPLING_FIELDS, compose, record
from penstock_server.engine.watermark import Watermark
from penstock_server.grammar.state import GrammarStates
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.grammar import ThoughtLimit
from penstock_server.protocol.plan import Grammar, NewSequence, Sampling
from plans import Advance, plan, step
from sample_at_once import sample_at_once

EOS = (0, 2)  # <|endoftext|> and <|im_end|>
NUM_SEQUENCES = 12
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "langs": {"type": "array", "items": {"enum": ["en", "de", "fr"]}, "maxItems": 2},
    },
    "required": ["name", "age", "langs"],
    "additionalProperties": False,
}
ARITHMETIC = """
start: sum
sum: product ("+" product)~0..2
product: atom ("*" atom)~0..1
atom: /[1-9]/ | "(" /[1-9]/ "-" /[1-9]/ ")"
"""


@pytest.fixture(scope="module")
def driver(embedded_folder: Path) -> Iterator[AnswerDriver]:
    engine, _ = Engine.load(LoadConfig(embedded_folder, BLOCK_TOKENS, dtype="bfloat16", device="cpu"))
    engine.warm_up(WarmUpConfig(512, NUM_SEQUENCES, 512, num_blocks=16 * NUM_SEQUENCES))
    yield AnswerDriver(engine, EOS, num_blocks=16 * NUM_SEQUENCES)
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(embedded_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(embedded_folder)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    question = [{"role": "user", "content": "Describe a person as JSON."}]
    return list(tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"])


def constrained(schema: dict[str, Any], **options: Any) -> Sampling:
    return Sampling(grammar=Grammar("json_schema", json.dumps(schema)), stop_token_ids=EOS, **options)


def test_forced_tokens_save_steps_and_change_no_token(driver: AnswerDriver, prompt: list[int]) -> None:
    drawn = [Sampling(do_sample=seed > 0, seed=seed, stop_token_ids=EOS) for seed in range(2)]
    asked = [
        (prompt, sampling) for sampling in (*(constrained(PERSON, do_sample=True, seed=i) for i in range(3)), *drawn)
    ]
    expected, num_steps = driver.run(asked, 60), driver.num_steps
    forcing = replace(driver, max_forced=3)
    # What a grammar forces ends before the end of the answer, so no answer has more tokens.
    assert forcing.run(asked[:3], 60) == expected[:3]
    num_tokens = max(len(answer.tokens) for answer in expected[:3])
    assert forcing.num_steps < num_tokens, "keys and punctuation are forced"
    short = replace(driver, max_forced=1).run(asked, 20, preempt_every=3)
    assert [answer.tokens[:20] for answer in short] == [answer.tokens[:20] for answer in expected]
    assert num_steps == 60


def test_thoughts_end_at_their_limit_whatever_shares_the_steps(
    driver: AnswerDriver, tokenizer: Any, prompt: list[int]
) -> None:
    end_ids = tuple(tokenizer.encode("[end]", add_special_tokens=False))
    started = ThoughtLimit(5, "", "[end]", end_ids)
    samplings = [Sampling(do_sample=seed > 0, seed=seed, temperature=1.5) for seed in range(3)]
    free = driver.run([(prompt, sampling) for sampling in samplings], 40)
    limited = [replace(sampling, grammar=Grammar("any", "", started)) for sampling in samplings]
    # A limit that is not reached changes nothing.
    generous = [
        replace(sampling, grammar=Grammar("any", "", replace(started, max_tokens=99))) for sampling in samplings
    ]
    answers = Grammar("lark", 'start: thoughts /[0-9]{3}/\nthoughts[lazy]: TEXT "[end]"\nTEXT: /(?s:.*)/')
    in_grammar = [replace(sampling, grammar=replace(answers, thoughts=started)) for sampling in samplings]
    asked = [(prompt, sampling) for sampling in limited + generous + in_grammar]
    found = driver.run(asked, 40)
    for answer, same in zip(found[3:6], free, strict=True):
        assert answer.tokens == same.tokens
    for answer, same in zip(found[:3], free, strict=True):
        assert answer.tokens[:5] == same.tokens[:5]
        assert tuple(answer.tokens[5 : 5 + len(end_ids)]) == end_ids
        assert len(answer.tokens) == 40 or answer.has_ended
    for answer in found[6:]:
        assert not answer.error
        assert tuple(answer.tokens[5 : 5 + len(end_ids)]) == end_ids
        assert re.fullmatch(r"[0-9]{3}", tokenizer.decode(answer.tokens[5 + len(end_ids) : -1]))
    expected = [answer.tokens for answer in found]
    assert [answer.tokens for answer in replace(driver, max_forced=3).run(asked[:3], 40)] == expected[:3]
    assert [answer.tokens for answer in driver.run(asked, 40, preempt_every=4)] == expected


def test_every_output_matches_its_grammar(driver: AnswerDriver, tokenizer: Any, prompt: list[int]) -> None:
    regex = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d (AM|PM)"
    grammars = [Grammar("json_schema", json.dumps(PERSON)), Grammar("regex", regex), Grammar("lark", ARITHMETIC)]
    samplings = [
        Sampling(grammar=grammar, do_sample=seed > 0, temperature=1.0 + seed / 2, seed=seed)
        for grammar in grammars
        for seed in range(4)
    ]
    answers = driver.run([(prompt, sampling) for sampling in samplings], max_tokens=120)
    for answer in answers:
        text = tokenizer.decode(answer.tokens[:-1])
        assert not answer.error
        assert answer.has_ended, text
        assert answer.sampling.grammar is not None
        if answer.sampling.grammar.kind == "json_schema":
            check_instance(text, PERSON)
        elif answer.sampling.grammar.kind == "regex":
            assert re.fullmatch(regex, text)
        else:
            assert re.fullmatch(r"[1-9+*()-]+", text)
            assert isinstance(eval(text), int)
    assert len({tuple(answer.tokens) for answer in answers}) > len(grammars), "outputs must depend on the seed"


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    def bounds(low: int, high: int) -> dict[str, Any]:
        return {"type": "integer", "minimum": min(low, high), "maximum": max(low, high)}

    leaf = st.one_of(
        st.builds(bounds, st.integers(-999, 999), st.integers(-999, 999)),
        st.builds(lambda length: {"type": "string", "maxLength": length}, st.integers(0, 8)),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]),
        st.lists(st.sampled_from(["x", "größe", 1, -2.5, None, True]), min_size=1, max_size=3, unique_by=repr).map(
            lambda values: {"enum": values}
        ),
    )

    def grow(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sampled_from(["a", "b b", 'c"', "ü"])

        def record(properties: dict[str, Any], is_required: bool) -> dict[str, Any]:
            required = list(properties) if is_required else list(properties)[:1]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

        return st.one_of(
            st.builds(record, st.dictionaries(names, inner, max_size=3), st.booleans()),
            st.builds(
                lambda items, max_items: {"type": "array", "items": items, "maxItems": max_items},
                inner,
                st.integers(0, 3),
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda branches: {"anyOf": branches}),
        )

    return st.recursive(leaf, grow, max_leaves=4)


@given(batch=st.lists(st.tuples(schemas(), st.booleans()), min_size=NUM_SEQUENCES, max_size=NUM_SEQUENCES))
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # no shrinking: an example takes seconds
    suppress_health_check=list(HealthCheck),
)
def test_outputs_for_any_schema_are_instances_of_it(
    driver: AnswerDriver, tokenizer: Any, prompt: list[int], batch: list[tuple[dict[str, Any], bool]]
) -> None:
    samplings = [constrained(schema, do_sample=do_sample, seed=i) for i, (schema, do_sample) in enumerate(batch)]
    answers = driver.run([(prompt, sampling) for sampling in samplings], max_tokens=80)
    for answer, (schema, _) in zip(answers, batch, strict=True):
        assert not answer.error, (schema, answer.error)
        if answer.has_ended:
            check_instance(tokenizer.decode(answer.tokens[:-1]), schema)
    assert sum(answer.has_ended for answer in answers) >= NUM_SEQUENCES // 2


@pytest.fixture(scope="module")
def alone(driver: AnswerDriver, prompt: list[int]) -> list[list[int]]:
    """The tokens of each of the four sequences when it runs alone."""
    return [driver.run([sequence], max_tokens=40)[0].tokens for sequence in four_sequences(prompt)]


def four_sequences(prompt: list[int]) -> list[tuple[list[int], Sampling]]:
    """Greedy and sampled, constrained and free."""
    sampled = constrained(PERSON, do_sample=True, seed=11, temperature=1.2, top_p=0.95, repetition_penalty=1.1)
    return [
        (prompt, sampling) for sampling in (constrained(PERSON), sampled, Sampling(), Sampling(do_sample=True, seed=3))
    ]


def test_chunks_and_batching_change_no_token(driver: AnswerDriver, prompt: list[int], alone: list[list[int]]) -> None:
    together = driver.run(four_sequences(prompt), max_tokens=40, chunk_tokens=7)
    assert [answer.tokens for answer in together] == alone


def test_a_preempted_sequence_resumes_in_its_grammar(
    driver: AnswerDriver, prompt: list[int], alone: list[list[int]]
) -> None:
    preempted = driver.run(four_sequences(prompt)[:2], max_tokens=40, preempt_every=5)
    assert [answer.tokens for answer in preempted] == alone[:2]


def test_an_invalid_grammar_affects_no_other_sequence(
    driver: AnswerDriver, prompt: list[int], alone: list[list[int]]
) -> None:
    invalid = [
        Sampling(grammar=Grammar("regex", "(")),
        Sampling(grammar=Grammar("lark", 'start: start "a"'), do_sample=True),
        constrained({"not": {}}),
        constrained(PERSON, min_new_tokens=1, logit_bias=((5, 1.0),)),
    ]
    first, second, *rest = four_sequences(prompt)
    answers = driver.run([first, *((prompt, sampling) for sampling in invalid), second, *rest], max_tokens=40)
    assert [answer.tokens for answer in (answers[0], *answers[5:])] == alone
    errors = [answer.error for answer in answers[1:4]]
    assert "unclosed group" in errors[0]
    assert "it matches no text" in errors[1]
    assert 'Unimplemented keys: ["not"]' in errors[2]
    assert answers[4].has_ended or not answers[4].error


def test_a_complete_grammar_overrides_min_new_tokens(driver: AnswerDriver, prompt: list[int]) -> None:
    for do_sample in (False, True):
        sampling = Sampling(
            grammar=Grammar("regex", "(yes|no)"), min_new_tokens=20, stop_token_ids=EOS, do_sample=do_sample
        )
        (answer,) = driver.run([(prompt, sampling)], max_tokens=30)
        assert answer.has_ended
        (free,) = driver.run([(prompt, replace(sampling, grammar=Grammar("regex", "[a-z ]*")))], max_tokens=30)
        assert len(free.tokens) > 20, "min_new_tokens holds while other tokens are allowed"


def test_model_logprobs_ignore_the_grammar(driver: AnswerDriver, prompt: list[int]) -> None:
    """Text that the grammar forces keeps the low probability that the model assigns to it."""
    driver.engine.reset()
    grammar = Grammar("regex", "zebra")
    samplings = [Sampling(grammar=grammar), Sampling(grammar=grammar, model_logprobs=True)]
    new = [
        NewSequence(i, prompt, len(prompt), block_ids=range(16 * i, 16 * i + 16), sampling=sampling)
        for i, sampling in enumerate(samplings)
    ]
    outputs = step(driver.engine, plan(1, (), new, [Advance(i, len(prompt), (), True) for i in (0, 1)]))
    processed, model = (output.tokens[0] for output in outputs)
    assert processed.id == model.id
    assert processed.logprob == 0
    assert model.logprob < -5


def test_rows_with_a_grammar_wait_only_for_their_own_mask(
    driver: AnswerDriver, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps run ahead: the model is started before the last step's tokens are awaited and masks are made, and a
    step without such rows awaits nothing."""
    engine, happened = driver.engine, []
    num_tokens, blocks = len(prompt), -(-(len(prompt) + 8) // BLOCK_TOKENS)
    samplings = [constrained(PERSON), Sampling()]
    new = [
        NewSequence(i, prompt, num_tokens, 0, range(i * blocks, (i + 1) * blocks), sampling)
        for i, sampling in enumerate(samplings)
    ]
    plans = [
        plan(1, (), new, [Advance(0, num_tokens, sample=True), Advance(1, num_tokens, sample=True)]),
        plan(2, advances=[Advance(0, 1, sample=True), Advance(1, 1, sample=True)]),
        plan(3, advances=[Advance(1, 1, sample=True)]),
        plan(4, advances=[Advance(0, 1, sample=True), Advance(1, 1, sample=True)]),
    ]
    engine.reset()
    expected = [engine.step(each).sampled.ids.tolist() for each in plans]

    def traced(owner: type, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            happened.append(what)
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    make_late(monkeypatch)
    monkeypatch.setattr(LateEvent, "on_wait", lambda: happened.append("wait"))
    traced(type(engine.model), "forward", "model")
    traced(GrammarStates, "start", "masks")
    engine.reset()
    pending = [engine.launch(plans[0]), engine.launch(plans[1])]
    assert happened == ["masks", "model", "model", "wait", "masks"]
    found = [engine.collect(pending.pop(0))]
    happened.clear()
    pending.append(engine.launch(plans[2]))
    assert happened == ["masks", "model"], "of no row"
    found.append(engine.collect(pending.pop(0)))
    pending.append(engine.launch(plans[3]))
    found += [engine.collect(each) for each in pending]
    engine.reset()
    assert [result.sampled.ids.tolist() for result in found] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_are_normalized_over_the_allowed_tokens(dtype: torch.dtype) -> None:
    """Greedy rows take a shorter path; this batch mixes them with rows that cannot."""
    vocab, grammar = 999, Grammar("regex", "a")
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.normal(size=(5, vocab)) * 4).to(dtype)
    is_allowed = generator.random((4, 1024)) < 0.02
    words = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
    samplings = [
        *(Sampling(grammar=grammar), Sampling(), Sampling(grammar=grammar, top_n=3)),
        *(Sampling(grammar=grammar), Sampling(grammar=grammar, model_logprobs=True)),
    ]
    expected = logits.float()
    expected[[0, 2, 3, 4]] += torch.where(torch.from_numpy(is_allowed[:, :vocab]), 0.0, float("-inf"))
    logprobs = expected.log_softmax(-1)
    logprobs[4] = logits[4].float().log_softmax(-1)
    composition = compose(np.array([record(sampling) for sampling in samplings], SAMPLING_FIELDS), {})
    sampler = Sampler(vocab, torch.device("cpu"), 5, Watermark.of(vocab))
    sampled = sample_at_once(sampler, logits, composition, NoHistory(), torch.from_numpy(words))
    assert sampled.ids.tolist() == expected.argmax(-1).tolist()
    assert torch.allclose(sampled.logprobs.float(), logprobs.gather(1, sampled.ids[:, None])[:, 0], atol=1e-5)


class NoHistory:
    def positions(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.zeros(len(places), np.int64)

    def known(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        raise AssertionError("no request has a penalty")

    def generated(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        raise AssertionError("no request has a penalty")
