"""Invalid requests, each with the status and the message that it must get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SERVED, FAILED, UNPROCESSABLE, BAD_REQUEST, TOO_LARGE, MEDIA_TYPE, TIMEOUT = 200, 424, 422, 400, 413, 415, 504
DEEP = "[" * 10_000 + "]" * 10_000
VOCAB_SIZE = 49152


@dataclass(frozen=True)
class Bad:
    """One request. The response must have `status` and contain `message`."""

    name: str
    path: str
    body: bytes
    status: int
    message: str
    content_type: str = "application/json"

    @property
    def is_costly(self) -> bool:
        """Whether the request has a grammar that takes seconds to compile or to apply."""
        return self.status in (SERVED, FAILED) and self.name.startswith(("json", "regex", "lark"))


def _raw(name: str, body: bytes, status: int, message: str = "", path: str = "/generate") -> Bad:
    return Bad(name, path, body, status, message)


def _generate(name: str, message: str, status: int = UNPROCESSABLE, path: str = "/generate", **parameters: Any) -> Bad:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4, **parameters}}
    return Bad(name, path, json.dumps(body).encode(), status, message)


def _chat(name: str, message: str, status: int = BAD_REQUEST, **fields: Any) -> Bad:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}
    return Bad(name, "/v1/chat/completions", json.dumps(body).encode(), status, message)


def _completion(name: str, message: str, status: int = BAD_REQUEST, **fields: Any) -> Bad:
    body = {"prompt": "Hello", "max_tokens": 4, **fields}
    return Bad(name, "/v1/completions", json.dumps(body).encode(), status, message)


def syntax() -> Iterator[Bad]:
    """Bodies that are not JSON, or not what the route expects."""
    for path, wrong_shape in (("/generate", UNPROCESSABLE), ("/v1/chat/completions", BAD_REQUEST)):
        field = b'"parameters":{"temperature":' if path == "/generate" else b'"messages":[],"x":{"temperature":'
        for literal in (b"NaN", b"Infinity", b"-Infinity", b"01", b"1e", b".5", b"0x10"):
            yield _raw("not a number", b'{"inputs":"a",' + field + literal + b"}}", BAD_REQUEST, "line 1", path)
        yield _raw("invalid UTF-8", b'{"inputs":"\xff\xfe","messages":"\xc3\x28"}', BAD_REQUEST, "", path)
        yield _raw("lone surrogate", rb'{"inputs":"\ud800","messages":"\ud800"}', BAD_REQUEST, "", path)
        yield _raw("truncated", b'{"inputs":"Hello","messages":[{"role":"us', BAD_REQUEST, "EOF", path)
        yield _raw("empty", b"", BAD_REQUEST, "EOF", path)
        yield _raw("deep", f'{{"inputs":{DEEP},"messages":{DEEP}}}'.encode(), wrong_shape, "", path)
        yield _raw("nothing", b"{}", wrong_shape, "missing field", path)
        yield _raw("null", b"null", wrong_shape, "null", path)
        yield _raw("list", b"[]", wrong_shape, "", path)
        yield _raw("large", b'{"inputs":"' + b"a" * 10_000_000 + b'"}', TOO_LARGE, "", path)
        yield Bad("no type", path, b'{"inputs":"a","messages":[]}', MEDIA_TYPE, "", "")
        yield Bad("text", path, b'{"inputs":"a","messages":[]}', MEDIA_TYPE, "", "text/plain")
        yield Bad("form", path, b"inputs=a", MEDIA_TYPE, "", "application/x-www-form-urlencoded")
    yield _raw("overflow", b'{"inputs":"a","parameters":{"temperature":1e400}}', BAD_REQUEST, "range")
    for value in (b"null", b"5", b"[]", b"{}", b"true", b'["a"]'):
        yield _raw("inputs", b'{"inputs":' + value + b"}", UNPROCESSABLE, "inputs")


def parameters() -> Iterator[Bad]:
    """Parameters of the wrong type or out of range."""
    for name, values in {
        "temperature": ("hot", [], 1e39, -1, 0),
        "repetition_penalty": ("a", {}, 0, -1),
        "frequency_penalty": (3, "1", -1e30),
        "presence_penalty": (2.5, "x"),
        "top_k": (-7, 1.5, 2**40, "a"),
        "top_p": (-0.5, 1.5, "a"),
        "typical_p": (-1, 7, []),
        "min_p": (-0.1, 2, "a"),
        "stop": ({}, 5, [5], [None], [""], ["s"] * 10_000),
        "seed": (2**64, 1.5, "a"),
        "n": (0, -1, 10**9, 2**64, "2"),
        "best_of": (3, 10**9, -1, "two"),
        "logit_bias": ({"1": 1000}, {"x": 1}, {"-1": 1}, {"1": "a"}, [1, 2], {str(n): 1 for n in range(2000)}),
        "stop_token_ids": ([-1], ["a"], [2**33], list(range(1000)), 3),
        "min_tokens": (5, -1, "a"),
        "priority": (101, -101, 1.5, 2**40),
        "timeout": (0, -1, 1e9, "1"),
        "ignore_eos": ("yes", 1),
    }.items():
        for value in values:
            yield _generate(name, name, **{name: value})
            if (name, value) != ("temperature", 0) and name != "best_of":
                yield _chat(name, name, **{name: value})
    for name in ("logit_bias", "stop_token_ids"):
        for token_id in (VOCAB_SIZE, 2**32 - 1):
            value = {str(token_id): 1} if name == "logit_bias" else [token_id]
            yield _generate(f"{name} unknown", str(VOCAB_SIZE), **{name: value})
            yield _chat(f"{name} unknown", str(VOCAB_SIZE), **{name: value})
    for value in (0, 10**6, 2**32, -1, 1.5):
        yield _generate("max_new_tokens", "max_new_tokens", max_new_tokens=value)
        yield _chat("max_tokens", "max_tokens", max_tokens=value)
    yield _generate("truncate", "truncate", truncate=0)
    yield _generate("truncate", "8191", truncate=10**6)
    yield _generate("top_n_tokens", "top_n_tokens", top_n_tokens=10**6)
    yield _generate("adapter", "unknown/adapter", adapter_id="unknown/adapter")
    yield _generate("timeout over", "timeout", TIMEOUT, timeout=0.001, max_new_tokens=200)
    yield _chat("timeout over", "timeout", TIMEOUT, timeout=0.001, max_tokens=200)


def conversations() -> Iterator[Bad]:
    """Invalid messages, tools and prompts."""
    user = {"role": "user", "content": "Hello"}
    for messages in ([], None, "Hello", {}, [None], ["Hello"], [{}], [{"content": "Hello"}], [{"role": 5}]):
        yield _chat("messages", "messages", messages=messages)
    for content in (5, {}, [5], [{"type": "text"}], [{"type": "image_url", "image_url": {"url": "data:,"}}]):
        yield _chat("content", "content", messages=[{"role": "user", "content": content}])
    yield _chat("audio", "audio", messages=[user], audio={"voice": "alloy"})
    for tools in (5, [5], [{}], [{"type": "function"}], [{"type": "retrieval", "function": {"name": "f"}}]):
        yield _chat("tools", "tools", tools=tools)
    for name in ("", 5, None, ["f"]):
        tool = {"type": "function", "function": {"name": name}}
        yield _chat("tool name", "tools" if name != "" else "name", tools=[tool], tool_choice="required")
    for schema in (5, "x", [], {"$ref": "#/nowhere"}):
        function = {"name": "broken_one", "parameters": schema}
        message = "nowhere" if isinstance(schema, dict) and "$ref" in schema else "broken_one"
        yield _chat("tool schema", message, tools=[{"type": "function", "function": function}], tool_choice="required")
    yield _chat("no such tool", "no_such", tool_choice="no_such")
    for prompt in ([], "", [[]], ["a", ""]):
        yield _completion("no prompt", "prompt", prompt=prompt)
    yield _completion("prompt", "prompt", prompt={"a": 1})
    yield _completion("prompts", "at most 128", prompt=["a"] * 129)
    for ids in ([VOCAB_SIZE], [1, 2**32 - 1], [[1], [VOCAB_SIZE]]):
        yield _completion("token ids", str(VOCAB_SIZE), prompt=ids)
    for ids in ([-1], [2**40], [1.5], [[[1]]], [1, "a"]):
        yield _completion("prompt", "prompt", prompt=ids)
    yield _completion("long prompt", "8192", prompt=[5] * 10_000)
    yield _completion("best_of", "best_of", best_of=10**9)
    yield _completion("suffix", "suffix", suffix="end")
    yield _completion("logprobs", "logprobs", logprobs=10**6)


def _message(name: str, message: str, path: str = "/v1/messages", **fields: Any) -> Bad:
    body = {"model": "tgi", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return Bad(name, path, json.dumps(body).encode(), BAD_REQUEST, message)


def _response(name: str, message: str, **fields: Any) -> Bad:
    body = {"model": "tgi", "max_output_tokens": 4, "input": "Hello", **fields}
    return Bad(name, "/v1/responses", json.dumps(body).encode(), BAD_REQUEST, message)


def dialects() -> Iterator[Bad]:
    """Invalid requests of Anthropic's dialect and of Responses."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    orphan = {"type": "tool_result", "tool_use_id": "toolu_0", "content": "rain"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for messages in (
            [],
            None,
            "Hello",
            {},
            [None],
            ["Hello"],
            [{}],
            [{"role": 5}],
            [{"role": "tool", "content": ""}],
        ):
            yield _message("messages", "messages", path, messages=messages)
        for content in (5, {}, [5], [{"type": "text"}], [{"type": "video"}], [image], [orphan], [call], [[]]):
            yield _message("content", "messages[0].content", path, messages=[{"role": "user", "content": content}])
        yield _message("no result", "toolu_1", path, messages=[{"role": "assistant", "content": [call]}])
        yield _message("system", "system", path, system=[image])
        yield _message("tools", "tools[0].type", path, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        yield _message("servers", "mcp_servers", path, mcp_servers=[{"url": "http://127.0.0.1:1"}])
        yield _raw("deep", f'{{"model":"tgi","messages":{DEEP}}}'.encode(), BAD_REQUEST, "messages", path)
    for value in (0, -1, 2**32, "a", None):
        yield _message("max_tokens", "max_tokens", max_tokens=value)
    for message, tool in (
        ("tools[0]: missing field `input_schema`", {"name": "f"}),
        ("tools[0].name", {"name": 5, "input_schema": {}}),
        ("broken_one", {"name": "broken_one", "input_schema": {"properties": 5}}),
    ):
        yield _message("tools", message, tools=[tool], tool_choice={"type": "any"})
    yield _message("long prompt", "prompt is too long", messages=[{"role": "user", "content": "word " * 20_000}])
    for items in (5, None, [], [5], [{}], [{"role": "user"}], [{"type": "item_reference", "id": "msg_1"}]):
        yield _response("input", "input", input=items)
    for part, place in (
        ({"type": "input_image"}, "input[0].content[0]"),
        ({"type": "input_text"}, "input[0].content[0]"),
        ({"type": "input_text", "text": 5}, "input[0]: content[0].text"),
        (5, "input[0]: content[0]"),
    ):
        yield _response("content", place, input=[{"role": "user", "content": [part]}])
    yield _response("orphan", "call_0", input=[{"type": "function_call_output", "call_id": "call_0", "output": "rain"}])
    for tool in ({"type": "web_search"}, {"type": "custom"}, {"type": "function"}, {}):
        yield _response("tools", "tools[0]", tools=[tool])
    yield _response("previous", "previous_response_id", previous_response_id="resp_0")
    for name, value in {
        "truncation": "some",
        "background": True,
        "include": ["logprobs"],
        "text": {"format": 5},
    }.items():
        yield _response(name, name, **{name: value})
    yield _raw("deep", f'{{"model":"tgi","input":{DEEP}}}'.encode(), BAD_REQUEST, "input", "/v1/responses")


def _grammar(name: str, kind: str, value: Any, status: int = UNPROCESSABLE, message: str = "grammar") -> Bad:
    return _generate(f"{kind} {name}", message, status, max_new_tokens=16, grammar={"type": kind, "value": value})


def grammars() -> Iterator[Bad]:
    """Grammars that are invalid, cannot be compiled, or exceed a limit."""
    for name, schema, message in (
        ("unknown type", {"type": "circle"}, "circle"),
        ("properties", {"type": "object", "properties": 5}, "schema"),
        ("reference", {"$ref": "#/$defs/missing"}, "missing"),
        ("remote reference", {"$ref": "http://127.0.0.1:1/schema.json"}, "schema"),
        ("unsupported", {"type": "array", "contains": {"const": 1}}, "contains"),
        ("endless", {"$ref": "#"}, "schema"),
        ("nothing fits", {"type": "integer", "minimum": 5, "maximum": 4}, "schema"),
        ("never", {"not": {}}, "matches no text"),
        ("many fields", {"properties": {f"p{n}": {} for n in range(3000)}}, "at most 400 are allowed"),
        ("many copies", {"type": "string", "pattern": "^a{1000000}$"}, "at most 10000 are allowed"),
        ("too many digits", {"const": 9007199254740993}, "`const` 9007199254740993 cannot be enforced exactly"),
        ("30 digits", {"properties": {"a": {"maximum": 10**30 + 1}}}, "`maximum` 1000000000000000000000000000001"),
    ):
        yield _grammar(name, "json", schema, message=message)
    for name, regex in (
        ("open", "(a"),
        ("empty class", "[z-a]"),
        ("backreference", r"(a)\1"),
        ("look behind", "(?<=a)b"),
        ("repeats", "(.{0,300}[a-f].{0,300}){1,50}"),
        ("alternatives", "|".join(f"{n:x}{n * 7919:x}" for n in range(40_000))),
        ("copies", "a{1000000}"),
        ("nested", "(" * 10_000 + "a" + ")" * 10_000),
    ):
        yield _grammar(name, "regex", regex)
    for name, lark in (
        ("words", "this is not lark"),
        ("unknown rule", "start: missing"),
        ("no start", 'begin: "a"'),
        ("only itself", "start: start"),
        ("open", 'start: "a'),
        ("regex", "start: /(a/"),
        ("large", "start: " + " | ".join(f'"{n}"' for n in range(30_000))),
    ):
        yield _grammar(name, "lark", lark)
    for value in (5, "x", [], {}, {"type": "xml", "value": ""}, {"type": "regex"}, {"type": "json", "value": "{"}):
        yield _generate("grammar", "grammar", grammar=value)
        yield _chat("response_format", "response_format", response_format=value)
    yield _chat("no schema", "schema", response_format={"type": "json_schema", "json_schema": {"name": "a"}})
    deep = '{"inputs":"a","parameters":{"grammar":{"type":"json","value":' + DEEP + "}}}"
    yield _raw("schema deep", deep.encode(), BAD_REQUEST, "recursion")


def costly_grammars() -> Iterator[Bad]:
    """Valid grammars on which backtracking matchers and eager automata never finish: served, or stopped at a limit."""
    layers: dict[str, Any] = {
        f"d{n}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 40}} for n in range(40)
    }
    layers["d40"] = {"type": "string", "pattern": "(a{1,500}){1,500}"}
    yield _grammar("exploding", "json", {"$defs": layers, "$ref": "#/$defs/d0"}, SERVED, "text")
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    yield _grammar("only itself", "json", endless, SERVED, "text")
    yield _grammar("backtracking", "regex", "(a+)+$", SERVED, "aaaa")
    yield _grammar("more backtracking", "regex", "(.*a.{30}){5}", SERVED, "text")
    yield _grammar("alternatives", "regex", "|".join(f"{n:x}{n * 7919:x}" for n in range(18_000)), SERVED, "text")
    yield _grammar("optionals", "regex", "(?:a?){2000}a{2000}", FAILED)
    yield _grammar("repeats", "regex", "((a{1,500}){1,500})", SERVED, "aaaa")
    yield _grammar("more repeats", "regex", "(((a{1,999}b){1,999}){1,999}c){1,999}", SERVED, "text")
    yield _grammar("states", "regex", ".*(a|b|c|d|e|f).{15}(g|h|i).{15}.*", SERVED, "text")


def every() -> list[Bad]:
    return [*grammars(), *costly_grammars(), *syntax(), *parameters(), *conversations(), *dialects()]
