"""Weights read in pieces equal those read at once, for every layout and every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES
from gguf_cases import GGUF_CASES
from penstock_server.parallel import RankGroup
from penstock_server.weights import loader, safetensors_file
from penstock_server.weights.gguf import matrix
from shares import open_loader
from test_gguf_parity import made as made_gguf
from tiny_model import save_case

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = [(RankGroup(), True), (RankGroup(1, 2), True), (RankGroup(1, 2), False)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, of different sizes in the file and in the model."""
    monkeypatch.setattr(loader, "PIECE_BYTES", 1000)
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 700)
    monkeypatch.setattr(matrix, "PIECE_WEIGHTS", 200)


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_checkpoint_make_the_whole(name: str, tmp_path: Path) -> None:
    check(save_case(name, tmp_path))


@pytest.mark.parametrize("name", GGUF_CASES)
def test_pieces_of_a_gguf_file_make_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    check(made_gguf(name, tmp_path)[1])


def check(folder: Path) -> None:
    num_pieces = 0
    for group, exact in RANKS:
        whole, cut = open_loader(folder, group, exact), open_loader(folder, group, exact)
        for name, parameter in whole.parameters.items():
            expected = whole.read(name)
            if len(parameter.local_shape) == 2:
                pieces = [piece.clone() for piece in cut.pieces(name)]
                num_pieces += len(pieces) - 1
                assert torch.equal(torch.cat(pieces), expected), name
            else:
                cut.read(name)
        whole.finish()
        cut.finish()
        assert cut.loaded_bytes == whole.loaded_bytes
    assert num_pieces
