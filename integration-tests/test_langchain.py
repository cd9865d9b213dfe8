"""LangChain through its OpenAI integration, with only the address changed."""

from __future__ import annotations

import pytest
from binary import Server
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


@pytest.fixture
def model(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="-", model="tgi", temperature=0, max_completion_tokens=120, max_retries=0
    )


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def test_invoke_and_stream_agree(model: ChatOpenAI) -> None:
    question = "What is the capital of Japan?"
    plain = model.invoke(question)
    assert "Tokyo" in plain.content
    assert plain.usage_metadata["total_tokens"] > plain.usage_metadata["input_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(question)) == plain.content


def test_structured_output_is_parsed(model: ChatOpenAI) -> None:
    city = model.with_structured_output(City, method="json_schema").invoke("Name a city in Italy.")
    assert isinstance(city, City)
    assert city.name


def test_bound_tools_are_called(model: ChatOpenAI) -> None:
    answer = model.bind_tools([add], tool_choice="add").invoke("What is 3 + 4?")
    (call,) = answer.tool_calls
    assert call["name"] == "add"
    assert set(call["args"]) == {"a", "b"}
    assert all(isinstance(value, int) for value in call["args"].values())
