"""EAGLE-3 heads and MTP layers on the real binary: the answers of a server without drafts, wherever they end, also
across a worker's death."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import byte_model
import pytest
from binary import Server, start
from client import ask, send
from drafts import interrupted, token_ids
from fault.probe import metrics, wait_until
from test_worker_death import Stream

pytestmark = pytest.mark.native

PROMPT = "The heads know"
NUM_TOKENS = 40
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass
class Served:
    """A server with heads whose first drafts are right in one text, one without, and the text."""

    drafting: Server
    plain: Server
    text: list[int]


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, heads = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("heads")
    model, flags, text = (save_eagle if request.param == "eagle" else save_mtp)(folder, heads)
    common = ["--model-id", str(model), "--dtype", "float32"]
    with ThreadPoolExecutor(2) as threads:
        drafting, plain = threads.map(lambda more: start(*common, *more), (["--speculate", "3", *flags], []))
    yield Served(drafting, plain, text)
    assert [server.stop() for server in (drafting, plain)] == [0, 0]


def save_eagle(folder: Path, heads: Path) -> tuple[Path, list[str], list[int]]:
    """The model's folder, the flags that name the head, and the text that it knows."""
    from eagle_checkpoint import knowing_head, save_head

    model, tokenizer = byte_model.save(folder, 256, None)
    text = byte_model.greedy(model, tokenizer, PROMPT, NUM_TOKENS)
    head = knowing_head(model, [*tokenizer.encode(PROMPT).ids, *text], (0, 1))
    head["fc.weight"] = head["fc.weight"].contiguous()
    save_head(heads, head, draft_vocab_size=256, eagle_aux_hidden_state_layer_ids=[0, 1], rms_norm_eps=1e-6)
    return folder, ["--speculative-model", str(heads)], text


def save_mtp(folder: Path, knowing: Path) -> tuple[Path, list[str], list[int]]:
    from mtp_checkpoint import Reference

    reference = Reference.random(vocab_size=256)
    reference.save(folder)
    tokenizer = byte_model.save_tokenizer(knowing)
    prompt = tokenizer.encode(PROMPT).ids
    text = reference.greedy(prompt, NUM_TOKENS)
    reference.save_knowing([*prompt, *text], folder, knowing)
    return knowing, [], text


def body(prompt: str = PROMPT, **parameters: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True, "ignore_eos": True, **parameters}
    return {"inputs": prompt, "parameters": parameters}


def answer(server: Server, request: dict[str, Any]) -> Any:
    """The text and its details without the number of drafts."""
    found = ask(server, "/generate", request).json
    found["details"].pop("draft_tokens", None)
    return found["generated_text"], found["details"]


def test_right_drafts_are_counted_and_change_no_token(served: Served) -> None:
    names = [f"vllm:spec_decode_num_{name}_tokens_total" for name in ("draft", "accepted")]

    def has_right_drafts() -> bool:
        """The scheduler gives no drafts while it measures that making and verifying them takes as long as steps."""
        before = metrics(served.drafting)
        details = ask(served.drafting, "/generate", body()).json["details"]
        assert [token["id"] for token in details["tokens"]] == served.text
        after = metrics(served.drafting)
        drafts, accepted = (after[name] - before[name] for name in names)
        assert details.get("draft_tokens", {"verified": 0, "accepted": 0}) == {"verified": drafts, "accepted": accepted}
        assert accepted <= drafts
        return accepted > 0

    wait_until(has_right_drafts, "drafts are right")
    after = metrics(served.drafting)
    positions = [after[f'{PER_POSITION}{{position="{position}"}}'] for position in range(16)]
    assert positions == sorted(positions, reverse=True)
    assert positions[0] > 0
    assert positions[3:] == [0] * 13


def test_an_answer_ends_where_it_ends_without_drafts(served: Served) -> None:
    """At a count, a token or a text inside drafts; greedy, drawn, penalised, alone and together."""
    ends = [body(max_new_tokens=count, top_n_tokens=2) for count in (1, 2, 3, 4, 7)]
    ends += [body(ignore_eos=False, stop_token_ids=[served.text[place]]) for place in (2, 3, 4, 9)]
    whole, _ = answer(served.plain, body())
    ends += [body(stop=[whole[place : place + 2]]) for place in (3, 8)]
    drawn = {"do_sample": True, "temperature": 0.5, "top_p": 0.9}
    others = [body(prompt, seed=3, **drawn) for prompt in (PROMPT, "Another text")]
    others += [body("A third one", repetition_penalty=1.3, top_n_tokens=2), body(do_sample=True, seed=1, min_p=0.1)]
    requests = [*ends, *others]
    expected = [answer(served.plain, request) for request in requests]
    assert [answer(served.drafting, request) for request in requests] == expected
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda request: answer(served.drafting, request), requests)) == expected


def test_a_cancelled_stream_changes_no_token_of_others(served: Served) -> None:
    streams = [Stream(served.drafting, body()) for _ in range(2)]
    connection, response = send(served.drafting, "/generate_stream", body(max_new_tokens=200))
    assert response.readline().startswith(b"data:")
    connection.close()
    for stream in streams:
        assert [token for token, _, _ in stream.result()[0]] == served.text


def test_a_worker_s_death_changes_no_token(served: Served) -> None:
    request = body(max_new_tokens=160)
    undisturbed = [token["id"] for token in answer(served.plain, request)[1]["tokens"]]
    assert undisturbed[:NUM_TOKENS] == served.text
    for stream in interrupted(served.drafting, [request] * 4):
        assert token_ids(stream) == undisturbed
        assert [event["index"] for event in stream.events] == list(range(1, 161))
