"""The constrained sequences of one stream, and the masks of a step.

A step's masks are made by threads of their own, while the model computes: first every matcher takes the token that was
sampled for it in the step before, then it says what may follow. A grammar that cannot be used, a token that it does not
take, and a dead end are the end of their sequence and of no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from penstock_server.errors import GrammarError
from penstock_server.grammar.compiler import GrammarCompiler, threads_with_stack
from penstock_server.grammar.language import readable
from penstock_server.grammar.start import Start
from penstock_server.plan import Plan

Words = npt.NDArray[
    np.int32
]  # [rows, words]: bit b of word w stands for token 32·w + b, as little-endian memory has it

_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
_MANY = 4  # sequences for which another thread is worth its start


class _State:
    """One sequence's place in its grammar."""

    def __init__(self, start: Future[Start], generated: Sequence[int], ends: Sequence[int]) -> None:
        self._start = start
        self._matcher: LLMatcher | None = None
        self._untaken = list(generated)
        self._ends = frozenset(ends)
        self._has_ended = False

    def chosen(self, token_id: int) -> None:
        self._untaken.append(token_id)

    def fill(self, mask: Words) -> str:
        """Write what may follow into the mask [words]; returns the reason when nothing may."""
        try:
            start = self._start.result()
        except GrammarError as error:
            return str(error)
        matcher = self._matcher
        if matcher is None:
            if not self._untaken:
                mask[:] = start.mask
                return self._finish(mask, start.is_accepting)
            matcher = self._matcher = start.matcher(self._untaken[0])
            if matcher is None:
                return "the grammar does not allow what was generated"
        for token_id in self._untaken:
            if token_id in self._ends and matcher.is_accepting():
                self._has_ended = True  # nothing follows an end but an end, should the sequence go on all the same
            elif not matcher.consume_token(token_id):
                return f"the grammar does not allow what was generated: {readable(matcher.get_error())}"
        self._untaken.clear()
        if self._has_ended:
            mask.fill(0)
        else:
            start.fill(matcher, mask)
            if matcher.is_error():
                return f"the grammar allows no further token: {readable(matcher.get_error())}"
        return self._finish(mask, self._has_ended or matcher.is_accepting())

    def _finish(self, mask: Words, may_end: bool) -> str:
        if may_end:
            for token_id in self._ends:
                mask[token_id // 32] |= _BITS[token_id % 32]
        elif not mask.any():
            return "the grammar allows no further token: the model has none for what must follow"
        return ""


@dataclass(frozen=True, slots=True)
class Masks:
    """A step's masks in the making."""

    places: npt.NDArray[np.int64]  # of the constrained rows among those to be sampled, ascending
    _words: Words
    _jobs: Sequence[Future[dict[int, str]]]

    def finish(self) -> tuple[Words, dict[int, str]]:
        """Wait for the masks [constrained, words], and the reasons of those that have none, by place."""
        errors: dict[int, str] = {}
        for job in self._jobs:
            errors |= job.result()
        return self._words, errors


NO_MASKS = Masks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), ())


class GrammarStates:
    """By sequence id, where each constrained sequence stands. Only the compute thread calls."""

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self._compiler = compiler
        self._threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._states: dict[int, _State] = {}
        self._words = np.zeros((0, 0), np.int32)

    def apply(self, plan: Plan) -> None:
        """Forget what the plan frees and follow what is new in it; from its prompt's end on, as far as it is known."""
        for sequence_id in plan.freed_sequence_ids:
            self._states.pop(sequence_id, None)
        for new in plan.new_sequences:
            if new.sampling.grammar is not None:
                generated = new.token_ids[new.num_prompt_tokens :]
                start = self._compiler.start(new.sampling.grammar)
                ends = (*self._compiler.eos_ids, *new.sampling.stop_token_ids)
                self._states[new.sequence_id] = _State(start, generated, ends)

    def clear(self) -> None:
        self._states.clear()

    def start(self, sequence_ids: Sequence[int]) -> Masks:
        """Begin the masks of those among the sequences that are constrained."""
        if not self._states:
            return NO_MASKS
        states = [(place, self._states[i]) for place, i in enumerate(sequence_ids) if i in self._states]
        if not states:
            return NO_MASKS
        words = self._room(len(states))
        if self._pool is None:
            self._pool = threads_with_stack(self._threads, "masks")
        num_jobs = min(self._threads, -(-len(states) // _MANY))
        jobs = [self._pool.submit(_fill, states[job::num_jobs], words[job::num_jobs]) for job in range(num_jobs)]
        return Masks(np.array([place for place, _ in states]), words, jobs)

    def chosen(self, sequence_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """What was sampled; taken into account by the next masks."""
        if self._states:
            for sequence_id, token_id in zip(sequence_ids, token_ids, strict=True):
                if (state := self._states.get(sequence_id)) is not None:
                    state.chosen(token_id)

    def _room(self, num_rows: int) -> Words:
        """The same memory in every step: the step before has read its masks."""
        if num_rows > len(self._words):
            self._words = np.zeros((num_rows, -(-self._compiler.vocab_size // 32)), np.int32)
        return self._words[:num_rows]


def _fill(states: Sequence[tuple[int, _State]], words: Words) -> dict[int, str]:
    errors = {}
    for (place, state), mask in zip(states, words, strict=True):
        error = state.fill(mask)
        if error:
            mask.fill(-1)  # everything: the logits' own health is not the grammar's concern
            errors[place] = error
    return errors
