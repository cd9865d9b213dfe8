"""Requests with reproducible answers: greedy, sampled, constrained, with stop strings, with several choices."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from binary import Server
from client import connect

TIMEOUT_S = 600
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
REGEX = {"type": "regex", "value": "([A-Z][a-z]{1,9} ){4,60}"}
LARK = {"type": "lark", "value": 'start: ("red" | "blue" | "green" | ", ")+'}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 7}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}

Answer = Any


@dataclass(frozen=True)
class Request:
    """A streaming request. `body` is sent as JSON."""

    path: str
    body: dict[str, Any]

    @property
    def data(self) -> bytes:
        return json.dumps(self.body).encode()


def _generate(inputs: str, num_tokens: int, **parameters: Any) -> Request:
    fixed = {"max_new_tokens": num_tokens, "details": True}
    return Request("/generate_stream", {"inputs": inputs, "parameters": {**fixed, **parameters}})


def _chat(num_tokens: int, **fields: Any) -> Request:
    messages = [{"role": "user", "content": "Tell me about a person in a village."}]
    fixed = {"messages": messages, "max_tokens": num_tokens, "stream": True, "logprobs": True, "top_logprobs": 2}
    return Request("/v1/chat/completions", {**fixed, **fields})


def requests(num_tokens: int) -> list[Request]:
    """Sixteen streams of up to `num_tokens` tokens each."""
    long = "Once upon a time, in a village by the sea, " * 40
    schema = {"type": "json", "value": SCHEMA}
    return [
        _generate("A long story:", num_tokens),
        _generate("The capital of France is", num_tokens, top_n_tokens=3),
        _generate("def fibonacci(n):", num_tokens, ignore_eos=True, **PENALTIES),
        _generate(long, num_tokens),
        _generate("A long story:", num_tokens, **DRAWN),
        _generate("Once there was", num_tokens, **{**DRAWN, **PENALTIES, "seed": 11}, logit_bias={"28": -5}),
        _generate(long, num_tokens, do_sample=True, temperature=1.3, top_k=50, seed=13, top_n_tokens=2),
        _generate("Numbers: one, two,", num_tokens, typical_p=0.9, do_sample=True, seed=17, watermark=True),
        _generate("Write about a person:", num_tokens, grammar=schema),
        _generate("Write about a person:", num_tokens, grammar=schema, **{**DRAWN, "seed": 19}),
        _generate("Names of people: ", num_tokens, grammar=REGEX, **{**DRAWN, "seed": 23}),
        _generate("Colours: ", num_tokens, grammar=LARK, **PENALTIES),
        _generate("List: 1, 2, 3,", num_tokens, stop=["9", "15,"]),
        _chat(num_tokens, n=2, temperature=0.8, seed=29),
        _chat(num_tokens, n=3, temperature=1.1, seed=31, stop=["village", "\n\n"], presence_penalty=0.5),
        Request(
            "/v1/completions",
            {"prompt": ["The sun is", "def add(a, b):"], "max_tokens": num_tokens, "stream": True, "temperature": 0},
        ),
    ]


def events(server: Server, request: Request) -> Iterator[dict[str, Any]]:
    """The events of a stream as they arrive. Raises OSError if the request is refused."""
    connection = connect(server, TIMEOUT_S)
    try:
        connection.request("POST", request.path, request.data, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{request.path} answered {response.status}: {response.read(300)!r}")
        for line in response:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                yield json.loads(line[5:])
    except http.client.HTTPException as error:
        raise OSError(f"{request.path} was interrupted: {error!r}") from error
    finally:
        connection.close()


def answer_of(events: Sequence[dict[str, Any]]) -> Answer:
    """The reproducible part of the events, by choice: no ids, times or cache statistics.

    Events of different choices interleave in any order.
    """
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice, part in _by_choice(event):
            choices.setdefault(choice, []).append(part)
    return choices


def _by_choice(event: dict[str, Any]) -> list[tuple[int, Any]]:
    """The parts of an event by choice; -1 stands for a response without choices."""
    if "choices" not in event:
        return [(-1, event)]
    return [(choice["index"], {k: v for k, v in choice.items() if k != "index"}) for choice in event["choices"]]


def error_in(events: Sequence[dict[str, Any]]) -> str | None:
    """The first error event, if there is one."""
    return next((json.dumps(event) for event in events if "error" in event), None)


def answers(server: Server, asked: Sequence[Request]) -> list[Answer]:
    """The answers to concurrent requests."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda request: answer_of(list(events(server, request))), asked))


@dataclass(frozen=True)
class Progress:
    """The progress of a repeated stream."""

    num_answers: int
    num_events: Counter[int]  # events of the current answer, by choice


class Repeated:
    """Runs all requests concurrently, repeats each until the context ends, and compares each answer with the first."""

    def __init__(self, server: Server, asked: Sequence[Request], expected: Sequence[Answer] | None = None) -> None:
        self.expected = list(expected or answers(server, asked))
        self.differences: list[str] = []
        self.num_answers = 0
        self._progress = [Progress(0, Counter()) for _ in asked]
        self._server, self._asked = server, asked
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(n,)) for n in range(len(asked))]

    def _repeat(self, n: int) -> None:
        for num_answers in itertools.count():
            if self._stopping.is_set():
                return
            got: list[dict[str, Any]] = []
            progress = self._progress[n] = Progress(num_answers, Counter())
            try:
                for event in events(self._server, self._asked[n]):
                    got.append(event)
                    progress.num_events.update(choice for choice, _ in _by_choice(event))
            except OSError as error:
                self.differences.append(f"stream {n} after {len(got)} events: {error!r}")
                return
            if answer_of(got) != self.expected[n]:
                self.differences.append(self._difference(n, got))
            self.num_answers += 1

    def _difference(self, n: int, got: Sequence[dict[str, Any]]) -> str:
        if error := error_in(got):
            return f"stream {n} after {len(got)} events: {error}"
        for choice, theirs in answer_of(got).items():
            for place, (one, other) in enumerate(zip(theirs, self.expected[n].get(choice, ()), strict=False)):
                if one != other:
                    return f"stream {n}, choice {choice}, event {place}: {one} instead of {other}"
        return f"stream {n}: {len(got)} events, a correct prefix of the answer"

    def progress(self) -> list[Progress]:
        return [Progress(now.num_answers, now.num_events.copy()) for now in self._progress]

    def have_gone_on(self, since: Sequence[Progress], num_events: int) -> bool:
        """Whether every choice of every stream has had `num_events` more events, or has ended, since `since`."""
        for then, now, expected in zip(since, self._progress, self.expected, strict=True):
            if now.num_answers > then.num_answers:
                continue
            before, after = then.num_events, now.num_events
            if any(
                after[choice] < min(before[choice] + num_events, len(of_all)) for choice, of_all in expected.items()
            ):
                return False
        return True

    def is_running(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Repeated:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
