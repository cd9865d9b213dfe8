"""The service over real unix sockets with real clients: pipelining, isolation, refusals, health while a step runs.
Steps are a call and a stream on a socket of their own in turn."""

from __future__ import annotations

import math
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
import torch
from fake_model import BLOCK_TOKENS, CRASH, FakeModel, continuation
from grammar_walk import END, WORDS, write_small_tokenizer
from penstock_server.engine import Engine
from penstock_server.engine.device import libraries
from penstock_server.engine.device_progress import DeviceProgress
from penstock_server.engine.sampling import SAMPLING_FIELDS
from penstock_server.errors import ConfigError, FullMemoryError, ImageError, ImagesOverloadError
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.pb import worker_pb2 as pb
from penstock_server.pb import worker_pb2_grpc as rpc
from penstock_server.process.service import Worker, start_server
from penstock_server.protocol.config import WorkerConfig
from penstock_server.protocol.endpoint import UnixEndpoint
from penstock_server.protocol.frames import OK, Frames, steps_socket
from penstock_server.protocol.message import PROTOCOL_VERSION
from penstock_server.protocol.plan import Sampling
from penstock_server.watermark import GreenLists
from plans import Advance, columns

TIMEOUT_S = 240
GREEDY = pb.Sampling(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)
LOAD = pb.LoadRequest(
    protocol_version=PROTOCOL_VERSION, model_path="/nowhere", block_tokens=BLOCK_TOKENS, dtype="float32", num_threads=1
)
WARM_UP = pb.WarmUpRequest(max_step_tokens=64, max_step_sequences=8, num_blocks=40, memory_fraction=0.9)


@dataclass
class Client:
    """A worker with a fake model in this process, and a stub that talks to it."""

    worker: Worker
    stub: rpc.WorkerStub
    models: list[FakeModel]
    steps_socket: Path | None  # None: steps are a call

    @property
    def model(self) -> FakeModel:
        return self.models[0]

    def make_ready(self, options: pb.LoadRequest | None = None) -> None:
        request = pb.LoadRequest()
        request.CopyFrom(LOAD)
        request.MergeFrom(options or pb.LoadRequest())
        self.stub.Load(request, timeout=TIMEOUT_S)
        self.stub.WarmUp(WARM_UP, timeout=TIMEOUT_S)
        self.model.started.clear()

    def steps(self) -> Steps:
        return Steps(self.stub, self.steps_socket)


class StreamError(grpc.RpcError):
    """The reason for which a stream has failed, as a call would raise it."""

    def __init__(self, code: int, reason: bytes) -> None:
        super().__init__(reason)
        self._code, self._reason = code, reason

    def code(self) -> grpc.StatusCode:
        return next(code for code in grpc.StatusCode if code.value[0] == self._code)

    def details(self) -> str:
        return self._reason.decode()


class SocketResults:
    """The results of plans that are sent over the socket of steps."""

    def __init__(self, path: Path, plans: Iterator[pb.Plan]) -> None:
        self._connection = sockets.socket(sockets.AF_UNIX)
        self._connection.settimeout(TIMEOUT_S)
        self._connection.connect(str(path))
        self._frames = Frames(self._connection)
        self._received = iter(self._frames)
        threading.Thread(target=self._send, args=(plans,), daemon=True).start()

    def _send(self, plans: Iterator[pb.Plan]) -> None:
        for plan in plans:
            self._frames.write(OK, plan.SerializeToString())
        self._connection.shutdown(sockets.SHUT_WR)

    def __iter__(self) -> Iterator[pb.StepResult]:
        return self

    def __next__(self) -> pb.StepResult:
        code, payload = next(self._received)
        if code != OK:
            raise StreamError(code, payload)
        return pb.StepResult.FromString(payload)

    def cancel(self) -> None:
        self._frames.close()


@dataclass
class Steps:
    """An open stream of steps."""

    stub: rpc.WorkerStub
    socket: Path | None
    sent: SimpleQueue[pb.Plan | None] = field(default_factory=SimpleQueue)
    num_sent: int = 0

    def __post_init__(self) -> None:
        plans = iter(self.sent.get, None)
        self.results = (
            self.stub.Steps(plans, timeout=TIMEOUT_S) if self.socket is None else SocketResults(self.socket, plans)
        )

    def send(self, *advances: Advance, new: list[pb.NewSequence] | None = None, freed: list[int] | None = None) -> None:
        self.num_sent += 1
        packed = columns(advances)
        message = pb.Advances(
            sequence_ids=packed.sequence_ids.tobytes(),
            num_tokens=packed.num_tokens.tobytes(),
            sample=packed.sample.tobytes(),
            num_new_blocks=packed.num_new_blocks.tobytes(),
            new_block_ids=packed.new_block_ids.tobytes(),
        )
        self.sent.put(pb.Plan(step=self.num_sent, new_sequences=new, freed_sequence_ids=freed, advances=message))

    def end(self) -> None:
        self.sent.put(None)


@pytest.fixture(params=["call", "socket"])
def client(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    models: list[FakeModel] = []

    def load(options: LoadOptions, group: RankGroup) -> FakeModel:
        models.append(FakeModel())
        return models[-1]

    path = tmp_path / "worker"
    worker = Worker(WorkerConfig(UnixEndpoint(path)), load_model=load)
    server = start_server(worker, UnixEndpoint(path))
    with grpc.insecure_channel(f"unix:{path}") as channel:
        own_socket = steps_socket(path) if request.param == "socket" else None
        yield Client(worker, rpc.WorkerStub(channel), models, own_socket)
    server.stop()


def new_sequence(sequence_id: int, prompt: list[int], sampling: pb.Sampling = GREEDY) -> pb.NewSequence:
    return pb.NewSequence(
        sequence_id=sequence_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_ids=range(4 * sequence_id, 4 * sequence_id + 4),
        sampling=sampling,
    )


def advance(sequence_id: int, num_tokens: int = 1) -> Advance:
    return Advance(sequence_id, num_tokens, sample=True)


def sampled(result: pb.StepResult) -> dict[int, int]:
    """The token of each sequence, in the order of the result."""
    ids = np.frombuffer(result.sampled.ids, "<u4").tolist()
    assert (np.frombuffer(result.sampled.logprobs, "<f4") <= 0).all()
    return dict(zip(np.frombuffer(result.sequence_ids, "<u8").tolist(), ids, strict=True))


def top(tokens: pb.Tokens, index: int) -> list[tuple[int, float]]:
    """The alternatives to a token."""
    (found,) = (top for top in tokens.top if top.index == index)
    columns = (np.frombuffer(found.ids, "<u4").tolist(), np.frombuffer(found.logprobs, "<f4").tolist())
    return list(zip(*columns, strict=True))


def errors(result: pb.StepResult) -> dict[int, str]:
    return {error.sequence_id: error.reason for error in result.errors}


def test_plans_sent_ahead_are_executed_in_order(client: Client) -> None:
    client.make_ready()
    steps = client.steps()
    prompts = {1: [5, 6, 7], 2: [8, 9]}
    client.model.gate.clear()
    steps.send(advance(1, 3), advance(2, 2), new=[new_sequence(i, prompt) for i, prompt in prompts.items()])
    for _ in range(5):
        steps.send(advance(1), advance(2))
    steps.end()
    assert client.model.started.wait(TIMEOUT_S)
    client.model.gate.set()
    results = list(steps.results)
    assert [result.step for result in results] == [1, 2, 3, 4, 5, 6]
    assert all(list(sampled(result)) == [1, 2] for result in results)
    for sequence_id, prompt in prompts.items():
        assert [sampled(result)[sequence_id] for result in results] == continuation(prompt, 6)


def test_an_asynchronous_device_gets_the_next_step_before_the_last_is_collected(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "is_asynchronous", True)
    calls: list[tuple[str, int]] = []
    for name, call in (("launch", Engine.launch), ("collect", Engine.collect)):

        def record(engine: Engine, step: Any, name: str = name, call: Any = call) -> Any:
            calls.append((name, step.step))
            return call(engine, step)

        monkeypatch.setattr(Engine, name, record)
    client.make_ready()
    calls.clear()
    all_are_posted, post = threading.Barrier(2), client.worker._compute.post

    def post_and_tell(job: Any) -> None:
        post(job)
        if job.func == client.worker._end:
            all_are_posted.wait(TIMEOUT_S)

    monkeypatch.setattr(client.worker._compute, "post", post_and_tell)
    steps = client.steps()
    client.model.gate.clear()
    steps.send(advance(1, 2), new=[new_sequence(1, [5, 6])])
    for _ in range(4):
        steps.send(advance(1))
    steps.end()
    all_are_posted.wait(TIMEOUT_S)
    client.model.gate.set()
    assert [sampled(result)[1] for result in steps.results] == continuation([5, 6], 5)
    assert calls[:4] == [("launch", 1), ("launch", 2), ("collect", 1), ("launch", 3)]
    assert [step for name, step in calls if name == "collect"] == [1, 2, 3, 4, 5]


def test_a_result_is_returned_while_the_next_step_computes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.make_ready()
    steps = client.steps()
    entered, forward, may_go_on = threading.Semaphore(0), client.model.forward, threading.Semaphore(0)

    def wait_and_compute(batch: Any) -> Any:
        entered.release()
        may_go_on.acquire(timeout=TIMEOUT_S)
        return forward(batch)

    monkeypatch.setattr(client.model, "forward", wait_and_compute)
    steps.send(advance(1, 2), new=[new_sequence(1, [5, 6])])
    steps.send(advance(1))
    assert entered.acquire(timeout=TIMEOUT_S)
    may_go_on.release()
    assert next(steps.results).step == 1, "the second step has not ended"
    may_go_on.release()
    steps.end()
    assert [result.step for result in steps.results] == [2]


def test_health_tells_how_far_a_gpu_is(client: Client) -> None:
    client.make_ready()
    assert not client.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S).HasField("device"), "there is no GPU"
    is_finished = [True, False, True]  # an event behind an unfinished one is not asked
    events = (Mock(query=lambda place=place: is_finished[place]) for place in range(3))
    engine = client.worker._engine
    assert engine is not None
    engine.progress = DeviceProgress(lambda: next(events))
    found = []
    for _ in range(3):
        engine.progress.mark()
        device = client.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S).device
        found.append((device.num_finished, device.is_busy))
    is_finished[1] = True
    device = client.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S).device
    assert [*found, (device.num_finished, device.is_busy)] == [(1, False), (1, True), (1, True), (3, False)]


def test_health_tells_whether_the_pool_still_takes_memory(client: Client) -> None:
    client.make_ready()
    engine = client.worker._engine
    assert engine is not None
    may_end = threading.Event()
    engine._backing = threading.Thread(target=may_end.wait)
    engine._backing.start()
    assert client.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S).is_backing_pool
    may_end.set()
    engine._backing.join()
    assert not client.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S).is_backing_pool


def test_health_answers_while_a_step_runs(client: Client) -> None:
    client.make_ready()
    steps = client.steps()
    client.model.gate.clear()
    steps.send(advance(1, 2), new=[new_sequence(1, [5, 6])])
    assert client.model.started.wait(TIMEOUT_S)
    assert client.stub.Health(pb.HealthRequest(), timeout=TIMEOUT_S).processor_seconds > 0
    client.model.gate.set()
    next(steps.results)
    steps.end()
    assert list(steps.results) == []


def test_a_router_of_another_version_is_refused_with_both_versions(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Load(pb.LoadRequest(protocol_version=99), timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol version 99" in caught.value.details()
    assert f"speaks version {PROTOCOL_VERSION}" in caught.value.details()
    client.make_ready()  # the worker is unaffected


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("dtype", "float32, float16, bfloat16"), ("kv_cache_dtype", "auto, fp8_e4m3fn, fp8_e5m2")],
)
def test_an_invalid_option_is_refused_with_the_reason(name: str, allowed: str, client: Client) -> None:
    request = pb.LoadRequest()
    request.CopyFrom(LOAD)
    setattr(request, name, "int3")
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Load(request, timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == f'{name} is "int3", must be one of {allowed}'
    assert not client.worker.faulted.is_set()


def test_calls_out_of_order_are_refused(client: Client) -> None:
    for call in (lambda: client.stub.WarmUp(WARM_UP, timeout=TIMEOUT_S), lambda: next(client.steps().results)):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    client.make_ready()
    for call in (
        lambda: client.stub.Load(LOAD, timeout=TIMEOUT_S),
        lambda: client.stub.WarmUp(WARM_UP, timeout=TIMEOUT_S),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_the_load_and_warm_up_responses_describe_the_model(client: Client) -> None:
    description = client.stub.Load(LOAD, timeout=TIMEOUT_S)
    assert description.protocol_version == PROTOCOL_VERSION
    assert (description.architecture, description.dtype, description.device) == ("fake", "float32", "cpu")
    assert (description.device_name, description.libraries) == ("", libraries(torch.device("cpu")))
    assert (description.vocab_size, description.max_position_tokens) == (997, 64)
    assert description.block_tokens == BLOCK_TOKENS
    assert [phase.name for phase in description.phases] == ["meet ranks", "load model"]
    assert client.stub.WarmUp(WARM_UP, timeout=TIMEOUT_S).num_blocks == 40


def test_sources_and_windows_reach_both_sides(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = replace(FakeModel.traits, max_source_tokens=8, decoder_prefix=(5, 6), window_tokens=32)
    monkeypatch.setattr(FakeModel, "traits", traits)
    description = client.stub.Load(LOAD, timeout=TIMEOUT_S)
    assert (description.max_source_tokens, list(description.decoder_prefix)) == (8, [5, 6])
    assert description.window_tokens == 32
    client.stub.WarmUp(WARM_UP, timeout=TIMEOUT_S)
    steps, prompt = client.steps(), [21, 22, 23, 5, 6]
    with_source = new_sequence(1, prompt)
    with_source.num_source_tokens = 3
    steps.send(advance(1, 5), advance(2, 5), new=[with_source, new_sequence(2, prompt)])
    steps.end()
    (result,) = steps.results
    assert sampled(result) == {1: continuation(prompt, 1)[0]}
    assert errors(result) == {2: "has no source tokens, but the model has an encoder"}


UNACCEPTABLE = {
    "typical_p is 1.5, must be in (0, 1]": {"typical_p": 1.5},
    "frequency_penalty is inf, must be finite": {"frequency_penalty": math.inf},
    "presence_penalty is nan, must be finite": {"presence_penalty": math.nan},
    "logit_bias of token 1 is inf, must be finite": {"logit_bias": [pb.LogitBias(token_id=1, bias=math.inf)]},
    "logit_bias or stop_token_ids name token 997, outside of the vocabulary of 997": {
        "min_new_tokens": 2,
        "stop_token_ids": [997],
    },
}


def sampling(**options: Any) -> pb.Sampling:
    message = pb.Sampling(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)
    message.MergeFrom(pb.Sampling(**options))
    return message


def test_a_broken_sequence_fails_alone(client: Client) -> None:
    client.make_ready()
    steps = client.steps()
    fine, outside = new_sequence(1, [5, 6]), new_sequence(2, [5, 2000])
    asking = []
    for sequence_id, options in enumerate(UNACCEPTABLE.values(), 3):
        asking.append(new_sequence(sequence_id, [7], sampling(**options)))
    for sequence in asking:
        del sequence.block_ids[:]
    steps.send(advance(1, 2), advance(2, 2), new=[fine, outside, *asking])
    steps.send(advance(1), *(advance(sequence.sequence_id) for sequence in asking[:4]))
    steps.send(*(advance(sequence.sequence_id) for sequence in asking[4:]), advance(1))
    first, second, third = (next(steps.results) for _ in range(3))
    assert errors(first) == {2: "token id 2000 is outside of the vocabulary of 997"}
    assert list((errors(second) | errors(third)).values()) == list(UNACCEPTABLE)
    assert [sampled(result) for result in (first, second, third)] == [{1: i} for i in continuation([5, 6], 3)]


def test_the_message_sampling_and_the_engine_s_type_have_the_same_fields() -> None:
    # The protocol carries the grammar in NewSequence.
    properties = {"masked", "mask_reads_history", "has_grammar"}
    assert [*pb.Sampling.DESCRIPTOR.fields_by_name, "grammar"] == [field.name for field in fields(Sampling)]
    assert set(SAMPLING_FIELDS.names or ()) < {*pb.Sampling.DESCRIPTOR.fields_by_name, *properties}


def test_every_field_of_sampling_reaches_the_sampler(client: Client) -> None:
    client.make_ready()
    first = continuation([5, 6], 1)[0]
    others = sampling(top_n=3, logit_bias=[pb.LogitBias(token_id=42, bias=30)], prompt_logprobs=True)
    asked = {
        1: (others, 42),
        2: (sampling(min_new_tokens=1, stop_token_ids=[first]), 0),
        3: (sampling(do_sample=True, seed=3, typical_p=0.5, watermark=True, top_p=0.01), first),
        4: (sampling(frequency_penalty=1, presence_penalty=1), first),
    }
    steps = client.steps()
    new = [new_sequence(sequence_id, [5, 6], message) for sequence_id, (message, _) in asked.items()]
    steps.send(*(advance(sequence_id, 2) for sequence_id in asked), new=new)
    result = next(steps.results)
    assert list(sampled(result).values()) == [wanted for _, wanted in asked.values()]
    assert len(result.sampled.top) == 1
    alternatives = top(result.sampled, 0)
    assert [token_id for token_id, _ in alternatives] == [42, first, 0]
    logprobs = [logprob for _, logprob in alternatives]
    assert logprobs[0] == np.frombuffer(result.sampled.logprobs, "<f4")[0]
    assert logprobs == sorted(logprobs, reverse=True)
    (prompt,) = result.prompts
    assert (prompt.sequence_id, prompt.tokens.ids) == (1, np.array([6], "<u4").tobytes())
    expected = (20 if continuation([5], 1) == [6] else 0) - math.log(math.exp(20) + 996)
    assert np.frombuffer(prompt.tokens.logprobs, "<f4") == pytest.approx([expected], abs=1e-4)
    assert [len(top(prompt.tokens, 0)), top(prompt.tokens, 0)[0][0]] == [3, continuation([5], 1)[0]]


def test_the_watermark_is_that_of_the_load_request(client: Client) -> None:
    request = pb.LoadRequest()
    request.CopyFrom(LOAD)
    request.watermark_gamma = 1.5
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Load(request, timeout=TIMEOUT_S)
    assert caught.value.details() == "watermark gamma is 1.5, must be in (0, 1)"
    request.watermark_gamma, request.watermark_delta = 0.25, 60.0
    client.stub.Load(request, timeout=TIMEOUT_S)
    client.stub.WarmUp(WARM_UP, timeout=TIMEOUT_S)
    steps = client.steps()
    steps.send(advance(1, 2), new=[new_sequence(1, [5, 6], sampling(watermark=True))])
    chosen = sampled(next(steps.results))[1]
    assert GreenLists(997, 0.25).are_green(np.array([6]), np.array([chosen])).all()


def test_the_attention_is_that_of_the_load_request(client: Client) -> None:
    request = pb.LoadRequest()
    request.CopyFrom(LOAD)
    request.block_tokens, request.attention = 0, "paged"
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Load(request, timeout=TIMEOUT_S)
    assert caught.value.details() == 'attention is "paged", must be one of native, flash, triton, reference'


def test_a_grammar_is_compiled_while_a_step_runs_and_then_constrains(client: Client, tmp_path: Path) -> None:
    regex = pb.CompileGrammarRequest(grammar=pb.Grammar(regex="aab?"))
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.CompileGrammar(regex, timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    write_small_tokenizer(tmp_path)
    load = pb.LoadRequest(model_path=str(tmp_path))
    client.make_ready(load)
    steps = client.steps()
    client.model.gate.clear()
    steps.send(advance(1, 2), new=[new_sequence(1, [5, 6])])
    assert client.model.started.wait(TIMEOUT_S)
    first, again = (client.stub.CompileGrammar(regex, timeout=TIMEOUT_S) for _ in range(2))
    assert (first.error, again.error) == ("", "")
    broken = pb.CompileGrammarRequest(grammar=pb.Grammar(json_schema='{"type": "shoe"}'))
    assert "Invalid type: shoe" in client.stub.CompileGrammar(broken, timeout=TIMEOUT_S).error
    assert "is empty" in client.stub.CompileGrammar(pb.CompileGrammarRequest(), timeout=TIMEOUT_S).error
    client.model.gate.set()
    constrained = new_sequence(2, [5, 6], sampling(stop_token_ids=[END]))
    constrained.grammar.CopyFrom(regex.grammar)
    steps.send(advance(2, 2), advance(1), new=[constrained])
    steps.send(advance(2), advance(1))
    results = [next(steps.results) for _ in range(3)]
    ids = [sampled(result)[2] for result in results[1:]]
    text = "".join((*WORDS, "<end>")[token_id] for token_id in ids)
    assert any(whole.startswith(text) for whole in ("aa<end>", "aab<end>"))
    assert sampled(results[2])[1] == continuation([5, 6], 3)[2]


def test_a_new_stream_forgets_the_one_before(client: Client) -> None:
    client.make_ready()
    old = client.steps()
    old.send(advance(1, 2), new=[new_sequence(1, [5, 6])])
    next(old.results)
    new = client.steps()
    new.send(advance(1))
    assert errors(next(new.results)) == {1: "unknown sequence id"}
    with pytest.raises(grpc.RpcError) as caught:
        next(old.results)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    new.send(advance(1, 2), new=[new_sequence(1, [5, 6])], freed=[1])
    assert sampled(next(new.results)) == {1: continuation([5, 6], 1)[0]}


def test_a_cancelled_stream_leaves_room_for_the_next(client: Client) -> None:
    client.make_ready()
    for _ in range(12):  # more than there are RPC threads
        steps = client.steps()
        steps.send(advance(1, 2), new=[new_sequence(1, [5, 6])])
        assert next(steps.results).step == 1
        steps.results.cancel()


ONE = np.ones(1, "<u4").tobytes()
BROKEN_PLANS = {
    "step": (pb.Plan(step=7), "step is 7, must be 1"),
    "half a number": (
        pb.Plan(step=1, advances=pb.Advances(sequence_ids=b"123")),
        "a column has 3 bytes, which is not a multiple of 8",
    ),
    "short column": (
        pb.Plan(step=1, advances=pb.Advances(sequence_ids=ONE + ONE, num_tokens=ONE, num_new_blocks=ONE)),
        "the columns of the advances do not have the same length",
    ),
    "missing blocks": (
        pb.Plan(
            step=1,
            advances=pb.Advances(sequence_ids=ONE + ONE, num_tokens=ONE, num_new_blocks=ONE, sample=b"0"),
        ),
        "the columns of the advances do not have the same length",
    ),
}


@pytest.mark.parametrize(("plan", "message"), BROKEN_PLANS.values(), ids=BROKEN_PLANS.keys())
def test_a_broken_plan_ends_the_stream_and_not_the_worker(client: Client, plan: pb.Plan, message: str) -> None:
    client.make_ready()
    steps = client.steps()
    steps.sent.put(plan)
    with pytest.raises(grpc.RpcError) as caught:
        next(steps.results)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == message
    again = client.steps()
    again.send()
    assert next(again.results).step == 1


@pytest.mark.parametrize("cut", [b"\x05\x00", b"\x05\x00\x00\x00\x00\x08", b"\x00\x00\x00\x00"])
def test_a_connection_that_breaks_within_a_frame_ends_its_stream_only(client: Client, cut: bytes) -> None:
    if client.steps_socket is None:
        pytest.skip("a call has no frames of ours")
    client.make_ready()
    with sockets.socket(sockets.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(client.steps_socket))
        connection.sendall(cut)
        connection.shutdown(sockets.SHUT_WR)
        assert connection.recv(1) == b""
    steps = client.steps()
    steps.send()
    assert next(steps.results).step == 1
    assert not client.worker.faulted.is_set()


def test_a_crash_in_a_step_is_internal_and_ends_the_worker(client: Client) -> None:
    client.make_ready()
    steps = client.steps()
    steps.send(advance(1, 2), new=[new_sequence(1, [5, CRASH])])
    with pytest.raises(grpc.RpcError) as caught:
        next(steps.results)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "the model crashed" in caught.value.details()
    assert client.worker.faulted.wait(TIMEOUT_S)


def test_a_message_may_be_larger_than_grpc_s_default_limit(client: Client) -> None:
    client.make_ready()
    steps = client.steps()
    long = pb.NewSequence(sequence_id=1, token_ids=[900] * 3_000_000, num_prompt_tokens=1, sampling=GREEDY)
    steps.send(advance(1), new=[long])
    assert errors(next(steps.results)) == {1: "has 3000000 tokens, at most 64 are allowed"}


def test_a_stale_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    for path in (stale, steps_socket(stale)):
        with sockets.socket(sockets.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
    start_server(Worker(WorkerConfig(UnixEndpoint(stale))), UnixEndpoint(stale)).stop()
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="cannot listen on"):
        start_server(Worker(WorkerConfig(UnixEndpoint(file))), UnixEndpoint(file))
    assert file.read_text() == "precious"
    with pytest.raises(ConfigError, match="at most 107 are allowed"):
        start_server(Worker(WorkerConfig(UnixEndpoint(file))), UnixEndpoint(tmp_path / ("x" * 200)))


def test_answers_say_whether_a_later_call_may_succeed(client: Client) -> None:
    client.make_ready()
    request = pb.LoadAdapterRequest(adapter=pb.Adapter(id=1, path="/adapters/one"))
    for error, is_full in ((ConfigError("damaged"), False), (FullMemoryError("full"), True)):
        client.model.adapters = Mock(**{"load.side_effect": error})
        answer = client.stub.LoadAdapter(request, timeout=TIMEOUT_S)
        assert (answer.error, answer.is_memory_full) == (str(error), is_full)
    for refusal, is_overloaded in ((ImageError("damaged"), False), (ImagesOverloadError("busy"), True)):
        client.model.images = Mock(**{"encode.side_effect": refusal})
        images = client.stub.EncodeImages(pb.EncodeImagesRequest(), timeout=TIMEOUT_S)
        assert (images.error, images.is_overloaded) == (str(refusal), is_overloaded)


def test_an_encoder_learns_that_its_caller_has_left(client: Client) -> None:
    client.make_ready()
    has_begun, has_left = threading.Event(), threading.Event()

    def encode(images: Any, is_awaited: Callable[[], bool]) -> list[Any]:
        assert is_awaited()
        has_begun.set()
        deadline = time.monotonic() + TIMEOUT_S
        while is_awaited() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not is_awaited():
            has_left.set()
        return []

    client.model.images = Mock(encode=encode)
    call = client.stub.EncodeImages.future(pb.EncodeImagesRequest(), timeout=TIMEOUT_S)
    assert has_begun.wait(TIMEOUT_S)
    call.cancel()
    assert has_left.wait(TIMEOUT_S)
