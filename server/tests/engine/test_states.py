"""Models that keep a state between tokens: their slots and snapshots, as the engine uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_model import BLOCK_TOKENS, FakeModel, continuation
from fake_states import CHUNK_TOKENS, FakeStateModel, FakeStates, load_fake_states
from penstock_server.engine import Engine, memory
from penstock_server.engine.capacity import CapacityProbe
from penstock_server.engine.drafting import ngram
from penstock_server.engine.host_batch import HostBatch
from penstock_server.errors import ConfigError, PlanError
from penstock_server.parallel import RankGroup
from penstock_server.pb import worker_pb2 as pb
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.message import plan_of
from penstock_server.protocol.phase import PhaseClock
from penstock_server.protocol.plan import NewSequence, Save, StepTiming, Transfer, TransferKind
from plans import Advance, Output, outputs, plan

LIMITS = WarmUpConfig(
    max_step_tokens=64, max_step_sequences=8, num_blocks=40, num_state_slots=3, num_snapshots=4, memory_fraction=0.9
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_server.engine.engine.choose_num_threads", lambda config, world_size: 1)


def load(block_tokens: int = BLOCK_TOKENS) -> Engine:
    config = LoadConfig(Path("nowhere"), block_tokens, dtype="float32")
    engine, described = Engine.load(config, load_model=load_fake_states)
    assert (described.state_bytes_per_sequence, described.snapshot_bytes) == (80, 8)
    assert described.snapshot_reach_tokens == FakeStates.reach_tokens
    return engine


def prompt_of(sequence_id: int, length: int) -> list[int]:
    return [(sequence_id * 101 + place * 7) % 900 + 20 for place in range(length)]


@dataclass
class Driver:
    """Sends plans to a new engine."""

    limits: WarmUpConfig = LIMITS
    step: int = 0

    def __post_init__(self) -> None:
        self.engine = load()
        self.engine.warm_up(self.limits)

    def run(
        self,
        *advances: Advance,
        new: Sequence[NewSequence] = (),
        freed: Sequence[int] = (),
        saves: Sequence[Save] = (),
        transfers: Sequence[Transfer] = (),
    ) -> list[Output]:
        self.step += 1
        planned = replace(plan(self.step, freed, new, advances), saves=saves, transfers=transfers)
        return outputs(self.engine.step(planned), planned)

    def tokens(self, *advances: Advance, **changes: Sequence[object]) -> list[list[int]]:
        """The sampled tokens of each output."""
        return [[token.id for token in output.tokens] for output in self.run(*advances, **changes)]  # type: ignore[arg-type]


def start(sequence_id: int, length: int, **fields: object) -> NewSequence:
    return NewSequence(sequence_id, prompt_of(sequence_id, length), length, **fields)  # type: ignore[arg-type]


def decode(driver: Driver, sequence_id: int, num_tokens: int) -> list[int]:
    return [driver.tokens(Advance(sequence_id, 1, sample=True))[0][0] for _ in range(num_tokens)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 13])
def test_chunks_and_slots_do_not_change_a_sequence(chunk: int) -> None:
    driver = Driver()
    new = [start(sequence_id, 13) for sequence_id in (1, 2)]
    blocks = {1: range(8), 2: range(8, 16)}
    computed = 0
    while computed < 13:
        num = min(chunk, 13 - computed)
        advances = [Advance(i, num, () if computed else blocks[i], sample=computed + num == 13) for i in (1, 2)]
        found = driver.tokens(*advances, new=() if computed else new)
        computed += num
    for sequence_id, first in zip((1, 2), found, strict=True):
        assert first + decode(driver, sequence_id, 9) == continuation(prompt_of(sequence_id, 13), 10)


def test_a_freed_slot_has_nothing_of_its_sequence() -> None:
    driver = Driver()
    for sequence_id in range(1, 6):
        (found,) = driver.tokens(
            Advance(sequence_id, 6, range(4), sample=True),
            new=[start(sequence_id, 6)],
            freed=[sequence_id - 1] if sequence_id > 1 else [],
        )
        assert found + decode(driver, sequence_id, 5) == continuation(prompt_of(sequence_id, 6), 6)


def test_more_sequences_than_slots_are_refused() -> None:
    driver = Driver()
    driver.run(*(Advance(i, 3, [i]) for i in range(3)), new=[start(i, 4) for i in range(3)])
    (output,) = driver.run(Advance(3, 4, [3], sample=True), new=[start(3, 4)])
    assert output.error == "finds none of the 3 state slots free"


def shared(sequence_id: int, num_computed: int, snapshot: int | None) -> NewSequence:
    """A sequence with the prompt of sequence 1, which starts behind its first tokens."""
    blocks = range(num_computed // BLOCK_TOKENS)
    return NewSequence(sequence_id, prompt_of(1, 14), 14, num_computed, blocks, snapshot=snapshot)


def test_a_sequence_continues_at_a_snapshot() -> None:
    """Plans save first, free, and restore then: the freed sequence's slot is the new one's."""
    driver = Driver()
    driver.run(Advance(1, 8, range(4)), new=[start(1, 14)])
    driver.run(Advance(1, 6, sample=True), saves=[Save(1, 8, 2)])
    (first,) = driver.tokens(Advance(2, 6, range(8, 14), sample=True), new=[shared(2, 8, 2)])
    assert first + decode(driver, 2, 5) == continuation(prompt_of(1, 14), 6)
    ended = driver.tokens(
        Advance(3, 2, range(20, 24), sample=True), new=[shared(3, 12, 0)], freed=[1], saves=[Save(1, 12, 0)]
    )
    assert ended == [continuation(prompt_of(1, 14), 1)]
    wrong = driver.tokens(Advance(4, 2, range(30, 34), sample=True), new=[shared(4, 12, 2)])
    assert wrong != ended, "the model would show another state"


@pytest.mark.parametrize("num_behind", range(2 * CHUNK_TOKENS))
def test_the_states_at_a_boundary_are_there_some_tokens_later(num_behind: int) -> None:
    driver = Driver()
    driver.run(Advance(1, 4, range(4)), new=[start(1, 14)])
    if num_behind:
        driver.run(Advance(1, num_behind))
    found = driver.tokens(
        Advance(2, 10, range(8, 14), sample=True), new=[shared(2, 4, 3)], freed=[1], saves=[Save(1, 4, 3)]
    )
    assert found == [continuation(prompt_of(1, 14), 1)]


def test_rejected_drafts_change_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed over the end of a chunk and beyond; the next steps compute these positions again."""
    driver, expected = Driver(), continuation(prompt_of(1, 6), 12)
    drafts = iter([[expected[1], 1, 1, 1], [1, 1, 1], [expected[5], expected[6], 1, 1, 1]])

    def propose(history: np.ndarray, most: int) -> np.ndarray:
        return np.array(next(drafts, [])[:most], np.int32)

    monkeypatch.setattr(ngram, "continuation", propose)
    (found,) = driver.tokens(Advance(1, 6, range(8), sample=True), new=[start(1, 6)])
    while len(found) < 12:
        found += driver.tokens(Advance(1, 1, sample=True, num_draft_tokens=min(5, 12 - len(found))))[0]
    assert found == expected
    text = prompt_of(1, 6) + expected
    resumed = NewSequence(2, text, 6, 16, range(4), snapshot=1)
    # 17 tokens are computed, and the last drafts were before.
    (found,) = driver.tokens(
        Advance(2, 2, range(20, 22), sample=True), new=[resumed], freed=[1], saves=[Save(1, 16, 1)]
    )
    assert found == continuation(text, 1)


def test_what_a_failed_sequence_would_save_is_not_saved() -> None:
    driver = Driver()
    driver.run(Advance(1, 4, range(4)), new=[start(1, 14)])
    driver.run(Advance(2, 2, [9]), saves=[Save(1, 4, 0)], new=[start(2, 4)])
    (failed,) = driver.run(Advance(1, 20))
    assert failed.error
    saved = driver.engine.model.states
    assert isinstance(saved, FakeStates)
    before = saved.snapshots.tolist()
    driver.run(Advance(2, 1), freed=[1], saves=[Save(1, 4, 1)])
    assert saved.snapshots.tolist() == before


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (shared(1, 8, None), "has 8 computed tokens, but no snapshot of its states"),
        (shared(1, 8, 4), "starts with snapshot 4, but there are 4 snapshots"),
    ],
)
def test_a_sequence_that_cannot_continue_is_refused(new: NewSequence, reason: str) -> None:
    (output,) = Driver().run(Advance(1, 2, range(9, 12)), new=[new])
    assert output.error == reason


def test_a_save_elsewhere_is_refused() -> None:
    driver = Driver()
    driver.run(Advance(1, 4, range(4)), new=[start(1, 14)])
    with pytest.raises(PlanError, match="the plan saves snapshot 4, but there are 4 snapshots"):
        driver.run(Advance(1, 4), saves=[Save(1, 4, 4)])


def test_blocks_move_to_slots_without_states(tmp_path: Path) -> None:
    driver = Driver(replace(LIMITS, num_memory_slots=2))
    driver.run(Advance(1, 8, range(2)), new=[start(1, 14)])
    driver.run(Advance(1, 4, [9]), saves=[Save(1, 8, 0)])
    moves = [
        *(Transfer(TransferKind.STORE, block, block) for block in (0, 1)),
        *(Transfer(TransferKind.LOAD, slot, 5 + slot) for slot in (0, 1)),
    ]
    new = NewSequence(2, prompt_of(1, 14), 14, 8, [5, 6], snapshot=0)
    found = driver.tokens(Advance(2, 6, [7, 8], sample=True), new=[new], freed=[1], transfers=moves)
    assert found == [continuation(prompt_of(1, 14), 1)]


def test_messages_bring_saves_and_snapshots() -> None:
    columns = pb.Saves(
        sequence_ids=np.array([5, 6], "<u8").tobytes(),
        num_tokens=np.array([16, 32], "<u4").tobytes(),
        snapshots=np.array([1, 0], "<u4").tobytes(),
    )
    new = [pb.NewSequence(sequence_id=1, snapshot=0), pb.NewSequence(sequence_id=2)]
    received = plan_of(pb.Plan(step=1, saves=columns, new_sequences=new))
    assert received.saves == [Save(5, 16, 1), Save(6, 32, 0)]
    assert [sequence.snapshot for sequence in received.new_sequences] == [0, None]
    columns.snapshots = b""
    with pytest.raises(PlanError, match="the columns of the saves do not have the same length"):
        plan_of(pb.Plan(step=1, saves=columns))


def test_rows_of_one_sequence_are_not_cut_apart() -> None:
    """A graph computes each row as a sequence of its own, which would not see the states that the rows before leave."""
    longs, ints = np.arange(3), np.arange(4, dtype=np.int32)
    batch = HostBatch(longs, longs, longs, ints[:2] * 3, ints[3:], np.zeros((1, 1), np.int32), longs, 3, 3)
    assert batch.is_decode
    assert not replace(batch, state_slots=longs[:1]).is_decode
    single = replace(batch, query_starts=ints, context_lens=ints[1:], state_slots=longs)
    assert single.is_decode
    padded = single.padded(5, 8, 4)
    assert padded.state_slots is not None
    assert padded.state_slots.tolist() == [0, 1, 2, -1, -1]


def test_warm_up_allocates_slots_for_the_sequences_of_a_step_and_snapshots() -> None:
    engine = load()
    capacity = engine.warm_up(replace(LIMITS, num_state_slots=0, num_snapshots=None))
    assert capacity.num_state_slots == LIMITS.max_step_sequences
    assert capacity.num_snapshots == 40 * FakeModel.kv_bytes_per_block // FakeStates.bytes_per_snapshot
    assert isinstance(engine.model, FakeStateModel)
    sizes = len(engine.model.states.slots), len(engine.model.states.snapshots), len(engine.model.cache)
    assert sizes == (capacity.num_state_slots, capacity.num_snapshots, capacity.num_blocks)


def test_a_later_group_allocates_what_the_first_one_has() -> None:
    engine = load()
    capacity = engine.warm_up(replace(LIMITS, proven=True, num_state_slots=5, num_snapshots=0))
    assert (capacity.num_blocks, capacity.num_state_slots, capacity.num_snapshots) == (40, 5, 0)


def test_a_block_must_end_with_a_chunk() -> None:
    message = "KV blocks of 6 tokens cannot end with the states of this model, which are saved every 4 tokens"
    with pytest.raises(ConfigError, match=message):
        load(block_tokens=6)


GIB = 1 << 30


def probe(monkeypatch: pytest.MonkeyPatch, free_gib: int) -> CapacityProbe:
    """Probe of a machine with 100 GiB. Blocks have 16 MiB, slots 1 GiB, snapshots 256 MiB."""
    meter = type("Meter", (), {"measure": lambda self, releasing=0: memory.Memory(100 * GIB, free_gib * GIB, 0)})
    monkeypatch.setattr(memory, "MemoryMeter", lambda device: meter())
    monkeypatch.setattr(memory, "free_bytes", lambda device: free_gib * GIB)
    model = FakeStateModel()
    model.kv_bytes_per_block = 1 << 24
    model.states.bytes_per_slot, model.states.bytes_per_snapshot = GIB, GIB // 4
    return CapacityProbe(model, RankGroup(), torch.device("cpu"), BLOCK_TOKENS, False, num_state_slots=4)


def test_slots_take_at_most_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe(monkeypatch, 30)  # 20 GiB are within the fraction
    assert found.agree_on_state_slots(WarmUpConfig(64, 8, memory_fraction=0.9)) == 8
    assert found.agree_on_state_slots(WarmUpConfig(64, 80, memory_fraction=0.9)) == 10
    assert found.agree_on_state_slots(WarmUpConfig(64, 80, memory_fraction=0.9, num_groups=4)) == 2
    message = re.escape(
        "0 state slots fit, but 1 is needed: the model keeps 1024 MiB for each sequence between tokens, and 1024 MiB "
        "are free after loading the model, half of them for states; lower --replicas, raise --cuda-memory-fraction, or "
        "free memory"
    )
    with pytest.raises(ConfigError, match=message):
        found.agree_on_state_slots(WarmUpConfig(64, 8, memory_fraction=0.9, num_groups=20))


def test_blocks_without_keys_and_values_are_limited_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe(monkeypatch, 30)
    found.model.kv_bytes_per_block = 0  # type: ignore[misc]
    config = WarmUpConfig(16, 4, memory_fraction=0.9)
    sizes = found.measure(config, lambda *_: StepTiming(), 0, lambda: 0, PhaseClock())
    # A pool of 1 GiB in which a token counts as 1 KiB.
    assert (sizes.num_blocks, sizes.num_snapshots) == ((1 << 20) // BLOCK_TOKENS, 4)


def test_snapshots_take_as_much_as_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe(monkeypatch, 30)

    def measured(**options: int | None) -> tuple[int, int]:
        config = WarmUpConfig(16, 4, memory_fraction=0.9, **options)  # type: ignore[arg-type]
        sizes = found.measure(config, lambda *_: StepTiming(), 0, lambda: 0, PhaseClock())
        return sizes.num_blocks, sizes.num_snapshots

    assert measured() == (64, 4), "1 GiB each"
    assert measured(num_blocks=640) == (640, 39), "the rest is less than the 10 GiB of the pool"
    assert measured(num_snapshots=0) == (64, 0)
    assert measured(num_snapshots=78) == (31, 78)
    message = re.escape(
        "100 snapshots of states were asked for (25600 MiB), but only 79 (20224 MiB) fit next to the model and the "
        "largest step; lower --state-snapshots"
    )
    with pytest.raises(ConfigError, match=message):
        measured(num_snapshots=100)
