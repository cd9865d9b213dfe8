"""Prompt logprobs of the whole engine compared with a forward pass of transformers, for any chunks of the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock_server.engine import Engine, prompt
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Sampling
from plans import Advance, Token, plan, step
from tiny_models import make_model, prompts, save_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    model = make_model("llama")
    return save_model(model, tmp_path_factory.mktemp("tiny")), model


def ready(folder: Path) -> Engine:
    engine, _ = Engine.load(LoadConfig(folder, 4, dtype="float32", num_threads=1))
    engine.warm_up(WarmUpConfig(64, 8, max_sequence_tokens=64, num_blocks=64))
    return engine


def reference(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    """[tokens - 1, vocab]: logprobs of the token that follows each token."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([text])).logits[0, :-1].double(), -1)


def check(tokens: list[Token], model: torch.nn.Module, text: list[int], top_n: int) -> None:
    wanted = reference(model, text)
    assert [token.id for token in tokens] == text[1:]
    for token, row in zip(tokens, wanted, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
        best = row.topk(top_n)
        assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert all(logprob == pytest.approx(float(row[top_id]), abs=1e-3) for top_id, logprob in token.top)


@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunks_give_the_model_s_own_logprobs(
    tiny: tuple[Path, torch.nn.Module], data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tiny
    engine = ready(folder)
    monkeypatch.setitem(prompt.CHUNK_ROWS, "cpu", data.draw(st.sampled_from([3, 64])))
    text, neighbour = prompts(5, [23, 17], 131)
    top_n = data.draw(st.sampled_from([0, 2]))
    asking = Sampling(do_sample=True, temperature=3.0, prompt_logprobs=True, top_n=top_n, logit_bias=((3, 9.0),))
    new = [NewSequence(1, text, 23, 0, range(10)), NewSequence(2, neighbour, 17, 0, range(10, 20))]
    new[0] = NewSequence(1, text, 23, 0, range(10), asking)
    tokens: list[Token] = []
    sampled = computed = number = 0
    while computed < 23:
        number += 1
        num = data.draw(st.integers(1, 23 - computed))
        computed += num
        advances = [
            Advance(1, num, sample=computed == 23),
            Advance(2, 17, sample=True) if number == 1 else Advance(2, 1, sample=True),
        ]
        for output in step(engine, plan(number, new_sequences=new if number == 1 else (), advances=advances)):
            assert not output.error
            if output.sequence_id == 1:
                tokens += output.prompt_tokens
                sampled += len(output.tokens)
            else:
                assert not output.prompt_tokens
    assert sampled == 1
    check(tokens, model, text, top_n)


def test_generated_tokens_that_are_computed_again_have_no_prompt_logprobs(tiny: tuple[Path, torch.nn.Module]) -> None:
    folder, model = tiny
    engine = ready(folder)
    (text,) = prompts(6, [12], 131)
    asking = Sampling(prompt_logprobs=True)
    again = NewSequence(1, [*text, 7, 8, 9], 12, 0, range(10), asking)
    output = step(engine, plan(1, new_sequences=[again], advances=[Advance(1, 15, sample=True)]))[0]
    check(list(output.prompt_tokens), model, text, 0)
    assert len(output.tokens) == 1
