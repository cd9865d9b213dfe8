"""The grammar states of the constrained sequences of one stream, and the masks of a step.

Threads compute a step's masks while the model runs: each matcher consumes the tokens that were sampled in the last
step, then computes the tokens that may follow, also after each draft token, which a copy of the matcher consumes. An
unusable grammar, a token that does not match and a dead end fail only their own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from penstock_server.errors import GrammarError
from penstock_server.grammar.compiler import GrammarCompiler, threads_with_stack
from penstock_server.grammar.language import readable
from penstock_server.grammar.start import Start
from penstock_server.grammar.thoughts import Thoughts
from penstock_server.protocol.grammar import Grammar
from penstock_server.protocol.plan import Fault, Plan

# [rows, words]: bit b of word w stands for token 32·w + b (little-endian)
Words = npt.NDArray[np.int32]
TokenIds = npt.NDArray[np.int32]
# (text, max_tokens, min_match) → at most `max_tokens` tokens that may follow the text; empty unless its last
# `min_match` tokens occurred in it before.
Guess = Callable[[TokenIds, int, int], TokenIds]

_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
_SEQUENCES_PER_THREAD = 4  # fewer are not worth another thread
_FEW_ALLOWED = 16  # tokens among which the one used last is a good guess
_FREE_TEXT = 1000  # more allowed tokens are text; fewer are syntax and its whitespace
_SHORT_MATCH, _LONG_MATCH = 2, 6  # tokens


class Refusal(NamedTuple):
    """Why a mask allows nothing."""

    reason: str
    fault: Fault


GRAMMAR_ENDED = Refusal("the grammar has ended", Fault.NONE)  # and there is no token to say so


class _State:
    """The state of one sequence in its grammar."""

    def __init__(self, start: Future[Start], generated: Sequence[int], end_ids: Sequence[int]) -> None:
        self._start = start
        self._matcher: LLMatcher | None = None  # None: no token has been generated
        self._pending = list(generated)
        self._end_ids = frozenset(end_ids)
        self._has_ended = False
        self._error = ""
        self._draft: list[int] = []
        self._known: dict[int, Words] = {}  # masks that the draft needed, by the draft tokens before them

    def chosen(self, token_id: int) -> None:
        self._pending.append(token_id)
        self._known = {}

    def draft(self, history: TokenIds, most: int, guess: Guess, expected: Sequence[int]) -> list[int]:
        """At most `most` tokens that probably follow: those that the grammar forces, which are always right, and
        between them those that are expected, and guesses, as far as it allows them. history: the known tokens."""
        if self._consume() or self._matcher is None or self._has_ended:
            return []
        start, matcher = self._start.result(), self._matcher.deep_copy()
        draft: list[int] = []
        known: dict[int, Words] = {}
        has_guessed_text = False
        while len(draft) < most:
            left = most - len(draft)
            if not (tokens := matcher.compute_ff_tokens()[:left]):
                text = np.append(history, np.array(draft, np.int32))
                mask = self._known_mask(draft)
                if mask is None:
                    mask = np.zeros(len(start.mask) // 4, np.int32)
                    start.fill(matcher, mask)
                    if matcher.is_error():
                        break
                known[len(draft)] = mask
                is_text = _num_allowed(mask) > _FREE_TEXT
                if not is_text:
                    tokens = _guess_syntax(text, matcher, mask, guess)
                if not tokens and draft == expected[: len(draft)]:
                    tokens = list(expected[len(draft) : most])
                    tokens = tokens[: matcher.validate_tokens(tokens)]
                if not tokens and is_text and not has_guessed_text:
                    tokens, has_guessed_text = _guess_text(text, left, guess), True
            tokens = self._draftable(tokens)
            count = matcher.try_consume_tokens(tokens)
            draft += tokens[:count]
            if count == 0:
                break
        self._draft, self._known = draft, known
        return draft

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens that must follow."""
        if self._consume() or self._matcher is None or self._has_ended:
            return []
        return self._draftable(self._matcher.compute_ff_tokens()[:most])

    def fill(self, masks: Words, draft: Sequence[int]) -> dict[int, Refusal]:
        """Writes the tokens that may follow, and those that may follow after each draft token, into the masks
        [1 + draft tokens, words]. Returns the refusals by mask, for masks that allow nothing."""
        if error := self._consume():
            return {0: Refusal(error, Fault.REQUEST)}
        refusals = {0: refusal} if (refusal := self._fill(self._matcher, masks[0], self._known_mask([]))) else {}
        if not draft or refusal or self._matcher is None:
            return refusals
        matcher = self._matcher.deep_copy()
        for i, token_id in enumerate(draft, 1):
            if not matcher.try_consume_tokens([token_id]):
                masks[i:] = -1  # this draft token is wrong, so no token after it is kept
                break
            if refusal := self._fill(matcher, masks[i], self._known_mask(draft[:i])):
                refusals[i] = refusal
        return refusals

    def _known_mask(self, draft: Sequence[int]) -> Words | None:
        """The mask after these draft tokens, if the last draft needed it."""
        return self._known.get(len(draft)) if draft == self._draft[: len(draft)] else None

    def _consume(self) -> str:
        """Brings the matcher up to date. Returns an error message when the generated tokens do not match."""
        if self._pending and not self._error:
            self._error = self._consume_pending()
            self._pending.clear()
        return self._error

    def _consume_pending(self) -> str:
        try:
            start = self._start.result()
        except GrammarError as error:
            return str(error)
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = start.matcher(self._pending[0])
            if matcher is None:
                return "the generated tokens do not match the grammar"
        for token_id in self._pending:
            if token_id in self._end_ids and matcher.is_accepting():
                self._has_ended = True  # if the sequence continues nevertheless, only end tokens may follow
            elif not matcher.consume_token(token_id):
                return f"the generated tokens do not match the grammar: {readable(matcher.get_error())}"
        return ""

    def _fill(self, matcher: LLMatcher | None, mask: Words, known: Words | None) -> Refusal | None:
        """Writes the tokens that may follow, in the matcher's state or as the first token, into the mask [words].
        known: what the state allows, if it has been computed."""
        try:
            start = self._start.result()
        except GrammarError as error:
            return Refusal(str(error), Fault.REQUEST)
        if matcher is None:
            mask[:] = np.frombuffer(start.mask, np.int32)
            return self._finish(mask, start.is_accepting)
        if self._has_ended:
            mask.fill(0)
        elif known is not None:
            mask[:] = known
        else:
            start.fill(matcher, mask)
            if matcher.is_error():
                return _dead_end(readable(matcher.get_error()))
        return self._finish(mask, self._has_ended or matcher.is_accepting())

    def _finish(self, mask: Words, may_end: bool) -> Refusal | None:
        if may_end:
            for token_id in self._end_ids:
                mask[token_id // 32] |= _BITS[token_id % 32]
        if mask.any():
            return None
        if may_end and self._matcher is not None:
            return GRAMMAR_ENDED
        return _dead_end(
            "it matches only the empty text" if may_end else "the vocabulary cannot spell what must follow"
        )

    def _draftable(self, tokens: Sequence[int]) -> list[int]:
        """The tokens before the first that ends the text or is never sampled."""
        never = self._end_ids.union(self._start.result().never_ids)
        return list(takewhile(lambda token_id: token_id not in never, tokens))


class _LimitedState:
    """The state of one sequence whose thoughts are limited, in its grammar if it has one."""

    def __init__(self, thoughts: Thoughts, answer: _State | None, end_ids: Sequence[int]) -> None:
        self._thoughts = thoughts
        self._answer = answer
        self._end_ids = frozenset(end_ids)

    def chosen(self, token_id: int) -> None:
        self._thoughts.push(token_id)
        if self._answer is not None:
            self._answer.chosen(token_id)

    def draft(self, history: TokenIds, most: int, guess: Guess, expected: Sequence[int]) -> list[int]:
        if forced := self._forced(most):
            return forced
        if self._answer is not None:
            return self._answer.draft(history, most, guess, expected)
        return list(expected[:most]) or guess(history, most, _SHORT_MATCH).tolist()

    def forced(self, most: int) -> list[int]:
        if forced := self._forced(most):
            return forced
        return [] if self._answer is None else self._answer.forced(most)

    def fill(self, masks: Words, draft: Sequence[int]) -> dict[int, Refusal]:
        refusals: dict[int, Refusal] = {}
        if self._answer is None:
            masks.fill(-1)
        else:
            refusals = self._answer.fill(masks, draft)
        thoughts = self._thoughts.copy()
        for i, mask in enumerate(masks):
            if i > 0:
                thoughts.push(draft[i - 1])
            if forced := thoughts.forced():
                mask.fill(0)
                mask[forced[0] // 32] = _BITS[forced[0] % 32]
        return refusals

    def _forced(self, most: int) -> list[int]:
        return list(takewhile(lambda token_id: token_id not in self._end_ids, self._thoughts.forced()[:most]))


def _dead_end(reason: str) -> Refusal:
    return Refusal(f"the grammar allows no further token: {reason}", Fault.REQUEST)


def _num_allowed(mask: Words) -> int:
    return int(np.bitwise_count(mask.view(np.uint32)).sum())


def _guess_syntax(text: TokenIds, matcher: LLMatcher, mask: Words, guess: Guess) -> list[int]:
    """The next token where a grammar allows only some, as around the keys of a schema: what followed the last token
    before, or, of a few allowed tokens, the one that the text used last."""
    token = guess(text, 1, 1).tolist()
    if (token and matcher.validate_tokens(token)) or _num_allowed(mask) > _FEW_ALLOWED:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    places = np.flatnonzero(np.isin(text, allowed))
    return text[places[-1:]].tolist()


def _guess_text(text: TokenIds, most: int, guess: Guess) -> list[int]:
    """The next tokens where a grammar allows nearly all, as in a schema's strings. Their beginnings look alike, so a
    short match is worth only a short draft."""
    tokens = guess(text, most, _LONG_MATCH)
    return (tokens if len(tokens) else guess(text, min(most, 2), _SHORT_MATCH)).tolist()


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step, while threads compute them."""

    places: npt.NDArray[np.int64]  # indices of the constrained rows among the sampled ones, ascending
    _words: Words
    _jobs: Sequence[Future[dict[int, Refusal]]]

    def finish(self) -> tuple[Words, dict[int, Refusal]]:
        """Waits for the masks [constrained, words]. Also returns the refusals by place, of rows that allow nothing."""
        refusals: dict[int, Refusal] = {}
        for job in self._jobs:
            refusals |= job.result()
        return self._words, refusals


NO_MASKS = Masks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), ())


class GrammarStates:
    """The grammar state of each constrained sequence. Used only by the compute thread."""

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self._compiler = compiler
        self._threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._states: dict[int, _State | _LimitedState] = {}
        self._words = np.zeros((0, 0), np.int32)

    def apply(self, plan: Plan) -> None:
        """Drops freed sequences and adds new ones; their known generated tokens are consumed with the first mask."""
        for sequence_id in plan.freed_sequence_ids:
            self._states.pop(sequence_id, None)
        for new in plan.new_sequences:
            if (grammar := new.sampling.grammar) is not None:
                generated = new.token_ids[new.num_prompt_tokens :]
                end_ids = (*self._compiler.eos_ids, *new.sampling.stop_token_ids)
                self._states[new.sequence_id] = self._state(grammar, generated, end_ids)

    def _state(self, grammar: Grammar, generated: Sequence[int], end_ids: Sequence[int]) -> _State | _LimitedState:
        answer = None
        if grammar.kind != "any":
            answer = _State(self._compiler.start(grammar.without_limit), generated, end_ids)
            if grammar.thoughts is None:
                return answer
        assert grammar.thoughts is not None  # `grammar_of` makes no other
        ends_characters = answer is not None
        thoughts = Thoughts(grammar.thoughts, self._compiler.bytes_of, generated, ends_characters=ends_characters)
        return _LimitedState(thoughts, answer, end_ids)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is constrained."""
        return not self._states

    def clear(self) -> None:
        """Drops all sequences."""
        self._states.clear()

    def draft(
        self, sequence_id: int, history: TokenIds, most: int, guess: Guess, expected: Sequence[int] = ()
    ) -> list[int]:
        """At most `most` tokens that probably follow `history`, the known tokens of a constrained sequence, and that
        its grammar allows. Where it allows several: those that the drafter expects to follow `history`, or what `guess`
        makes of the text."""
        return self._states[sequence_id].draft(history, most, guess, list(expected))

    def forced(self, sequence_id: int, most: int) -> list[int]:
        """Up to `most` next tokens that the grammar forces."""
        return self._states[sequence_id].forced(most)

    def start(self, sequence_ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> Masks:
        """Starts to compute the masks of the constrained sequences among those given: of the next token, and of the one
        after each of the sequence's draft tokens. Sequences and draft tokens are those of the rows, in their order."""
        fills: list[_Fill] = []
        places: list[int] = []
        first = 0
        for sequence_id, draft in zip(sequence_ids, drafts, strict=True):
            end = first + 1 + len(draft)
            if (state := self._states.get(sequence_id)) is not None:
                fills.append((first, len(places), state, draft))
                places += range(first, end)
            first = end
        if not fills:
            return NO_MASKS
        words = self._room(len(places))
        if self._pool is None:
            self._pool = threads_with_stack(self._threads, "masks")
        num_jobs = min(self._threads, -(-len(fills) // _SEQUENCES_PER_THREAD))
        jobs = [self._pool.submit(_fill, fills[job::num_jobs], words) for job in range(num_jobs)]
        return Masks(np.array(places), words, jobs)

    def chosen(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Records the sampled tokens; the next masks consume them."""
        if self._states:
            for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
                if (state := self._states.get(sequence_id)) is not None:
                    state.chosen(token_id)

    def _room(self, num_rows: int) -> Words:
        """Reuses one buffer, because the masks of the previous step have been read."""
        if num_rows > len(self._words):
            self._words = np.zeros((num_rows, -(-self._compiler.vocab_size // 32)), np.int32)
        return self._words[:num_rows]


# The place of a sequence's first row among the sampled ones, its first mask, its state, and its draft tokens.
_Fill = tuple[int, int, _State | _LimitedState, Sequence[int]]


def _fill(fills: Sequence[_Fill], words: Words) -> dict[int, Refusal]:
    refusals = {}
    for place, first, state, draft in fills:
        masks = words[first : first + 1 + len(draft)]
        for row, refusal in state.fill(masks, draft).items():
            masks[row].fill(0)  # a row without an allowed token fails, on every rank
            refusals[place + row] = refusal
    return refusals
