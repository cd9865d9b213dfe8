"""Models that keep a state between tokens: prefixes continue at snapshots with the same tokens, also after kill -9."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from binary import Server, launch, start
from byte_model import greedy, save_tokenizer
from client import ask
from fault.probe import metric, restarts
from tokenizers import Tokenizer

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("states")]

FLAGS = ("--dtype", "float32", "--max-total-tokens", "1024", "--max-batch-size", "4", "--standby", "off")
SYSTEM = "You answer in few words, and only what you know. " * 4
NUM_TOKENS = 20
Saved = tuple[Path, torch.nn.Module, Tokenizer]


SIZES = {
    "vocab_size": 256,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
MODELS = {
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **SIZES,
            intermediate_size=80,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            max_position_embeddings=1024,
        )
    ),
    # It has no keys and values, two caches in each layer, and a state that runs.
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=8)),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("states")
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(2)
    model = MODELS[request.param]().eval()
    model.save_pretrained(folder)
    return folder, model, tokenizer


def answer(server: Server, text: str, num_tokens: int = NUM_TOKENS) -> list[int]:
    body = {"inputs": text, "parameters": {"max_new_tokens": num_tokens, "details": True}}
    return [token["id"] for token in ask(server, "/generate", body).json["details"]["tokens"]]


def hit_tokens(server: Server) -> float:
    return metric(server, "penstock_prefix_hit_tokens")


def run(folder: Path, *flags: str) -> Iterator[Server]:
    server = start("--model-id", str(folder), *FLAGS, *flags)
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def server(saved: Saved) -> Iterator[Server]:
    yield from run(saved[0])


@pytest.fixture(scope="module")
def alone(saved: Saved) -> Iterator[Server]:
    """A server that keeps no snapshot."""
    yield from run(saved[0], "--state-snapshots", "0")


def test_answers_are_those_of_transformers(server: Server, saved: Saved) -> None:
    _, model, tokenizer = saved
    for text in ("Once", SYSTEM):
        assert answer(server, text) == greedy(model, tokenizer, text, NUM_TOKENS)
    assert metric(server, "penstock_state_slots") == 4
    assert 0 < metric(server, "penstock_state_full_snapshots") <= metric(server, "penstock_state_snapshots")


def conversation(tokenizer: Tokenizer, ask_one: Callable[[str], Sequence[int]]) -> list[Sequence[int]]:
    """The answers to turns that each have all before in their prompt. An answer is text again."""
    text, answers = SYSTEM, []
    for turn in range(6):
        text += f" Question {turn}?"
        answers.append(ask_one(text))
        text += tokenizer.decode(list(answers[-1]))
    return answers


def test_a_conversation_continues_at_snapshots(server: Server, alone: Server, saved: Saved) -> None:
    tokenizer = saved[2]
    before = hit_tokens(server)
    found = conversation(tokenizer, lambda text: answer(server, text))
    assert hit_tokens(server) - before > 5 * len(SYSTEM) // 2
    assert found == conversation(tokenizer, lambda text: answer(alone, text))
    assert hit_tokens(alone) == 0


def test_branches_of_a_common_beginning_continue_where_they_part(server: Server, alone: Server) -> None:
    prompts = [f"{SYSTEM} Then he said {number}, and {'so on, ' * number}" for number in range(5)]
    before = hit_tokens(server)
    found = [answer(server, prompt) for prompt in prompts]
    assert hit_tokens(server) - before > 3 * 160, "the first two make the place where the others continue"
    assert found == [answer(alone, prompt) for prompt in prompts]


def test_speculation_changes_no_token(saved: Saved, alone: Server) -> None:
    for server in run(saved[0], "--speculate", "5"):
        text = "again and again and " * 10
        assert answer(server, text, 60) == answer(alone, text, 60)
        again = text + "again and"
        assert answer(server, again, 60) == answer(alone, again, 60)
        assert hit_tokens(server) > 0


def test_a_new_worker_gives_the_same_tokens_and_saves_its_own_snapshots(saved: Saved, alone: Server) -> None:
    for server in run(saved[0]):
        expected = answer(alone, SYSTEM)
        assert answer(server, SYSTEM) == answer(server, SYSTEM) == expected
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        assert answer(server, SYSTEM) == expected
        assert restarts(server) == 1
        hits = hit_tokens(server)
        assert answer(server, SYSTEM) == expected
        assert hit_tokens(server) > hits


def test_stages_preemptions_and_offloaded_blocks_change_no_token(saved: Saved, alone: Server) -> None:
    """The pool holds one of two answers to a prompt, of one request, so that they run together."""
    pool = ("--max-batch-total-tokens", "1024", "--kv-offload-gib", "0.1")
    for server in run(saved[0], "--pipeline-parallel-size", "2", *pool):
        parameters = {"max_new_tokens": 500, "details": True, "do_sample": True, "top_k": 1, "best_of": 2}
        details = ask(server, "/generate", {"inputs": SYSTEM, "parameters": parameters}).json["details"]
        found = [details["tokens"], *(each["tokens"] for each in details["best_of_sequences"])]
        expected = answer(alone, SYSTEM, 500)
        assert [[token["id"] for token in each] for each in found] == [expected] * 2
        if metric(server, "penstock_kv_blocks"):
            assert metric(server, "penstock_preemptions") > 0
        os.kill(server.worker_pids()[-1], signal.SIGKILL)
        assert answer(server, SYSTEM, 500) == expected
        assert restarts(server) == 1


def test_more_requests_than_slots_wait_for_one(server: Server, alone: Server) -> None:
    prompts = [f"{number} is a number, and " for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        found = list(clients.map(lambda prompt: answer(server, prompt), prompts))
    assert found == [answer(alone, prompt) for prompt in prompts]


def test_more_snapshots_than_fit_are_refused(saved: Saved) -> None:
    process = launch("--model-id", str(saved[0]), *FLAGS, "--state-snapshots", "100000000")
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "100000000 snapshots of states were asked for (" in output
    assert "lower --state-snapshots" in output
