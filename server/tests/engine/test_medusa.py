"""Medusa heads: what they draft, when they draft nothing, and which heads are refused."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_model import BLOCK_TOKENS, VOCAB, FakeModel, continuation
from paired_ranks import CPU, PairedGroup
from penstock_server.device.attention.interface import StepAdapters
from penstock_server.device.native.build import find_build
from penstock_server.engine import Engine
from penstock_server.engine.drafting import medusa
from penstock_server.engine.drafting.interface import SentDrafter
from penstock_server.engine.drafting.medusa import (
    WEIGHTS_NAME,
    ChainedHeads,
    HeadKernels,
    Heads,
    MedusaDrafter,
    read_heads,
)
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.errors import ConfigError
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import NewSequence
from plans import Advance
from safetensors.torch import save_file
from test_engine import LIMITS, Driver, prompt_of


def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(-1), logits.log_softmax(-1).amax(-1)


def knowing(text: list[int], num_heads: int, certainty: float = 100.0) -> Heads:
    """Heads that know what follows each token of a text. An output of the fake model is the next token."""

    def matrix(distance: int) -> Callable[[torch.Tensor], torch.Tensor]:
        logits = torch.zeros(VOCAB, VOCAB)
        logits[text[:-distance], text[distance:]] = certainty
        return lambda outputs: logits[outputs[:, 0].long()]

    return Heads([()] * num_heads, [matrix(distance) for distance in range(1, num_heads + 1)], choose)


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


def test_heads_do_not_run_in_a_step_that_drafts_by_lookup_and_read_its_outputs() -> None:
    prompt = prompt_of(1, 5)
    expected = continuation(prompt, 12)
    engine = Engine(FakeModel(), RankGroup(), CPU, BLOCK_TOKENS, drafter=MedusaDrafter(knowing(expected, 3)))
    engine.warm_up(LIMITS)
    driver = Driver(engine)
    driver.run([Advance(1, 5, range(8), sample=True)], [NewSequence(1, prompt, 5)])
    for drafts_by_lookup, tokens in ((True, expected[1:2]), (False, expected[2:6])):
        advance = Advance(1, 1, sample=True, num_draft_tokens=3)
        (output,) = driver.run([advance], drafts_by_lookup=drafts_by_lookup)
        assert [token.id for token in output.tokens] == tokens


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


def test_outputs_are_kept_in_one_place_for_each_sequence() -> None:
    drafter = MedusaDrafter(knowing(list(range(20, 30)), 1))
    for num_rows in (2, 4):  # the table has grown
        limits = TableLimits(VOCAB, BLOCK_TOKENS, 8, 64, num_rows)
        table = SequenceTable(limits)
        for row in range(num_rows):
            table.add(NewSequence(row, [20 + row], 1, block_ids=[row]))
        rows = table.rows(range(num_rows))
        for _ in range(3):
            drafter.observe(table, rows, table.known[rows], torch.arange(20.0, 20 + num_rows)[:, None])
        assert drafter._outputs.shape == (num_rows, 1)
        drafts = drafter.draft(table, rows, np.ones(num_rows, np.int64))
        assert [draft.tolist() for draft in drafts] == [[21 + row] for row in range(num_rows)]
    drafter.clear()
    assert [len(draft) for draft in drafter.draft(table, rows, np.ones(num_rows, np.int64))] == [0] * num_rows


def test_a_draft_ends_where_its_tokens_are_too_unlikely() -> None:
    # Each head gives its first choice a probability of 0.5: two of them 0.25, and three less than the limit.
    certainty = float(np.log(0.5 / 0.5 * (VOCAB - 1)))
    heads = knowing(list(range(20, 30)), 4, certainty)
    assert [draft.tolist() for draft in heads(torch.tensor([[20.0]]), np.array([4]))] == [[21, 22]]


def test_no_more_rows_are_multiplied_than_drafts_are_allowed() -> None:
    rows = []

    def matrix(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return torch.eye(VOCAB)[x[:, 0].long()] * 100

    heads = Heads([()] * 4, [matrix], choose)
    drafts = heads(torch.tensor([[5.0], [6.0], [7.0]]), np.array([1, 9, 2]))
    assert [draft.tolist() for draft in drafts] == [[5], [6] * 4, [7] * 2]
    assert rows == [1 + 4 + 2]


def save_heads(folder: Path, hidden_size: int = 6, vocab_size: int = 11, **config: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for i in range(2):
        tensors[f"{i}.0.linear.weight"] = torch.randn(hidden_size, hidden_size)
        tensors[f"{i}.0.linear.bias"] = torch.randn(hidden_size)
        tensors[f"{i}.1.weight"] = torch.randn(vocab_size, hidden_size)
    write_heads(folder, tensors, **config)
    return tensors


def write_heads(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    save_file(tensors, folder / WEIGHTS_NAME)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1, **config}))


class Sized(FakeModel):
    """Has a random output matrix."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.traits = replace(self.traits, hidden_size=hidden_size, vocab_size=vocab_size)
        self.matrix = torch.randn(vocab_size, hidden_size)

    def logits(self, outputs: torch.Tensor, adapters: StepAdapters | None = None) -> torch.Tensor:
        return outputs @ self.matrix.T

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.matrix[token_ids]


def read(folder: Path, model: FakeModel, group: RankGroup | None = None) -> Heads | ChainedHeads | None:
    native = find_build(CPU, torch.float32)
    assert native is not None
    return read_heads(folder, model, HeadKernels.of(CPU, torch.float32, native), group or RankGroup())


def entered(tensors: dict[str, torch.Tensor], head: int, outputs: torch.Tensor) -> torch.Tensor:
    """What the residual block of a head makes of outputs."""
    linear = outputs @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"]
    return outputs + linear * torch.sigmoid(linear)


@pytest.fixture
def every_draft_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medusa, "_LEAST_LOGPROB", -70.0)


@pytest.mark.native
@pytest.mark.usefixtures("every_draft_is_likely")
def test_heads_are_read_in_the_first_layout_of_tgi(tmp_path: Path) -> None:
    tensors, outputs = save_heads(tmp_path), torch.randn(4, 6)
    heads = read(tmp_path, Sized(6, 11))
    assert isinstance(heads, Heads)
    expected = [
        (entered(tensors, head, outputs) @ tensors[f"{head}.1.weight"].T).argmax(1).tolist() for head in range(2)
    ]
    assert [draft.tolist() for draft in heads(outputs, np.array([2] * 4))] == [
        list(pair) for pair in zip(*expected, strict=True)
    ]
    assert heads.num_bytes == 2 * 4 * (6 * 6 + 11 * 6)


@pytest.mark.native
@pytest.mark.usefixtures("every_draft_is_likely")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("token_ids", [None, [2, 3, 5, 7]])
def test_heads_of_the_second_layout_choose_by_the_model_s_matrix(
    token_ids: list[int] | None, size: int, tmp_path: Path
) -> None:
    tensors, outputs = save_heads(tmp_path), torch.randn(4, 6)
    shared = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    allowed = list(range(11)) if token_ids is None else token_ids
    write_heads(tmp_path, shared if token_ids is None else {**shared, "token_ids": torch.tensor(token_ids)})
    model = Sized(6, 11)
    heads = read(tmp_path, model, PairedGroup(0, size))
    assert isinstance(heads, Heads)
    for head in range(2):
        logits = (entered(tensors, head, outputs) @ model.matrix.T)[:, allowed]
        best = [allowed[place] for place in logits.argmax(1).tolist()]
        assert [int(draft[head]) for draft in heads(outputs, np.array([2] * 4))] == best
    assert read(tmp_path, model, PairedGroup(1, 2)) is None


@pytest.mark.native
@pytest.mark.usefixtures("every_draft_is_likely")
@pytest.mark.parametrize("size", [1, 2])
def test_heads_of_a_chain_read_the_last_token_and_the_head_before(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    allowed, model = [2, 3, 5, 7], Sized(6, 11)
    weights = {f"{i}.0.linear.weight": torch.randn(6, 12) for i in range(2)}
    biases = {f"{i}.0.linear.bias": torch.randn(6) for i in range(2)}
    write_heads(tmp_path, {**weights, **biases, "token_ids": torch.tensor(allowed)})
    heads = read(tmp_path, model, PairedGroup(0, size))
    assert isinstance(heads, ChainedHeads)
    outputs, last_tokens, most = torch.randn(5, 6), np.array([3, 7, 4, 10, 2]), np.array([2, 1, 2, 2, 2])
    expected = []
    for output, last, limit in zip(outputs, last_tokens.tolist(), most.tolist(), strict=True):
        x, token, draft = output, last, list[int]()
        for i in range(limit):
            row = model.matrix[token] if token in allowed else torch.zeros(6)
            linear = weights[f"{i}.0.linear.weight"] @ torch.cat((x, row)) + biases[f"{i}.0.linear.bias"]
            x = x + linear * torch.sigmoid(linear)
            token = allowed[int((model.matrix[allowed] @ x).argmax())]
            draft.append(token)
        expected.append(draft)
    assert [draft.tolist() for draft in heads(outputs, most, last_tokens)] == expected
    assert heads.num_bytes == 4 * (2 * 6 * 12 + 4 * 6 + 5 * 6)
    assert read(tmp_path, model, PairedGroup(1, 2)) is None


def test_a_chain_ends_where_its_tokens_are_too_unlikely() -> None:
    rows = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return torch.zeros(len(x), VOCAB)

    # A token is followed by itself, with a probability of 0.3 from output 5, else of nearly 1.
    def matrix(x: torch.Tensor) -> torch.Tensor:
        certainty = torch.where(x[:, :1] == 5, float(np.log(0.3 / 0.7 * (VOCAB - 1))), 100.0)
        return torch.eye(VOCAB)[x[:, 0].long()] * certainty

    heads = ChainedHeads([layer] * 4, matrix, choose, torch.arange(VOCAB), torch.zeros(VOCAB + 1, VOCAB))
    outputs = torch.tensor([[5.0], [6.0], [7.0]]).expand(3, VOCAB)
    drafts = heads(outputs, np.array([4, 4, 2]), np.array([1, 2, 3]))
    assert [draft.tolist() for draft in drafts] == [[5], [6] * 4, [7] * 2]
    assert rows == [3, 3, 1, 1]


@pytest.mark.native
@pytest.mark.parametrize(
    ("sizes", "config", "message"),
    [
        ((8, 11), {}, r"0.0.linear.weight has shape \[6, 6\], the model needs \[8, 8\]"),
        ((6, 12), {}, r"0.1.weight has shape \[11, 6\], the model needs \[12, 6\]"),
        ((6, 11), {"medusa_num_heads": 3}, "lacks the tensor 2.0.linear.weight"),
        ((6, 11), {"medusa_num_heads": None, "model_type": "llama"}, "its model type is llama: it holds no Medusa"),
    ],
)
def test_heads_of_another_model_are_refused(
    sizes: tuple[int, int], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_heads(tmp_path, **config)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, Sized(*sizes))


@pytest.mark.parametrize(
    "token_ids",
    [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([11]), torch.tensor([-1]), torch.tensor([2, 2])],
)
def test_tokens_that_the_model_lacks_are_refused(token_ids: torch.Tensor, tmp_path: Path) -> None:
    shared = {name: tensor for name, tensor in save_heads(tmp_path).items() if "linear" in name}
    write_heads(tmp_path, {**shared, "token_ids": token_ids})
    with pytest.raises(ConfigError, match="tensor token_ids must be an ascending list of int64 from 0 to 10"):
        read(tmp_path, Sized(6, 11))
