"""The worker's gRPC face, and its streams of steps over a unix socket. `message` converts what it receives and sends.

The compute thread runs steps. Plans are read ahead as they arrive, so plan n+1 is ready when step n ends, and on an
asynchronous device before. proto/worker.proto specifies every method.

PERF: with grpc, the messages of a step take some 0.6 ms on three threads. Over a unix socket the compute thread sends
results itself.
"""

from __future__ import annotations

import hmac
import logging
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import grpc

from penstock_server.engine import Engine
from penstock_server.engine.load import LoadModel
from penstock_server.errors import (
    ConfigError,
    FullMemoryError,
    GrammarError,
    ImageError,
    ImagesOverloadError,
    PlanError,
)
from penstock_server.pb import worker_pb2 as pb
from penstock_server.pb import worker_pb2_grpc as rpc
from penstock_server.process.compute import ComputeThread
from penstock_server.protocol.config import Description, LoadConfig, WarmUpConfig, WorkerConfig
from penstock_server.protocol.endpoint import Endpoint, Tls, UnixEndpoint
from penstock_server.protocol.frames import OK, FrameListener, Frames, steps_socket
from penstock_server.protocol.message import (
    PROTOCOL_VERSION,
    adapter_of,
    grammar_of,
    image_input_message,
    load_config,
    phases_message,
    plan_of,
    pooling_message,
    result_message,
)
from penstock_server.protocol.plan import Image, Plan, StepResult

logger = logging.getLogger(__name__)

_RPC_THREADS = 64  # started when needed; enough for Health while many calls wait for grammars and images
_MAX_LAUNCHED_STEPS = 2  # on an asynchronous device: one runs while the next one is prepared
_MAX_SOCKET_PATH_BYTES = 107  # longest path in sockaddr_un, without its final zero
_NOT_READY = "the worker is not warmed up; WarmUp comes before Steps"


class _Abort:
    """The status of a stream that fails."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code = code
        self.message = message


class _Stream:
    """One open stream of steps."""

    def __init__(self, put: Callable[[StepResult | _Abort | None], None]) -> None:
        """put: takes the results, then None or an _Abort."""
        self.put = put
        self.ended = False


class Worker(rpc.WorkerServicer):
    """Serves one rank. `faulted` is set when the process must exit."""

    def __init__(self, config: WorkerConfig, load_model: LoadModel | None = None) -> None:
        self.faulted = threading.Event()
        self._config = config
        self._load_model = load_model
        self._engine: Engine | None = None
        self._ready = False
        self._stream: _Stream | None = None
        self._opening = threading.Lock()
        self._launched: deque[Any] = deque()
        self._compute = ComputeThread(self._fault)

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:  # noqa: N802
        if request.protocol_version != PROTOCOL_VERSION:
            _refuse(
                context,
                f"the router speaks protocol version {request.protocol_version}, this worker (penstock "
                f"{_package_version()}) speaks version {PROTOCOL_VERSION}; install both from one release",
            )
        if not hmac.compare_digest(request.token.encode(), self._config.token.encode()):
            _abort(context, _Abort(grpc.StatusCode.PERMISSION_DENIED, "the token in Load is not that of this worker"))
        try:
            description = self._compute.call(partial(self._load, load_config(request)))
        except ConfigError as error:
            _refuse(context, str(error))
        except Exception as error:  # noqa: BLE001 - the service's boundary
            self._abort_with_fault(context, error)
        return pb.LoadResponse(
            protocol_version=PROTOCOL_VERSION,
            architecture=description.architecture,
            dtype=description.dtype,
            device=description.device,
            attention=description.attention,
            vocab_size=description.vocab_size,
            block_tokens=description.block_tokens,
            max_position_tokens=description.max_position_tokens,
            default_position_tokens=description.default_position_tokens,
            weight_bytes=description.weight_bytes,
            kv_bytes_per_block=description.kv_bytes_per_block,
            phases=phases_message(description.phases),
            window_tokens=description.window_tokens,
            decoder_prefix=description.decoder_prefix,
            max_source_tokens=description.max_source_tokens,
            pooling=pooling_message(description),
            can_draft=description.can_draft,
            drafts_with_model=description.drafts_with_model,
            drafts_extend_lookup=description.drafts_extend_lookup,
            image_input=image_input_message(description.image_input),
            device_name=description.device_name,
            libraries=description.libraries,
            state_bytes_per_sequence=description.state_bytes_per_sequence,
            snapshot_bytes=description.snapshot_bytes,
            snapshot_reach_tokens=description.snapshot_reach_tokens,
        )

    def WarmUp(self, request: pb.WarmUpRequest, context: grpc.ServicerContext) -> pb.WarmUpResponse:  # noqa: N802
        config = WarmUpConfig(
            max_step_tokens=request.max_step_tokens,
            max_step_sequences=request.max_step_sequences,
            max_sequence_tokens=request.max_sequence_tokens,
            num_blocks=request.num_blocks,
            memory_fraction=request.memory_fraction,
            proven=request.proven,
            graph_sizes=tuple(request.graph_sizes),
            reserves_standby=request.reserves_standby,
            num_memory_slots=request.num_memory_slots,
            num_disk_slots=request.num_disk_slots,
            offload_folder=Path(request.offload_folder) if request.offload_folder else None,
            num_groups=request.num_groups or 1,
            num_state_slots=request.num_state_slots,
            num_snapshots=request.num_snapshots if request.HasField("num_snapshots") else None,
        )
        engine = self._engine
        if engine is None:
            _refuse(context, "no model is loaded; Load comes before WarmUp")
        if self._ready:
            _refuse(context, "the worker is warmed up already")
        try:
            capacity = self._compute.call(partial(engine.warm_up, config))
        except ConfigError as error:
            _refuse(context, str(error))
        except Exception as error:  # noqa: BLE001 - the service's boundary
            self._abort_with_fault(context, error)
        self._ready = True
        return pb.WarmUpResponse(
            num_blocks=capacity.num_blocks,
            phases=phases_message(capacity.phases),
            worst_step_seconds=capacity.worst_step_s,
            standby_room_bytes=capacity.standby_room_bytes,
            num_state_slots=capacity.num_state_slots,
            num_snapshots=capacity.num_snapshots,
        )

    def CompileGrammar(  # noqa: N802
        self, request: pb.CompileGrammarRequest, context: grpc.ServicerContext
    ) -> pb.CompileGrammarResponse:
        engine, grammar = self._engine, grammar_of(request.grammar)
        if engine is None:
            _refuse(context, "no model is loaded; Load comes before CompileGrammar")
        if grammar is None:
            return pb.CompileGrammarResponse(
                error="the grammar is empty; send a JSON schema, a regular expression or Lark"
            )
        try:
            engine.compile_grammar(grammar)
        except GrammarError as error:
            return pb.CompileGrammarResponse(error=str(error))
        return pb.CompileGrammarResponse()

    def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.LoadAdapterResponse:
        engine, adapter = self._engine, adapter_of(request.adapter)
        if engine is None or adapter is None:
            _refuse(context, "LoadAdapter needs a loaded model, and an adapter with an id")
        try:
            if request.only_checks:
                engine.check_adapter(adapter)
            else:
                engine.load_adapter(adapter, request.unloaded_ids)
        except ConfigError as error:
            return pb.LoadAdapterResponse(error=str(error), is_memory_full=isinstance(error, FullMemoryError))
        except Exception as error:  # noqa: BLE001 - the service's boundary
            self._abort_with_fault(context, error)
        return pb.LoadAdapterResponse()

    def EncodeImages(  # noqa: N802
        self, request: pb.EncodeImagesRequest, context: grpc.ServicerContext
    ) -> pb.EncodeImagesResponse:
        engine = self._engine
        if engine is None:
            _refuse(context, "no model is loaded; Load comes before EncodeImages")
        images = [Image(image.hash, image.data) for image in request.images]
        try:
            encoded = engine.encode_images(images, context.is_active)
        except ImageError as error:
            return pb.EncodeImagesResponse(error=str(error), is_overloaded=isinstance(error, ImagesOverloadError))
        except Exception as error:  # noqa: BLE001 - the service's boundary
            self._abort_with_fault(context, error)
        messages = [pb.EncodedImage(token_ids=each.token_ids.tolist(), num_bytes=each.num_bytes) for each in encoded]
        return pb.EncodeImagesResponse(images=messages)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:  # noqa: N802
        engine, device = self._engine, None
        if engine is not None and engine.progress is not None:
            progress = engine.progress.ask()
            device = pb.DeviceProgress(num_finished=progress.num_finished, is_busy=progress.is_busy)
        is_backing_pool = engine is not None and engine.is_backing_pool
        return pb.HealthResponse(processor_seconds=time.process_time(), device=device, is_backing_pool=is_backing_pool)

    def Steps(  # noqa: N802
        self, requests: Iterator[pb.Plan], context: grpc.ServicerContext
    ) -> Iterator[pb.StepResult]:
        if not self._ready:
            _refuse(context, _NOT_READY)
        results: SimpleQueue[StepResult | _Abort | None] = SimpleQueue()
        stream = self._open_stream(results.put)
        context.add_callback(partial(results.put, None))
        threading.Thread(target=self._read, args=(requests, stream), name="plans", daemon=True).start()
        while (result := results.get()) is not None:
            if isinstance(result, _Abort):
                _abort(context, result)
            yield result_message(result)

    def serve_steps(self, listener: FrameListener) -> None:
        """Serve streams of steps until the listener is closed."""
        for frames in listener:
            threading.Thread(target=self._serve_frames, args=(frames,), name="plans", daemon=True).start()

    def _serve_frames(self, frames: Frames) -> None:
        def put(result: StepResult | _Abort | None) -> None:
            if isinstance(result, StepResult):
                frames.write(OK, result_message(result).SerializeToString())
                return
            if result is not None:
                frames.write(result.code.value[0], result.message.encode())
            frames.close()

        if self._ready:
            self._read((pb.Plan.FromString(message) for _, message in frames), self._open_stream(put))
        else:
            put(_Abort(grpc.StatusCode.FAILED_PRECONDITION, _NOT_READY))

    def _open_stream(self, put: Callable[[StepResult | _Abort | None], None]) -> _Stream:
        """A new stream, in place of the one before. put: as of `_Stream`."""
        stream = _Stream(put)
        with self._opening:
            if self._stream is not None:
                self._stream.put(_Abort(grpc.StatusCode.ABORTED, "a new stream of steps was opened"))
            self._stream = stream
            self._compute.post(partial(self._open, stream))
        return stream

    def _read(self, requests: Iterator[pb.Plan], stream: _Stream) -> None:
        """Reader thread: post plans as they arrive, however far ahead the router sends them."""
        try:
            for request in requests:
                self._compute.post(partial(self._step, stream, plan_of(request)))
        except PlanError as error:
            self._compute.post(partial(self._refuse_plan, stream, error))
            return
        except (grpc.RpcError, OSError):
            logger.info("the router closed the stream of steps")
        except Exception as error:  # noqa: BLE001 - the service's boundary
            self._fault(error)
        self._compute.post(partial(self._end, stream))

    # Everything below runs on the compute thread, except _fault.

    def _load(self, config: LoadConfig) -> Description:
        if self._engine is not None:
            raise ConfigError("a model is loaded already; a worker serves one model for its lifetime")
        options = {} if self._load_model is None else {"load_model": self._load_model}
        rank, size, node = self._config.rank, self._config.world_size, self._config.node
        self._engine, description = Engine.load(config, rank, size, node=node, **options)
        return description

    def _open(self, stream: _Stream) -> None:
        assert self._engine is not None
        self._launched.clear()
        if stream is self._stream:
            self._engine.reset()

    def _step(self, stream: _Stream, plan: Plan) -> None:
        if stream is not self._stream or stream.ended:
            return
        assert self._engine is not None
        try:
            self._launched.append(self._engine.launch(plan))
        except PlanError as error:
            self._refuse_plan(stream, error)
        if self._engine.is_asynchronous and len(self._launched) < _MAX_LAUNCHED_STEPS:
            # Behind the plans that are here already: they are launched before this thread waits for the device.
            self._compute.post(partial(self._collect, stream))
        else:
            self._collect(stream)

    def _collect(self, stream: _Stream) -> None:
        """Wait for the oldest launched step, if there is one, and return its result."""
        if self._launched and stream is self._stream:
            assert self._engine is not None
            result = self._engine.collect(self._launched.popleft())
            stream.put(result)

    def _end(self, stream: _Stream) -> None:
        while self._launched and stream is self._stream:
            self._collect(stream)
        stream.put(None)

    def _refuse_plan(self, stream: _Stream, error: PlanError) -> None:
        stream.ended = True
        stream.put(_Abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)))

    def _fault(self, error: BaseException) -> None:
        """Report a defect to the log and the stream, and let the process exit."""
        logger.error("the worker failed and exits", exc_info=error)
        stream = self._stream
        if stream is not None:
            stream.ended = True
            stream.put(_Abort(grpc.StatusCode.INTERNAL, f"the worker failed: {error!r}"))
        self.faulted.set()

    def _abort_with_fault(self, context: grpc.ServicerContext, error: BaseException) -> NoReturn:
        self._fault(error)
        _abort(context, _Abort(grpc.StatusCode.INTERNAL, f"the worker failed: {error!r}"))


@dataclass(frozen=True, slots=True)
class Server:
    """What listens on an endpoint."""

    calls: grpc.Server
    steps: FrameListener | None  # listener on a unix socket

    def stop(self, last_replies_s: float | None = None) -> None:
        """Stop to listen, and wait until all calls have ended; after `last_replies_s` they are ended."""
        if self.steps is not None:
            self.steps.close()
        self.calls.stop(last_replies_s).wait()


def start_server(worker: Worker, endpoint: Endpoint) -> Server:
    """Listen on an endpoint, replacing a stale socket. Raises ConfigError when it cannot be bound."""
    server = grpc.server(
        ThreadPoolExecutor(max_workers=_RPC_THREADS, thread_name_prefix="rpc"),
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # A router on another machine pings every 5 s, also without a call. By default that ends its connection.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    rpc.add_WorkerServicer_to_server(worker, server)
    steps = None
    try:
        if isinstance(endpoint, UnixEndpoint):
            for path in _sockets(endpoint):
                _check_socket(path)
            server.add_insecure_port(str(endpoint))
            steps = FrameListener(steps_socket(endpoint.path))
        else:
            host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
            server.add_secure_port(f"{host}:{endpoint.port}", _credentials(endpoint.tls))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"cannot listen on {endpoint}: {error}") from error
    if steps is not None:
        threading.Thread(target=worker.serve_steps, args=(steps,), name="streams", daemon=True).start()
    server.start()
    return Server(server, steps)


def _sockets(endpoint: UnixEndpoint) -> tuple[Path, Path]:
    return endpoint.path, steps_socket(endpoint.path)


def _check_socket(path: Path) -> None:
    if len(bytes(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket path has {len(bytes(path))} bytes, at most {_MAX_SOCKET_PATH_BYTES} are allowed")
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def remove_socket(endpoint: Endpoint) -> None:
    """Remove the files of an endpoint, if it has any."""
    if isinstance(endpoint, UnixEndpoint):
        for path in _sockets(endpoint):
            path.unlink(missing_ok=True)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key.encode(), tls.certificate.encode())], tls.authority.encode(), require_client_auth=True
    )


def _abort(context: grpc.ServicerContext, abort: _Abort) -> NoReturn:
    context.abort(abort.code, abort.message)
    raise AssertionError("invariant: abort raises")


def _refuse(context: grpc.ServicerContext, message: str) -> NoReturn:
    _abort(context, _Abort(grpc.StatusCode.FAILED_PRECONDITION, message))


def _package_version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
