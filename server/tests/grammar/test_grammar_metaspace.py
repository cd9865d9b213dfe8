"""Grammars with T5-like tokenizers, whose first token loses its space: compared with the tokenizer's decoder."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from grammar_walk import Language, languages
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.errors import GrammarError
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.grammar.metaspace import Metaspace
from penstock_server.grammar.start import build_start
from penstock_server.grammar.state import GrammarStates
from penstock_server.grammar.vocabulary import read_vocabulary
from penstock_server.protocol.plan import Grammar, NewSequence, Plan, Sampling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PIECES = ["▁", "▁a", "▁b", "▁ab", "▁a▁b", "a", "b", "ab", "ba", "▁{", "{", "}", '"', ":", ",", "1", "0", "▁1", '":']
END, UNKNOWN = 1, 2
VOCAB = 40  # logits, more than tokens


def tokenizer(scheme: str = "always") -> Tokenizer:
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), *((piece, -1.0) for piece in PIECES)]
    made = Tokenizer(models.Unigram(scored, unk_id=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return made


TOKENIZER = tokenizer()


def write(folder: Path, made: Tokenizer, *, has_encoder: bool = True) -> Path:
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END, "is_encoder_decoder": has_encoder}))
    return folder


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(write(tmp_path_factory.mktemp("t5"), TOKENIZER), VOCAB)
    yield compiler
    compiler.close()


class Answer:
    """One sequence's way through a grammar."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, token_ids: tuple[int, ...] = ()) -> None:
        compiler.compile(grammar)
        self.token_ids = list(token_ids)
        self._states = GrammarStates(compiler, 1)
        new = NewSequence(1, [5, 5, END, 0, *token_ids], 4, sampling=Sampling(grammar=grammar), num_source_tokens=3)
        self._states.apply(Plan(1, (), [new]))

    def allowed(self) -> set[int]:
        words, refusals = self._states.start([1], [[]]).finish()
        if refusals:
            raise GrammarError(refusals[0].reason)
        return set(np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little")).tolist())

    def choose(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self._states.chosen([1], [token_id])

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.token_ids)


@given(language=languages("a", "b", " ", "ab", " a"), data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_mask_allows_exactly_the_tokens_that_decode_to_matching_texts(
    compiler: GrammarCompiler, language: Language, data: st.DataObject
) -> None:
    regex, texts = language
    answer = Answer(compiler, Grammar("lark", f'%llguidance {{"no_forcing": true}}\nstart: /{regex}/'))
    while True:
        expected = {END} if answer.text in texts else set()
        for token_id in range(UNKNOWN + 1, UNKNOWN + 1 + len(PIECES)):
            begun = TOKENIZER.decode([*answer.token_ids, token_id])
            if any(text.startswith(begun) for text in texts):
                expected.add(token_id)
        if not answer.token_ids:
            expected.discard(TOKENIZER.token_to_id("▁a▁b"))  # at the beginning it decodes to "ab"
        allowed = answer.allowed()
        assert allowed == expected
        assert Answer(compiler, Grammar("regex", regex), tuple(answer.token_ids)).allowed() <= expected
        token_id = data.draw(st.sampled_from(sorted(allowed)))
        if token_id == END or len(answer.token_ids) > 12:
            break
        answer.choose(token_id)


@pytest.mark.parametrize("seed", range(10))
def test_outputs_for_a_schema_are_instances_of_it(compiler: GrammarCompiler, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["ab", "b a", "ba b"]}, "b": {"type": "integer", "minimum": 0, "maximum": 101}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer, rng = Answer(compiler, Grammar("json_schema", json.dumps(schema))), random.Random(seed)
    while END not in (allowed := answer.allowed()):
        answer.choose(rng.choice(sorted(allowed)))
    assert answer.text.startswith("{")
    jsonschema.validate(json.loads(answer.text), schema)


def test_outputs_may_begin_with_or_without_the_space_marker(compiler: GrammarCompiler) -> None:
    answer = Answer(compiler, Grammar("regex", "(ab|b) a"))
    begin = {TOKENIZER.id_to_token(token_id) for token_id in answer.allowed()}
    assert begin == {"▁", "▁a", "▁b", "▁ab", "a", "b", "ab"}
    answer.choose(TOKENIZER.token_to_id("▁ab"))
    answer.choose(TOKENIZER.token_to_id("▁a"))
    assert (answer.allowed(), answer.text) == ({END}, "ab a")


def test_a_text_that_no_token_can_spell_fails_with_a_reason(compiler: GrammarCompiler, tmp_path: Path) -> None:
    answer = Answer(compiler, Grammar("regex", "ax"))
    answer.choose(TOKENIZER.token_to_id("a"))
    with pytest.raises(GrammarError, match="the grammar allows no further token"):
        answer.allowed()
    with pytest.raises(GrammarError, match="no token of the model can begin a text of this grammar"):
        build_start(read_vocabulary(write(tmp_path, TOKENIZER, has_encoder=False)), Grammar("regex", "x"))


def test_the_first_token_keeps_its_space_after_a_prompt(tmp_path: Path) -> None:
    assert read_vocabulary(write(tmp_path, TOKENIZER, has_encoder=False)).first_tokens is None
    assert read_vocabulary(write(tmp_path, tokenizer("never"))).first_tokens is None
    vocabulary = read_vocabulary(write(tmp_path, TOKENIZER))
    assert vocabulary.first_tokens is not None
    assert vocabulary.tokenizer.decode_bytes([TOKENIZER.token_to_id("▁ab")]) == b" ab"
    assert vocabulary.tokenizer.eos_tokens == [END]


def test_byte_tokens_are_refused(tmp_path: Path) -> None:
    made = tokenizer()
    made.add_tokens(["<0x0A>"])
    with pytest.raises(GrammarError, match="byte tokens, which its decoder does not decode"):
        Metaspace.read(write(tmp_path, made) / "tokenizer.json")
