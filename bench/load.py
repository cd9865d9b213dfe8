"""A closed-loop load generator: N streams, each of which sends its next request when the previous answer is complete.

Uses raw sockets and a minimal SSE reader, because client and server share the cores: it scans for line ends and decodes
only a stream's last event. Every prompt is made of different random words, so prefix caches do not help.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class LoadError(Exception):
    """A server refused, broke off, or reported an unexpected token count."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The request for a greedy stream, and where the last event reports the input and output tokens."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    counts: Callable[[dict[str, Any]], tuple[int, int]]  # last event -> (input tokens, output tokens)


PENSTOCK = Dialect(
    path="/generate_stream",
    body=lambda prompt, num: {
        "inputs": prompt,
        "parameters": {"max_new_tokens": num, "do_sample": False, "details": True, "ignore_eos": True},
    },
    counts=lambda last: (last["details"]["input_length"], last["details"]["generated_tokens"]),
)
LLAMA_CPP = Dialect(
    path="/completion",
    body=lambda prompt, num: {
        "prompt": prompt,
        "n_predict": num,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    },
    counts=lambda last: (last["tokens_evaluated"], last["tokens_predicted"]),
)


def openai_dialect(path: str, body: Callable[[str, int], dict[str, Any]]) -> Dialect:
    """A stream of OpenAI's API. body: the fields that depend on the route."""
    fixed = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return Dialect(
        path,
        lambda prompt, num: {**body(prompt, num), "max_tokens": num, **fixed},
        lambda last: (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]),
    )


class EventParser:
    """Parses an HTTP/1.1 response incrementally and returns the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.retry_after_s: int | None = None
        self.body = bytearray()  # the rest after the last complete line; the message of a refusal
        self._raw = bytearray()
        self._chunked = False

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the payloads that `data` completes."""
        self._raw += data
        if self.status is None:
            end = self._raw.find(b"\r\n\r\n")
            if end < 0:
                return []
            head = bytes(self._raw[:end]).lower()
            self.status = int(head.split(b" ", 2)[1])
            retry_after = head.partition(b"\r\nretry-after: ")[2]
            self.retry_after_s = int(retry_after.split(b"\r\n")[0]) if retry_after else None
            self._chunked = b"transfer-encoding: chunked" in head
            del self._raw[: end + 4]
        if self._chunked:
            self._unchunk()
        else:
            self.body += self._raw
            self._raw.clear()
        *lines, rest = self.body.split(b"\n")
        self.body = rest
        return [bytes(line[5:].strip()) for line in lines if line.startswith(b"data:") and b"[DONE]" not in line]

    def _unchunk(self) -> None:
        while (line_end := self._raw.find(b"\r\n")) >= 0:
            start = line_end + 2
            end = start + int(self._raw[:line_end].split(b";")[0], 16)
            if len(self._raw) < end + 2:
                return
            self.body += self._raw[start:end]
            del self._raw[: end + 2]


@dataclass(slots=True)
class Sample:
    """One request: seconds since the start of the load, and `gaps_s`, the gaps between its events."""

    sent_s: float
    ttft_s: float
    gaps_s: list[float]
    num_tokens: int


class Exchange(asyncio.Protocol):
    """One request on its own connection; `done` is set when the server closes it. Times are from perf_counter."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.sent = time.perf_counter()
        self.event_times: list[float] = []
        self.ended = 0.0
        self.last = b""
        self.parser = EventParser()
        self._request = request
        self._done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for payload in self.parser.feed(data):
            self.event_times.append(now)
            self.last = payload

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended = time.perf_counter()
        if not self._done.done():
            self._done.set_result(None)


@dataclass(frozen=True, slots=True)
class Load:
    """`num_streams` clients, each sending `num_requests` prompts one after the other."""

    name: str
    num_streams: int
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class LoadResult:
    """The measurements of a load; times in seconds."""

    samples: list[Sample]
    wall_s: float
    client_cpu_s: float

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode rate of one stream: tokens after the first of each request, over their time."""
        return (self.num_tokens - len(self.samples)) / sum(sum(sample.gaps_s) for sample in self.samples)


def prompt_of(words: Sequence[str], num_tokens: int, source: random.Random) -> str:
    """Random words, each one token with its leading space: `num_tokens` tokens in total."""
    return "".join(" " + word for word in source.choices(words, k=num_tokens))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: the smallest value that is at least `share` of all values."""
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


async def ask(port: int, dialect: Dialect, prompt: str, num_output_tokens: int) -> Exchange:
    """Sends one prompt and reads the whole answer, whatever its status."""
    body = json.dumps(dialect.body(prompt, num_output_tokens)).encode()
    head = f"POST {dialect.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    exchange = Exchange(request, done)
    await loop.create_connection(lambda: exchange, "127.0.0.1", port)
    await done
    return exchange


async def _ask(port: int, dialect: Dialect, prompt: str, load: Load, start_s: float) -> Sample:
    exchange = await ask(port, dialect, prompt, load.num_output_tokens)
    if exchange.parser.status != 200 or not exchange.last:
        raise LoadError(f"{dialect.path} answered {exchange.parser.status}: {bytes(exchange.parser.body[:300])!r}")
    try:
        num_input, num_output = dialect.counts(json.loads(exchange.last))
    except (KeyError, TypeError) as error:
        raise LoadError(f"{dialect.path} ended without its counts: {exchange.last[:300]!r}") from error
    if num_input != load.num_input_tokens:
        raise LoadError(f"{dialect.path} saw {num_input} input tokens, {load.num_input_tokens} were sent")
    times = exchange.event_times
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Sample(exchange.sent - start_s, times[0] - exchange.sent, gaps, num_output)


async def _run(port: int, dialect: Dialect, load: Load, words: Sequence[str], seed: str) -> LoadResult:
    source = random.Random(f"{seed}/{load.name}")
    rounds = [
        [prompt_of(words, load.num_input_tokens, source) for _ in range(load.num_requests)]
        for _ in range(load.num_streams)
    ]
    start, cpu_start = time.perf_counter(), time.process_time()

    async def stream(prompts: list[str]) -> list[Sample]:
        return [await _ask(port, dialect, prompt, load, start) for prompt in prompts]

    answers = await asyncio.gather(*(stream(prompts) for prompts in rounds))
    samples = [sample for answer in answers for sample in answer]
    return LoadResult(samples, time.perf_counter() - start, time.process_time() - cpu_start)


def run(port: int, dialect: Dialect, load: Load, words: Sequence[str], seed: str) -> LoadResult:
    """Runs `load` to completion; the same `seed` gives every server the same prompts. Raises LoadError."""
    return asyncio.run(_run(port, dialect, load, words, seed))
