"""`AsyncLLM`: a server of its own, called from asyncio."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count, islice
from types import TracebackType
from typing import Any, Literal, Self, cast

from penstock import batch_file, call_name, prompt, result, setting_name
from penstock.batch_file import FileSummary
from penstock.client import Client
from penstock.errors import RequestError
from penstock.in_order import in_order
from penstock.lora import LoRARequest
from penstock.process import ServerProcess
from penstock.progress import Progress
from penstock.prompt import Given
from penstock.result import Chunk, Embedding, Message, Prompt, Result
from penstock.sampling import SamplingParams

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
RENDER = "/render"
"""Behind one of the first two: checks a request and renders its prompt, without generating."""

# Unless the settings say otherwise. The server computes up to 256 sequences in a step; the others are queued there, so
# that the next one takes a free place in the batch without a round trip. The limits for clients that TGI's defaults set
# are not for the only user of a private server.
_DEFAULTS = {
    "max_concurrent_requests": 320,
    "max_queued_tokens": 1 << 40,
    "max_stop_sequences": 1024,
    "max_top_n_tokens": 20,
    "trust_request_chat_template": True,
}
# Results that wait for an earlier, longer one, in multiples of the requests in flight.
_PENDING_PER_SLOT = 8
_TEXTS_PER_REQUEST = 32

PromptLike = Prompt | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""
Params = SamplingParams | Sequence[SamplingParams] | None
OnError = Literal["raise", "keep"]
Adapters = LoRARequest | str | Sequence[LoRARequest | str | None] | None
"""The adapter of all prompts, or one for each."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt or a conversation, with its parameters."""

    index: int
    given: Given
    params: SamplingParams
    is_chat: bool
    fields: Mapping[str, Any]
    """Further fields of all requests of the call."""


class AsyncLLM:
    """A model in a server of its own, for one event loop.

    `model` is a folder, a .gguf file or a model id on the Hub; by default, the small embedded model. `settings` are the
    launcher's flags: `max_total_tokens=4096` is `--max-total-tokens 4096`; vLLM's names of them are understood.
    `seed` makes requests that have no seed repeatable: the n-th one since the start gets the same tokens each time.
    Raises SettingError for an unknown setting. The server starts in the background; `async with`, `ready` and the first
    request wait for it, and `use_tqdm` shows how far it is, by default in terminals and notebooks.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        seed: int | None = None,
        use_tqdm: bool | None = None,
        **settings: Any,
    ) -> None:
        self._process = ServerProcess(model, {**_DEFAULTS, **setting_name.translated(model, settings)}, use_tqdm)
        self._starting: asyncio.Task[Client] | None = None
        self._seed = seed
        self._num_unseeded = count()
        # Known once the server has started.
        self._max_pending = 0
        self._max_texts = 0

    async def __aenter__(self) -> Self:
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def ready(self) -> None:
        """Waits until the model is loaded. Raises SettingError or StartError with the server's message."""
        await self._client()

    async def close(self) -> None:
        """Stops the server. Requests that are running fail with StoppedError."""
        if self._starting is not None and self._starting.done() and not self._starting.exception():
            await self._starting.result().close()
        await asyncio.to_thread(self._process.stop)
        if self._starting is not None:
            # Ends now, because the server has.
            await asyncio.gather(self._starting, return_exceptions=True)

    async def info(self) -> dict[str, Any]:
        """The model and the limits of the server, as /info reports them."""
        return cast("dict[str, Any]", await (await self._client()).get("/info"))

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters that leave everything to the model's defaults."""
        return SamplingParams()

    def __getattr__(self, name: str) -> Any:
        """vLLM's methods that this class lacks say what to use."""
        raise AttributeError(no_method(type(self).__name__, name))

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The server's answer to a body that is sent to a route."""
        return await (await self._client()).post(path, body)

    async def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lora_request: Adapters = None,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
        **others: Any,
    ) -> list[Result]:
        """Continues each prompt: a text, the ids of its tokens, or a mapping with `prompt` or `prompt_token_ids`.

        Returns a result for each, in their order. `sampling_params` is for all prompts, or one for each, as is
        `lora_request`, the name of one of `LLM(lora_adapters=…)`. `use_tqdm` shows a bar, by default in terminals and
        notebooks. All prompts are checked before the first one is computed: raises RequestError for the first one that
        is refused or, with `on_error="keep"`, returns it as that prompt's `error`.
        """
        call_name.check("argument", others, signature(self.generate).parameters)
        if (prompts is None) == (prompt_token_ids is None):
            raise TypeError("give either prompts or prompt_token_ids")
        listed = prompt.prompts(prompt_token_ids if prompts is None else prompts)
        requests = _requests(listed, sampling_params, is_chat=False)
        return await self._complete(await self._adapted(requests, lora_request), use_tqdm, on_error)

    async def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        lora_request: Adapters = None,
        on_error: OnError = "raise",
        **others: Any,
    ) -> list[Result]:
        """Answers a conversation, which is a list of messages, or each of several. Otherwise like `generate`."""
        call_name.check("argument", others, signature(self.chat).parameters)
        given = {
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        requests = _requests(prompt.conversations(messages), sampling_params, is_chat=True, fields=fields)
        return await self._complete(await self._adapted(requests, lora_request), use_tqdm, on_error)

    async def stream(
        self, prompt_or_messages: PromptLike | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk]:
        """The generation for one prompt or conversation, as it is made. Ending the iteration early cancels it."""
        is_chat = prompt.is_conversation(prompt_or_messages)
        given = (prompt.conversations if is_chat else prompt.prompts)(prompt_or_messages)
        if len(given) != 1:
            raise ValueError(f"stream takes one prompt or conversation, not {len(given)}")
        (request,) = _requests(given, sampling_params, is_chat=is_chat)
        if given[0].error is not None:
            raise given[0].error
        client = await self._client()
        async for event in client.stream(_route(request), self._body(request)):
            for chunk in result.chunks(event):
                yield chunk

    async def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[Embedding]:
        """The vector of each text, for a model that makes vectors."""
        call_name.check("argument", others, signature(self.embed).parameters)
        requests = prompt.prompts(prompts)
        if refused := next((one.error for one in requests if one.error is not None), None):
            raise refused
        client = await self._client()
        listed = [cast("Prompt", one.prompt) for one in requests]
        given = {"dimensions": dimensions, "normalize": normalize, "prompt_name": prompt_name}
        fields = {name: value for name, value in given.items() if value is not None}

        async def embed(batch: Sequence[Prompt]) -> list[list[float]]:
            answer = await client.post(EMBEDDINGS, {"input": batch, "encoding_format": "base64", **fields})
            return [_vector(data["embedding"]) for data in answer["data"]]

        vectors: list[list[float]] = []
        with Progress(len(listed), shown=use_tqdm) as bar:
            async for batch in in_order(_batches(listed, self._max_texts), embed, self._max_pending):
                vectors += batch
                for _ in batch:
                    bar.add(0)
        return [Embedding(i, text, vector) for i, (text, vector) in enumerate(zip(listed, vectors, strict=True))]

    async def generate_file(
        self,
        source: str | os.PathLike[str],
        destination: str | os.PathLike[str],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> FileSummary:
        """Completes every line of a file of JSON lines, in bounded memory, and writes the generations to another.

        A line has an `id`, a `prompt` (a text or token ids) or `messages`, and may have `params`, which override those
        given here. `destination` gets, in the order of the lines, one line for each generation, or one with `error`.
        If it has lines already, the work goes on behind them. Raises PenstockError if they are not those of `source`.
        """
        client = await self._client()

        async def complete(line: batch_file.Line) -> Result:
            # A line's seed is its own, so that a run that goes on after a kill gives the same tokens.
            params = self._seeded(line.params, line.number)
            return await self._send(client, Request(line.number, Given(line.prompt), params, line.is_chat, {}))

        given = sampling_params or SamplingParams()
        return await batch_file.run(source, destination, given, complete, self._max_pending, progress=use_tqdm)

    async def _complete(self, requests: Sequence[Request], use_tqdm: bool | None, on_error: OnError) -> list[Result]:
        if on_error not in ("raise", "keep"):
            raise ValueError(f'on_error is {on_error!r}, must be "raise" or "keep"')
        if on_error == "raise":
            await self._check(requests)
        client = await self._client()
        results: list[Result] = []

        async def complete(request: Request) -> Result:
            try:
                if request.given.error is not None:
                    raise request.given.error
                return await self._send(client, request)
            except RequestError as error:
                if on_error == "raise":
                    raise
                return Result(request.index, request.given.prompt, error=error)

        with Progress(len(requests), shown=use_tqdm) as bar:
            async for one in in_order(requests, complete, self._max_pending):
                results.append(one)
                bar.add(sum(len(output.token_ids) for output in one.outputs))
        return results

    async def _adapted(self, requests: Sequence[Request], given: Adapters) -> Sequence[Request]:
        """The requests with their adapters. Raises ValueError for one that is not served."""
        if given is None:
            return requests
        listed = [given] * len(requests) if isinstance(given, (str, LoRARequest)) else list(given)
        if len(listed) != len(requests):
            raise ValueError(
                f"{len(listed)} lora_requests were given for {len(requests)} prompts; give one, or one for each"
            )
        names = [LoRARequest.name(one) for one in listed]
        if any(name is not None for name in names):
            models = await (await self._client()).get("/v1/models")
            served = {model["id"] for model in models["data"] if model["parent"] is not None}
            for index, name in enumerate(names):
                if name is not None and name not in served:
                    # The base model would answer.
                    raise ValueError(
                        f"lora_request {index} is {name!r}, which is not served; use LLM(lora_adapters='{name}=FOLDER')"
                    )
        return [
            request if name is None else replace(request, fields={**request.fields, "model": name})
            for request, name in zip(requests, names, strict=True)
        ]

    async def _check(self, requests: Sequence[Request]) -> None:
        """Raises the first error of requests that the server would refuse. A single one is refused at once anyway."""
        if refused := next((one.given.error for one in requests if one.given.error is not None), None):
            raise refused
        if len(requests) < 2:
            return
        client = await self._client()

        async def check(request: Request) -> None:
            with _indexed(request):
                await client.post(_route(request) + RENDER, _fields(request))

        async for _ in in_order(requests, check, self._max_pending):
            pass

    async def _client(self) -> Client:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Client:
        await self._process.wait_until_ready()
        client = Client(self._process, 1)
        info = await client.get("/info")
        await client.close()
        max_in_flight = info["max_concurrent_requests"]
        self._max_texts = min(_TEXTS_PER_REQUEST, info["max_client_batch_size"])
        self._max_pending = _PENDING_PER_SLOT * max_in_flight
        return Client(self._process, max_in_flight)

    async def _send(self, client: Client, request: Request) -> Result:
        with _indexed(request):
            answer = await client.post(_route(request), self._body(request))
        if request.is_chat:
            return result.of_chat(request.index, cast("Sequence[Message]", request.given.prompt), answer)
        return result.of_completion(request.index, cast("Prompt", request.given.prompt), answer)

    def _body(self, request: Request) -> dict[str, Any]:
        return _fields(replace(request, params=self._seeded(request.params, next(self._num_unseeded))))

    def _seeded(self, params: SamplingParams, number: int) -> SamplingParams:
        """With a seed of their own for request `number`, if the model has a seed and they have none."""
        if self._seed is None or params.seed is not None:
            return params
        return replace(params, seed=self._seed + number)


def no_method(kind: str, name: str) -> str:
    """The message of an attribute that is missing."""
    instead = call_name.METHODS.get(name)
    return f"{kind} has no {name}; use {instead}" if instead else f"{kind!r} object has no attribute {name!r}"


@contextmanager
def _indexed(request: Request) -> Iterator[None]:
    """Errors within say which prompt they are about."""
    try:
        yield
    except RequestError as error:
        error.index = request.index
        raise


def _route(request: Request) -> str:
    return CHATS if request.is_chat else COMPLETIONS


def _fields(request: Request) -> dict[str, Any]:
    """The ids of tokens, not their texts, name them in answers: two tokens can have the same text."""
    return {
        "messages" if request.is_chat else "prompt": request.given.prompt,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **request.params.fields(is_chat=request.is_chat),
        **request.fields,
        **request.given.fields,
    }


def _requests(
    given: Sequence[Given], params: Params, *, is_chat: bool, fields: Mapping[str, Any] | None = None
) -> Sequence[Request]:
    if params is None or isinstance(params, SamplingParams):
        listed: Sequence[SamplingParams] = [params or SamplingParams()] * len(given)
    elif isinstance(params, (list, tuple)):
        listed = params
        for index, one in enumerate(listed):
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling_params {index} is {one!r}, must be SamplingParams")
    else:
        raise TypeError(f"sampling_params is {params!r}, must be SamplingParams, or a list of them")
    if len(listed) != len(given):
        raise ValueError(
            f"{len(listed)} sampling_params were given for {len(given)} prompts; give one, or one for each"
        )
    return [
        Request(i, one, params, is_chat, fields or {})
        for i, (one, params) in enumerate(zip(given, listed, strict=True))
    ]


def _batches(texts: Iterable[Prompt], max_texts: int) -> Iterable[list[Prompt]]:
    """The texts of each request."""
    rest = iter(texts)
    while batch := list(islice(rest, max_texts)):
        yield batch


def _vector(encoded: str) -> list[float]:
    data = base64.b64decode(encoded)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
