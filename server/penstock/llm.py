"""`LLM`: `AsyncLLM` for code without asyncio. Its event loop has a thread of its own, so it also works in notebooks."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.async_llm import Adapters, AsyncLLM, OnError, Params, PromptLike, no_method
from penstock.batch_file import FileSummary
from penstock.errors import StoppedError
from penstock.result import Chunk, Embedding, Message, Result
from penstock.sampling import SamplingParams
from penstock.tokenizer import Tokenizer

Answer = TypeVar("Answer")


class LLM:
    """A model in a server of its own. The constructor returns when the model is loaded.

    `model` is a folder, a .gguf file or a model id on the Hub; by default, the small embedded model. `settings` are the
    launcher's flags: `max_total_tokens=4096` is `--max-total-tokens 4096`; vLLM's names of them are understood.
    `seed` makes requests that have no seed repeatable: the n-th one since the start gets the same tokens each time.
    `use_tqdm` shows how far the start is, by default in terminals and notebooks. Raises SettingError for an unknown
    setting or a wrong value, and StartError if the server does not start.

    The server ends with `close`, at the end of a `with` block, or with this process, however that ends.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        seed: int | None = None,
        use_tqdm: bool | None = None,
        **settings: Any,
    ) -> None:
        self._llm = AsyncLLM(model, seed=seed, use_tqdm=use_tqdm, **settings)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True).start()
        self._end_loop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        try:
            self._run(self._llm.ready())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the server. Later calls raise StoppedError."""
        if self._end_loop.alive:
            self._run(self._llm.close())
            self._end_loop()

    def info(self) -> dict[str, Any]:
        """The model and the limits of the server, as /info reports them."""
        return self._run(self._llm.info())

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters that leave everything to the model's defaults."""
        return self._llm.get_default_sampling_params()

    def __getattr__(self, name: str) -> Any:
        """vLLM's methods that this class lacks say what to use."""
        raise AttributeError(no_method("LLM", name))

    def get_tokenizer(self) -> Tokenizer:
        """The server's tokenizer, for prompts that are made here."""
        return Tokenizer(lambda path, body: self._run(self._llm.ask(path, body)))

    def generate(
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
        return self._run(
            self._llm.generate(
                prompts,
                sampling_params,
                prompt_token_ids=prompt_token_ids,
                lora_request=lora_request,
                use_tqdm=use_tqdm,
                on_error=on_error,
                **others,
            )
        )

    def chat(
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
        return self._run(
            self._llm.chat(
                messages,
                sampling_params,
                use_tqdm,
                tools=tools,
                tool_choice=tool_choice,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                lora_request=lora_request,
                on_error=on_error,
                **others,
            )
        )

    def stream(
        self, prompt_or_messages: PromptLike | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """The generation for one prompt or conversation, as it is made. Ending the iteration early cancels it."""
        chunks = self._llm.stream(prompt_or_messages, sampling_params)
        try:
            while (chunk := self._run(_next(chunks))) is not None:
                yield chunk
        finally:
            self._run(chunks.aclose())

    def embed(
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
        return self._run(
            self._llm.embed(
                prompts,
                dimensions=dimensions,
                normalize=normalize,
                prompt_name=prompt_name,
                use_tqdm=use_tqdm,
                **others,
            )
        )

    def generate_file(
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
        return self._run(self._llm.generate_file(source, destination, sampling_params, use_tqdm=use_tqdm))

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        if not self._end_loop.alive:
            work.close()
            raise StoppedError("the server was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C: the requests in flight are cancelled.
            future.cancel()
            raise


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)
