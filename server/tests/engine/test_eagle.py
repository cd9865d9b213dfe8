"""EAGLE-3 heads: what they draft is what the published computation drafts, and it changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from eagle_checkpoint import HEAD_DIM, HEADS, Tensors, knowing_head, random_head, save_head
from penstock_server.engine import Engine
from penstock_server.engine.drafting.eagle import EagleHead, is_eagle_head
from penstock_server.engine.drafting.head import HeadDrafter
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.errors import ConfigError
from penstock_server.layers import rope
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.prepare import prepare_speculative_model
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import NewSequence
from plans import Advance, listed, plan
from tiny_models import make_model, prompts, save_model
from torch import Tensor
from torch.nn.functional import linear, silu

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

VOCAB, OBSERVED = 131, (2, 4, 5)
CPU, BLOCK_TOKENS = torch.device("cpu"), 16
LIMITS = WarmUpConfig(max_step_tokens=64, max_step_sequences=16, num_blocks=60, proven=True)


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_model("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def model_folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(reference, tmp_path_factory.mktemp("model"))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def attention(head: Tensors, x: Tensor) -> Tensor:
    """x [tokens, 2 hidden] from position 0 on."""
    layer, num = "midlayer.self_attn.", len(x)
    angles = torch.outer(torch.arange(num), 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def projected(name: str, rotates: bool) -> Tensor:
        heads = linear(x, head[f"{layer}{name}.weight"]).view(num, -1, HEAD_DIM)
        if rotates:
            pairs = torch.complex(*heads.chunk(2, -1)) * turns
            heads = torch.cat((pairs.real, pairs.imag), -1)
        return heads.repeat_interleave(HEADS // heads.shape[1], 1)

    queries, keys, values = projected("q_proj", True), projected("k_proj", True), projected("v_proj", False)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5
    weights = scores.masked_fill(torch.ones(num, num).triu(1).bool(), float("-inf")).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
    return linear(attended, head[f"{layer}o_proj.weight"])


def expected_draft(reference: Any, head: Tensors, text: list[int], num_drafts: int) -> list[int]:
    """By the published computation, over the whole text for each draft."""
    embed = reference.model.embed_tokens.weight
    with torch.inference_mode():
        states = reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        fused = linear(torch.cat([states[layer][0] for layer in OBSERVED], 1), head["fc.weight"])[:-1]
        ids = list(text)
        for _ in range(num_drafts):
            tokens = norm(embed[torch.tensor(ids[1:])], head["midlayer.input_layernorm.weight"])
            x = torch.cat((tokens, norm(fused, head["midlayer.hidden_norm.weight"])), 1)
            residual = fused + attention(head, x)
            x = norm(residual, head["midlayer.post_attention_layernorm.weight"])
            gated = silu(linear(x, head["midlayer.mlp.gate_proj.weight"])) * linear(
                x, head["midlayer.mlp.up_proj.weight"]
            )
            residual = residual + linear(gated, head["midlayer.mlp.down_proj.weight"])
            found = int(linear(norm(residual[-1], head["norm.weight"]), head["lm_head.weight"]).argmax())
            ids.append(found + int(head["d2t"][found]))
            fused = torch.cat((fused, residual[-1:]))
    return ids[len(text) :]


class Recorded(HeadDrafter):
    """Keeps the drafts with the texts that they continue."""

    def __init__(self, head: Any, device: torch.device) -> None:
        super().__init__(head, device)
        self.drafts: list[tuple[list[int], list[int]]] = []

    def draft(self, table: Any, rows: Any, most: Any) -> Any:
        texts = [table.known_ids(row).tolist() for row in rows.tolist()]
        drafts = super().draft(table, rows, most)
        self.drafts += [(text, draft.tolist()) for text, draft in zip(texts, drafts, strict=True)]
        return drafts


def load(folder: Path) -> tuple[CausalModel, LoadOptions]:
    options = LoadOptions(folder, torch.float32, CPU, BLOCK_TOKENS)
    return load_model(options, RankGroup()), options


def drafting(model_folder: Path, head_folder: Path) -> tuple[Engine, Recorded]:
    model, options = load(model_folder)
    drafter = load_drafter(head_folder, model, options, load_model, RankGroup())
    assert isinstance(drafter, HeadDrafter)
    recorded = Recorded(drafter.model, CPU)
    engine = Engine(model, RankGroup(), CPU, BLOCK_TOKENS, drafter=recorded)
    engine.warm_up(replace(LIMITS, proven=False))
    recorded.drafts.clear()
    return engine, recorded


def generate(engine: Engine, texts: list[list[int]], num_tokens: int, num_drafts: int) -> tuple[list[Any], int]:
    """The tokens of each text, whose prompts are computed in two chunks, and the number of steps."""
    engine.reset()
    blocks = [range(place, 60, len(texts)) for place in range(len(texts))]
    outputs: list[list[Any]] = [[] for _ in texts]
    new = [NewSequence(i, text, len(text), block_ids=blocks[i][:10]) for i, text in enumerate(texts)]
    engine.step(plan(1, new_sequences=new, advances=[Advance(i, 3) for i in range(len(texts))]))
    for step in range(2, 100):
        advances = []
        for i, text in enumerate(texts):
            left = num_tokens - len(outputs[i])
            if left > 0:
                count = 1 if outputs[i] else len(text) - 3
                advances.append(Advance(i, count, (), True, min(num_drafts, left - 1) if outputs[i] else 0))
        if not advances:
            return outputs, step
        result = engine.step(plan(step, advances=advances))
        assert not result.failures
        for i, token in zip(result.sequence_ids.tolist(), listed(result.sampled), strict=True):
            outputs[i].append(token)
    raise AssertionError("the texts do not end")


def test_drafts_are_those_of_the_published_computation_and_change_no_bit(
    reference: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "_FIRST_ROWS", 8)  # the others are computed once it is known how many are needed
    head = random_head(VOCAB)
    engine, drafter = drafting(model_folder, save_head(tmp_path / "head", head))
    plain = Engine(load(model_folder)[0], RankGroup(), CPU, BLOCK_TOKENS)
    plain.warm_up(LIMITS)
    texts = prompts(4, [5, 9, 14], VOCAB)
    expected, _ = generate(plain, texts, 12, num_drafts=0)
    drafted, _ = generate(engine, texts, 12, num_drafts=3)
    assert drafted == expected
    assert len(drafter.drafts) > 20
    for text, draft in drafter.drafts:
        assert draft == expected_draft(reference, head, text, len(draft))


# As published: by SGLang's and by vLLM's users, and by EAGLE's authors, whose configuration is that of a whole model.
ARCHITECTURES = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_that_knows_a_text_saves_steps(
    architecture: str, reference: Any, model_folder: Path, tmp_path: Path
) -> None:
    (prompt,) = prompts(4, [9], VOCAB)
    plain = Engine(load(model_folder)[0], RankGroup(), CPU, BLOCK_TOKENS)
    plain.warm_up(LIMITS)
    (expected,), num_plain_steps = generate(plain, [prompt], 24, num_drafts=0)
    text = [*prompt, *(token.id for token in expected)]
    head = knowing_head(reference, text, OBSERVED)
    folder = save_head(tmp_path / "head", head, draft_vocab_size=VOCAB, architectures=[architecture])
    (drafted,), num_steps = generate(drafting(model_folder, folder)[0], [prompt], 24, num_drafts=1)
    assert drafted == expected
    assert num_steps <= num_plain_steps - 10


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_heads_are_told_from_draft_models_by_their_tensors(
    prefix: str, architecture: str, model_folder: Path, tmp_path: Path
) -> None:
    head = {name.replace("midlayer.", prefix): tensor for name, tensor in random_head(VOCAB).items()}
    assert is_eagle_head(save_head(tmp_path, head, architectures=[architecture]))
    assert not is_eagle_head(model_folder)


@pytest.mark.usefixtures("model_cache")
def test_a_head_of_eagle_s_authors_is_prepared_and_drafts(model_folder: Path, tmp_path: Path) -> None:
    """Theirs is a pickle whose `config.json` is that of a whole model, with no tokenizer."""
    head = random_head(VOCAB)
    folder = save_head(tmp_path / "head", head, architectures=["LlamaForCausalLM"], num_hidden_layers=40)
    (folder / "model.safetensors").unlink()
    torch.save(head, folder / "pytorch_model.bin")
    prepared = Path(prepare_speculative_model(str(folder)).folder)
    model, options = load(model_folder)
    drafter = load_drafter(prepared, model, options, load_model, RankGroup())
    assert isinstance(drafter, HeadDrafter)
    assert isinstance(drafter.model, EagleHead)


class Unread:
    """Stands for a head that must not compute anything."""

    max_position_tokens, weight_bytes, kv_bytes_per_block, caches = 64, 0, 0, ()


def test_a_text_that_the_model_has_not_read_has_no_draft() -> None:
    drafter, limits = HeadDrafter(cast(Any, Unread()), CPU), TableLimits(VOCAB, BLOCK_TOKENS, 8, 64, 2)
    table = SequenceTable(limits)
    table.add(NewSequence(1, [5], 1, block_ids=[0]))
    table.add(NewSequence(2, [5, 6, 7], 3, block_ids=[1]))
    drafts = drafter.draft(table, table.rows([1, 2]), np.array([3, 3]))
    assert [len(draft) for draft in drafts] == [0, 0]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("fc.weight", {}, "lacks the tensor fc.weight"),
        ("", {"intermediate_size": 81}, r"gate_proj.weight has shape \[80, 48\], must have \[81, 48\]"),
        ("", {"eagle_aux_hidden_state_layer_ids": [1, 1, 9]}, r"reads layers \[1, 1, 9\], must be different ones"),
        ("", {"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3'.*, which is not read; use"),
    ],
)
def test_heads_of_another_model_or_layout_are_refused(
    name: str, config: dict[str, object], message: str, model_folder: Path, tmp_path: Path
) -> None:
    head = random_head(VOCAB)
    head.pop(name, None)
    model, options = load(model_folder)
    folder = save_head(tmp_path / "head", head, **config)
    with pytest.raises(ConfigError, match=message):
        load_drafter(folder, model, options, load_model, RankGroup())
