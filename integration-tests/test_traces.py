"""Traces at a collector, which is OpenTelemetry's own gRPC service, of the real binary with the real model."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from binary import Server, start
from client import Answer, ask, send
from fault.probe import metric, restarts, serving_ranks, wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

PARENT = "b7ad6b7169203331"
TGI_TIMES = ["total_time", "validation_time", "queue_time", "inference_time", "time_per_token"]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it gets."""

    port: int = 0
    received: list[ResourceSpans] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def Export(self, request, context):  # the name is the protocol's
        self.headers.append(dict(context.invocation_metadata()))
        self.received.extend(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> Trace:
        """The spans of a trace, once all are there."""
        wait_until(lambda: self.spans(trace_id) != [], f"trace {trace_id}")
        return Trace(self.spans(trace_id))

    def spans(self, trace_id: str) -> list[Span]:
        scopes = [scope for resource in list(self.received) for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans if span.trace_id.hex() == trace_id]


@dataclass
class Trace:
    spans: list[Span]

    @property
    def root(self) -> Span:
        (root,) = [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]
        return root

    def children(self, parent: Span) -> list[Span]:
        children = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(children, key=lambda span: span.start_time_unix_nano)

    def sequences(self) -> list[Span]:
        return [span for span in self.children(self.root) if span.name == "sequence"]

    def phases(self, sequence: Span) -> list[str]:
        return [span.name for span in self.children(sequence)]


def attributes(item) -> dict[str, object]:
    """The attributes of a span, an event or a resource."""

    def value(any_value) -> object:
        if any_value.WhichOneof("value") == "array_value":
            return [value(element) for element in any_value.array_value.values]
        return getattr(any_value, any_value.WhichOneof("value"))

    return {attribute.key: value(attribute.value) for attribute in item.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    service = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, service)
    collector.port = service.add_insecure_port("127.0.0.1:0")
    service.start()
    yield collector
    service.stop(None).wait()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer collectors-key")
        environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=b")
        running = start("--otlp-endpoint", f"http://127.0.0.1:{collector.port}", "--api-key", "clients-key")
    yield running
    assert running.stop() == 0


def post(server: Server, path: str, body: dict, flags: str = "01") -> tuple[str, Answer]:
    """Posts within a new trace. Returns the trace's id and the answer."""
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}", "authorization": "Bearer clients-key"}
    return trace_id, ask(server, path, body, **headers)


def test_a_plain_answer_has_tgis_root_span_and_fields(traced: Server, collector: Collector) -> None:
    parameters = {"max_new_tokens": 5, "temperature": 0.7, "seed": 42}
    trace_id, answer = post(traced, "/generate", {"inputs": "The capital of", "parameters": parameters})
    trace = collector.trace(trace_id)
    root = attributes(trace.root)
    assert trace.root.name == "generate"
    assert trace.root.parent_span_id.hex() == PARENT
    assert answer.headers["traceparent"] == f"00-{trace_id}-{trace.root.span_id.hex()}-01"
    assert root["seed"] == "Some(42)"
    assert root["parameters"].startswith("GenerateParameters { best_of: None, temperature: Some(0.7), ")
    for name in TGI_TIMES:
        seconds = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}
        number = root[name].rstrip("nµms")
        assert float(number) * seconds[root[name][len(number) :]] >= 0
    assert root["gen_ai.usage.input_tokens"] == int(answer.headers["x-prompt-tokens"])
    assert root["gen_ai.usage.output_tokens"] == 5
    assert root["gen_ai.request.temperature"] == 0.7
    assert root["gen_ai.response.finish_reasons"] == ["length"]
    assert [span.name for span in trace.children(trace.root)] == ["validate", "sequence"]
    assert trace.phases(trace.sequences()[0]) == ["queue", "prefill", "decode"]
    assert trace.root.status.code == Status.STATUS_CODE_UNSET


def test_a_stream_has_the_steps_of_each_phase(traced: Server, collector: Collector) -> None:
    chat = {"messages": [{"role": "user", "content": "Count to a hundred."}], "stream": True, "max_tokens": 20}
    trace_id, _ = post(traced, "/v1/chat/completions", {**chat, "ignore_eos": True})
    trace = collector.trace(trace_id)
    root = attributes(trace.root)
    assert trace.root.name == "chat_completions"
    assert (root["gen_ai.operation.name"], root["gen_ai.request.stream"]) == ("chat", True)
    assert 0 < root["gen_ai.response.time_to_first_chunk"] < 60
    _, prefill, decode = trace.children(trace.sequences()[0])
    assert (
        attributes(prefill)["penstock.computed_tokens"]
        + attributes(trace.sequences()[0])["gen_ai.usage.cache_read.input_tokens"]
        == root["gen_ai.usage.input_tokens"]
    )
    assert attributes(decode)["penstock.steps"] == 19
    assert (len(decode.events), decode.dropped_events_count) == (8, 11)
    steps = [attributes(event) for event in decode.events]
    assert [step["penstock.step.number"] for step in steps] == sorted(step["penstock.step.number"] for step in steps)
    for step in steps:
        assert 0 < step["penstock.step.worker_forward"] < attributes(decode)["penstock.worker_forward"]


def test_an_error_is_a_root_alone(traced: Server, collector: Collector) -> None:
    trace_id, answer = post(traced, "/generate", {"inputs": "x", "parameters": {"max_new_tokens": 0}})
    assert answer.status == 422
    trace = collector.trace(trace_id)
    assert len(trace.spans) == 1
    root = attributes(trace.root)
    assert (root["error.type"], root["http.response.status_code"]) == ("validation", 422)
    assert "total_time" not in root


def test_each_choice_is_a_sequence(traced: Server, collector: Collector) -> None:
    # The second choice may be submitted when the steps of the first one that a trace keeps are over.
    wait_until(lambda: bool(set.intersection(*two_choices(traced, collector))), "two choices share steps")


def two_choices(traced: Server, collector: Collector) -> list[set[object]]:
    """The numbers of the steps of each choice."""
    body = {"prompt": "A story:", "n": 2, "temperature": 1.0, "top_p": 0.9, "max_tokens": 9, "ignore_eos": True}
    trace_id, _ = post(traced, "/v1/completions", body)
    trace = collector.trace(trace_id)
    sequences = trace.sequences()
    assert [attributes(sequence)["penstock.sequence.index"] for sequence in sequences] == [0, 1]
    assert all(trace.phases(sequence) == ["queue", "prefill", "decode"] for sequence in sequences)
    assert len({attributes(sequence)["penstock.sequence.seed"] for sequence in sequences}) == 2
    decodes = [trace.children(sequence)[2] for sequence in sequences]
    return [{attributes(step)["penstock.step.number"] for step in decode.events} for decode in decodes]


def killed(traced: Server, collector: Collector) -> Trace:
    """The trace of a stream of 200 tokens whose worker is killed after the first tokens, or after the last one."""
    before = restarts(traced)
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "authorization": "Bearer clients-key"}
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 200, "ignore_eos": True}}
    connection, response = send(traced, "/generate_stream", body, **headers)
    for _ in range(10):
        response.readline()
    os.kill(serving_ranks(traced)[0], signal.SIGKILL)
    response.read()
    connection.close()
    wait_until(lambda: restarts(traced) > before)
    return collector.trace(trace_id)


def test_a_worker_death_is_an_interruption(traced: Server, collector: Collector) -> None:
    trace = killed(traced, collector)
    while "interruption" not in trace.phases(trace.sequences()[0]):
        trace = killed(traced, collector)
    (sequence,) = trace.sequences()
    interruption = trace.children(sequence)[-1]
    assert trace.phases(sequence) == ["queue", "prefill", "decode", "interruption"]
    assert attributes(interruption)["penstock.interruption.cause"] == "worker_failure"
    assert attributes(interruption)["penstock.interruption.reason"]
    assert interruption.end_time_unix_nano < sequence.end_time_unix_nano, "the stream went on afterwards"
    assert attributes(trace.root)["gen_ai.usage.output_tokens"] == 200


def test_a_client_that_leaves_is_seen(traced: Server, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "authorization": "Bearer clients-key"}
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8000, "ignore_eos": True}}
    connection, response = send(traced, "/generate_stream", body, **headers)
    for _ in range(10):  # several tokens
        response.readline()
    response.close()
    connection.close()
    trace = collector.trace(trace_id)
    assert attributes(trace.root)["error.type"] == "client_disconnected"
    assert "decode" in trace.phases(trace.sequences()[0])


def test_the_log_names_the_trace_of_a_request_without_one(traced: Server, collector: Collector) -> None:
    body = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
    answer = ask(traced, "/generate", body, authorization="Bearer clients-key")
    trace_id = answer.headers["traceparent"].split("-")[1]
    trace = collector.trace(trace_id)
    assert trace.root.parent_span_id == b""
    wait_until(lambda: any(trace_id in line for line in traced.lines), "the request is in the log")
    logged = [json.loads(line)["fields"] for line in traced.lines if trace_id in line]
    assert [fields["request_id"] for fields in logged] == [answer.headers["x-request-id"]]
    assert attributes(trace.root)["penstock.request_id"] == answer.headers["x-request-id"]


def test_spans_describe_the_server_and_hold_no_secret(traced: Server, collector: Collector) -> None:
    secret = "SECRET" + secrets.token_hex(4)
    body = {"inputs": secret, "parameters": {"max_new_tokens": 2, "stop": [secret]}}
    unsampled, _ = post(traced, "/generate", body, flags="00")
    trace_id, _ = post(traced, "/generate", body)
    collector.trace(trace_id)
    assert not collector.spans(unsampled), "it was queued before the one that is here"
    resource = attributes(collector.received[0].resource)
    assert resource["service.name"] == "text-generation-inference.router"
    assert resource["zone"] == "b"
    assert {headers["authorization"] for headers in collector.headers} == {"Bearer collectors-key"}
    everything = str(collector.received)
    assert secret not in everything
    assert "clients-key" not in everything
    assert "collectors-key" not in "".join(traced.lines)
    assert metric(traced, "penstock_spans_exported") > 0
    assert metric(traced, 'penstock_spans_lost{reason="export_failed"}') == 0
