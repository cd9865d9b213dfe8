"""Draft tokens change no bit of a model in any format of weights or of the KV cache, on one rank or on two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_mxfp4
import torch
from cases import VOCAB
from gguf_files import save_gguf
from penstock_server.device.attention.fp8 import FP8_DTYPES
from penstock_server.engine import Engine
from penstock_server.engine.drafting import ngram
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Plan
from penstock_server.weights.gguf.folder import gguf_folder
from plans import Token, listed
from quantized_checkpoints import save_quantized
from rank_threads import run_native_ranks
from test_drafts import BLOCK_TOKENS, NUM_BLOCKS, SAMPLINGS, Drafts, generate
from test_quantized_models import FLAGS, FORMATS, GGUF, MORE_FORMATS, MORE_GGUF, make_model
from tiny_models import prompts

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
LIMITS = WarmUpConfig(max_step_tokens=256, max_step_sequences=64, num_blocks=NUM_BLOCKS, proven=True)
CHECKPOINTS = {**FORMATS, **MORE_FORMATS}
DEFAULT = {*FORMATS, "w8a8", "fp8", "mxfp4", *FLAGS, "Q4_0", "Q5_1", *FP8_DTYPES}
KINDS = [
    pytest.param(kind, marks=() if kind in DEFAULT else pytest.mark.slow)
    for kind in (*CHECKPOINTS, "mxfp4", *FLAGS, *GGUF, *MORE_GGUF, *FP8_DTYPES)
]
# Greedy, drawn, and with penalties; two of them with the logprobs of alternatives.
KEPT = [sampling for sampling in SAMPLINGS if sampling.grammar is None][1::3]


@dataclass
class Recorded:
    """An engine that keeps its plans."""

    engine: Engine

    def __post_init__(self) -> None:
        self.plans: list[Plan] = []

    def reset(self) -> None:
        self.engine.reset()

    def step(self, made: Plan) -> Any:
        self.plans.append(made)
        return self.engine.step(made)


def save(kind: str, folder: Path) -> Path:
    """A checkpoint whose layers have this format."""
    if kind == "mxfp4":
        return test_mxfp4.save(test_mxfp4.make_model(2), folder)
    model = make_model("llama")
    if kind in CHECKPOINTS:
        return save_quantized(model, folder, *CHECKPOINTS[kind])[0]
    if kind in (*GGUF, *MORE_GGUF):
        return gguf_folder(save_gguf(model, folder / "model.gguf", "llama", kind))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_bit_in_any_format(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks run the plans of one rank, which depend on how many drafts were right."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("test_drafts.SAMPLINGS", KEPT)
    options = LoadOptions(
        save(kind, tmp_path),
        torch.bfloat16,
        CPU,
        BLOCK_TOKENS,
        quantize=kind.split()[0] if kind in FLAGS else "",
        kv_dtype=FP8_DTYPES.get(kind),
    )
    engine = ready(options, RankGroup())
    texts = prompts(3, [6 + 11 * i % 30 for i in range(len(KEPT))], VOCAB)
    plain, num_plain_steps = generate(engine, texts, 0, max_drafts=0)
    known = [text + [token.id for token in tokens] for text, tokens in zip(texts, plain, strict=True)]
    monkeypatch.setattr(ngram, "continuation", Drafts(known))
    recorded = Recorded(engine)
    drafted, num_steps = generate(recorded, texts, 0, max_drafts=6)  # type: ignore[arg-type]
    assert drafted == plain
    assert num_steps + 3 < num_plain_steps, "many drafts are right"

    def on_rank(group: RankGroup) -> list[list[Token]]:
        engine = ready(options, group)
        outputs: list[list[Token]] = [[] for _ in texts]
        for made in recorded.plans:
            result = engine.step(made)
            for sequence, token in zip(result.sequence_ids.tolist(), listed(result.sampled), strict=True):
                outputs[sequence].append(token)
        return outputs

    assert run_native_ranks(2, on_rank)[0] == plain


def ready(options: LoadOptions, group: RankGroup) -> Engine:
    engine = Engine(load_model(options, group), group, CPU, BLOCK_TOKENS)
    engine.warm_up(LIMITS)
    return engine
