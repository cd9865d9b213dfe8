"""Builds a matcher from a grammar's text, within limits. Used by the worker and the trial process.

A matcher is a state in the language of a grammar: it consumes tokens and computes which may follow.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock_server.errors import GrammarError
from penstock_server.protocol.grammar import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_BYTES = 256 << 10

# Whitespace between JSON tokens: none, a space, or a line break with at most 16 levels of indentation. This covers
# compact and pretty-printed JSON. The RFC's rule would allow endless whitespace.
_JSON_WHITESPACE = r" |\n {0,32}"
_JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _JSON_WHITESPACE,
    "coerce_one_of": False,  # would accept instances that match several branches
    "lenient": False,  # keywords that would not be enforced are refused by name
}
_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the Lark grammar"}
_MAX_MESSAGE_CHARACTERS = 400


def build_matcher(vocabulary: LLTokenizer, grammar: Grammar, *, after_space: bool = False) -> LLMatcher:
    """Compiles the grammar and computes its first mask, without holding the GIL. Raises GrammarError for the user.

    after_space: match the same texts, each preceded by a space. Only call it in a trial process or for grammars that
    passed their trial: a deeply nested grammar overflows the stack, and an intersection of regular expressions can take
    hours and all memory.
    """
    name = _NAMES[grammar.kind]
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_TEXT_BYTES:
        raise GrammarError(f"{name} has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are allowed")
    definition = _definition(grammar)
    if after_space:
        definition = _after_space(definition)
    matcher = LLMatcher(vocabulary, definition, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(grammar, matcher)
    return matcher


def refusal(grammar: Grammar, matcher: LLMatcher) -> GrammarError:
    """The error of a matcher, for the user."""
    reason = readable(matcher.get_error())
    if reason == "NoExtensionBias":
        reason = "it matches no text"
    return GrammarError(f"{_NAMES[grammar.kind]} cannot be used: {reason}")


def readable(message: str) -> str:
    """llguidance's message on one line, without excerpts of the grammar, and with the middle of long messages cut."""
    if message.startswith("oneOf constraints are not supported"):
        return "`oneOf`, whose branches may overlap, cannot be enforced; send `anyOf`"
    message = re.split(r"\n +\d+ \| |\n<state>|<non-verbose/>", message)[0]
    message = " ".join(message.split())
    half = _MAX_MESSAGE_CHARACTERS // 2
    return message if len(message) <= 2 * half else f"{message[:half]} … {message[-half:]}"


def _definition(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
    except ValueError as error:
        reason = readable(str(error))
        if reason == "Expecting object schema to apply options":
            is_false = json.loads(grammar.text) is False
            reason = "it matches no text" if is_false else "it must be a JSON object"
        raise GrammarError(f"{_NAMES[grammar.kind]} cannot be used: {reason}") from error


def _after_space(definition: str) -> str:
    """definition: in llguidance's format. Those of JSON schemas and regular expressions are JSON with one grammar."""
    if definition.lstrip().startswith("{"):
        (inner,) = json.loads(definition)["grammars"]
    else:
        inner = {"lark_grammar": definition}
    return json.dumps({"grammars": [{"lark_grammar": 'start: " " @text'}, {**inner, "name": "text"}]})


def _limits() -> LLParserLimits:
    # The slowest mask takes 14 ms in the lexer and 2.5 ms in the parser. A state has 1 to 2 kB; the default is 250,000.
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
