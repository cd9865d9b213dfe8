"""Requests in the shape in which Codex CLI and Claude Code send them: everything that these agents send is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from binary import Server
from client import ask

# Keywords of these agents' tools, and of tools that MCP servers offer, that no grammar expresses.
ODD_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "paths": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 2, "uniqueItems": True},
        "labels": {
            "type": "object",
            "properties": {"bug": {"type": "boolean"}},
            "propertyNames": {"type": "string"},
            "additionalProperties": False,
        },
        "contact": {"type": "string", "format": "email", "pattern": "^(?!\\.)[a-z.@]+$", "maxLength": 9},
        "link": {"type": "string", "format": "uri-of-mine", "maxLength": 9},
        "mode": {"oneOf": [{"type": "string", "const": "fast"}, {"type": "string", "enum": ["slow", "fast"]}]},
    },
    "required": ["mode"],
    "not": {"required": ["unknown"]},
    "additionalProperties": False,
}
PLAIN_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def events(server: Server, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[Any]:
    """The events of the stream that answers the request."""
    answer = ask(server, path, body, **headers)
    assert answer.status == 200, answer.text
    assert "unknown field" not in answer.headers.get("x-penstock-warning", "")
    return [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]


def codex_request(input_items: list[Any], **fields: Any) -> dict[str, Any]:
    function = {"type": "function", "name": "run", "description": "Runs.", "strict": False, "parameters": ODD_SCHEMA}
    stop = {"type": "function", "name": "stop", "description": "Stops.", "strict": False, "parameters": PLAIN_SCHEMA}
    return {
        "model": "tgi",
        "stream": True,
        "input": [
            message("developer", "You are a coding agent."),
            message("developer", "# Skills", "# Permissions"),
            message("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
            message("user", "Say hello"),
            *input_items,
        ],
        "tools": [
            function,
            {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [stop]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2074a-4eae-78a1-b349-9c2d6725efa7",
        "client_metadata": {"session_id": "01a2074a", "x-codex-turn-metadata": "{}"},
        "max_output_tokens": 100,
        "temperature": 0,
        **fields,
    }


def message(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": "msg_c89b2949", "role": role, "content": parts}


@pytest.mark.parametrize("name", [(None, "run"), ("agents", "stop")])
def test_codex_gets_a_call_and_an_answer_to_its_result(server: Server, name: tuple[str | None, str]) -> None:
    headers = {"originator": "codex_exec", "x-codex-window-id": "01a2074a:0", "session-id": "01a2074a"}
    choice = {"type": "function", "namespace": name[0], "name": name[1]}
    called = events(server, "/v1/responses", codex_request([], tool_choice=choice), headers)
    assert called[-1]["type"] == "response.completed"
    (call,) = [event["item"] for event in called if event["type"] == "response.output_item.done"]
    assert (call.get("namespace"), call["name"]) == name
    assert set(json.loads(call["arguments"])) <= set(ODD_SCHEMA["properties"])
    output = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "done"}
    answered = events(server, "/v1/responses", codex_request([call, output]), headers)
    assert answered[-1]["type"] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in answered] == list(range(len(answered)))


def claude_request(version: str, turns: list[Any], **fields: Any) -> dict[str, Any]:
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    question = {"type": "text", "text": "Say hello", **ephemeral}
    return {
        "model": "tgi",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder>\nA\n</system-reminder>"}, question],
            },
            {"role": "system", "content": "Available agents:\n- one\n- two"},
            *turns,
        ],
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **ephemeral},
            {"type": "text", "text": "\nYou help users with software. " * 20, **ephemeral},
        ],
        "tools": [
            {"name": "Run", "description": "Runs.", "input_schema": ODD_SCHEMA},
            {"name": "Stop", "description": "Stops.", "input_schema": PLAIN_SCHEMA, **ephemeral},
        ],
        "metadata": {"user_id": '{"device_id":"51f0"}'},
        "max_tokens": 100,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "temperature": 0,
        **fields,
    }


def test_claude_code_gets_a_call_and_an_answer_to_its_result_from_the_prefix_cache(server: Server) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-app": "cli"}
    path = "/v1/messages?beta=true"
    called = events(server, path, claude_request("2.1.1", [], tool_choice={"type": "any"}), headers)
    uses = [event["content_block"] for event in called if event["type"] == "content_block_start"]
    assert {use["type"] for use in uses} == {"tool_use"}
    turns = [
        {"role": "assistant", "content": [{**use, "input": {}} for use in uses]},
        {
            "role": "user",
            "content": [
                {"tool_use_id": use["id"], "type": "tool_result", "content": "No files", "is_error": True}
                for use in uses
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "Resume.", "cache_control": {"type": "ephemeral"}}]},
    ]
    answered = events(server, path, claude_request("2.1.2", turns), headers)
    assert [answered[0]["type"], answered[-1]["type"]] == ["message_start", "message_stop"]
    # The billing header, which differs, is not a part of the prompt.
    assert answered[0]["message"]["usage"]["cache_read_input_tokens"] > 100
