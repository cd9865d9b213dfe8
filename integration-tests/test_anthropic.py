"""Anthropic's package, with only the address changed: answers, streams, tools, counts and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic, AuthenticationError, BadRequestError, beta_tool
from binary import Server, start

QUESTION: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY: Any = {"temperature": 0}
ARGUMENTS: Any = {"model": "tgi", "max_tokens": 40, "messages": QUESTION, "extra_body": GREEDY}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather at a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["place", "unit"],
    },
}


@pytest.fixture
def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="-", max_retries=0)


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_conversation_is_answered(client: Anthropic) -> None:
    message = client.messages.create(**ARGUMENTS, system="You answer briefly.")
    assert "Tokyo" in text(message)
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 10


def test_a_stream_equals_the_plain_answer(client: Anthropic) -> None:
    plain = client.messages.create(**ARGUMENTS)
    with client.messages.stream(**ARGUMENTS) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == text(plain)
    assert text(final) == text(plain)
    assert (final.stop_reason, final.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)


def test_the_async_client_answers_and_streams(server: Server) -> None:
    async def ask() -> tuple[str, str]:
        async with AsyncAnthropic(base_url=server.url, api_key="-") as client:
            plain = await client.messages.create(**ARGUMENTS)
            async with client.messages.stream(**ARGUMENTS) as stream:
                return text(plain), "".join([piece async for piece in stream.text_stream])

    plain, streamed = asyncio.run(ask())
    assert plain == streamed
    assert "Tokyo" in plain


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_and_its_result_read(client: Anthropic, choice: Any) -> None:
    question: Any = [{"role": "user", "content": "What is the weather like in Oslo?"}]
    arguments: Any = {"model": "tgi", "max_tokens": 100, "tools": [WEATHER], "extra_body": GREEDY}
    called = client.messages.create(**arguments, messages=question, tool_choice=choice)
    assert called.stop_reason == "tool_use"
    calls = [block for block in called.content if block.type == "tool_use"]
    for call in calls:
        assert call.name == "get_weather"
        assert set(call.input) == {"place", "unit"}
    with client.messages.stream(**arguments, messages=question, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [call.input for call in calls]

    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "4 degrees, rain"} for call in calls]
    turns: Any = [*question, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**arguments, messages=turns, tool_choice={"type": "none"})
    assert text(answer)
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_documents_and_what_other_servers_searched_are_read(client: Anthropic) -> None:
    fact = "The capital of Ruritania is Strelsau."
    question: Any = {"type": "text", "text": "What is the capital of Ruritania? Answer with one word."}
    document: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": fact}}
    text_of: Any = {"type": "text", "text": fact}
    found: Any = {"type": "search_result", "source": "https://example.org", "title": "Ruritania", "content": [text_of]}
    for block in (document, found):
        messages: Any = [{"role": "user", "content": [block, question]}]
        message = client.messages.create(model="tgi", max_tokens=20, messages=messages, extra_body=GREEDY)
        assert "Strelsau" in text(message)
    searched: Any = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "Ruritania"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "I found nothing."},
    ]
    turns: Any = [*QUESTION, {"role": "assistant", "content": searched}, {"role": "user", "content": [question]}]
    assert client.messages.create(model="tgi", max_tokens=4, messages=turns, extra_body=GREEDY).content


def test_a_tool_that_the_client_executes_is_called_with_its_documented_input(client: Anthropic) -> None:
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    choice: Any = {"type": "tool", "name": "str_replace_based_edit_tool"}
    answer = client.messages.with_raw_response.create(
        **{**ARGUMENTS, "max_tokens": 200}, tools=tools, tool_choice=choice
    )
    assert "`web_search_20250305` is left out" in answer.headers["x-penstock-warning"]
    calls = [block for block in answer.parse().content if block.type == "tool_use"]
    for call in calls[:-1] or calls:
        assert call.name == "str_replace_based_edit_tool"
        assert not call.input or call.input["command"] in ("view", "create", "str_replace", "insert")
    count = client.messages.count_tokens(model="tgi", messages=QUESTION, tools=tools)
    assert count.input_tokens > client.messages.count_tokens(model="tgi", messages=QUESTION).input_tokens


def test_the_package_s_tool_runner_and_threads_work(client: Anthropic) -> None:
    @beta_tool
    def get_weather(place: str) -> str:
        """Get the weather at a place."""
        return f"4 degrees in {place}"

    question: Any = [{"role": "user", "content": "What is the weather like in Oslo?"}]
    runner = client.beta.messages.tool_runner(
        model="tgi", max_tokens=60, messages=question, tools=[get_weather], max_iterations=2, extra_body=GREEDY
    )
    assert runner.until_done().role == "assistant"
    thread = client.beta.messages.thread(model="tgi", max_tokens=8)
    for turn in ("Hi", "What did I say first?"):
        assert thread.send({"role": "user", "content": turn}).role == "assistant"
    assert len(thread.messages) == 4


def test_a_stop_sequence_ends_the_answer_and_is_named(client: Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "Count from one to ten in words."}]
    prefill: Any = {"role": "assistant", "content": "one, two, three, four,"}
    message = client.messages.create(
        model="tgi", max_tokens=40, messages=[*turns, prefill], stop_sequences=["nothing", " six"], extra_body=GREEDY
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " six")
    assert text(message).startswith(" five")


def test_the_text_follows_a_schema(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}, "required": ["capital"]}
    message = client.messages.create(**ARGUMENTS, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert text(message).startswith("{")


def test_tokens_are_counted_as_they_are_used(client: Anthropic) -> None:
    count = client.messages.count_tokens(model="tgi", system="Be brief.", messages=QUESTION, tools=[WEATHER])
    message = client.messages.create(
        model="tgi", max_tokens=1, system="Be brief.", messages=QUESTION, tools=[WEATHER], extra_body=GREEDY
    )
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_the_prefix_cache_is_hit_despite_a_header_that_differs_in_every_request(client: Anthropic) -> None:
    instructions = "You are a patient assistant. " * 40

    def ask(nonce: str) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
        system: Any = [
            {"type": "text", "text": header},
            {"type": "text", "text": instructions, "cache_control": {"type": "ephemeral"}},
        ]
        return client.messages.create(**ARGUMENTS, system=system).usage

    first, second = ask("36ee5"), ask("0aaa9")
    assert first.input_tokens + first.cache_read_input_tokens == second.input_tokens + second.cache_read_input_tokens
    assert second.cache_read_input_tokens > 200
    assert second.input_tokens < 32


def test_refusals_become_the_exceptions_of_the_package(client: Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].source: images are not supported") as error:
        client.messages.create(model="tgi", max_tokens=4, messages=[{"role": "user", "content": [image]}])
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(BadRequestError, match="prompt is too long"):
        client.messages.create(model="tgi", max_tokens=4, messages=[{"role": "user", "content": "word " * 20_000}])


def test_a_key_is_read_from_either_header() -> None:
    server = start("--api-key", "secret")
    try:
        for key in ({"api_key": "secret"}, {"auth_token": "secret"}):
            client = Anthropic(base_url=server.url, max_retries=0, **key)
            assert client.messages.create(**{**ARGUMENTS, "max_tokens": 1}).role == "assistant"
        with pytest.raises(AuthenticationError, match="API key"):
            Anthropic(base_url=server.url, api_key="other", max_retries=0).messages.create(**ARGUMENTS)
    finally:
        assert server.stop() == 0
