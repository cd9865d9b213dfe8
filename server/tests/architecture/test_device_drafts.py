"""Drafts on a GPU, or on its kernels in Triton's interpreter: steps with draft rows run as recorded decode steps, and
tokens have the bits of steps without drafts, whatever drafts. With `--deterministic`, where rows have the same bits in
every batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB
from eagle_checkpoint import random_head, save_head
from fake_cuda import record_eagerly
from late_device import make_late
from mtp_checkpoint import Reference
from penstock_server.device.triton import device as triton_device
from penstock_server.engine import Engine
from penstock_server.engine.drafting import medusa, ngram
from penstock_server.engine.drafting.interface import Drafter
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.engine.drafting.ngram import NgramDrafter
from penstock_server.engine.graphs import Bucket, StepGraphs
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Sampling
from safetensors.torch import save_file
from tested_device import DEVICE, triton_skip_reason
from tiny_model import save_case
from tiny_models import make_model, prompts, save_model

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from test_deterministic import triton_everywhere
from test_drafts import Drafts, generate

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, of the interpreter

SLOW_IN_THE_INTERPRETER = pytest.mark.slow if DEVICE.type == "cpu" else pytest.mark.gpu
BLOCK_TOKENS, NUM_BLOCKS, NUM_TOKENS, MAX_DRAFTS = 16, 100, 5, 3
LIMITS = WarmUpConfig(
    max_step_tokens=512,
    max_step_sequences=12,
    max_sequence_tokens=128,
    num_blocks=NUM_BLOCKS,
    proven=True,
    graph_sizes=(8,),
)
SAMPLINGS = [
    Sampling(top_n=2),
    Sampling(do_sample=True, seed=8, temperature=0.7, frequency_penalty=0.5, top_p=0.9),
    Sampling(repetition_penalty=1.3),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the graphs of each number of rows were replayed. On a CPU, all is copied as to a GPU."""
    monkeypatch.setattr("test_drafts.SAMPLINGS", SAMPLINGS)
    monkeypatch.setattr("test_drafts.NUM_TOKENS", NUM_TOKENS)
    replayed, forward = Counter[int](), StepGraphs.forward

    def counted(self: StepGraphs, bucket: Bucket, *args: Any) -> torch.Tensor:
        replayed[bucket.num_rows] += 1
        return forward(self, bucket, *args)

    monkeypatch.setattr(StepGraphs, "forward", counted)
    if DEVICE.type == "cpu":
        monkeypatch.setattr("penstock_server.engine.start.CudaRecorder", lambda: record_eagerly)
        monkeypatch.setattr(triton_device, "unavailable_reason", lambda device: None)
        make_late(monkeypatch)
    return replayed


def options_of(folder: Path, **others: Any) -> LoadOptions:
    return LoadOptions(folder, torch.float32, DEVICE, BLOCK_TOKENS, attention="triton", deterministic=True, **others)


def load(options: LoadOptions) -> CausalModel:
    """PERF: in the interpreter only attention runs on the kernels of a GPU, unless they are everywhere; the others are
    a CPU's, whose rows do not depend on the batch either."""
    model = load_model(options, RankGroup())
    model.traits = replace(model.traits, is_recordable=True)
    return model


def ready(model: CausalModel, drafter: Drafter | None = None) -> Engine:
    engine = Engine(model, RankGroup(), DEVICE, BLOCK_TOKENS, drafter=drafter)
    engine.warm_up(LIMITS)
    return engine


@SLOW_IN_THE_INTERPRETER
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v3", "t5"])
def test_recorded_steps_with_drafts_change_no_bit(
    name: str, tmp_path: Path, gpu: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full and sliding attention, latent attention, and attention over a source."""
    with triton_everywhere():
        check_recorded_steps(name, tmp_path, gpu, monkeypatch)


def check_recorded_steps(name: str, tmp_path: Path, gpu: Counter[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ready(load(options_of(save_case(name, tmp_path))))
    num_source = 5 if CASES[name].has_encoder else 0
    texts = prompts(3, [6, 20, 33], VOCAB)
    plain, num_plain_steps = generate(engine, texts, num_source, max_drafts=0)
    known = [text + [token.id for token in tokens] for text, tokens in zip(texts, plain, strict=True)]
    monkeypatch.setattr(ngram, "continuation", Drafts(known))
    gpu.clear()
    drafted, num_steps = generate(engine, texts, num_source, MAX_DRAFTS)
    assert drafted == plain
    assert num_steps < num_plain_steps, "drafts are right"
    assert gpu.total() >= num_steps - len(texts), "all steps without a prompt are recorded ones"


def draft_model(folder: Path) -> tuple[LoadOptions, Path | None]:
    """The model drafts for itself."""
    options = options_of(save_case("llama", folder))
    (options.folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return options, options.folder


def eagle(folder: Path) -> tuple[LoadOptions, Path | None]:
    model = save_model(make_model("llama"), folder / "model")
    return options_of(model), save_head(folder / "head", random_head(131), eagle_aux_hidden_state_layer_ids=[0, 1, 2])


def mtp(folder: Path) -> tuple[LoadOptions, Path | None]:
    return options_of(Reference.random().save(folder), drafts_with_mtp=True), None


def heads(folder: Path) -> tuple[LoadOptions, Path | None]:
    model, hidden = save_model(make_model("llama"), folder / "model"), 48
    torch.manual_seed(3)
    tensors = {f"{i}.0.linear.weight": torch.randn(hidden, hidden) * 0.1 for i in range(3)}
    tensors |= {f"{i}.0.linear.bias": torch.randn(hidden) * 0.1 for i in range(3)}
    tensors["token_ids"] = torch.arange(3, 120)
    (folder / "heads").mkdir()
    save_file(tensors, folder / "heads" / medusa.WEIGHTS_NAME)
    (folder / "heads" / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    return options_of(model), folder / "heads"


class Recorded:
    """Keeps what a drafter drafts behind each text. Implements `Drafter`."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, table: Any, rows: Any, most: Any) -> Any:
        drafts = self._drafter.draft(table, rows, most)
        for row, draft in zip(rows.tolist(), drafts, strict=True):
            self.drafts[tuple(table.known_ids(row).tolist())] = draft.tolist()
        return drafts


@SLOW_IN_THE_INTERPRETER
@pytest.mark.parametrize("write", [draft_model, eagle, mtp, heads])
def test_every_drafter_drafts_on_the_device_and_changes_no_bit(
    write: Callable[[Path], tuple[LoadOptions, Path | None]],
    tmp_path: Path,
    gpu: Counter[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded steps keep what a head reads of the model, which steps that run eagerly keep likewise."""
    monkeypatch.setattr(medusa, "_LEAST_LOGPROB", -70.0)
    options, folder = write(tmp_path)
    texts = prompts(4, [5, 18], 131)
    expected, _ = generate(ready(load(replace(options, drafts_with_mtp=False))), texts, 0, 0)
    found = []
    for graph_sizes in ((8,), (0,)):
        monkeypatch.setattr(f"{__name__}.LIMITS", replace(LIMITS, graph_sizes=graph_sizes))
        model = load(options)
        drafter = load_drafter(folder, model, options, load_model, RankGroup())
        assert not isinstance(drafter, NgramDrafter)
        engine, recorded = ready(model, drafter), Recorded(drafter)
        monkeypatch.setattr(engine._runner, "_drafter", recorded)
        gpu.clear()
        drafted, _ = generate(engine, texts, 0, MAX_DRAFTS)
        assert drafted == expected
        assert bool(gpu) == (graph_sizes != (0,))
        found.append(recorded.drafts)
    assert found[0] == found[1]
    # Heads are not asked where lookup finds a draft.
    assert sum(map(len, found[0].values())) >= NUM_TOKENS - (write is heads)


def test_rows_of_the_output_matrix_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    reference = make_model("llama")
    with triton_everywhere():
        model = load(options_of(save_model(reference, tmp_path)))
    ids = torch.tensor([7, 0, 130, 7])
    expected = reference.lm_head.weight[ids].detach()
    torch.testing.assert_close(model.head_rows(ids).cpu(), expected, atol=1e-3, rtol=1e-3)
