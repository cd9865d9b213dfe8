"""Whole models with `--deterministic` on a GPU, or in Triton's interpreter: a token's logits have the same bits alone
and in any batch, in any chunks, on one rank and on two; and the steps' kernels are those of the flag."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES
from fake_cuda import fake_cuda, launched, load
from model_driver import ModelDriver
from penstock_server import device as devices
from penstock_server.device.triton import device as triton_device
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Advances, NewSequence, Plan
from rank_threads import run_ranks
from tested_device import DEVICE, one_order_of_sums, triton_skip_reason
from tiny_model import save_case
from tiny_models import prompts
from torch import Tensor

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton.invariant import InvariantOps

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, of the interpreter

BLOCK_TOKENS = 16
# Each kind of layer that has a kernel of its own: biases, layer norms, windows and soft caps, sinks, latent attention,
# experts with and without a wide router.
KINDS = ("llama", "gpt2", "gemma2", "gpt-oss", "qwen3-moe", "deepseek-v3")
# The length of a text, its chunks, and whether other texts are beside it.
Cuts = tuple[int, Sequence[tuple[list[int], bool]]]
ALL_CUTS: Cuts = 40, [([40], True), ([17, 23], False), ([1, 36, 1, 1, 1], True)]
# In the interpreter, which is slow.
CUTS: Cuts = (20, [([1, 17, 1, 1], True)]) if DEVICE.type == "cpu" else ALL_CUTS
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.linear"}


def one_at_a_time(launch: Callable[..., None]) -> Callable[..., None]:
    """For ranks that are threads: the interpreter has one place in the grid for all of them."""
    lock = threading.Lock()

    def locked(*arguments: Any, **named: Any) -> None:
        with lock:
            launch(*arguments, **named)

    return locked


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """On a CPU, in the interpreter, models get the operators and the attention of a GPU."""
    with one_order_of_sums(), pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(triton_device, "unavailable_reason", lambda device: None)
            patch.setattr(devices, "choose_ops", lambda device, dtype, *_, **__: InvariantOps(device, dtype))
            patch.setattr(triton_device, "launch", one_at_a_time(triton_device.launch))
        yield


def load_deterministic(folder: Path, group: RankGroup | None = None) -> CausalModel:
    options = LoadOptions(folder, torch.float32, DEVICE, BLOCK_TOKENS, attention="triton", deterministic=True)
    return load_model(options, group or RankGroup())


def logits_of(model: CausalModel, chunks: list[int], beside: list[list[int]]) -> Tensor:
    """[tokens, vocab] of a text, cut into chunks, while other texts start and continue."""
    driver = ModelDriver(model, BLOCK_TOKENS)
    sequence = driver.sequence(prompts(7, [sum(chunks)], model.traits.vocab_size)[0])
    others, found = [driver.sequence(other) for other in beside], []
    for count in chunks:
        advances = [(other, 3) for other in others if other.num_computed + 3 <= len(other.token_ids)]
        logits = driver.step([*advances, (sequence, count)], every_row=True)
        found.append(logits[3 * len(advances) :])
    return torch.cat(found)


def assert_same_bits(name: str, folder: Path, cuts: Cuts) -> None:
    folder, (length, chunkings) = save_case(name, folder), cuts
    with triton_everywhere():
        model = load_deterministic(folder)
        assert model.traits.attention_name == "triton"
        whole = logits_of(model, [length], [])
        assert whole.isfinite().all()
        beside = prompts(8, [20, 9], model.traits.vocab_size)
        for chunks, has_others in chunkings:
            found = logits_of(model, chunks, beside if has_others else [])
            assert torch.equal(found, whole), (chunks, has_others, int((found != whole).any(-1).sum()))


@pytest.mark.parametrize("name", KINDS)
def test_logits_depend_neither_on_the_batch_nor_on_the_cut(name: str, tmp_path: Path) -> None:
    assert_same_bits(name, tmp_path, CUTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.has_encoder and not case.keeps_state]
)
def test_logits_of_every_decoder_depend_neither_on_the_batch_nor_on_the_cut(name: str, tmp_path: Path) -> None:
    assert_same_bits(name, tmp_path, ALL_CUTS)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the ranks are threads, which would share a GPU's stream")
@pytest.mark.parametrize("name", ["olmo2", "qwen3-moe", "deepseek-v3"])
def test_two_ranks_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    folder, chunks = save_case(name, tmp_path), [13, 5]
    with triton_everywhere():
        expected = logits_of(load_deterministic(folder), chunks, [])
        first, second = run_ranks(2, lambda group: logits_of(load_deterministic(folder, group), chunks, []))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


@pytest.mark.parametrize("name", KINDS)
def test_no_step_multiplies_by_the_matrix_library(name: str, tmp_path: Path) -> None:
    folder = save_case(name, tmp_path)
    new = [NewSequence(i, [7] * 5, 5, block_ids=[2 * i, 2 * i + 1]) for i in range(2)]
    with fake_cuda() as launches:
        engine = load(folder, deterministic=True)
        for plan in (
            Plan(1, new_sequences=new, advances=Advances.of([0, 1], [5] * 2, [True] * 2)),
            Plan(2, advances=Advances.of([0, 1], [1, 1], [True, True])),
        ):
            counts = launched((engine, launches), plan).kernels
            assert counts["product_kernel"]
            assert not PRODUCTS & counts.keys()
        engine.close()


def test_models_that_transformers_runs_are_refused(tmp_path: Path) -> None:
    transformers.DiffLlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="results depend on the batch; remove --deterministic"):
        load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 16, deterministic=True), RankGroup())


def test_states_are_refused(tmp_path: Path) -> None:
    with triton_everywhere(), pytest.raises(ConfigError, match=r"--deterministic .*layers that keep a state"):
        load_deterministic(save_case("qwen3-5", tmp_path))
