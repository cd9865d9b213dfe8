"""Frameworks that agents are built with, each with its own client, against a server at `PENSTOCK_URL`.

`test_frameworks.py` of the folder above starts the server, and runs these in an environment with pinned versions.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from pydantic import BaseModel, Field

URL = os.environ.get("PENSTOCK_URL", "")

QUESTION = "What is the capital of Japan?"
ANSWER = "Tokyo"
SUM = "What is 3 + 4?"


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def test_langchain_anthropic() -> None:
    langchain = pytest.importorskip("langchain_anthropic")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatAnthropic(
        base_url=URL, api_key="-", model="tgi", temperature=0, max_tokens=120, max_retries=0
    )

    async def streamed() -> str:
        return "".join([chunk.text async for chunk in model.astream(QUESTION)])

    assert ANSWER in model.invoke(QUESTION).text
    assert asyncio.run(streamed()) == "".join(chunk.text for chunk in model.stream(QUESTION))
    called = model.bind_tools([add], tool_choice="add").invoke(SUM)
    (call,) = called.tool_calls
    assert set(call["args"]) == {"a", "b"}
    assert model.invoke([messages.HumanMessage(SUM), called, messages.ToolMessage("7", tool_call_id=call["id"])]).text
    assert isinstance(model.with_structured_output(City).invoke("Name a city in Italy."), City)


def test_llama_index() -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    core = pytest.importorskip("llama_index.core.llms")
    tools = pytest.importorskip("llama_index.core.tools")
    model = openai_like.OpenAILike(
        api_base=f"{URL}/v1",
        api_key="-",
        model="tgi",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )
    question = [core.ChatMessage(role="user", content=QUESTION)]
    plain = model.chat(question).message.content
    assert ANSWER in plain
    assert "".join(chunk.delta for chunk in model.stream_chat(question)) == plain
    called = model.chat_with_tools([tools.FunctionTool.from_defaults(add)], user_msg=SUM, tool_required=True)
    assert [call.tool_name for call in model.get_tool_calls_from_response(called)] == ["add"]
    assert isinstance(model.as_structured_llm(City).complete("Name a city in Italy.").raw, City)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "huggingface"])
def test_litellm(provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    path = {"anthropic": "", "huggingface": "/v1/chat/completions"}.get(provider, "/v1")
    arguments: Any = {
        "model": f"{provider}/tgi",
        "api_base": URL + path,
        "api_key": "-",
        "max_tokens": 60,
        "temperature": 0,
    }
    question: Any = [{"role": "user", "content": QUESTION}]
    plain = litellm.completion(messages=question, **arguments).choices[0].message.content
    assert ANSWER in plain
    chunks = list(litellm.completion(messages=question, stream=True, **arguments))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Add", "parameters": ADD}}]
    turns: Any = [{"role": "user", "content": SUM}]
    called = litellm.completion(messages=turns, tools=tools, tool_choice="required", **arguments).choices[0].message
    assert {call.function.name for call in called.tool_calls} == {"add"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in called.tool_calls]
    turns = [*turns, called.model_dump(), *results]
    assert litellm.completion(messages=turns, tools=tools, **arguments).choices[0].message.content


def test_haystack() -> None:
    chat = pytest.importorskip("haystack.components.generators.chat")
    message = pytest.importorskip("haystack.dataclasses").ChatMessage
    secret = pytest.importorskip("haystack.utils").Secret
    tool = pytest.importorskip("haystack.tools").Tool
    pieces: list[str] = []
    arguments: Any = {"api_key": secret.from_token("-"), "api_base_url": f"{URL}/v1", "model": "tgi"}
    greedy = {"max_tokens": 80, "temperature": 0}
    question = [message.from_user(QUESTION)]
    model = chat.OpenAIChatGenerator(**arguments, generation_kwargs=greedy)
    plain = model.run(question)["replies"][0].text
    assert ANSWER in plain
    model.run(question, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert "".join(pieces) == plain
    adding = tool(name="add", description="Add", parameters=ADD, function=add)
    turns = [message.from_user(SUM)]
    called = model.run(turns, tools=[adding], generation_kwargs={"tool_choice": "required"})["replies"][0]
    assert {call.tool_name for call in called.tool_calls} == {"add"}
    results = [message.from_tool("7", origin=call) for call in called.tool_calls]
    assert model.run([*turns, called, *results])["replies"][0].text


def test_instructor() -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    question: Any = [{"role": "user", "content": "Name a city in Italy and its country."}]
    arguments: Any = {"model": "tgi", "messages": question, "response_model": City, "max_tokens": 120, "temperature": 0}
    connection = openai.OpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0)
    for mode in (
        instructor.Mode.TOOLS,
        instructor.Mode.JSON_SCHEMA,
        instructor.Mode.TOOLS_STRICT,
    ):
        found = instructor.from_openai(connection, mode=mode).create(**arguments, max_retries=0)
        assert isinstance(found, City), mode
    client = instructor.from_openai(connection, mode=instructor.Mode.TOOLS)
    *_, last = client.create_partial(**arguments, max_retries=0)
    assert last.name
    assert last.country


@pytest.mark.parametrize("provider", ["openai", "responses"])  # its Anthropic model fails with anthropic 2 by itself
def test_pydantic_ai(provider: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    kind = models.OpenAIResponsesModel if provider == "responses" else models.OpenAIChatModel
    model = kind("tgi", provider=providers.OpenAIProvider(api_key="-", base_url=f"{URL}/v1"))
    greedy: Any = {"temperature": 0, "max_tokens": 120}
    plain = pydantic_ai.Agent(model, model_settings=greedy)
    assert ANSWER in plain.run_sync(QUESTION).output

    async def streamed() -> str:
        async with plain.run_stream(QUESTION) as answer:
            return "".join([part async for part in answer.stream_text(delta=True)])

    assert ANSWER in asyncio.run(streamed())
    structured = pydantic_ai.Agent(model, output_type=City, model_settings=greedy)
    assert isinstance(structured.run_sync("Name a city in Italy.").output, City)


def test_smolagents() -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIModel("tgi", api_base=f"{URL}/v1", api_key="-", temperature=0, max_tokens=120)
    message: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert ANSWER in model.generate(message).content
    assert "".join(delta.content or "" for delta in model.generate_stream(message))

    class Add(smolagents.Tool):  # type: ignore[misc]
        name = "add"
        description = "Add two integers."
        inputs = {  # noqa: RUF012
            "a": {"type": "integer", "description": "the first"},
            "b": {"type": "integer", "description": "the second"},
        }
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a + b

    asked: Any = [{"role": "user", "content": [{"type": "text", "text": SUM}]}]
    called = model.generate(asked, tools_to_call_from=[Add()])
    assert [call.function.name for call in called.tool_calls] == ["add"] * len(called.tool_calls)
    assert called.tool_calls


def test_anthropic_runs_tools() -> None:
    anthropic = pytest.importorskip("anthropic")
    calls: list[tuple[int, int]] = []

    @anthropic.beta_tool  # type: ignore[misc]
    def plus(a: int, b: int) -> str:
        """Add two integers.

        Args:
            a: The first.
            b: The second.
        """
        calls.append((a, b))
        return str(a + b)

    @anthropic.beta_async_tool  # type: ignore[misc]
    async def plus_later(a: int, b: int) -> str:
        """Add two integers.

        Args:
            a: The first.
            b: The second.
        """
        calls.append((a, b))
        return str(a + b)

    arguments: Any = {
        "max_tokens": 100,
        "model": "tgi",
        "messages": [{"role": "user", "content": SUM}],
        "max_iterations": 2,
    }
    connection: Any = {"base_url": URL, "api_key": "-", "max_retries": 0}
    client = anthropic.Anthropic(**connection)
    runner = client.beta.messages.tool_runner(tools=[plus], tool_choice={"type": "any"}, **arguments)
    messages = list(runner)
    assert calls
    assert [message.stop_reason for message in messages] == ["tool_use"] * len(messages)

    async def run() -> int:
        later = anthropic.AsyncAnthropic(**connection)
        runner = later.beta.messages.tool_runner(tools=[plus_later], tool_choice={"type": "any"}, **arguments)
        return len([message async for message in runner])

    before = len(calls)
    assert asyncio.run(run()) >= 1
    assert len(calls) > before
