"""The grammar states of the constrained sequences of one stream, and the masks of a step.

Threads compute a step's masks while the model runs: each matcher consumes the token that was sampled in the last step,
then computes the tokens that may follow. An unusable grammar, a token that does not match and a dead end fail only
their own sequence.
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

# [rows, words]: bit b of word w stands for token 32·w + b (little-endian)
Words = npt.NDArray[np.int32]

_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
_SEQUENCES_PER_THREAD = 4  # fewer are not worth another thread


class _State:
    """The state of one sequence in its grammar."""

    def __init__(self, start: Future[Start], generated: Sequence[int], end_ids: Sequence[int]) -> None:
        self._start = start
        self._matcher: LLMatcher | None = None
        self._pending = list(generated)
        self._end_ids = frozenset(end_ids)
        self._has_ended = False

    def chosen(self, token_id: int) -> None:
        self._pending.append(token_id)

    def fill(self, mask: Words) -> str:
        """Writes the tokens that may follow into the mask [words]. Returns an error message when there are none."""
        try:
            start = self._start.result()
        except GrammarError as error:
            return str(error)
        matcher = self._matcher
        if matcher is None:
            if not self._pending:
                mask[:] = np.frombuffer(start.mask, np.int32)
                return self._finish(mask, start.is_accepting)
            matcher = self._matcher = start.matcher(self._pending[0])
            if matcher is None:
                return "the generated tokens do not match the grammar"
        for token_id in self._pending:
            if token_id in self._end_ids and matcher.is_accepting():
                self._has_ended = True  # if the sequence continues nevertheless, only end tokens may follow
            elif not matcher.consume_token(token_id):
                return f"the generated tokens do not match the grammar: {readable(matcher.get_error())}"
        self._pending.clear()
        if self._has_ended:
            mask.fill(0)
        else:
            start.fill(matcher, mask)
            if matcher.is_error():
                return f"the grammar allows no further token: {readable(matcher.get_error())}"
        return self._finish(mask, self._has_ended or matcher.is_accepting())

    def _finish(self, mask: Words, may_end: bool) -> str:
        if may_end:
            for token_id in self._end_ids:
                mask[token_id // 32] |= _BITS[token_id % 32]
        elif not mask.any():
            return "the grammar allows no further token: the vocabulary cannot spell what must follow"
        return ""


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step, while threads compute them."""

    places: npt.NDArray[np.int64]  # indices of the constrained rows among the sampled ones, ascending
    _words: Words
    _jobs: Sequence[Future[dict[int, str]]]

    def finish(self) -> tuple[Words, dict[int, str]]:
        """Waits for the masks [constrained, words]. Also returns the error messages of failed rows, by place."""
        errors: dict[int, str] = {}
        for job in self._jobs:
            errors |= job.result()
        return self._words, errors


NO_MASKS = Masks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32), ())


class GrammarStates:
    """The grammar state of each constrained sequence. Used only by the compute thread."""

    def __init__(self, compiler: GrammarCompiler, num_threads: int) -> None:
        self._compiler = compiler
        self._threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._states: dict[int, _State] = {}
        self._words = np.zeros((0, 0), np.int32)

    def apply(self, plan: Plan) -> None:
        """Drops freed sequences and adds new ones; their known generated tokens are consumed with the first mask."""
        for sequence_id in plan.freed_sequence_ids:
            self._states.pop(sequence_id, None)
        for new in plan.new_sequences:
            if new.sampling.grammar is not None:
                generated = new.token_ids[new.num_prompt_tokens :]
                start = self._compiler.start(new.sampling.grammar)
                end_ids = (*self._compiler.eos_ids, *new.sampling.stop_token_ids)
                self._states[new.sequence_id] = _State(start, generated, end_ids)

    def clear(self) -> None:
        """Drops all sequences."""
        self._states.clear()

    def start(self, sequence_ids: Sequence[int]) -> Masks:
        """Starts to compute the masks of the constrained sequences among those given."""
        if not self._states:
            return NO_MASKS
        states = [(place, self._states[i]) for place, i in enumerate(sequence_ids) if i in self._states]
        if not states:
            return NO_MASKS
        words = self._room(len(states))
        if self._pool is None:
            self._pool = threads_with_stack(self._threads, "masks")
        num_jobs = min(self._threads, -(-len(states) // _SEQUENCES_PER_THREAD))
        jobs = [self._pool.submit(_fill, states[job::num_jobs], words[job::num_jobs]) for job in range(num_jobs)]
        return Masks(np.array([place for place, _ in states]), words, jobs)

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


def _fill(states: Sequence[tuple[int, _State]], words: Words) -> dict[int, str]:
    errors = {}
    for (place, state), mask in zip(states, words, strict=True):
        error = state.fill(mask)
        if error:
            mask.fill(0)  # a row without an allowed token fails, on every rank
            errors[place] = error
    return errors
