"""Blocks that leave the KV pool come back with the same bytes, from host memory and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.engine.offload import Offload
from penstock_server.errors import ConfigError, PlanError
from penstock_server.plan import Transfer

NUM_BLOCKS, NUM_SLOTS = 6, 4
TRANSFERS = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_SLOTS - 1), st.booleans()), max_size=20
)


def make_caches() -> list[torch.Tensor]:
    """Two layers of different shapes and types, whose bytes all differ between blocks."""
    first = torch.arange(NUM_BLOCKS * 8, dtype=torch.float32).view(NUM_BLOCKS, 4, 2).to(torch.bfloat16)
    return [first, torch.arange(NUM_BLOCKS * 3, dtype=torch.float32).view(NUM_BLOCKS, 3)]


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "file" else None


@settings(max_examples=100, deadline=None)
@given(plans=st.lists(TRANSFERS, min_size=1, max_size=3), in_file=st.booleans())
def test_transfers_are_made_in_their_order(
    plans: list[list[tuple[int, int, bool]]], in_file: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    caches, expected = make_caches(), make_caches()
    offload = Offload(caches, NUM_SLOTS, tmp_path_factory.getbasetemp() if in_file else None)
    slots: dict[int, list[torch.Tensor]] = {}
    for plan in plans:
        moved = []
        for block_id, slot, is_load in plan:
            if is_load and slot not in slots:
                continue  # the scheduler loads only what it has stored
            moved.append(Transfer(block_id, slot, is_load))
            for layer, cache in enumerate(expected):
                if is_load:
                    cache[block_id] = slots[slot][layer]
            if not is_load:
                slots[slot] = [cache[block_id].clone() for cache in expected]
        offload.move(moved)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache, other)


def test_a_place_that_does_not_exist_is_refused(folder: Path | None) -> None:
    offload = Offload(make_caches(), NUM_SLOTS, folder)
    for transfer in (Transfer(NUM_BLOCKS, 0, False), Transfer(0, NUM_SLOTS, False)):
        with pytest.raises(PlanError, match="is beyond 6 blocks and 4 slots"):
            offload.move([transfer])


def test_a_file_that_gives_back_other_bytes_is_noticed(tmp_path: Path) -> None:
    offload = Offload(make_caches(), NUM_SLOTS, tmp_path)
    offload.move([Transfer(1, 2, False)])
    offload._slots[2, 0] ^= 1
    with pytest.raises(RuntimeError, match="slot 2 of the KV offload file is not what was written"):
        offload.move([Transfer(1, 2, True)])


def test_a_file_takes_its_space_at_the_start_and_has_no_name(tmp_path: Path) -> None:
    Offload(make_caches(), NUM_SLOTS, tmp_path)
    assert not list(tmp_path.iterdir())
    for folder, slots in ((tmp_path / "missing", 1), (tmp_path, 1 << 50)):
        with pytest.raises(ConfigError, match=r"--kv-offload-folder .* cannot reserve"):
            Offload(make_caches(), slots, folder)
