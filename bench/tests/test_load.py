"""The load generator's arithmetic, and a complete load against a scripted server."""

import json
import random
import socketserver
import threading
from collections.abc import Iterator

import pytest
from load import PENSTOCK, EventParser, Load, LoadError, percentile, prompt_of, run

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("piece", [1, 2, 7, 10_000])
def test_events_do_not_depend_on_how_the_bytes_arrive(piece: int) -> None:
    response = CHUNKED + chunk(b"data: one\n") + chunk(b"\nda") + chunk(b"ta:two\n\n: keep-alive\n\n") + chunk(b"")
    parser = EventParser()
    pieces = [response[start : start + piece] for start in range(0, len(response), piece)]
    assert [payload for data in pieces for payload in parser.feed(data)] == [b"one", b"two"]
    assert parser.status == 200


def test_a_response_without_chunks_is_read_too() -> None:
    assert EventParser().feed(HEAD + b"\r\ndata:{}\n\ndata: [DONE]\n\n") == [b"{}"]


def test_a_refusal_keeps_its_message() -> None:
    parser = EventParser()
    assert parser.feed(b'HTTP/1.1 422 Nope\r\ncontent-length: 9\r\n\r\n{"error"}') == []
    assert (parser.status, bytes(parser.body)) == (422, b'{"error"}')


def test_percentile_is_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.99, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([7.0], 0.5) == 7.0


def test_prompts_repeat_with_the_seed_and_only_then() -> None:
    words = ["one", "two", "three", "four"]
    prompts = [prompt_of(words, 40, random.Random(seed)) for seed in ("a", "a", "b")]
    assert prompts[0] == prompts[1] != prompts[2]
    assert prompts[0].count(" ") == 40


class Answer(socketserver.StreamRequestHandler):
    """Answers in Penstock's format and counts each word as a token."""

    def handle(self) -> None:
        length = 0
        while (line := self.rfile.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        request = json.loads(self.rfile.read(length))
        num = request["parameters"]["max_new_tokens"]
        self.wfile.write(CHUNKED)
        for index in range(num):
            details = {"input_length": request["inputs"].count(" "), "generated_tokens": num}
            event = {"index": index, "details": details if index == num - 1 else None}
            self.wfile.write(chunk(b"data:" + json.dumps(event).encode() + b"\n\n"))
        self.wfile.write(chunk(b""))


@pytest.fixture
def port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_load_counts_what_was_really_produced(port: int) -> None:
    result = run(port, PENSTOCK, Load("test", 3, 2, 5, 4), ["word"], "seed")
    assert len(result.samples) == 6
    assert result.num_tokens == 24
    assert all(len(sample.gaps_s) == 3 and sample.ttft_s > 0 for sample in result.samples)


def test_a_wrong_prompt_length_is_refused(port: int) -> None:
    with pytest.raises(LoadError, match="saw 10 input tokens, 5 were sent"):
        run(port, PENSTOCK, Load("test", 1, 1, 5, 4), ["two words"], "seed")
