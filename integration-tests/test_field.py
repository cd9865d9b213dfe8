"""No field of an API is ignored in silence: it is used, refused by name, or listed in the docs as without effect."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import anthropic.types
import pytest
from anthropic.types import beta
from anthropic.types.message_create_params import MessageCreateParamsBase
from binary import Server
from client import ask
from openai.types import EmbeddingCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseInputTextParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_param import FunctionCallOutput
from openai.types.shared_params import Reasoning

DOCS = Path(__file__).parents[1] / "docs"
MESSAGES = [{"role": "user", "content": "Hello"}]
# Fields of the anthropic package that it sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
# Fields of text-embeddings-inference 1.8, which has no package.
EMBED = {"inputs", "normalize", "truncate", "truncation_direction", "prompt_name", "dimensions"}
RERANK = {"query", "texts", "raw_scores", "return_text", "truncate", "truncation_direction"}


@dataclass(frozen=True)
class Route:
    path: str
    server: str  # the fixture of a server with the right model
    schema: str  # schema of the request, in the OpenAPI document
    page: str
    headings: tuple[str, ...]  # headings of the page's sections that list the fields
    body: dict[str, Any]
    known: set[str]  # the API's own fields


def keys(*kinds: Any) -> set[str]:
    return {key for kind in kinds for key in get_type_hints(kind)}


ROUTES = {
    "chat": Route(
        "/v1/chat/completions",
        "server",
        "ChatRequest",
        "openai-compatibility.md",
        ("Both routes", "Chat"),
        {"messages": MESSAGES, "max_tokens": 1},
        keys(ChatParams),
    ),
    "completions": Route(
        "/v1/completions",
        "server",
        "CompletionRequest",
        "openai-compatibility.md",
        ("Both routes", "Completions"),
        {"prompt": "Hello", "max_tokens": 1},
        keys(CompletionCreateParamsBase),
    ),
    "responses": Route(
        "/v1/responses",
        "server",
        "ResponsesRequest",
        "responses-compatibility.md",
        ("Request",),
        {"model": "tgi", "input": "Hello", "max_output_tokens": 1},
        keys(ResponseCreateParamsBase),
    ),
    "messages": Route(
        "/v1/messages",
        "server",
        "AnthropicMessagesRequest",
        "anthropic-compatibility.md",
        ("Conversation", "Messages"),
        {"model": "tgi", "messages": MESSAGES, "max_tokens": 1},
        keys(MessageCreateParamsBase, beta.message_create_params.MessageCreateParamsBase) - HEADERS,
    ),
    "count_tokens": Route(
        "/v1/messages/count_tokens",
        "server",
        "AnthropicCountTokensRequest",
        "anthropic-compatibility.md",
        ("Conversation",),
        {"model": "tgi", "messages": MESSAGES},
        keys(anthropic.types.MessageCountTokensParams, beta.MessageCountTokensParams) - HEADERS,
    ),
    "embeddings": Route(
        "/v1/embeddings",
        "encoder",
        "EmbeddingRequest",
        "embeddings.md",
        ("`/v1/embeddings`",),
        {"input": "Hello"},
        keys(EmbeddingCreateParams),
    ),
    "embed": Route("/embed", "encoder", "EmbedRequest", "embeddings.md", ("`/embed`",), {"inputs": "Hello"}, EMBED),
    "rerank": Route(
        "/rerank",
        "reranker",
        "RerankRequest",
        "embeddings.md",
        ("`/rerank`",),
        {"query": "Hello", "texts": ["Hello"]},
        RERANK,
    ),
    "rerank_documents": Route(
        "/v1/rerank",
        "reranker",
        "DocumentsRequest",
        "embeddings.md",
        ("`/v1/rerank`",),
        {"query": "Hello", "documents": ["Hello"]},
        set(),
    ),
}
# Parts of requests, and the section that must name their fields.
PARTS: list[tuple[Any, str, str]] = [
    (anthropic.types.ToolParam, "anthropic-compatibility.md", "Conversation"),
    (anthropic.types.ThinkingConfigEnabledParam, "anthropic-compatibility.md", "Conversation"),
    (anthropic.types.ThinkingConfigAdaptiveParam, "anthropic-compatibility.md", "Conversation"),
    (anthropic.types.OutputConfigParam, "anthropic-compatibility.md", "Conversation"),
    (anthropic.types.TextBlockParam, "anthropic-compatibility.md", "Content"),
    (anthropic.types.ThinkingBlockParam, "anthropic-compatibility.md", "Content"),
    (anthropic.types.ToolUseBlockParam, "anthropic-compatibility.md", "Content"),
    (anthropic.types.ToolResultBlockParam, "anthropic-compatibility.md", "Content"),
    (EasyInputMessageParam, "responses-compatibility.md", "Items"),
    (ResponseFunctionToolCallParam, "responses-compatibility.md", "Items"),
    (FunctionCallOutput, "responses-compatibility.md", "Items"),
    (ResponseReasoningItemParam, "responses-compatibility.md", "Items"),
    (ResponseInputTextParam, "responses-compatibility.md", "Items"),
    (ResponseOutputTextParam, "responses-compatibility.md", "Items"),
    (FunctionToolParam, "responses-compatibility.md", "Request"),
    (Reasoning, "responses-compatibility.md", "Request"),
    (ResponseTextConfigParam, "responses-compatibility.md", "Request"),
]
# Fields of parts that are the part itself, and so need no word.
PLAIN = {"type", "role", "text", "content", "name", "description", "parameters", "arguments", "input", "output"}


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def properties(document: Any, schema: Any) -> dict[str, Any]:
    """The fields of a request with their schemas, those of the schemas that it includes too."""
    found = dict(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        name = part.get("$ref", "").rpartition("/")[2]
        found |= properties(document, document["components"]["schemas"][name] if name else part)
    return found


def described(document: Any, route: Route) -> dict[str, Any]:
    return properties(document, document["components"]["schemas"][route.schema])


def running(request: pytest.FixtureRequest, route: Route) -> Server:
    served = request.getfixturevalue(route.server)
    return served if isinstance(served, Server) else served.server


def listed(route: Route, field: str) -> str:
    """What the page says about a field."""
    lines: Iterable[str] = (line for heading in route.headings for line in section(route.page, heading).splitlines())
    rows = [line.split(" | ", 1) for line in lines if line.startswith("| `")]
    (behaviour,) = [behaviour for names, behaviour in rows if f"`{field}`" in names]
    return behaviour


@pytest.mark.parametrize("name", ROUTES)
def test_every_field_of_an_api_is_known(name: str, document: Any) -> None:
    route = ROUTES[name]
    assert route.known - {"stream"} - described(document, route).keys() == set()


@pytest.mark.parametrize("name", ROUTES)
def test_a_field_without_effect_is_listed_or_refused(name: str, document: Any, request: pytest.FixtureRequest) -> None:
    route = ROUTES[name]
    server = running(request, route)
    for field, schema in described(document, route).items():
        about = schema.get("description", "")
        value: Any = "a" if "string" in schema.get("type", []) else {"a": 1}
        answer = None
        if about.startswith("Accepted without effect"):
            answer = ask(server, route.path, {**route.body, field: value})
            assert answer.status == 200, f"{field}: {answer.text}"
        elif re.match("(OpenAI's; n|N)ot supported", about):
            answer = ask(server, route.path, {**route.body, field: value})
            assert answer.status in (400, 422), f"{field}: {answer.text}"
            # COMPAT: TGI writes `suffix` without backticks.
            assert re.search(rf"\b{field}`? is not supported", answer.text), answer.text
        wording = {None: "", 200: "without effect"}.get(answer and answer.status, "refused")
        assert wording in listed(route, field), f"{field} in {route.page}"
        assert (wording == "without effect") == ("accepted without effect" in listed(route, field)), field


@pytest.mark.parametrize(("part", "page", "heading"), PARTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_a_part_is_named(part: Any, page: str, heading: str) -> None:
    text = section(page, heading)
    assert {key for key in keys(part) - PLAIN if f"`{key}`" not in text} == set()


@pytest.mark.parametrize("path", ["/embed_all", "/embed_sparse", "/similarity", "/predict", "/decode"])
def test_other_routes_of_text_embeddings_inference_are_not_found(server: Server, path: str) -> None:
    assert ask(server, path, {"inputs": "Hello"}).status == 404
