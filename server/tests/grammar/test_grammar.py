"""Grammars and masks without a model: compared with exhaustive enumeration, and within their limits."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from grammar_walk import (
    END,
    OTHER_END,
    WORDS,
    Language,
    allowed,
    check_instance,
    languages,
    walk,
    write_small_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from penstock_server.engine.constraint import Constrainer
from penstock_server.engine.drafting.ngram import continuation
from penstock_server.errors import GrammarError
from penstock_server.grammar import compiler as compiler_module
from penstock_server.grammar import state
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.grammar.language import MAX_TEXT_BYTES, build_matcher
from penstock_server.grammar.start import Start, build_start
from penstock_server.grammar.state import GRAMMAR_ENDED, GrammarStates, Refusal
from penstock_server.grammar.trial import Trial
from penstock_server.grammar.vocabulary import Vocabulary, fast_vocabulary, read_vocabulary, small_vocabulary
from penstock_server.grammar.walk import walk as walk_texts
from penstock_server.protocol.plan import Fault, Grammar, NewSequence, Plan, Sampling

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
VOCAB = 49152


@pytest.fixture(scope="module")
def vocabulary(embedded_folder: Path) -> LLTokenizer:
    return fast_vocabulary(read_vocabulary(embedded_folder, VOCAB)).tokenizer


@pytest.fixture(scope="module")
def embedded_small(embedded_folder: Path) -> Vocabulary:
    return small_vocabulary(read_vocabulary(embedded_folder, VOCAB))


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_small_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def small(small_folder: Path) -> LLTokenizer:
    return fast_vocabulary(read_vocabulary(small_folder, 40)).tokenizer


@pytest.fixture
def compiler(small_folder: Path) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(small_folder, 40, time_limit_s=0.5)
    yield compiler
    compiler.close()


def schema(**keywords: object) -> Grammar:
    return Grammar("json_schema", json.dumps(keywords))


@given(language=languages("a", "b", "0", "1", "ab", "01", "ba1"), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_mask_allows_exactly_the_continuations_of_matching_texts(
    small: LLTokenizer, language: Language, data: st.DataObject
) -> None:
    """Except where only one byte can follow: there the mask may force the tokenizer's own tokenization."""
    regex, texts = language
    prefix = ""
    matcher = build_matcher(small, Grammar("regex", regex))
    exact = build_matcher(small, Grammar("lark", f'%llguidance {{"no_forcing": true}}\nstart: /{regex}/'))
    while True:
        expected = {i for i, word in enumerate(WORDS) if any(text.startswith(prefix + word) for text in texts)}
        if prefix in texts:
            expected.add(END)
        next_bytes = {text[len(prefix) : len(prefix) + 1] for text in texts if text.startswith(prefix)}
        mask = allowed(matcher)
        assert allowed(exact) == expected
        assert mask == expected or (mask and mask < expected and len(next_bytes) == 1)
        token_id = data.draw(st.sampled_from(sorted(mask)))
        if token_id == END:
            break
        prefix += WORDS[token_id]
        assert matcher.consume_token(token_id)
        assert exact.consume_token(token_id)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_texts_that_a_schema_allows_are_instances_of_it(vocabulary: LLTokenizer, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    matcher = build_matcher(vocabulary, Grammar("json_schema", text))
    for seed in range(2):
        check_instance(walk(vocabulary, matcher, random.Random(seed)), json.loads(text))


def test_there_are_fifty_schemas() -> None:
    assert len(SCHEMAS) >= 50


@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas"),
        *("unevaluatedProperties", "unevaluatedItems", "minContains", "$dynamicRef"),
    ],
)
def test_a_keyword_that_would_not_be_enforced_is_refused_by_name(small: LLTokenizer, keyword: str) -> None:
    for lenient in (False, True):
        nested = {"type": "array", "items": {keyword: True}, "x-guidance": {"lenient": lenient}}
        with pytest.raises(GrammarError, match=rf'^the JSON schema cannot be used: .*"{keyword.replace("$", ".")}"'):
            build_matcher(small, schema(**nested))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "{"), "the JSON schema cannot be used: EOF while parsing"),
        (Grammar("json_schema", "[]"), "the JSON schema cannot be used: it must be a JSON object"),
        (schema(type="strin"), "the JSON schema cannot be used: Invalid type: strin"),
        (schema(type="string", format="shoe"), "the JSON schema cannot be used: Unknown format: shoe"),
        (schema(**{"$ref": "#/$defs/x"}), "Pointer '/$defs/x' does not exist"),
        (schema(**{"$ref": "https://example.org/x"}), "does not fetch resources"),
        (schema(type="integer", minimum=5, maximum=3), "minimum (5) is greater than maximum (3)"),
        (
            schema(oneOf=[{"type": "number"}, {"type": "integer"}]),
            "`oneOf`, whose branches may overlap, cannot be enforced",
        ),
        (schema(**{"$ref": "#/$defs/t", "$defs": {"t": {"$ref": "#/$defs/t"}}}), "it matches no text"),
        (Grammar("regex", "(a"), "the regular expression cannot be used: .*unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around, including look-ahead and look-behind, is not supported"),
        (Grammar("lark", "x: /a/"), "the Lark grammar cannot be used: no start rule found"),
        (Grammar("lark", 'start: "a" b'), 'unknown name: "b"'),
        (Grammar("regex", "a" * (MAX_TEXT_BYTES + 1)), "has 262145 bytes, at most 262144 are allowed"),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, Grammar) else "",
)
def test_an_invalid_grammar_is_refused_with_the_reason(small: LLTokenizer, grammar: Grammar, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        build_matcher(small, grammar)
    text = str(caught.value)
    assert len(text) < 600
    assert "\n" not in text
    first, _, last = message.partition(".*")
    assert first in text
    assert last in text


def accepts(vocabulary: LLTokenizer, matcher: LLMatcher, text: str) -> bool:
    copy, tokens = matcher.deep_copy(), vocabulary.tokenize_str(text)
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


@pytest.mark.parametrize(
    ("keywords", "allowed_texts", "refused_texts"),
    [
        ({"const": 2**53}, [2**53], [2**53 + 1, 2**53 - 1]),
        ({"enum": [-(2**53) - 2, 10**22]}, [-(2**53) - 2, 10**22], [-(2**53) - 1, -(2**53) - 3, 10**22 + 1]),
        ({"const": 2**63 - 1}, [2**63 - 1], [2**63, 2**63 - 2]),
        ({"type": "integer", "maximum": 2**63 - 1}, [2**63 - 1, -(10**30)], [2**63]),
        ({"type": "integer", "minimum": -(2**63) + 1024}, [-(2**63) + 1024, 10**30], [-(2**63) + 1023]),
        ({"type": "integer", "minimum": 2**53 + 2, "maximum": 2**53 + 4}, [2**53 + 3], [2**53 + 1, 2**53 + 5]),
        ({"type": "number", "multipleOf": 0.01}, ["0.07", "1", "-2.5"], ["0.005"]),
        ({"type": "number", "multipleOf": 0.06999999999999999}, ["0.07", "0.7", "1.4"], ["0.08"]),
    ],
    ids=str,
)
def test_the_engine_keeps_the_numbers_that_the_router_lets_pass(
    vocabulary: LLTokenizer, keywords: dict[str, object], allowed_texts: list[object], refused_texts: list[object]
) -> None:
    """The router's `number.rs` relies on it."""
    matcher = build_matcher(vocabulary, schema(**keywords))
    for text in allowed_texts:
        assert accepts(vocabulary, matcher, str(text)), text
    for text in refused_texts:
        assert not accepts(vocabulary, matcher, str(text)), text


@pytest.mark.parametrize("ending", ["\n", " ", "\t"])
def test_json_may_be_pretty_printed_but_has_no_endless_whitespace(vocabulary: LLTokenizer, ending: str) -> None:
    matcher = build_matcher(vocabulary, schema(type="object", additionalProperties={"type": "integer"}))
    value = {"a": 1, "b": 2}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        copy = matcher.deep_copy()
        assert copy.consume_tokens(vocabulary.tokenize_str(text)), copy.get_error()
        assert allowed(copy) == set(vocabulary.eos_tokens)
    copy, blank = matcher.deep_copy(), vocabulary.tokenize_str(ending)
    assert copy.consume_tokens(vocabulary.tokenize_str('{"a":'))
    assert copy.try_consume_tokens(blank * 40) <= 1


def runaway() -> Grammar:
    """A hundred words in any order: the automaton has too many states to build."""
    return Grammar("lark", "start: T\nT: " + " & ".join(f"/.*x{word}.*/" for word in range(100)))


def bottomless() -> Grammar:
    names = range(3000)
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "integer"}]} for i in names}
    return schema(**{"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {"type": "string"}}})


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'),
        Grammar("regex", "[a-z]{3,9} (foo|bar)+"),
        Grammar("lark", 'start: <|im_start|> /[^x]+/ "y"'),
        Grammar("regex", "(?s).*"),
    ],
)
def test_a_fast_and_a_small_vocabulary_allow_the_same_tokens(embedded_folder: Path, grammar: Grammar) -> None:
    plain = read_vocabulary(embedded_folder)
    expected = build_start(plain, grammar)
    for vocabulary in (fast_vocabulary(plain), small_vocabulary(plain)):
        assert vocabulary.tokenizer.eos_tokens == plain.tokenizer.eos_tokens
        start = build_start(vocabulary, grammar)
        assert start.mask == expected.mask
        assert start.is_accepting == expected.is_accepting


def test_the_first_grammar_reads_the_vocabulary_and_starts_one_process(small_folder: Path) -> None:
    compiler = GrammarCompiler(small_folder, 40)
    assert not compiler.rehearse(Grammar("regex", "b")), "there is no vocabulary yet"
    assert compiler._reading is None
    assert [trial._process for trial in compiler._trials.queue] == [None, None]
    compiler.compile(Grammar("regex", "a"))
    reading = compiler.read()
    processes = [trial._process for trial in compiler._trials.queue]
    assert sorted(process is None for process in processes) == [False, True]
    compiler.compile(Grammar("regex", "0"))
    assert compiler.read() is reading
    assert {trial._process for trial in compiler._trials.queue} == set(processes)
    compiler.close()


def test_a_trial_process_without_a_vocabulary_exits(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.start()
    assert trial._process is not None
    assert trial._process.wait(240) == 0
    trial.close()


def test_a_grammar_of_a_plan_needs_no_trial(compiler: GrammarCompiler) -> None:
    compiler.start(Grammar("regex", "a{3}")).result()
    assert all(trial._process is None for trial in compiler._trials.queue)


def test_a_grammar_that_would_kill_or_block_the_worker_is_refused(compiler: GrammarCompiler) -> None:
    for grammar, message in ((runaway(), "takes more than 0.5 s"), (bottomless(), "nested too deeply")):
        with pytest.raises(GrammarError, match=message):
            compiler.compile(grammar)
        assert not compiler.compile(Grammar("regex", f"a{{{len(message)}}}")), "the next grammar compiles"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "a{1000000}"), "too many expressions"),
        (schema(type="object", properties={f"p{i}": {"type": "null"} for i in range(900)}), "max is 2000"),
    ],
    ids=["regex", "schema"],
)
def test_a_limit_that_shows_after_the_first_token_is_found_by_the_trial(
    embedded_small: Vocabulary, grammar: Grammar, message: str
) -> None:
    start = build_start(embedded_small, grammar)
    with pytest.raises(GrammarError, match=f"cannot be used: .*{message}"):
        walk_texts(start, grammar)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_usable_grammars_pass_the_whole_trial(embedded_small: Vocabulary, path: Path) -> None:
    grammar = Grammar("json_schema", path.read_text(encoding="utf-8"))
    walk_texts(build_start(embedded_small, grammar), grammar)


def test_grammars_are_compiled_once_and_the_oldest_is_evicted(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 3)
    checked: list[str] = []
    check = Trial.check
    monkeypatch.setattr(Trial, "check", lambda self, grammar: (checked.append(grammar.text), check(self, grammar)))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(compiler.compile, [Grammar("regex", "a+")] * 8))
    assert checked == ["a+"]
    for text in ("b", "0", "a+", "1"):
        compiler.compile(Grammar("regex", text))
    assert compiler.compile(Grammar("regex", "a+"))
    assert not compiler.compile(Grammar("regex", "b"))
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiler.compile(Grammar("regex", "("))
    assert checked == ["a+", "b", "0", "1", "b", "(", "("]


def test_too_many_concurrent_grammars_are_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Trial, "check", lambda self, grammar: gate.wait(240))
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 3)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(compiler.compile, Grammar("regex", text)) for text in "ab01"]
        refused = next(future for future in iter(lambda: next((f for f in waiting if f.done()), None), 0) if future)
        gate.set()
        assert "3 grammars are being compiled already" in str(refused.exception())
        assert [future.exception() for future in waiting if future is not refused] == [None] * 3


def test_a_model_without_a_usable_tokenizer_refuses_grammars(tmp_path: Path, small_folder: Path) -> None:
    complete = (small_folder / "tokenizer.json").read_text().replace("<other>", "<|end of a grammar|>")
    cases = (r"no tokenizer\.json", "{}"), ("tokenizer cannot be", complete), ("its tokenizer takes no further one", "")
    for reason, following in cases:
        compiler = GrammarCompiler(tmp_path, 40)
        for _ in range(2):
            with pytest.raises(GrammarError, match=reason):
                compiler.compile(Grammar("regex", "a"))
        with pytest.raises(GrammarError, match=reason):
            compiler.start(Grammar("regex", "a")).result()
        assert (compiler.vocab_size, compiler.eos_ids) == (0, ())
        assert not compiler.rehearse(Grammar("regex", "a"))
        compiler.close()
        (tmp_path / "tokenizer.json").write_text(following)


def test_the_eos_tokens_are_those_of_the_router(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, END, 4000]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))  # another file than the router's
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<other>"}}))
    assert set(read_vocabulary(tmp_path, 40).tokenizer.eos_tokens) == {3, END, OTHER_END}


@pytest.mark.parametrize("vocab_size", [4, OTHER_END + 1, 1000])
def test_there_may_be_fewer_or_more_logits_than_tokens(small_folder: Path, vocab_size: int) -> None:
    vocabulary = read_vocabulary(small_folder, vocab_size).tokenizer
    mask = allowed(build_matcher(vocabulary, Grammar("regex", "(?s).+")))
    assert vocabulary.vocab_size >= vocab_size
    assert mask == set(range(len(WORDS)))


def masks_of(
    states: GrammarStates, sequence_ids: list[int], drafts: dict[int, list[int]] | None = None
) -> tuple[np.ndarray, dict[int, Refusal]]:
    masks = states.start(sequence_ids, [(drafts or {}).get(sequence_id, []) for sequence_id in sequence_ids])
    words, errors = masks.finish()
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert len(masks.places) == len(bits)
    return bits.copy(), errors


def constrained(sequence_id: int, grammar: Grammar, generated: list[int], stops: tuple[int, ...] = ()) -> NewSequence:
    sampling = Sampling(grammar=grammar, stop_token_ids=stops)
    return NewSequence(sequence_id, [7, 7, *generated], 2, sampling=sampling)


def test_a_state_built_from_known_tokens_equals_one_fed_step_by_step(compiler: GrammarCompiler) -> None:
    grammar, tokens = Grammar("regex", "(a|ab|0){3,5}1"), [0, 5, 2, 0, 3, END]
    states = GrammarStates(compiler, 1)
    states.apply(Plan(1, (), [constrained(1, grammar, [])]))
    for known in range(len(tokens) + 1):
        states.apply(Plan(1, [2], [constrained(2, grammar, tokens[:known])]))
        bits, errors = masks_of(states, [1, 9, 2])
        assert not errors
        assert (bits[0] == bits[1]).all()
        if known < len(tokens):
            assert bits[0, tokens[known]]
            states.chosen([1], [tokens[known]])
    assert set(np.flatnonzero(bits[0])) == {END}, "only an end token follows an end token"


def test_masks_after_drafts_are_those_of_sequences_that_generated_them(compiler: GrammarCompiler) -> None:
    grammar, tokens = Grammar("regex", "(a|ab|0){3,5}1"), [0, 5, 2, 0, 3, END]
    states = GrammarStates(compiler, 1)
    states.apply(Plan(1, (), [constrained(i, grammar, tokens[: i + 1]) for i in range(5)]))
    alone, _ = masks_of(states, [0, 1, 2, 3, 4])
    for _ in range(2):  # drafts leave the state as it is
        bits, errors = masks_of(states, [1, 0, 2], {0: tokens[1:5], 2: [1, 0]})
        assert not errors
        assert (bits[0] == alone[1]).all()
        assert (bits[1:6] == alone).all()
        assert (bits[6] == alone[2]).all()
        assert bits[7:9].all(), "nothing is kept behind a draft token that the grammar does not allow"


def draft_of(states: GrammarStates, history: list[int], most: int, *guesses: list[int]) -> list[int]:
    """guesses: the results of one call after the other."""
    left = list(guesses)

    def guess(_text: np.ndarray, most: int, _least_match: int) -> np.ndarray:
        return np.array((left.pop(0) if left else [])[:most], np.int32)

    return states.draft(1, np.array(history, np.int32), most, guess)


def test_masks_are_the_same_where_the_draft_has_computed_them(compiler: GrammarCompiler) -> None:
    a, b, zero, one = range(4)
    grammar = Grammar("regex", "(a[01]|b[ab])+")
    guesses = [zero], [b], [a], [a], [one]

    def masks(draft: list[int], *guesses: list[int]) -> tuple[list[int], np.ndarray]:
        """Masks of a new state for `draft`, or for the draft that it makes of the guesses; and that draft."""
        states = GrammarStates(compiler, 1)
        states.apply(Plan(1, (), [constrained(1, grammar, [a])]))
        made = draft_of(states, [7, a], 5, *guesses) if guesses else []
        bits, errors = masks_of(states, [1], {1: draft or made})
        assert not errors
        return made, bits

    draft, known = masks([], *guesses)
    assert draft == [zero, b, a, a, one]
    assert (known == masks(draft)[1]).all()
    other = [zero, a, one]
    assert (masks(other, *guesses)[1] == masks(other)[1]).all()


def test_a_second_draft_computes_only_the_masks_that_the_first_one_did_not_need(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, zero, computed, fill = 0, 2, [], Start.fill
    monkeypatch.setattr(Start, "fill", lambda *args: computed.append(fill(*args)))
    states = GrammarStates(compiler, 1)
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "(a[01]|b[ab])+"), [a])]))
    assert draft_of(states, [7, a], 3) == []
    assert len(computed) == 1
    assert draft_of(states, [7, a], 3, [zero], [a], [zero]) == [zero, a, zero]
    assert len(computed) == 3
    masks_of(states, [1], {1: [zero, a, zero]})
    assert len(computed) == 4, "the mask after the whole draft"


def test_a_draft_has_what_the_grammar_forces_and_guesses_that_it_allows(compiler: GrammarCompiler) -> None:
    states, a, b = GrammarStates(compiler, 1), WORDS.index("a"), WORDS.index("b")
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "[ab]{2}0110[ab]{0,9}"), [])]))
    assert draft_of(states, [7], 9, [a]) == [], "no token has been generated"
    states.chosen([1], [a])
    forced = draft_of(states, [7, a], 3, [b])[1:]
    assert [WORDS[token_id] for token_id in forced] == ["01", "10"]
    assert draft_of(states, [7, a], 2, [b]) == [b, forced[0]]
    assert draft_of(states, [7, a], 5, [b], [a, a, 3, a]) == [b, *forced, a, a]
    assert draft_of(states, [7, a], 9, [b], [b, END]) == [b, *forced, b, *[b] * 5], "then the token that was used last"
    for token_id in (b, *forced):
        bits, _ = masks_of(states, [1])
        assert token_id == b or np.flatnonzero(bits[0]).tolist() == [token_id]
        states.chosen([1], [token_id])
    states.chosen([1], [END])
    assert draft_of(states, [7, a, b, *forced, END], 9, [a]) == []


def test_forced_tokens_are_those_that_alone_may_follow(compiler: GrammarCompiler) -> None:
    states, a, b = GrammarStates(compiler, 1), WORDS.index("a"), WORDS.index("b")
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "[ab]0110[ab]"), [])]))
    assert states.forced(1, 9) == [], "before the first token"
    states.chosen([1], [a])
    forced = states.forced(1, 9)
    assert states.forced(1, 9) == forced, "asking changes nothing"
    assert len(forced) > 0
    assert states.forced(1, 1) == forced[:1]
    for token_id in forced:
        bits, _ = masks_of(states, [1])
        assert np.flatnonzero(bits[0]).tolist() == [token_id]
        states.chosen([1], [token_id])
    assert states.forced(1, 9) == []
    states.chosen([1], [b])
    assert states.forced(1, 9) == [], "only the end may follow"


def test_of_a_few_allowed_tokens_a_draft_has_the_one_that_was_used_last(compiler: GrammarCompiler) -> None:
    states, ids = GrammarStates(compiler, 1), [WORDS.index(word) for word in "0a1"]
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "(0|1)[ab](0|1)"), ids[:1])]))
    assert draft_of(states, [7, ids[1], 9, *ids[:1]], 9) == [ids[1], ids[0]]
    assert draft_of(states, [7, *ids[:1]], 9) == []


def test_a_draft_guesses_free_text_once_and_further_only_after_a_long_match(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_FREE_TEXT", 0)
    states, a, b = GrammarStates(compiler, 1), WORDS.index("a"), WORDS.index("b")
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "[ab]{30}"), [a])]))
    text, zero, one = [a, b, b, a, b, a, a, b], WORDS.index("0"), WORDS.index("1")

    def draft(*history: int) -> list[int]:
        return states.draft(1, np.array(history, np.int32), 5, continuation)

    assert draft(*text, zero, *text[:6]) == text[6:], "what follows is not in the grammar"
    assert draft(*text, zero, *text[:3]) == text[3:5]
    assert draft(*text, zero, *text[1:3]) == text[3:5]
    assert draft(zero, *text, one, *text[:1]) == []


def test_a_draft_has_what_is_expected_where_the_grammar_allows_it(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, a, b, zero = GrammarStates(compiler, 1), *(WORDS.index(word) for word in ("a", "b", "0"))
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "[ab]{3}0110[ab]{9}"), [a])]))
    history, forced = np.array([7, a], np.int32), draft_of(states, [7, a], 9, [b], [b])[2:4]

    def draft(*expected: int) -> list[int]:
        return states.draft(1, history, 7, lambda *_: history[:0], expected)

    monkeypatch.setattr(state, "_FREE_TEXT", 0)
    assert draft(a, b, *forced, b, a, a) == [a, b, *forced, b, a, a]
    assert draft(a, zero, a) == [a], "the second token is not allowed"
    assert draft(zero, a) == []
    assert draft(a, b, a, a) == [a, b, *forced], "no token is expected behind the ones that the grammar forces"


def test_a_complete_grammar_allows_the_sequence_s_stop_tokens(compiler: GrammarCompiler) -> None:
    states = GrammarStates(compiler, 1)
    states.apply(Plan(1, (), [constrained(1, Grammar("regex", "aa?"), [], (END, OTHER_END, 35))]))
    assert set(np.flatnonzero(masks_of(states, [1])[0][0])) == {0, WORDS.index("aa")}
    states.chosen([1], [0])
    assert set(np.flatnonzero(masks_of(states, [1])[0][0])) == {0, END, OTHER_END, 35}
    states.chosen([1], [35])
    assert set(np.flatnonzero(masks_of(states, [1])[0][0])) == {END, OTHER_END, 35}


def test_without_eos_tokens_a_complete_grammar_says_so_and_token_0_is_text(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    compiler = GrammarCompiler(tmp_path, 40)
    compiler.compile(Grammar("regex", "1a?"))  # also in a trial process
    assert compiler.eos_ids == ()
    states, one = GrammarStates(compiler, 1), WORDS.index("1")
    alone, stopped = (constrained(i, Grammar("regex", "1a?"), [one], stops) for i, stops in ((1, ()), (2, (35,))))
    empty = constrained(3, Grammar("regex", ""), [])
    states.apply(Plan(1, (), [alone, stopped, empty]))
    bits, errors = masks_of(states, [1, 2, 3], {1: [0]})
    assert [set(np.flatnonzero(row)) for row in bits] == [{0}, set(), {0, 35}, set()]
    assert errors == {
        1: GRAMMAR_ENDED,
        3: Refusal("the grammar allows no further token: it matches only the empty text", Fault.REQUEST),
    }
    states.chosen([1], [0])
    assert states.forced(1, 8) == []
    assert masks_of(states, [1])[1] == {0: GRAMMAR_ENDED}
    compiler.close()


def test_a_broken_grammar_or_token_fails_only_its_sequence(compiler: GrammarCompiler) -> None:
    states = GrammarStates(compiler, 3)
    fine = [constrained(i, Grammar("regex", "a{9}"), [0] * i) for i in range(1, 9)]
    broken = [constrained(20, Grammar("regex", "("), []), constrained(21, Grammar("regex", "ab"), [1])]
    alone = GrammarStates(compiler, 1)
    alone.apply(Plan(1, (), fine))
    states.apply(Plan(1, (), [*fine[:4], *broken, *fine[4:]]))
    ids = [1, 2, 20, 3, 4, 21, 5, 6, 7, 8]
    bits, errors = masks_of(states, ids)
    assert sorted(errors) == [2, 5]
    assert "unclosed group" in errors[2].reason
    assert "the generated tokens do not match the grammar" in errors[5].reason
    assert not bits[[2, 5]].any()  # so that these rows fail on every rank
    expected, _ = masks_of(alone, list(range(1, 9)))
    assert (np.delete(bits, [2, 5], axis=0) == expected).all()


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_masks_change_only_their_rows(data: st.DataObject) -> None:
    vocab, rows = data.draw(st.sampled_from([5, 32, 45, 64])), data.draw(st.integers(1, 4))
    places = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    is_allowed = generator.random((len(places), 64)) < 0.3
    is_allowed[:, generator.integers(0, vocab)] = True
    scores = torch.from_numpy(generator.normal(size=(rows, vocab)).astype(np.float32))
    expected = scores.clone()
    for place, mask in zip(places, is_allowed, strict=True):
        expected[place, ~torch.from_numpy(mask[:vocab])] = float("-inf")
    words = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
    Constrainer(torch.device("cpu")).apply(scores, torch.tensor(places), torch.from_numpy(words))
    assert torch.equal(scores, expected)


def test_end_tokens_are_allowed_when_no_other_token_remains() -> None:
    scores = torch.tensor([[1.0, 2.0, float("-inf")], [1.0, 2.0, 3.0], [float("nan")] * 3])
    Constrainer(torch.device("cpu")).apply(scores, torch.arange(3), torch.tensor([[4], [4], [4]], dtype=torch.int32))
    assert scores[0].tolist() == [float("-inf"), float("-inf"), 0.0]
    assert scores[1].tolist() == [float("-inf"), float("-inf"), 3.0]
    assert scores[2].isnan().all()
