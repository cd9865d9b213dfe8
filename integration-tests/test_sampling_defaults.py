"""The sampling parameters that a model's folder has are the defaults of requests, except on TGI's routes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from binary import PENSTOCK, Server, launch, start
from byte_model import save
from client import ask, events
from fault.drain import ENVIRONMENT, engine_url, start_server
from penstock.setting import command_line

# One token is left to choose from, at any temperature.
GREEDY = {"temperature": 1.7, "top_k": 1, "max_new_tokens": 24, "num_beams": 4, "top_p": "0.9"}
MESSAGES = [{"role": "user", "content": "a river"}]
NUM_REQUESTS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(folder, 256, None)
    (folder / "generation_config.json").write_text(json.dumps(GREEDY))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = start("--model-id", str(folder), "--speculate", "2")
    yield server
    assert server.stop() == 0


def text(path: str, answer: Any) -> str:
    """What the model wrote, from the answer of any route."""
    match path:
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"]
        case "/v1/completions":
            return answer["choices"][0]["text"]
        case "/v1/responses":
            return answer["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return answer["content"][0]["text"]
        case _:
            return answer["generated_text"]


def answers(server: Server, path: str, body: dict[str, Any]) -> set[str]:
    """The different answers to equal requests."""

    def once(_: int) -> str:
        answer = ask(server, path, body)
        assert answer.status == 200, answer.text
        return text(path, answer.json)

    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        return set(threads.map(once, range(NUM_REQUESTS)))


CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
COMPLETION = ("/v1/completions", {"prompt": "a river"})
RESPONSE = ("/v1/responses", {"model": "tgi", "input": "a river"})
MESSAGE = ("/v1/messages", {"model": "tgi", "messages": MESSAGES, "max_tokens": 24})


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION, RESPONSE, MESSAGE])
def test_what_a_request_leaves_out_is_the_models_default(server: Server, path: str, body: dict[str, Any]) -> None:
    sampled = answers(server, path, body)
    assert sampled == answers(server, path, {**body, "temperature": 0})
    assert len(sampled) == 1


def test_a_value_of_the_request_wins_also_if_it_turns_the_models_off(server: Server) -> None:
    for path, body in (CHAT, COMPLETION):
        for off in (-1, 0):
            assert len(answers(server, path, {**body, "top_k": off})) > 1
        assert len(answers(server, path, {**body, "top_k": None})) == 1


def test_the_defaults_hold_for_choices_and_streams(server: Server) -> None:
    path, body = CHAT
    answer = ask(server, path, {**body, "n": 3}).json
    assert answer["usage"]["completion_tokens"] == 3 * GREEDY["max_new_tokens"]
    choices = {choice["message"]["content"] for choice in answer["choices"]}
    streamed = "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events(server, path, {**body, "stream": True})
    )
    assert choices == {streamed} == answers(server, path, body)


def test_tgis_routes_keep_tgis_defaults(server: Server) -> None:
    parameters = {"do_sample": True, "max_new_tokens": 24}
    assert len(answers(server, "/generate", {"inputs": "a river", "parameters": parameters})) > 1


def test_log_info_and_check_show_the_same_defaults(server: Server, folder: Path) -> None:
    shown = {"temperature": 1.7, "top_k": 1, "max_new_tokens": 24}
    assert ask(server, "/info").json["sampling_defaults"] == shown
    report = subprocess.run([str(PENSTOCK), "check", str(folder), "--json"], capture_output=True, text=True, check=True)
    checked = json.loads(report.stdout)
    assert checked["text"]["sampling_defaults"] == shown
    log = [json.loads(line)["fields"]["message"] for line in server.lines if line.startswith("{")]
    assert any(
        "requests that leave them out get temperature 1.7, top_k 1, max_new_tokens 24, except on TGI's routes" in line
        for line in log
    )
    notes = [note for note in checked["notes"] if note.startswith("generation_config.json")]
    assert notes == [
        'generation_config.json: top_p is "0.9", must be a number from 0 to 1; it is ignored',
        "generation_config.json: no effect here, but in transformers: num_beams 4",
    ]
    assert set(notes) < set(log)


def test_a_router_has_the_defaults_of_its_own_flags_and_model(folder: Path) -> None:
    model = ["--model-id", str(folder)]
    behind = start_server("127.0.0.1:0", *model, "--generation-config", "none")
    routers = [
        start(*model, "--replica", engine_url(behind), *flags, command=["route"], env=ENVIRONMENT)
        for flags in ([], ["--override-generation-config", '{"top_k": null}'])
    ]
    assert ask(behind, "/info").json["sampling_defaults"] == {}
    assert [len(answers(server, *CHAT)) > 1 for server in (behind, *routers)] == [True, False, True]
    assert [server.stop() for server in (*routers, behind)] == [0, 0, 0]


def test_settings_that_have_no_effect_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for flags, reason in [
        (["--override-generation-config", '{"top_q": 1}'], "top_q has no effect here; give temperature, top_p, top_k"),
        (["--override-generation-config", '{"top_p": 3}'], "top_p is 3, must be a number from 0 to 1"),
        (["--generation-config", str(tmp_path)], f"cannot read {tmp_path}/generation_config.json"),
    ]:
        process = launch("--model-id", str(folder), *flags)
        output, _ = process.communicate(timeout=240)
        assert process.returncode in (1, 2)
        assert reason in output


def test_the_python_package_takes_an_override_as_a_dict() -> None:
    arguments = command_line(PENSTOCK, {"override_generation_config": {"temperature": 0.5, "top_k": None}})
    assert arguments == ['--override-generation-config={"temperature": 0.5, "top_k": null}']
