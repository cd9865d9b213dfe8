"""The engine over a model whose tokens reveal the contents of its cache."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fake_model import BLOCK_TOKENS, POISON, VOCAB, FakeModel, continuation, load_fake
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_ranks import paired_engines
from penstock_server.device.reference.attention import ReferenceAttention
from penstock_server.engine import Engine, memory, warmup
from penstock_server.engine import device as device_module
from penstock_server.engine.capacity import CapacityProbe
from penstock_server.engine.device import (
    DTYPES,
    check_device_on_node,
    choose_device,
    choose_dtype,
    device_name,
    libraries,
    naming_full_memory,
    open_device,
    usable_cores,
)
from penstock_server.engine.step import BROKEN_LOGITS
from penstock_server.errors import ConfigError, FullMemoryError, PlanError
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig, Node, WarmUpConfig
from penstock_server.protocol.endpoint import Tls
from penstock_server.protocol.phase import PhaseClock
from penstock_server.protocol.plan import Adapter, NewSequence, Plan, Sampling, StepTiming
from plans import Advance, Output, plan, step


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """With more threads, small operators on a busy machine spend their time in OpenMP's barriers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_server.engine.engine.choose_num_threads", lambda config, world_size: 1)
        yield


LIMITS = WarmUpConfig(max_step_tokens=64, max_step_sequences=8, num_blocks=40, memory_fraction=0.9)


def ready_engine(limits: WarmUpConfig = LIMITS) -> Engine:
    engine, _ = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS, dtype="float32"), load_model=load_fake)
    engine.warm_up(limits)
    return engine


@dataclass
class Driver:
    """Sends plans to an engine and collects tokens by sequence."""

    engine: Engine
    step: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def run(
        self,
        advances: list[Advance] | None = None,
        new: list[NewSequence] | None = None,
        freed: list[int] | None = None,
        drafts_by_lookup: bool = False,
    ) -> list[Output]:
        self.step += 1
        planned = plan(self.step, freed or (), new or (), advances or ())
        outputs = step(self.engine, replace(planned, drafts_by_lookup=drafts_by_lookup))
        for output in outputs:
            if output.error:
                self.errors[output.sequence_id] = output.error
            else:
                self.tokens.setdefault(output.sequence_id, []).extend(token.id for token in output.tokens)
        return outputs


def prompt_of(sequence_id: int, length: int) -> list[int]:
    return [(sequence_id * 101 + place * 7) % 900 + 20 for place in range(length)]


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_chunks_batch_and_order_do_not_change_a_sequence(data: st.DataObject) -> None:
    driver = Driver(ready_engine())
    free_blocks = data.draw(st.permutations(range(40)))
    blocks: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    computed: dict[int, int] = {}
    known: dict[int, int] = {}
    wanted: dict[int, int] = {}
    waiting = list(range(1, 7))
    for _ in range(60):
        new: list[NewSequence] = []
        if waiting and len(known) < 3:
            sequence_id = waiting.pop()
            length = data.draw(st.integers(1, 20))
            known[sequence_id] = lengths[sequence_id] = length
            computed[sequence_id], blocks[sequence_id] = 0, []
            wanted[sequence_id] = data.draw(st.integers(1, 8))
            new = [NewSequence(sequence_id, prompt_of(sequence_id, length), length)]
        advances = []
        for sequence_id in data.draw(st.permutations(sorted(known))):
            num = data.draw(st.integers(1, known[sequence_id] - computed[sequence_id]))
            computed[sequence_id] += num
            missing = -(-computed[sequence_id] // BLOCK_TOKENS) - len(blocks[sequence_id])
            added, free_blocks = free_blocks[: max(0, missing)], free_blocks[max(0, missing) :]
            blocks[sequence_id] += added
            sample = computed[sequence_id] == known[sequence_id]
            known[sequence_id] += sample
            advances.append(Advance(sequence_id, num, added, sample))
        done = [i for i in known if len(driver.tokens.get(i, ())) >= wanted[i]]
        for sequence_id in done:  # freed in the next plan; leave them out of this one
            advances = [advance for advance in advances if advance.sequence_id != sequence_id]
            free_blocks = [*free_blocks, *blocks.pop(sequence_id)]
            del known[sequence_id], computed[sequence_id]
        driver.run(advances, new, freed=done)
        if not waiting and not known:
            break
    assert not driver.errors
    for sequence_id, tokens in driver.tokens.items():
        assert tokens == continuation(prompt_of(sequence_id, lengths[sequence_id]), len(tokens))


def test_a_sampled_token_is_known_in_the_next_step_without_being_sent() -> None:
    driver = Driver(ready_engine())
    prompt = prompt_of(1, 6)
    driver.run([Advance(1, 6, range(5), sample=True)], [NewSequence(1, prompt, 6)])
    for _ in range(9):
        driver.run([Advance(1, 1, sample=True)])
    assert driver.tokens[1] == continuation(prompt, 10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frequency_penalty": 300.0, "presence_penalty": 50.0},
        {"repetition_penalty": 9.0, "watermark": True, "typical_p": 0.9},
        {"min_new_tokens": 5, "stop_token_ids": tuple(range(20, 900))},
    ],
    ids=str,
)
def test_a_recomputed_sequence_continues_with_the_same_tokens(options: dict[str, Any]) -> None:
    driver = Driver(ready_engine())
    prompt = prompt_of(1, 6)
    random = Sampling(do_sample=True, seed=5, temperature=50.0, **options)
    driver.run([Advance(1, 6, range(5), sample=True)], [NewSequence(1, prompt, 6, sampling=random)])
    for _ in range(7):
        driver.run([Advance(1, 1, sample=True)])
    expected = driver.tokens.pop(1)
    assert expected != continuation(prompt, 8), "the temperature must make it random"
    again = NewSequence(1, prompt + expected[:3], 6, sampling=random)
    driver.run([Advance(1, 9, range(20, 25), sample=True)], [again], freed=[1])
    for _ in range(4):
        driver.run([Advance(1, 1, sample=True)])
    assert driver.tokens[1] == expected[3:]


def test_frequency_and_presence_count_generated_tokens_and_not_the_prompt() -> None:
    for option in ("frequency_penalty", "presence_penalty"):
        driver = Driver(ready_engine())
        prompt = prompt_of(1, 6)
        favourite = continuation(prompt, 1)[0]
        # Biases are added after the penalties, so a penalized token needs a larger bias to win.
        liked = Sampling(logit_bias=((prompt[0], 21.0),), **{option: 30.0})
        in_prompt = NewSequence(1, [*prompt, 5], 7, 0, [1, 2], liked)
        driver.run([Advance(1, 7, sample=True)], [in_prompt])
        assert driver.tokens[1] == [prompt[0]]
        disliked = Sampling(logit_bias=((favourite, 21.0),), **{option: 30.0})
        told = NewSequence(2, [*prompt[:5], favourite], 5, 0, [3, 4], disliked)
        driver.run([Advance(2, 6, sample=True)], [told])
        assert driver.tokens[2] != [favourite]


def test_a_fork_shares_full_blocks_and_computes_the_rest() -> None:
    driver = Driver(ready_engine())
    prompt = prompt_of(1, 6)
    driver.run([Advance(1, 6, [0, 1], sample=False)], [NewSequence(1, [*prompt, 5], 6)])
    fork = NewSequence(2, [*prompt, 6], 6, num_computed_tokens=4, block_ids=[0, 9])
    driver.run([Advance(1, 1, sample=True), Advance(2, 3, sample=True)], [fork])
    assert driver.tokens == {1: continuation([*prompt, 5], 1), 2: continuation([*prompt, 6], 1)}


def test_a_row_with_nan_ends_its_sequence_and_no_other() -> None:
    driver = Driver(ready_engine())
    prompts = {1: prompt_of(1, 5), 2: [*prompt_of(2, 4), POISON], 3: prompt_of(3, 5)}
    outputs = driver.run(
        [Advance(i, 5, [2 * i, 2 * i + 1], sample=True) for i in prompts],
        [NewSequence(i, prompt, 5) for i, prompt in prompts.items()],
    )
    assert [output.sequence_id for output in outputs] == [1, 2, 3]
    driver.run([Advance(i, 1, sample=True) for i in prompts])  # planned before the result came back
    assert driver.errors == {2: BROKEN_LOGITS}
    assert driver.tokens == {1: continuation(prompts[1], 2), 3: continuation(prompts[3], 2)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nan_in_a_chunk_with_prompt_logprobs_ends_its_sequence_and_no_other(num_ranks: int) -> None:
    """On every rank, because the ranks must keep the same batch."""
    engines = [ready_engine()] if num_ranks == 1 else paired_engines(LIMITS)
    asking = Sampling(prompt_logprobs=True)
    prompts = {1: prompt_of(1, 6), 2: [30, POISON, 31, 32, 33, 34], 3: prompt_of(3, 6)}
    new = [NewSequence(i, prompt, 6, 0, [2 * i, 2 * i + 1], asking) for i, prompt in prompts.items()]
    drivers = [Driver(engine) for engine in engines]
    for driver in drivers:
        driver.run([Advance(i, 3) for i in prompts], new)
    for driver in drivers:
        driver.run([Advance(i, 3, sample=True) for i in prompts])
    assert drivers[0].errors == {2: BROKEN_LOGITS}
    assert drivers[0].tokens == {i: continuation(prompts[i], 1) for i in (1, 3)}
    models = [engine.model for engine in engines]
    assert all(torch.equal(model.cache, models[0].cache) for model in models if isinstance(model, FakeModel))


def test_outputs_keep_the_order_of_the_advances() -> None:
    driver = Driver(ready_engine())
    new = [NewSequence(i, prompt_of(i, 3), 3, 0, [i]) for i in (1, 2, 3, 4)]
    advances = [Advance(3, 3, sample=True), Advance(9, 1), Advance(1, 1), Advance(4, 9), Advance(2, 3, sample=True)]
    outputs = driver.run(advances, new)
    assert [output.sequence_id for output in outputs] == [3, 9, 4, 2]


def test_a_plan_that_only_frees_runs_no_model() -> None:
    engine = ready_engine()
    driver = Driver(engine)
    driver.run([Advance(1, 3, [1], sample=True)], [NewSequence(1, prompt_of(1, 3), 3)])
    assert isinstance(engine.model, FakeModel)
    before = engine.model.num_steps
    outputs = driver.run(freed=[1])
    assert (outputs, engine.model.num_steps) == ([], before)
    assert driver.run([Advance(1, 1)])[0].error == "unknown sequence id"


def test_a_reset_forgets_every_sequence_and_starts_at_step_one() -> None:
    driver = Driver(ready_engine())
    driver.run([Advance(1, 3, [1], sample=True)], [NewSequence(1, prompt_of(1, 3), 3)])
    driver.engine.reset()
    driver.step = 0
    assert driver.run([Advance(1, 1)])[0].error == "unknown sequence id"


BROKEN_PLANS = {
    "step": (Plan(2), "step is 2, must be 1"),
    "advances": (plan(1, advances=[Advance(i, 1) for i in range(9)]), "plan has 9 advances, at most 8 are allowed"),
    "tokens": (plan(1, advances=[Advance(1, 65)]), "plan advances 65 tokens, at most 64 are allowed"),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN_PLANS.values(), ids=BROKEN_PLANS.keys())
def test_a_broken_plan_is_refused_as_a_whole(broken: Plan, message: str) -> None:
    engine = ready_engine()
    with pytest.raises(PlanError) as caught:
        engine.step(broken)
    assert str(caught.value) == message
    assert engine.step(Plan(1)).step == 1, "nothing happened"


def test_warm_up_runs_the_most_expensive_steps() -> None:
    limits = warmup.WorstStep(100, 4, 30, max_context_tokens=60, block_tokens=4)
    assert warmup.prefill(limits) == ([30, 30, 30, 10], [30, 30, 30, 10])
    assert warmup.decode(limits) == ([1] * 4, [30, 10, 10, 10])
    assert warmup.mixed(limits) == ([30, 1, 1, 1], [30, 10, 10, 10])
    limits = warmup.WorstStep(16, 4, 50, max_context_tokens=80, block_tokens=4)
    assert warmup.prefill(limits) == ([16], [50]), "the end of a long prompt, not its beginning"
    assert warmup.mixed(limits) == ([13, 1, 1, 1], [50, 10, 10, 10])


def test_the_most_expensive_steps_are_plans_that_a_router_could_send() -> None:
    limits = warmup.WorstStep(16, 4, 50, max_context_tokens=80, block_tokens=4)
    worst = warmup.plan(limits, warmup.mixed(limits), prompt_logprobs=True)
    assert worst.advances.num_tokens.tolist() == [13, 1, 1, 1]
    assert [len(new.token_ids) for new in worst.new_sequences] == [50, 10, 10, 10]
    assert [new.num_computed_tokens for new in worst.new_sequences] == [37, 9, 9, 9]
    assert [len(new.block_ids) for new in worst.new_sequences] == [13, 3, 3, 3]
    first = worst.new_sequences[0]
    assert first.num_prompt_tokens == 50
    assert first.sampling.prompt_logprobs
    decode = warmup.plan(limits, warmup.decode(limits))
    assert decode.new_sequences[0].num_prompt_tokens == 1, "penalties count what was generated"
    without = warmup.plan(replace(limits, has_grammars=False), warmup.decode(limits))
    assert not any(new.sampling.grammar for new in without.new_sequences)


def test_warm_up_allocates_the_default_pool() -> None:
    engine, description = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS), load_model=load_fake)
    assert isinstance(engine.model, FakeModel)
    engine.model.kv_bytes_per_block = 1 << 24
    served: list[tuple[int, int]] = []
    engine.model.serve_up_to = lambda num: served.append((num, engine.model.num_steps))  # type: ignore[method-assign]
    capacity = engine.warm_up(WarmUpConfig(16, 4))
    assert served[0][0] >= served[-1][0]
    assert served[0][1] == 0, "what it writes takes part in the measurement"
    longest_bytes = engine.model.max_position_tokens // BLOCK_TOKENS << 24
    assert 1 <= capacity.num_blocks <= memory.default_cap_bytes(longest_bytes) >> 24
    assert len(engine.model.cache) == capacity.num_blocks
    worst = ["worst prefill", "worst decode", "worst mixed step"]
    before, behind = ["measure memory", "first step"], ["measure what is left"]
    names = [*before, *worst, *behind, "allocate KV pool", "rehearse"]
    assert [phase.name for phase in capacity.phases] == names
    assert 0 < capacity.worst_step_s <= max(phase.seconds for phase in capacity.phases if phase.name in worst)
    assert description.vocab_size == VOCAB


def test_the_worst_step_is_estimated_from_the_layers_that_ran() -> None:
    model, sample = FakeModel(), FakeModel()
    model.traits, sample.traits = (replace(FakeModel.traits, num_layers=num) for num in (30, 2))
    model.sample = lambda: sample  # type: ignore[method-assign]
    ran: list[CausalModel] = []

    def run(model: CausalModel, plan: Plan, num_blocks: int) -> StepTiming:
        ran.append(model)
        return StepTiming(prepare_s=1, forward_s=4, sample_s=2, idle_s=100)

    probe = CapacityProbe(model, RankGroup(), torch.device("cpu"), BLOCK_TOKENS, has_grammars=False)
    measured = probe.measure(WarmUpConfig(16, 4, num_blocks=40, memory_fraction=0.9), run, 0, lambda: 0, PhaseClock())
    assert ran == [model, sample, sample, sample], "the first step brings all layers into memory"
    assert measured.worst_step_s == 1 + 4 * 30 / 2 + 2


def test_with_a_window_a_sequence_may_be_longer_than_the_pool() -> None:
    """Its block table reuses the blocks before the window."""
    engine, _ = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS), load_model=load_fake)
    assert isinstance(engine.model, FakeModel)
    engine.model.traits = replace(FakeModel.traits, window_tokens=6)
    with pytest.raises(
        ConfigError, match=r"the KV pool has room for 8 tokens \(2 blocks\), but one sequence may have 50"
    ):
        engine.warm_up(WarmUpConfig(8, 1, max_sequence_tokens=50, num_blocks=2))
    assert engine.warm_up(WarmUpConfig(8, 1, max_sequence_tokens=50, num_blocks=3)).num_blocks == 3
    blocks = [index % 3 for index in range(13)]
    new = NewSequence(1, [5] * 49, 49, 48, blocks[:13])
    assert not step(engine, plan(1, new_sequences=[new], advances=[Advance(1, 1, sample=True)]))[0].error
    probe = CapacityProbe(engine.model, RankGroup(), torch.device("cpu"), BLOCK_TOKENS, has_grammars=False)
    assert [probe.contexts_in(num_blocks, 64) for num_blocks in (2, 3, 6)] == [8, 64, 128]


BROKEN_LIMITS = {
    "no tokens": (WarmUpConfig(0, 1), "max_step_tokens is 0 and max_step_sequences 1, both must be at least 1"),
    "too long": (WarmUpConfig(8, 1, max_sequence_tokens=65), "sequences of 65 tokens were asked for"),
    "fraction": (WarmUpConfig(8, 1, memory_fraction=0), "memory_fraction is 0, must be in (0, 1]"),
    "small pool": (
        WarmUpConfig(8, 1, max_sequence_tokens=50, num_blocks=3),
        "the KV pool has room for 12 tokens (3 blocks), but one sequence may have 50",
    ),
    "large pool": (WarmUpConfig(8, 1, num_blocks=1 << 45), "35184372088832 KV blocks were asked for (1073741824 MiB)"),
}


@pytest.mark.parametrize(("limits", "message"), BROKEN_LIMITS.values(), ids=BROKEN_LIMITS.keys())
def test_limits_that_cannot_be_served_are_refused(limits: WarmUpConfig, message: str) -> None:
    engine, _ = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS), load_model=load_fake)
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(").replace(")", r"\)")):
        engine.warm_up(limits)


BROKEN_LOADS = {
    "dtype": ({"dtype": "int3"}, 'dtype is "int3", must be one of float32, float16, bfloat16'),
    "kv-cache-dtype": (
        {"kv_cache_dtype": "int4"},
        'kv_cache_dtype is "int4", must be one of auto, fp8_e4m3fn, fp8_e5m2',
    ),
    "device": ({"device": "tpu"}, 'device is "tpu", must be "cpu" or "cuda:N"'),
}


@pytest.mark.parametrize(("options", "message"), BROKEN_LOADS.values(), ids=BROKEN_LOADS.keys())
def test_options_that_cannot_be_served_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.load(LoadConfig(**{"model_path": Path("x"), "block_tokens": 4, **options}), load_model=load_fake)


@pytest.mark.parametrize(("asked", "given"), [(4, 4), (0, ReferenceAttention.preferred_block_tokens)])
def test_the_worker_chooses_the_block_size_unless_it_is_given(asked: int, given: int) -> None:
    loaded: list[LoadOptions] = []

    def load(options: LoadOptions, group: RankGroup) -> FakeModel:
        loaded.append(options)
        return load_fake(options, group)

    config = LoadConfig(Path("x"), asked, dtype="float32", device="cpu")
    _, description = Engine.load(config, load_model=load)
    assert (description.block_tokens, loaded[0].block_tokens) == (given, given)


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match="2 ranks need a rendezvous"):
        Engine.load(LoadConfig(Path("x"), 4), world_size=2, load_model=load_fake)


def test_ranks_share_the_memory_that_is_left() -> None:
    gib = 1 << 30
    left = memory.Memory(total=100 * gib, available=50 * gib, transient=gib)
    assert memory.usable_bytes(left, memory.Share(1.0, 1)) == 49 * gib
    assert memory.usable_bytes(left, memory.Share(0.9, 2)) == pytest.approx(19 * gib, abs=2)
    assert memory.usable_bytes(left, memory.Share(1.0, 1, cap_bytes=2 * gib)) == 2 * gib
    assert memory.usable_bytes(left, memory.Share(0.4, 1)) == 0
    scarce = memory.Memory(total=4 * gib, available=2 * gib, transient=0)
    assert memory.usable_bytes(scarce, memory.Share(1.0, 2, cap_bytes=2 * gib)) == gib // 2


def gpu_probe(monkeypatch: pytest.MonkeyPatch, free_gib: int) -> CapacityProbe:
    """Probe of a GPU of 100 GiB, with 16 GiB of weights on it."""
    meter = type("Meter", (), {"measure": lambda self, releasing=0: memory.Memory(100 << 30, free_gib << 30, 0)})
    monkeypatch.setattr(memory, "MemoryMeter", lambda device: meter())
    model = FakeModel()
    model.weight_bytes, model.kv_bytes_per_block = 16 << 30, 1 << 24
    return CapacityProbe(model, RankGroup(), torch.device("cuda", 0), BLOCK_TOKENS, has_grammars=False)


@pytest.mark.parametrize(("free_gib", "left_gib"), [(40, 9), (30, -1)])
def test_a_gpu_has_room_for_a_standby_group_where_its_weights_fit_twice(
    free_gib: int, left_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 3 GiB of the largest step, 2 GiB that each process needs, and 10 GiB beyond the fraction."""
    probe, config = gpu_probe(monkeypatch, free_gib), WarmUpConfig(16, 4, memory_fraction=0.9)
    assert probe.standby_room(config, 3 << 30) == pytest.approx(left_gib * (1 << 30), abs=9)
    assert probe.standby_room(replace(config, proven=True), 3 << 30) is None
    assert replace(probe, device=torch.device("cpu")).standby_room(config, 3 << 30) is None


def test_a_pool_leaves_room_for_a_standby_group_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, config = gpu_probe(monkeypatch, 60), WarmUpConfig(16, 4, memory_fraction=0.9)
    num_blocks = [
        probe.measure(
            replace(config, reserves_standby=reserves),
            lambda model, plan, num_blocks: StepTiming(),
            0,
            lambda: 0,
            PhaseClock(),
        ).num_blocks
        for reserves in (False, True)
    ]
    assert num_blocks == [(50 << 30) >> 24, (32 << 30) >> 24]


def cpu_probe(monkeypatch: pytest.MonkeyPatch, free_gib: int) -> CapacityProbe:
    """Probe of a machine with 100 GiB. Blocks have 16 MiB."""
    meter = type("Meter", (), {"measure": lambda self, releasing=0: memory.Memory(100 << 30, free_gib << 30, 0)})
    monkeypatch.setattr(memory, "MemoryMeter", lambda device: meter())
    monkeypatch.setattr(memory, "free_bytes", lambda device: free_gib << 30)
    model = FakeModel()
    model.kv_bytes_per_block = 1 << 24
    return CapacityProbe(model, RankGroup(), torch.device("cpu"), BLOCK_TOKENS, has_grammars=False)


def test_replicas_on_cpus_divide_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GiB is within the fraction, of which results on their way take a little."""
    probe = cpu_probe(monkeypatch, 11)

    def num_blocks(**options: int) -> int:
        config = WarmUpConfig(16, 4, memory_fraction=0.9, **options)
        return probe.measure(
            config, lambda model, plan, num_blocks: StepTiming(), 0, lambda: 0, PhaseClock()
        ).num_blocks

    assert [num_blocks(num_groups=num_groups) for num_groups in (1, 2, 4)] == [63, 31, 15]
    assert num_blocks(num_blocks=40) == 40
    message = (
        r"40 KV blocks were asked for \(640 MiB\), but only 31 \(496 MiB\) fit in each of 2 replicas next to the model "
        "and the largest step; lower --replicas, --max-batch-total-tokens, or raise --cuda-memory-fraction"
    )
    with pytest.raises(ConfigError, match=message):
        num_blocks(num_blocks=40, num_groups=2)
    with pytest.raises(ConfigError, match=r"no KV block fits in each of 1000 replicas: .*; lower --replicas, --max"):
        num_blocks(num_groups=1000)


def test_the_default_pool_of_an_encoder_holds_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = cpu_probe(monkeypatch, 90)
    pools = [probe.default_pool_bytes(WarmUpConfig(num_tokens, 4)) >> 24 for num_tokens in (16, 1600)]
    assert pools == [64, 64]
    probe.model.traits = replace(FakeModel.traits, max_source_tokens=64)
    pools = [probe.default_pool_bytes(WarmUpConfig(num_tokens, 4)) >> 24 for num_tokens in (16, 1600)]
    assert pools == [4 * 64 // BLOCK_TOKENS, 4 * (1600 // BLOCK_TOKENS + 4)]


def test_the_offloads_of_all_replicas_fit_beside_their_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, config = cpu_probe(monkeypatch, 3), WarmUpConfig(16, 4, num_blocks=64, num_memory_slots=64)
    probe.check_offload(config)
    message = (
        "the KV offload of 2 replicas needs 2048 MiB of host memory, but 1024 MiB are free beside the KV cache; "
        "lower --replicas or --kv-offload-gib; --kv-offload-disk-gib uses a disk"
    )
    with pytest.raises(ConfigError, match=message):
        probe.check_offload(replace(config, num_groups=2))
    probe.check_offload(replace(config, num_groups=2, num_memory_slots=0, num_disk_slots=64))


def test_the_default_pool_has_room_for_some_of_the_longest_sequences() -> None:
    gib = 1 << 30
    assert memory.default_cap_bytes(1 << 20) == gib
    assert memory.default_cap_bytes(gib) == 4 * gib


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1000 << 10, 800 << 10)),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, (1000 << 10, 800 << 10)),
        (
            {"memory.max": "600000", "memory.current": "500000", "memory.stat": "inactive_file 100000\nother 1\n"},
            (600_000, 200_000),
        ),
        (
            {
                "memory/memory.limit_in_bytes": "600000",
                "memory/memory.usage_in_bytes": "500000",
                "memory/memory.stat": "total_inactive_file 50000\n",
            },
            (600_000, 150_000),
        ),
    ],
    ids=["none", "unlimited", "version 2", "version 1"],
)
def test_a_control_group_limits_the_memory(tmp_path: Path, files: dict[str, str], expected: tuple[int, int]) -> None:
    write(tmp_path, {"meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"})
    write(tmp_path / "cgroup", files)
    assert memory._host_memory(tmp_path, tmp_path / "cgroup") == expected


def test_a_cpu_quota_limits_the_threads(tmp_path: Path) -> None:
    cores = usable_cores(tmp_path)
    assert cores >= 1
    write(tmp_path, {"cpu.max": "50000 100000"})
    assert usable_cores(tmp_path) == 1
    write(tmp_path, {"cpu.max": "max 100000"})
    assert usable_cores(tmp_path) == cores


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_needs_a_gpu_of_its_own() -> None:
    assert [str(choose_device("", rank)) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"rank 2 has no GPU: torch sees 2 here.*at most 2 shards"):
        choose_device("", 2)
    with pytest.raises(ConfigError, match=r'device is "cuda:2", but torch sees 2 GPUs here'):
        choose_device("cuda:2", 0)


@pytest.mark.usefixtures("two_gpus")
def test_a_router_learns_what_decides_the_bits_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    versions = {"triton": "3.5.1"}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert (device_name(gpu), libraries(gpu)) == ("GPU 1", f"torch {torch.__version__}, triton 3.5.1")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert (device_name(cpu), libraries(cpu)) == ("", f"torch {torch.__version__} with AVX2")


@pytest.mark.parametrize("uses_gpu", [False, True])
def test_a_rank_on_a_node_runs_on_what_server_and_node_have_agreed_on(uses_gpu: bool) -> None:
    node = Node(0, 1, ("10.0.0.2", 7), Tls("", "", ""), "", uses_gpu)
    agreed, other = torch.device("cpu"), torch.device("cuda", 0)
    if uses_gpu:
        agreed, other = other, agreed
    check_device_on_node(agreed, node)
    check_device_on_node(other, None)
    expected = "but 10.0.0.2 has none that torch sees" if uses_gpu else "10.0.0.2 has GPUs; set CUDA_VISIBLE_DEVICES="
    with pytest.raises(ConfigError, match=expected):
        check_device_on_node(other, node)


def test_several_mig_instances_are_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3f7a,MIG-91c0")
    assert choose_device("", 0) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"rank 1 has no GPU: torch sees 1 here.*a process sees one MIG instance"):
        choose_device("", 1)


def test_without_a_driver_the_model_runs_on_the_cpu_unless_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "NVIDIA_DRIVER", tmp_path / "missing")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level(logging.INFO):
        assert choose_device("", 0) == torch.device("cpu")
    assert "there is no NVIDIA driver" in caplog.text
    with pytest.raises(ConfigError, match='device is "cuda:0", but torch sees 0 GPUs here'):
        choose_device("cuda:0", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    expected = r'CUDA_VISIBLE_DEVICES is "0", but there is no NVIDIA driver .*docker\'s --gpus.*To serve on the CPU'
    with pytest.raises(ConfigError, match=expected):
        choose_device("", 0)
    assert choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("visible", "cuda", "reason"),
    [
        ("7", "13.2", 'CUDA_VISIBLE_DEVICES is "7", which names none of them'),
        (None, None, "is built without CUDA"),
        (
            None,
            "13.2",
            r"driver on your system is too old .*is built for CUDA 13\.2: install a driver for it",
        ),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_an_error_that_says_why(
    visible: str | None, cuda: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(device_module, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"{reason}.*To serve on the CPU"):
        choose_device("", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("", 0) == torch.device("cpu")


def test_a_gpu_that_cannot_be_opened_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(device: torch.device) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore")

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_120"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    for unsupported in ((7, 0), (8, 0), (10, 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=unsupported: found)
        version = r"\.".join(map(str, unsupported))
        expected = rf"Tesla V100 has compute capability {version}, for which torch .* has no code, only for sm_75, sm_9"
        with pytest.raises(ConfigError, match=expected):
            open_device(gpu)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    expected = r"cuda:0 cannot be used: CUDA error: .*busy or unavailable; `nvidia-smi`"
    for supported in ((7, 5), (9, 0), (12, 0), (12, 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=supported: found)
        with pytest.raises(ConfigError, match=expected):
            open_device(gpu)
    # CUDA may refuse its first use, which asks for the capability.
    monkeypatch.setattr(torch.cuda, "get_device_capability", busy)
    with pytest.raises(ConfigError, match=expected):
        open_device(gpu)


def test_full_memory_is_an_error_that_says_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
    expected = "for the weights: of 16384 MiB, this rank used 10240 MiB, other processes used 5120 MiB, and 1024 MiB"
    with pytest.raises(ConfigError, match=expected), naming_full_memory(torch.device("cuda"), "the weights", "do this"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    full, other = torch.AcceleratorError("CUDA error: out of memory"), torch.AcceleratorError("CUDA error: other")
    full.error_code, other.error_code = 2, 719  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=expected), naming_full_memory(torch.device("cuda"), "the weights", "do this"):
        raise full
    with pytest.raises(torch.AcceleratorError), naming_full_memory(torch.device("cuda"), "the weights", "do this"):
        raise other


def test_an_adapter_that_does_not_fit_in_memory_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDevice:
        def load(self, adapter: Adapter) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 << 30)
    engine, _ = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS, dtype="float32"), load_model=load_fake)
    monkeypatch.setattr(engine.model, "adapters", FullDevice(), raising=False)
    expected = (
        "too little memory for the adapter in /adapters/one: of 16384 MiB, this rank used 15360 MiB, other processes "
        "used 0 MiB, and 1024 MiB were free; lower --max-lora-slots, or --cuda-memory-fraction"
    )
    with pytest.raises(FullMemoryError, match=expected):
        engine.load_adapter(Adapter(1, Path("/adapters/one")), [])


@pytest.mark.skipif(sys.platform != "linux", reason="only there do threads have priorities")
def test_an_adapter_is_loaded_at_a_low_priority() -> None:
    class Adapters:
        priorities: ClassVar[list[int]] = []

        def load(self, adapter: Adapter) -> None:
            self.priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    engine, _ = Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS, dtype="float32"), load_model=load_fake)
    engine.model.adapters = Adapters()  # type: ignore[attr-defined]
    engine.load_adapter(Adapter(1, Path("/adapters/one")), [])
    assert Adapters.priorities[0] > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(("capability", "best"), [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_the_dtype_is_one_that_the_gpu_computes_in(
    capability: tuple[int, int], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # torch counts emulation
    assert choose_dtype("", gpu) == DTYPES[best]
    assert choose_dtype("float16", gpu) == torch.float16
    assert choose_dtype("float32", gpu) == torch.float32
    if best == "bfloat16":
        assert choose_dtype("bfloat16", gpu) == torch.bfloat16
        return
    major, minor = capability
    with pytest.raises(ConfigError, match=rf"Tesla T4 has compute capability {major}\.{minor}, .*use --dtype float16"):
        choose_dtype("bfloat16", gpu)


def test_device_and_dtype_are_chosen_from_the_machine() -> None:
    device = choose_device("cpu", 0)
    assert device == torch.device("cpu")
    assert choose_dtype("float16", device) == torch.float16
    assert choose_dtype("", device) in (torch.bfloat16, torch.float32)
    assert math.isfinite(float(torch.zeros(1, dtype=choose_dtype("", device))))
