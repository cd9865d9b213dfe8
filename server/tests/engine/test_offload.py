"""Blocks that leave the KV pool come back with the same bytes, from memory and from a file, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine.offload import Offload
from penstock_server.engine.pool_blocks import DeviceBlocks, HostBlocks, pool_blocks
from penstock_server.errors import ConfigError, PlanError
from penstock_server.protocol.plan import Transfer, TransferKind
from torch import Tensor

STORE, LOAD, DEMOTE = TransferKind
NUM_BLOCKS, NUM_MEMORY_SLOTS, NUM_DISK_SLOTS = 6, 3, 4
NUM_SLOTS = NUM_MEMORY_SLOTS + NUM_DISK_SLOTS
BLOCKS = st.integers(0, NUM_BLOCKS - 1)
SLOTS = st.integers(0, NUM_SLOTS - 1)
TRANSFERS = st.lists(
    st.one_of(
        st.builds(Transfer, st.just(STORE), BLOCKS, SLOTS),
        st.builds(Transfer, st.just(LOAD), SLOTS, BLOCKS),
        st.builds(Transfer, st.just(DEMOTE), SLOTS, SLOTS),
    ),
    max_size=20,
)
KINDS = [HostBlocks, DeviceBlocks]
"""What is for GPUs runs on a CPU, too, where nothing is asynchronous."""


def make_caches() -> list[Tensor]:
    """Two layers of different shapes and types, whose bytes all differ between blocks."""
    first = torch.arange(NUM_BLOCKS * 8, dtype=torch.float32).view(NUM_BLOCKS, 4, 2).to(torch.bfloat16)
    return [first, torch.arange(NUM_BLOCKS * 3, dtype=torch.float32).view(NUM_BLOCKS, 3)]


def offload_of(
    folder: Path, kind: type[HostBlocks | DeviceBlocks] = HostBlocks, caches: Sequence[Tensor] | None = None
) -> Offload:
    caches = make_caches() if caches is None else caches
    return Offload(kind(caches, NUM_BLOCKS, torch.device("cpu")), NUM_MEMORY_SLOTS, NUM_DISK_SLOTS, folder)


@settings(max_examples=100, deadline=None)
@given(plans=st.lists(TRANSFERS, min_size=1, max_size=3), kind=st.sampled_from(KINDS))
def test_transfers_are_made_in_their_order(
    plans: list[list[Transfer]], kind: type[HostBlocks | DeviceBlocks], tmp_path_factory: pytest.TempPathFactory
) -> None:
    caches, expected = make_caches(), make_caches()
    offload = offload_of(tmp_path_factory.getbasetemp(), kind, caches)
    slots: dict[int, list[Tensor]] = {}
    for plan in plans:
        moved = []
        for move in plan:
            if move.kind is not STORE and move.source not in slots:
                continue  # the scheduler moves only what it has stored
            moved.append(move)
            if move.kind is STORE:
                slots[move.target] = [cache[move.source].clone() for cache in expected]
            elif move.kind is DEMOTE:
                slots[move.target] = slots[move.source]
            else:
                for cache, content in zip(expected, slots[move.source], strict=True):
                    cache[move.target] = content
        offload.move(moved)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache, other)


def test_a_place_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    offload = offload_of(tmp_path)
    beyond = [(STORE, NUM_BLOCKS, 0), (STORE, 0, NUM_SLOTS), (LOAD, NUM_SLOTS, 0), (LOAD, 0, NUM_BLOCKS)]
    for move in (*beyond, (DEMOTE, NUM_SLOTS, 0), (DEMOTE, 0, NUM_SLOTS)):
        with pytest.raises(PlanError, match="is beyond 6 blocks and 7 slots"):
            offload.move([Transfer(*move)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("moves", "slot", "place"),
    [
        ([(STORE, 1, 2)], 2, "memory"),
        ([(STORE, 1, 3)], 3, "disk"),
        ([(STORE, 1, 2), (DEMOTE, 2, 4)], 4, "disk"),
    ],
)
def test_a_slot_that_gives_back_other_bytes_is_noticed(
    kind: type[HostBlocks | DeviceBlocks],
    moves: list[tuple[TransferKind, int, int]],
    slot: int,
    place: str,
    tmp_path: Path,
) -> None:
    for byte in range(28):
        offload = offload_of(tmp_path, kind)
        offload.move([Transfer(*move) for move in moves])
        offload._row(slot)[byte] ^= 1 << byte % 8
        with pytest.raises(RuntimeError, match=f"slot {slot} of the KV offload is not what .*: the {place} is faulty"):
            offload.move([Transfer(LOAD, slot, 1)])


def test_what_changes_in_memory_is_noticed_after_it_has_moved_to_disk(tmp_path: Path) -> None:
    offload = offload_of(tmp_path)
    offload.move([Transfer(STORE, 1, 2)])
    offload._row(2)[0] ^= 1
    offload.move([Transfer(DEMOTE, 2, 4)])
    with pytest.raises(RuntimeError, match="slot 4 of the KV offload is not what was written"):
        offload.move([Transfer(LOAD, 4, 1)])


def test_a_file_takes_its_space_at_the_start_and_has_no_name(tmp_path: Path) -> None:
    offload_of(tmp_path)
    assert not list(tmp_path.iterdir())
    for folder, slots in ((tmp_path / "missing", 1), (tmp_path, 1 << 50)):
        with pytest.raises(ConfigError, match=r"--kv-offload-folder .* cannot reserve"):
            Offload(pool_blocks(make_caches(), NUM_BLOCKS, torch.device("cpu")), 0, slots, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_without_bytes_move_to_every_slot(kind: type[HostBlocks | DeviceBlocks], tmp_path: Path) -> None:
    """A stage whose layers keep states only is told the same moves as the others."""
    offload = offload_of(tmp_path, kind, [])
    offload.move([Transfer(STORE, 5, 0), Transfer(DEMOTE, 0, 6), Transfer(LOAD, 6, 1)])
    with pytest.raises(PlanError, match="is beyond 6 blocks and 7 slots"):
        offload.move([Transfer(STORE, 6, 0)])


def test_only_slots_in_memory_have_pages_to_back(tmp_path: Path) -> None:
    blocks = pool_blocks(make_caches(), NUM_BLOCKS, torch.device("cpu"))
    assert [page.shape for page in Offload(blocks, 2, 3, tmp_path).pages] == [(2, blocks.width)]
    assert not Offload(blocks, 0, 3, tmp_path).pages
