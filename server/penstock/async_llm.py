"""`AsyncLLM`: a server of its own, called from asyncio."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Self, cast

from penstock import batch_file, result
from penstock.batch_file import FileSummary
from penstock.client import Client
from penstock.errors import RequestError
from penstock.in_order import in_order
from penstock.process import ServerProcess
from penstock.progress import Progress
from penstock.result import Chunk, Completion, Embedding, Message, Prompt
from penstock.sampling import SamplingParams

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"

# Unless the settings say otherwise. The server computes up to 256 sequences in a step; the others are queued there, so
# that the next one takes a free place in the batch without a round trip.
_DEFAULTS = {"max_concurrent_requests": 320, "max_queued_tokens": 1 << 40}
# Results that wait for an earlier, longer one, in multiples of the requests in flight.
_PENDING_PER_SLOT = 8
_TEXTS_PER_REQUEST = 32

Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt or a conversation, with its parameters."""

    index: int
    prompt: Prompt | Sequence[Message]
    params: SamplingParams
    is_chat: bool
    fields: Mapping[str, Any]
    """Further fields of the request."""


class AsyncLLM:
    """A model in a server of its own, for one event loop.

    `model` is a folder, a .gguf file or a model id on the Hub; by default, the small embedded model. `settings` are the
    launcher's flags: `max_total_tokens=4096` is `--max-total-tokens 4096`. Raises SettingError for an unknown setting.
    The server starts in the background; `async with`, `ready` and the first request wait for it.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        self._process = ServerProcess(model, {**_DEFAULTS, **settings})
        self._starting: asyncio.Task[Client] | None = None
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

    async def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, progress: bool | None = None
    ) -> list[Completion]:
        """Continues each prompt: a text, or the ids of its tokens. Returns the generations in the order of the prompts.

        `params` is for all prompts, or one for each. `progress` shows a bar, by default in terminals and notebooks.
        Raises RequestError for the first prompt that the server refuses.
        """
        return await self._complete(_requests(_listed(prompts), params, is_chat=False, fields={}), progress)

    async def chat(
        self,
        conversations: Sequence[Message] | Iterable[Sequence[Message]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Answers each conversation, a list of messages. Otherwise like `generate`."""
        listed: list[Any] = list(conversations)
        if listed and isinstance(listed[0], Mapping):
            listed = [listed]
        given = {
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template_kwargs": chat_template_kwargs,
            "continue_final_message": continue_final_message,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        return await self._complete(_requests(listed, params, is_chat=True, fields=fields), progress)

    async def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk]:
        """The generation for one prompt or conversation, as it is made. Ending the iteration early cancels it."""
        is_chat = not _is_prompt(prompt)
        client = await self._client()
        request = Request(0, cast("Prompt", prompt), params or SamplingParams(), is_chat, {})
        async for event in client.stream(CHATS if is_chat else COMPLETIONS, _body(request)):
            for chunk in result.chunks(event):
                yield chunk

    async def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> list[Embedding]:
        """The vector of each text, for a model that makes vectors."""
        client = await self._client()
        listed = _listed(texts)
        given = {"dimensions": dimensions, "normalize": normalize, "prompt_name": prompt_name}
        fields = {name: value for name, value in given.items() if value is not None}

        async def embed(batch: Sequence[Prompt]) -> list[list[float]]:
            answer = await client.post(EMBEDDINGS, {"input": batch, "encoding_format": "base64", **fields})
            return [_vector(data["embedding"]) for data in answer["data"]]

        vectors: list[list[float]] = []
        with Progress(len(listed), shown=progress) as bar:
            async for batch in in_order(_batches(listed, self._max_texts), embed, self._max_pending):
                vectors += batch
                for _ in batch:
                    bar.add(0)
        return [Embedding(i, text, vector) for i, (text, vector) in enumerate(zip(listed, vectors, strict=True))]

    async def generate_file(
        self,
        source: str | os.PathLike[str],
        destination: str | os.PathLike[str],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> FileSummary:
        """Completes every line of a file of JSON lines, in bounded memory, and writes the generations to another.

        A line has an `id`, a `prompt` (a text or token ids) or `messages`, and may have `params`, which override those
        given here. `destination` gets, in the order of the lines, one line for each generation, or one with `error`.
        If it has lines already, the work goes on behind them. Raises PenstockError if they are not those of `source`.
        """
        client = await self._client()

        async def complete(line: batch_file.Line) -> list[Completion]:
            return await _send(client, Request(line.number, line.prompt, line.params, line.is_chat, {}))

        return await batch_file.run(
            source, destination, params or SamplingParams(), complete, self._max_pending, progress=progress
        )

    async def _complete(self, requests: Sequence[Request], progress: bool | None) -> list[Completion]:
        client = await self._client()
        completions: list[Completion] = []

        async def complete(request: Request) -> list[Completion]:
            return await _send(client, request)

        with Progress(len(requests), shown=progress) as bar:
            async for choices in in_order(requests, complete, self._max_pending):
                completions += choices
                bar.add(sum(len(choice.token_ids) for choice in choices))
        return completions

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


async def _send(client: Client, request: Request) -> list[Completion]:
    try:
        answer = await client.post(CHATS if request.is_chat else COMPLETIONS, _body(request))
    except RequestError as error:
        error.index = request.index
        raise
    if request.is_chat:
        return result.chat_completions(request.index, cast("Sequence[Message]", request.prompt), answer)
    return result.completions(request.index, cast("Prompt", request.prompt), answer)


def _body(request: Request) -> dict[str, Any]:
    """The ids of tokens, not their texts, name them in answers: two tokens can have the same text."""
    return {
        "messages" if request.is_chat else "prompt": request.prompt,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **request.params.fields(is_chat=request.is_chat),
        **request.fields,
    }


def _requests(prompts: Sequence[Any], params: Params, *, is_chat: bool, fields: Mapping[str, Any]) -> Sequence[Request]:
    if params is None or isinstance(params, SamplingParams):
        listed: Sequence[SamplingParams] = [params or SamplingParams()] * len(prompts)
    else:
        listed = params
    if len(listed) != len(prompts):
        raise ValueError(f"{len(listed)} params were given for {len(prompts)} prompts; give one, or one for each")
    return [
        Request(i, prompt, one, is_chat, fields) for i, (prompt, one) in enumerate(zip(prompts, listed, strict=True))
    ]


def _is_prompt(value: object) -> bool:
    """Whether this is one prompt: a text, or token ids."""
    return isinstance(value, str) or (
        isinstance(value, Sequence) and bool(value) and all(isinstance(part, int) for part in value)
    )


def _listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    return [cast("Prompt", prompts)] if _is_prompt(prompts) else list(cast("Iterable[Prompt]", prompts))


def _batches(texts: Iterable[Prompt], max_texts: int) -> Iterable[list[Prompt]]:
    """The texts of each request."""
    rest = iter(texts)
    while batch := list(islice(rest, max_texts)):
        yield batch


def _vector(encoded: str) -> list[float]:
    data = base64.b64decode(encoded)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
