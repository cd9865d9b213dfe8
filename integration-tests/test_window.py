"""Sequences longer than the KV cache, with a model whose layers all have a sliding window, without and with drafts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from binary import Server, start
from byte_model import greedy, save
from client import ask
from fault.probe import wait_for_rest, wait_until

WINDOW, POOL, LONGEST = 20, 64, 512
NUM_TOKENS = 200
TEXTS = ["a river " * 16, "so it was said", "x" * 70]
FORCED = {"grammar": {"type": "regex", "value": "(to and fro, ){20}"}}
DRAWN = {"do_sample": True, "seed": 3, "temperature": 0.7}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, list[list[int]]]]:
    """A server without drafts and one with them, and what transformers says after the texts."""
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = save(folder, LONGEST, WINDOW)
    common = ["--model-id", str(folder), "--dtype", "float32", "--max-batch-total-tokens", str(POOL)]
    with ThreadPoolExecutor(2) as threads:
        plain, drafting = threads.map(lambda more: start(*common, *more), ([], ["--speculate", "4"]))
    yield plain, drafting, [greedy(model, tokenizer, text, NUM_TOKENS) for text in TEXTS]
    assert [server.stop() for server in (plain, drafting)] == [0, 0]


def generate(server: Server, text: str, **parameters: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many drafts were verified for it."""
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True, **parameters}
    details = ask(server, "/generate", {"inputs": text, "parameters": parameters}).json["details"]
    return [token["id"] for token in details["tokens"]], details.get("draft_tokens", {}).get("verified", 0)


def together(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        return [tokens for tokens, _ in threads.map(lambda text: generate(server, text), TEXTS)]


def test_a_windowed_sequence_may_exceed_the_kv_cache(served: tuple[Server, Server, list[list[int]]]) -> None:
    plain, _, expected = served
    assert ask(plain, "/info").json["max_total_tokens"] == LONGEST
    assert together(plain) == expected
    assert all(len(answer) == NUM_TOKENS > 3 * POOL for answer in expected)
    wait_for_rest(plain)


def test_drafts_change_no_token_of_a_windowed_sequence(served: tuple[Server, Server, list[list[int]]]) -> None:
    plain, drafting, expected = served
    assert together(drafting) == expected
    forced, none = generate(plain, TEXTS[0], **FORCED)
    assert none == 0

    def was_drafted() -> bool:
        """The scheduler gives no drafts while it measures that their rows take as long as steps."""
        tokens, num_drafts = generate(drafting, TEXTS[0], **FORCED)
        assert tokens == forced
        return num_drafts > 0

    wait_until(was_drafted, "drafts are verified")
    for text, parameters in [(text, parameters) for text in TEXTS for parameters in ({}, FORCED, DRAWN)]:
        assert generate(drafting, text, **parameters)[0] == generate(plain, text, **parameters)[0]
    wait_for_rest(drafting)
