"""Two ranks that hold the whole fake model: both choose every token, and only the first one has grammars."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from fake_model import POISON, FakeModel, continuation
from paired_ranks import PairedGroup, paired_engines
from penstock_server.engine.step import BROKEN_LOGITS
from penstock_server.grammar.state import Masks, Refusal
from penstock_server.protocol.plan import Fault, Grammar, NewSequence, Plan, Sampling
from plans import Advance
from test_engine import LIMITS, Driver, prompt_of


def run_paired(drivers: list[Driver], samplings: dict[int, Sampling], prompts: dict[int, list[int]]) -> None:
    """Four steps that sample every sequence, on both ranks. In the end, all tokens but the last are in the cache."""
    for step_number in range(4):
        for driver in drivers:
            advances = [
                Advance(i, 1 if step_number else 5, [] if step_number else [2 * i, 2 * i + 1], sample=True)
                for i in prompts
            ]
            new = [NewSequence(i, prompt, 5, sampling=samplings[i]) for i, prompt in prompts.items()]
            driver.run(advances, [] if step_number else new)
    first, second = (driver.engine.model for driver in drivers)
    assert isinstance(first, FakeModel)
    assert isinstance(second, FakeModel)
    assert torch.equal(first.cache, second.cache), "both ranks chose the same tokens"
    assert (drivers[1].tokens, drivers[1].errors) == ({}, {}), "only the first rank returns tokens"


@pytest.mark.parametrize("computes_alike", [True, False])
def test_every_rank_chooses_the_same_tokens(computes_alike: bool) -> None:
    """By itself; and where the other rank's GPU computes other bits, it takes the first rank's."""
    drivers = [Driver(engine) for engine in paired_engines(LIMITS, computes_alike)]
    group = drivers[0].engine._parts.group
    assert isinstance(group, PairedGroup)
    group.sent.clear()
    if not computes_alike:
        other = drivers[1].engine.model
        logits = other.logits
        other.logits = lambda outputs, adapters: logits(outputs, adapters).roll(1, -1)
    prompts = {1: prompt_of(1, 5), 2: [*prompt_of(2, 4), POISON], 3: prompt_of(3, 5), 4: prompt_of(4, 5)}
    samplings = {
        1: Sampling(prompt_logprobs=True),
        2: Sampling(prompt_logprobs=True),
        3: Sampling(do_sample=True, seed=5, temperature=9.0),
        4: Sampling(repetition_penalty=1.5, top_n=2),
    }
    run_paired(drivers, samplings, prompts)
    assert not group.sent
    assert drivers[0].tokens[1] == continuation(prompts[1], 4)
    assert drivers[0].errors == {2: BROKEN_LOGITS}


class FewTokens:
    """Stands for `GrammarStates`: allows sequence i the tokens 30 · i to 30 · i + 9, and sequence 4 none."""

    def __init__(self) -> None:
        self.told: dict[int, list[int]] = {}

    @property
    def is_empty(self) -> bool:
        return not self.told

    def apply(self, plan: Plan) -> None:
        self.told |= {new.sequence_id: [] for new in plan.new_sequences if new.sampling.grammar is not None}

    def start(self, sequence_ids: list[int], drafts: list[list[int]]) -> Masks:
        assert not any(drafts)
        places = [place for place, i in enumerate(sequence_ids) if i in self.told]
        allowed = np.zeros((len(places), 40 * 32), bool)  # the tokenizer has more tokens than the model
        for row, place in zip(allowed, places, strict=True):
            row[30 * sequence_ids[place] : 30 * sequence_ids[place] + 10] = sequence_ids[place] != 4
        refusals: Future[dict[int, Refusal]] = Future()
        refusal = Refusal("no token", Fault.REQUEST)
        refusals.set_result({place: refusal for place in places if sequence_ids[place] == 4})
        return Masks(np.array(places), np.packbits(allowed, axis=1, bitorder="little").view(np.int32), [refusals])

    def chosen(self, sequence_ids: list[int], token_ids: list[int]) -> None:
        for i, token_id in zip(sequence_ids, token_ids, strict=True):
            if i in self.told:
                self.told[i].append(token_id)


@pytest.mark.parametrize("has_plain", [False, True])
def test_every_rank_chooses_under_the_masks_of_the_first(has_plain: bool) -> None:
    drivers, grammars = [Driver(engine) for engine in paired_engines(LIMITS)], FewTokens()
    drivers[0].engine._runner._grammars = grammars
    grammar = Grammar("regex", "a")
    samplings = {
        1: Sampling(),
        2: Sampling(do_sample=True, seed=3, grammar=grammar),
        3: Sampling(grammar=grammar) if has_plain else Sampling(do_sample=True, seed=4, grammar=grammar),
        4: Sampling(grammar=grammar) if has_plain else Sampling(do_sample=True, seed=5, grammar=grammar),
        5: Sampling(grammar=grammar, top_n=1),
    }
    run_paired(drivers, samplings, {i: prompt_of(i, 5) for i in samplings})
    assert drivers[0].tokens[1] == continuation(prompt_of(1, 5), 4)
    for i in (2, 3, 5):
        assert grammars.told[i] == drivers[0].tokens[i]
        assert len(grammars.told[i]) == 4
        assert all(30 * i <= token < 30 * i + 10 for token in grammars.told[i])
    assert drivers[0].errors == {4: "no token"}
