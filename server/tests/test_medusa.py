"""Medusa heads: what they draft, when they draft nothing, and which heads are refused."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest
import torch
from fake_model import BLOCK_TOKENS, VOCAB, FakeModel, continuation
from paired_ranks import CPU, PairedGroup
from penstock_server.engine import Engine
from penstock_server.engine.drafting.interface import SentDrafter
from penstock_server.engine.drafting.medusa import WEIGHTS_NAME, Head, MedusaDrafter, read_heads
from penstock_server.errors import ConfigError
from penstock_server.parallel import RankGroup
from penstock_server.plan import NewSequence
from plans import Advance
from safetensors.torch import save_file
from test_engine import LIMITS, Driver, prompt_of


def knowing(text: list[int], num_heads: int) -> list[Head]:
    """Heads that know what follows each token of a text. An output of the fake model is the next token."""
    heads = []
    for distance in range(1, num_heads + 1):
        # token t scores 2·t'·x − t'² for the token t' that comes `distance` before it, which is greatest for x = t'.
        vocabulary = torch.full((VOCAB, 2), -1e9)
        for token, later in zip(text, text[distance:], strict=False):
            vocabulary[later] = torch.tensor([2.0 * token, -(float(token) ** 2)])
        heads.append(_WithOne((), vocabulary))
    return heads


class _WithOne(Head):
    """Reads a second column of ones."""

    __slots__ = ()

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        return Head.__call__(self, torch.cat((outputs.float(), torch.ones(len(outputs), 1)), 1))


def drafting(drafter: MedusaDrafter | SentDrafter, group: RankGroup) -> Driver:
    engine = Engine(FakeModel(), group, CPU, BLOCK_TOKENS, drafter=drafter)
    engine.warm_up(LIMITS)
    return Driver(engine)


def test_right_drafts_of_heads_are_kept_on_both_ranks_and_others_change_nothing() -> None:
    prompt = prompt_of(1, 5)
    expected = continuation(prompt, 16)
    assert len(set(expected)) == len(expected)
    for text, num_steps, num_tokens in ((expected, 3, 13), (expected[::-1], 6, 7)):
        sent: deque[torch.Tensor] = deque()
        drafters = MedusaDrafter(knowing(text, 3)), SentDrafter()
        drivers = [drafting(drafter, PairedGroup(rank, 2, sent=sent)) for rank, drafter in enumerate(drafters)]
        new = NewSequence(1, prompt, 5)
        for driver in drivers:
            driver.run([Advance(1, 5, range(8), sample=True)], [new])
            for _ in range(num_steps):
                driver.run([Advance(1, 1, sample=True, num_draft_tokens=3)])
        assert drivers[0].tokens[1] == expected[:num_tokens]
        models = [driver.engine.model for driver in drivers]
        assert torch.equal(models[0].caches[0], models[1].caches[0])


def test_a_sequence_that_returns_has_drafts_after_its_next_token() -> None:
    prompt = prompt_of(1, 5)
    expected = continuation(prompt, 12)
    driver = drafting(MedusaDrafter(knowing(expected, 3)), RankGroup())
    driver.run([Advance(1, 5, range(8), sample=True)], [NewSequence(1, prompt, 5)])
    driver.engine.reset()
    driver = Driver(driver.engine)
    text = [*prompt, *expected[:2]]
    # Its cache is computed again: one step samples without drafts, the next has them.
    new = NewSequence(1, text, 5)
    (output,) = driver.run([Advance(1, len(text), range(8), sample=True, num_draft_tokens=3)], [new])
    assert [token.id for token in output.tokens] == expected[2:3]
    (output,) = driver.run([Advance(1, 1, sample=True, num_draft_tokens=3)])
    assert [token.id for token in output.tokens] == expected[3:7]


def save_heads(folder: Path, hidden_size: int = 6, vocab_size: int = 11, **config: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for i in range(2):
        tensors[f"{i}.0.linear.weight"] = torch.randn(hidden_size, hidden_size)
        tensors[f"{i}.0.linear.bias"] = torch.randn(hidden_size)
        tensors[f"{i}.1.weight"] = torch.randn(vocab_size, hidden_size)
    save_file(tensors, folder / WEIGHTS_NAME)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, **config}))
    return tensors


def test_heads_are_read_in_the_layout_of_tgi(tmp_path: Path) -> None:
    tensors, outputs = save_heads(tmp_path), torch.randn(4, 6)
    heads = read_heads(tmp_path, 6, 11, torch.float32)
    for i, head in enumerate(heads):
        linear = outputs @ tensors[f"{i}.0.linear.weight"].T + tensors[f"{i}.0.linear.bias"]
        logits = (outputs + linear * torch.sigmoid(linear)) @ tensors[f"{i}.1.weight"].T
        assert head(outputs).tolist() == logits.argmax(1).tolist()
    assert len(heads) == 2


@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        ((8, 11), {}, r"0.0.linear.weight has shape \[6, 6\], the model needs \[8, 8\]"),
        ((6, 12), {}, r"0.1.weight has shape \[11, 6\], the model needs \[12, 6\]"),
        ((6, 11), {"medusa_num_heads": 3}, "lacks the tensor 2.0.linear.weight"),
        ((6, 11), {"medusa_num_heads": None, "model_type": "llama"}, "its model type is llama; only Medusa heads"),
    ],
)
def test_heads_of_another_model_are_refused(
    sizes: tuple[int, int], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_heads(tmp_path, **config)
    with pytest.raises(ConfigError, match=message):
        read_heads(tmp_path, *sizes, torch.float32)
