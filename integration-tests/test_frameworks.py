"""Frameworks that are not development dependencies, because they bring many packages. Each runs where it is installed:

python -m pip install langchain-anthropic llama-index-llms-openai-like litellm mcp haystack-ai
python -m pytest -m slow integration-tests/test_frameworks.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from binary import Server
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

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


def test_langchain_anthropic(server: Server) -> None:
    langchain = pytest.importorskip("langchain_anthropic")
    messages = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatAnthropic(
        base_url=server.url, api_key="-", model="tgi", temperature=0, max_tokens=120, max_retries=0
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


def test_llama_index(server: Server) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    core = pytest.importorskip("llama_index.core.llms")
    tools = pytest.importorskip("llama_index.core.tools")
    model = openai_like.OpenAILike(
        api_base=f"{server.url}/v1",
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
def test_litellm(server: Server, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    path = {"anthropic": "", "huggingface": "/v1/chat/completions"}.get(provider, "/v1")
    arguments: Any = {
        "model": f"{provider}/tgi",
        "api_base": server.url + path,
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


def test_haystack(server: Server) -> None:
    chat = pytest.importorskip("haystack.components.generators.chat")
    message = pytest.importorskip("haystack.dataclasses").ChatMessage
    secret = pytest.importorskip("haystack.utils").Secret
    tool = pytest.importorskip("haystack.tools").Tool
    pieces: list[str] = []
    arguments: Any = {"api_key": secret.from_token("-"), "api_base_url": f"{server.url}/v1", "model": "tgi"}
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
