"""Runs sequences to completion on an engine as a router would, with chunks, batches and preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock_server.engine import Engine
from penstock_server.protocol.plan import NewSequence, Sampling
from plans import Advance, plan, step

BLOCK_TOKENS = 16


@dataclass
class Answer:
    """The result of one sequence."""

    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    has_ended: bool = False  # by an EOS token


@dataclass
class AnswerDriver:
    """One stream of steps. Each sequence gets the same number of blocks."""

    engine: Engine
    eos_ids: tuple[int, ...]
    num_blocks: int
    blocks_each: int = 16
    num_steps: int = 0
    max_forced: int = 0  # draft tokens of each decode, which grammars force

    def run(
        self,
        asked: Sequence[tuple[list[int], Sampling]],
        max_tokens: int,
        chunk_tokens: int = 1 << 30,
        preempt_every: int = 0,
    ) -> list[Answer]:
        """Runs all sequences together until each has ended or has `max_tokens` tokens.

        preempt_every: preempt a sequence each time it has this many more tokens; it recomputes from its known tokens.
        """
        self.engine.reset()
        self.num_steps = 0
        answers = [Answer(prompt, sampling) for prompt, sampling in asked]
        computed = dict.fromkeys(range(len(answers)), 0)
        new, freed = list(range(len(answers))), []
        while computed:
            self._step(answers, computed, new, freed, chunk_tokens)
            new, freed = [], []
            for place in list(computed):
                answer, known = answers[place], len(answers[place].prompt) + len(answers[place].tokens)
                if answer.error or answer.has_ended or len(answer.tokens) >= max_tokens:
                    del computed[place]
                    freed.append(place)
                elif preempt_every and computed[place] == known - 1 and len(answer.tokens) % preempt_every == 0:
                    computed[place] = 0
                    freed.append(place)
                    new.append(place)
        return answers

    def _step(
        self, answers: list[Answer], computed: dict[int, int], new: list[int], freed: list[int], chunk_tokens: int
    ) -> None:
        advances = []
        for place in computed:
            known = len(answers[place].prompt) + len(answers[place].tokens)
            num_tokens = min(chunk_tokens, known - computed[place])
            computed[place] += num_tokens
            num_drafts = self.max_forced if num_tokens == 1 else 0
            advances.append(Advance(place, num_tokens, (), computed[place] == known, num_drafts))
        self.num_steps += 1
        told = [self._new(place, answers[place]) for place in new]
        planned = replace(plan(self.num_steps, freed, told, advances), drafts_only_forced=self.max_forced > 0)
        for output in step(self.engine, planned):
            answer = answers[output.sequence_id]
            answer.error = output.error
            computed[output.sequence_id] += max(0, len(output.tokens) - 1)
            for token in output.tokens:
                answer.tokens.append(token.id)
                answer.has_ended = token.id in self.eos_ids

    def _new(self, place: int, answer: Answer) -> NewSequence:
        first = place * self.blocks_each
        assert first + self.blocks_each <= self.num_blocks
        blocks = range(first, first + self.blocks_each)
        known = [*answer.prompt, *answer.tokens]
        return NewSequence(place, known, len(answer.prompt), block_ids=blocks, sampling=answer.sampling)
