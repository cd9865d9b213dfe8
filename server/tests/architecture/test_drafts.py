"""A model's tokens, logprobs and alternatives have the same bits with and without draft tokens, whichever of these are
right, for every sampling parameter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import VOCAB
from grammar_walk import END, write_small_tokenizer
from native_builds import build
from penstock_server.engine import Engine
from penstock_server.engine.drafting import medusa, ngram
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Adapter, Grammar, ImageSpan, NewSequence, Sampling
from plans import Advance, Token, listed, plan
from rank_threads import run_native_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_model import save_case
from tiny_models import prompts

pytestmark = pytest.mark.native

BLOCK_TOKENS = 16
NUM_BLOCKS = 100
NUM_TOKENS = 24
SAMPLINGS = [
    Sampling(grammar=Grammar("regex", "(ab?a|0101){3,9}b{20}"), top_n=2, stop_token_ids=(END,)),
    Sampling(do_sample=True, seed=9, grammar=Grammar("lark", 'start: ("aab" "10"+ "ba1")+'), frequency_penalty=0.5),
    Sampling(
        do_sample=True, seed=10, grammar=Grammar("regex", "[ab01]+"), bad_words=((0, 1),), min_new_tokens=20, top_p=0.8
    ),
    Sampling(),
    Sampling(top_n=3),
    Sampling(do_sample=True, seed=1),
    Sampling(do_sample=True, seed=2, temperature=0.3, top_k=5, top_n=2),
    Sampling(do_sample=True, seed=3, top_p=0.7, min_p=0.01, model_logprobs=True),
    Sampling(do_sample=True, seed=4, typical_p=0.8),
    Sampling(repetition_penalty=1.4),
    Sampling(do_sample=True, seed=5, frequency_penalty=0.7, presence_penalty=0.4, top_n=2),
    Sampling(do_sample=True, seed=6, watermark=True),
    Sampling(logit_bias=((3, 4.0), (5, -2.0)), min_new_tokens=12, stop_token_ids=(3, 7, 9)),
    Sampling(bad_words=((3,), (5, 6), (8, 9, 10))),
    Sampling(do_sample=True, seed=7, allowed_tokens=b"\xff\x0f\xf0\xff"),
    Sampling(do_sample=True, seed=8, temperature=0.2, frequency_penalty=0.5, bad_words=((4, 5),), top_p=0.9, top_n=1),
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_small_tokenizer(folder)
    compiler = GrammarCompiler(folder, VOCAB)
    yield compiler
    compiler.close()


class Drafts:
    """Stands for the search of a text: continuations of known texts, each token wrong with a probability. The same text
    has the same draft on every rank."""

    def __init__(self, texts: list[list[int]], vocab_size: int = VOCAB) -> None:
        self.texts = texts
        self.vocab_size = vocab_size

    def __call__(self, history: np.ndarray, most: int, least_match: int = 2) -> np.ndarray:
        # A grammar's draft may have gone on with a token that was not generated.
        text = next((text for text in self.texts if text[: len(history)] == history.tolist()), [])
        draw = random.Random(history.tobytes())
        draft = text[len(history) :][: draw.randrange(most + 1)]
        return np.array([(i + (draw.random() < 0.2)) % self.vocab_size for i in draft], np.int32)


def generate(
    engine: Engine,
    texts: list[list[int]],
    num_source: int,
    max_drafts: int,
    adapters: Sequence[Adapter | None] = (None,),
    images: Sequence[Sequence[ImageSpan]] = ((),),
) -> tuple[list[list[Token]], int]:
    """The tokens of each text under its sampling, and the number of steps. Texts start one after the other, and take
    the adapters and images in turn."""
    engine.reset()
    draw = random.Random(max_drafts)
    outputs: list[list[Token]] = [[] for _ in texts]
    num_computed = [0] * len(texts)
    blocks = [range(i, NUM_BLOCKS, len(texts)) for i in range(len(texts))]
    num_blocks = [0] * len(texts)
    for step in itertools.count(1):
        new, advances = [], []
        for i, text in enumerate(texts[:step]):
            if not num_computed[i]:
                told = NewSequence(
                    i,
                    text,
                    len(text),
                    sampling=SAMPLINGS[i % len(SAMPLINGS)],
                    num_source_tokens=num_source,
                    images=images[i % len(images)],
                    adapter=adapters[i % len(adapters)],
                )
                new.append(told)
            pending = len(text) + len(outputs[i]) - num_computed[i]
            left = NUM_TOKENS - len(outputs[i])
            if left > 0:
                drafts = min(draw.randrange(max_drafts + 1), left - 1)
                end = -(-(num_computed[i] + pending + drafts) // BLOCK_TOKENS)
                advances.append(Advance(i, pending, blocks[i][num_blocks[i] : end], True, drafts))
                num_blocks[i] = max(num_blocks[i], end)
        if not advances:
            return outputs, step - 1
        result = engine.step(plan(step, new_sequences=new, advances=advances))
        assert not result.failures
        for i, token in zip(result.sequence_ids.tolist(), listed(result.sampled), strict=True):
            outputs[i].append(token)
        for i in {advance.sequence_id for advance in advances}:
            num_computed[i] = len(texts[i]) + len(outputs[i]) - 1
    raise AssertionError("the loop returns")


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "deepseek-v3", "gpt2", "t5"])
def test_drafts_change_no_bit(
    name: str, tmp_path: Path, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LoadOptions(save_case(name, tmp_path), torch.bfloat16, torch.device("cpu"), BLOCK_TOKENS)
    model = load_model(options, RankGroup())
    engine = Engine(model, RankGroup(), torch.device("cpu"), BLOCK_TOKENS, compiler=compiler)
    engine.warm_up(WarmUpConfig(max_step_tokens=512, max_step_sequences=256, num_blocks=NUM_BLOCKS, proven=True))
    num_source = 5 if engine.model.traits.max_source_tokens else 0
    texts = prompts(3, [6 + 11 * i % 30 for i in range(len(SAMPLINGS))], VOCAB)
    plain, num_plain_steps = generate(engine, texts, num_source, max_drafts=0)
    known = [text + [token.id for token in tokens] for text, tokens in zip(texts, plain, strict=True)]
    monkeypatch.setattr(ngram, "continuation", Drafts(known))
    drafted, num_steps = generate(engine, texts, num_source, max_drafts=6)
    assert drafted == plain
    assert num_steps + 5 < num_plain_steps, "many drafts are right"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_heads_that_share_the_model_s_matrix_change_no_bit(
    name: str, tmp_path: Path, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medusa, "_LEAST_LOGPROB", -70.0)
    group, cpu = RankGroup(), torch.device("cpu")
    model = load_model(LoadOptions(save_case(name, tmp_path), torch.bfloat16, cpu, BLOCK_TOKENS), group)
    heads = tmp_path / "heads"
    heads.mkdir()
    hidden = model.traits.hidden_size
    # Without a residual, a head repeats the token that was sampled.
    save_file(
        {f"{i}.0.linear.{part}": torch.zeros(*shape) for i in range(3) for part, shape in shapes_of(hidden)},
        heads / medusa.WEIGHTS_NAME,
    )
    (heads / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    found = medusa.read_heads(heads, model, medusa.HeadKernels.of(cpu, torch.bfloat16, build()), group)
    assert found is not None
    drafter = medusa.MedusaDrafter(found)
    engine = Engine(model, group, cpu, BLOCK_TOKENS, compiler=compiler, drafter=drafter)
    engine.warm_up(WarmUpConfig(max_step_tokens=512, max_step_sequences=256, num_blocks=NUM_BLOCKS, proven=True))
    texts = prompts(3, [6 + 11 * i % 30 for i in range(len(SAMPLINGS))], VOCAB)
    plain, _ = generate(engine, texts, 0, max_drafts=0)
    num_drafts = []
    draft = drafter.draft

    def counted(*args: Any) -> Any:
        drafts = draft(*args)
        num_drafts.append(sum(map(len, drafts)))
        return drafts

    monkeypatch.setattr(drafter, "draft", counted)
    assert generate(engine, texts, 0, max_drafts=6)[0] == plain
    assert sum(num_drafts) > len(texts)


def shapes_of(hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("weight", (hidden, hidden)), ("bias", (hidden,))]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_of_the_output_matrix_are_those_of_the_checkpoint_on_two_ranks(name: str, tmp_path: Path) -> None:
    options = LoadOptions(save_case(name, tmp_path), torch.bfloat16, torch.device("cpu"), BLOCK_TOKENS)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensor = "lm_head.weight" if "lm_head.weight" in set(file.keys()) else "model.embed_tokens.weight"
        expected = file.get_tensor(tensor).bfloat16()
    ids = torch.tensor([0, VOCAB - 1, 7, VOCAB // 2, 7]).repeat(300)
    for rows in run_native_ranks(2, lambda group: load_model(options, group).head_rows(ids)):
        assert torch.equal(rows, expected[ids])
