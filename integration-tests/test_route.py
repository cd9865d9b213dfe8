"""`penstock route` in front of two servers with LoRA adapters: their restart and kill -9 stop no stream and change no
token."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from binary import TIMEOUT_S, Server, launch, paused, start
from client import ask, events, send
from fault.drain import ENVIRONMENT, engine_url, start_server
from fault.probe import health, metric, wait_for_rest, wait_until
from random_adapter import make_adapter, request
from test_replicas import GRAMMAR, STOP
from test_worker_death import ENDLESS, REQUESTS, Stream

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("route")]

QUESTION = "Tell me a story."
MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT = {
    "messages": MESSAGES,
    "max_tokens": 60,
    "temperature": 0.8,
    "seed": 3,
    "stream": True,
    "logprobs": True,
}
# Greedy, sampled and with penalties, each with another prompt, and the long prompt.
OF_EACH_KIND = [*REQUESTS[::4], REQUESTS[-1]]
MIXED = [*OF_EACH_KIND, GRAMMAR, STOP, request("A long story:", "one"), request("The capital of France is", "two")]

# Members of answers that name one answer, or the time at which it was given.
OF_ONE_ANSWER = ("id", "item_id", "response_id", "created", "created_at", "completed_at")


class ChatStream(threading.Thread):
    """A streaming chat request on its own thread."""

    def __init__(self, server: Server, body: dict[str, Any] = CHAT) -> None:
        super().__init__()
        self.server, self.body = server, body
        self.chunks: list[dict] = []
        self.start()

    def run(self) -> None:
        connection, response = send(self.server, "/v1/chat/completions", self.body)
        for line in response:
            if line.startswith(b"data: {"):
                self.chunks.append(json.loads(line[6:])["choices"][0])
        connection.close()

    def result(self) -> list[dict]:
        self.join()
        assert self.chunks, self.server.last_lines()
        return self.chunks


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, seed) for seed, name in enumerate(("one", "two", "mine", "theirs"))}


@pytest.fixture(scope="module")
def start_adapted(adapters: dict[str, Path]) -> Callable[..., Server]:
    """Starts a server with the adapters `one` and `two`, and `law`, whose files depend on the server."""

    def start_one(number: int, place: str = "127.0.0.1:0") -> Server:
        law = adapters["theirs" if number else "mine"]
        given = f"one={adapters['one']},two={adapters['two']},law={law}"
        return start_server(place, "--lora-adapters", given, "--enable-lora-updates")

    return start_one


@pytest.fixture(scope="module")
def servers(start_adapted: Callable[..., Server]) -> Iterator[list[Server]]:
    """Two servers; tests replace those that they stop."""
    with ThreadPoolExecutor() as threads:
        running = list(threads.map(start_adapted, range(2)))
    yield running
    for server in running:
        assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="module")
def router(servers: list[Server]) -> Iterator[Server]:
    replicas = [f"--replica={engine_url(server)}" for server in servers]
    process = start(*replicas, env=ENVIRONMENT, command=["route"])
    wait_until(lambda: metric(process, "penstock_kv_blocks") == 2 * metric(servers[0], "penstock_kv_blocks"))
    wait_until(lambda: {"one", "two", "law"} <= models(process).keys())
    yield process
    assert process.stop() == 0, process.last_lines()


def models(server: Server) -> dict[str, str | None]:
    """The models of a server, with their parents."""
    return {model["id"]: model["parent"] for model in ask(server, "/v1/models").json["data"]}


class MixedStreams:
    """The chat and the streams of `MIXED`, which have begun."""

    def __init__(self, server: Server) -> None:
        self._chat = ChatStream(server)
        self._streams = [Stream(server, request) for request in MIXED]

    def wait_until_they_run(self) -> None:
        wait_until(lambda: sum(len(stream.events) > 5 for stream in self._streams) >= 3)

    def results(self) -> list:
        return [self._chat.result(), *(stream.result() for stream in self._streams)]


@pytest.fixture(scope="module")
def undisturbed(router: Server, servers: list[Server]) -> list:
    routed = MixedStreams(router).results()
    assert routed == MixedStreams(servers[0]).results(), "a server alone gives the same"
    return routed


def hold(router: Server, server: Server) -> list[Stream]:
    """Endless streams, of which the server has one at least."""
    streams: list[Stream] = []
    while metric(server, "tgi_batch_current_size") == 0:
        streams.append(Stream(router, ENDLESS))
        wait_until(lambda: bool(streams[-1].events))
    return streams


def wait_until_it_goes_on(stream: Stream) -> None:
    num_tokens = len(stream.events) + 5
    wait_until(lambda: len(stream.events) >= num_tokens, "the endless stream goes on")


def assert_tokens_are_those_of(server: Server, endless: Stream) -> None:
    """Compares what a dropped stream of `ENDLESS` had with the answer of the server alone."""
    events = [event for event in endless.events if "token" in event]
    parameters = {**ENDLESS["parameters"], "max_new_tokens": len(events), "details": True}
    answer = ask(server, "/generate", {**ENDLESS, "parameters": parameters}).json
    assert [event["token"] for event in events] == answer["details"]["tokens"]


def disturbed(router: Server, servers: list[Server], victim: int, signal_number: int) -> list:
    """The results when a server gets a signal while both have sequences."""
    statuses: list[int] = []
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(0.05):
            statuses.append(health(router))

    watcher = threading.Thread(target=watch)
    watcher.start()
    held = hold(router, servers[victim])
    mixed = MixedStreams(router)
    mixed.wait_until_they_run()
    servers[victim].process.send_signal(signal_number)
    found = mixed.results()
    for stream in held:
        stream.drop()
    stopped.set()
    watcher.join()
    assert set(statuses) == {200}, "the other server takes requests"
    return found


def test_a_restart_and_a_kill_of_servers_stop_no_stream_and_change_no_token(
    router: Server, servers: list[Server], undisturbed: list, start_adapted: Callable[..., Server]
) -> None:
    place = engine_url(servers[0]).removeprefix("http://")
    num_blocks = metric(router, "penstock_kv_blocks")
    assert disturbed(router, servers, 0, signal.SIGTERM) == undisturbed
    assert servers[0].process.wait(TIMEOUT_S) == 0, "its sequences left"
    servers[0] = start_adapted(0, place)
    wait_until(lambda: metric(router, "penstock_kv_blocks") == num_blocks)

    place = engine_url(servers[1]).removeprefix("http://")
    assert disturbed(router, servers, 1, signal.SIGKILL) == undisturbed
    servers[1].process.wait(TIMEOUT_S)
    servers[1] = start_adapted(1, place)
    wait_until(lambda: metric(router, "penstock_kv_blocks") == num_blocks)
    wait_for_rest(router)


def test_a_silent_server_stops_no_stream_and_is_used_again(
    router: Server, servers: list[Server], undisturbed: list
) -> None:
    """A stopped process closes no connection, so only the missing signs of life tell that it is lost."""
    num_blocks = metric(router, "penstock_kv_blocks")
    urls = [engine_url(server) for server in servers]
    impatient = start(
        *("--replica-timeout", "2"), *(f"--replica={url}" for url in urls), env=ENVIRONMENT, command=["route"]
    )
    wait_until(lambda: metric(impatient, "penstock_kv_blocks") == num_blocks)
    wait_until(lambda: {"one", "two"} <= models(impatient).keys())
    held = hold(impatient, servers[0])
    mixed = MixedStreams(impatient)
    mixed.wait_until_they_run()
    with paused(servers[0].process.pid):
        assert mixed.results() == undisturbed
        loss = f"replica {urls[0]} is not used: it has sent nothing for 2 s"
        wait_until(lambda: any(loss in line for line in impatient.lines), "the router takes the server as lost")
        for stream in held:
            wait_until_it_goes_on(stream)
    assert metric(impatient, 'penstock_replica_handovers{replica="0"}') > 0
    for stream in held:
        stream.drop()
        assert_tokens_are_those_of(servers[1], stream)

    wait_until(lambda: metric(impatient, "penstock_kv_blocks") == num_blocks, "the server is used again")
    wait_for_rest(servers[0])
    for stream in hold(impatient, servers[0]):
        stream.drop()
    assert impatient.stop() == 0, impatient.last_lines()
    # The other router may have lost the server too.
    wait_until(lambda: metric(router, "penstock_kv_blocks") == num_blocks)


def test_a_server_joins_and_the_other_leaves_while_streams_run(
    servers: list[Server], undisturbed: list, tmp_path: Path
) -> None:
    replicas = tmp_path / "replicas"
    first, second = (engine_url(server) for server in servers)

    def change(text: str) -> None:
        """Replaces the file at once, as Kubernetes replaces a ConfigMap."""
        new = tmp_path / "new"
        new.write_text(text)
        new.rename(replicas)

    change(f"{first}\nhttp://10.0.0.1:1  # is refused alone\n")
    router = start("--replica-file", str(replicas), env=ENVIRONMENT, command=["route"])
    num_blocks = metric(router, "penstock_kv_blocks")
    wait_until(lambda: "two" in models(router))
    # The list is read every few seconds, when the other streams may have ended.
    long = Stream(router, ENDLESS)
    mixed = MixedStreams(router)
    mixed.wait_until_they_run()
    change(f"{first}\n{second}\n")
    wait_until(lambda: metric(router, "penstock_kv_blocks") == 2 * num_blocks, "the second server joins")
    change(f"{second}\n")
    wait_until(lambda: metric(router, 'penstock_replica_health{replica="0"}') == -1, "the first one left")
    assert metric(router, 'penstock_replica_health{replica="1"}') == 1
    assert metric(router, 'penstock_replica_handovers{replica="0"}') > 0
    wait_until_it_goes_on(long)
    long.drop()
    assert_tokens_are_those_of(servers[1], long)
    assert mixed.results() == undisturbed
    wait_until(lambda: metric(servers[0], "tgi_batch_current_size") == 0, "its sequences left")
    assert router.stop() == 0, router.last_lines()
    assert any("line 2" in line and "without TLS" in line for line in router.lines)


def test_a_router_answers_as_a_server_does(router: Server, servers: list[Server]) -> None:
    body = {
        "inputs": "The capital of France is",
        "parameters": {"max_new_tokens": 8, "details": True, "top_n_tokens": 3},
    }
    routed, direct = (ask(server, "/generate", body).json for server in (router, servers[0]))
    assert routed == direct
    fields = ("model_id", "max_input_tokens", "max_total_tokens")
    infos = [ask(server, "/info").json for server in (router, servers[0])]
    assert [infos[0][field] for field in fields] == [infos[1][field] for field in fields]


def without_ids_and_times(answer: Any) -> Any:
    """An answer without what differs each time it is asked for."""
    if isinstance(answer, list):
        return [without_ids_and_times(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    return {key: without_ids_and_times(value) for key, value in answer.items() if key not in OF_ONE_ANSWER}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The sun is", "max_tokens": 8, "logprobs": 2}),
        ("/v1/responses", {"input": QUESTION, "instructions": "Be brief.", "max_output_tokens": 8}),
        ("/v1/messages", {"messages": MESSAGES, "system": "Be brief.", "max_tokens": 8}),
        ("/tokenize", {"inputs": QUESTION}),
        ("/chat_tokenize", {"messages": MESSAGES}),
    ],
)
def test_each_route_of_a_router_answers_as_a_server_does(
    router: Server, servers: list[Server], path: str, body: dict[str, Any]
) -> None:
    (base,) = models(servers[0]).keys() - {"one", "two", "law"}
    body = body if "tokenize" in path else {"model": base, "temperature": 0, **body}
    for server in servers:
        assert ask(server, path, body).status == 200, "from here on both have the prompt in their caches"
    routed, direct = (ask(server, path, body) for server in (router, servers[0]))
    assert routed.status == 200
    assert without_ids_and_times(routed.json) == without_ids_and_times(direct.json)
    if "tokenize" not in path:
        streams = [events(server, path, {**body, "stream": True}) for server in (router, servers[0])]
        assert len(streams[0]) >= 8
        assert without_ids_and_times(streams[0]) == without_ids_and_times(streams[1])


def test_the_adapters_of_servers_are_models_of_the_router(router: Server, servers: list[Server]) -> None:
    base = models(servers[0]).keys() - {"one", "two", "law"}
    assert models(router) == dict.fromkeys(base) | dict.fromkeys(("one", "two", "law"), *base)
    chat = {"messages": CHAT["messages"], "max_tokens": 8, "temperature": 0, "model": "two"}
    routed, direct = (ask(server, "/v1/chat/completions", chat).json for server in (router, servers[1]))
    assert (routed["model"], routed["choices"]) == ("two", direct["choices"])
    unknown = ask(router, "/generate", request("Hi", "poet"))
    assert (unknown.status, "poet is unknown: the server has `law`, `one`, `two`" in unknown.text) == (422, True)


def test_servers_with_other_files_of_a_name_get_none_of_its_requests(
    router: Server, servers: list[Server], adapters: dict[str, Path]
) -> None:
    law = request("A long story:", "law")
    mine, theirs = (Stream(server, law).result() for server in servers)
    assert mine != theirs
    assert [stream.result() for stream in [Stream(router, law) for _ in range(6)]] == [mine] * 6

    load, unload, new = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", {"lora_name": "new"}
    assert ask(servers[1], load, {**new, "lora_path": str(adapters["theirs"])}).status == 200
    wait_until(lambda: "new" in models(router))
    found = [Stream(router, request("A long story:", "new")) for _ in range(4)]
    assert [stream.result() for stream in found] == [theirs] * 4
    assert ask(servers[1], unload, new).status == 200
    wait_until(lambda: "new" not in models(router))
    assert ask(router, "/generate", request("Hi", "new")).status == 422
    refused = ask(router, load, {**new, "lora_path": str(adapters["mine"])})
    assert (refused.status, "--enable-lora-updates" in refused.text) == (404, True)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (["route"], [], "`penstock route` needs --replica"),
        ([], ["--replica", "http://127.0.0.1:1"], "--replica is only for `penstock route`"),
        (["route"], ["--replica", "http://127.0.0.1:1", "--replica-file", "x"], "cannot be used together"),
        (["route"], ["--replica-file", "/missing"], "cannot read it"),
        (["route"], ["--replica", "http://127.0.0.1:1", "--num-shard", "2"], "--num-shard has no effect"),
        (["route"], ["--replica", "http://10.0.0.1:1"], "leaves this machine without TLS"),
        ([], ["--engine-listen", "0.0.0.0:0"], "which other machines can reach, without TLS"),
    ],
)
def test_flags_that_cannot_be_are_refused(command: list[str], flags: list[str], message: str) -> None:
    process = launch(*flags, env=ENVIRONMENT, command=command)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert message in output
