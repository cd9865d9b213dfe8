"""From a grammar's text to a matcher, or to the reason why not, within limits. The same in both processes.

A matcher is a place in the language of a grammar: it takes tokens and says which may come next.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock_server.errors import GrammarError
from penstock_server.plan import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_BYTES = 256 << 10

# Between the tokens of JSON: nothing, a space, or a line break with the indentation of 16 levels. What people and
# models write, compact or pretty-printed; no model can stay in white space for ever, as it could by the RFC's rule.
_JSON_WHITESPACE = r" |\n {0,32}"
_JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _JSON_WHITESPACE,
    "coerce_one_of": False,  # it would take instances of several branches for valid
    "lenient": False,  # what is not enforced is refused by its name
}
_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the Lark grammar"}
_MAX_MESSAGE_CHARACTERS = 400


def build_matcher(vocabulary: LLTokenizer, grammar: Grammar, *, behind_space: bool = False) -> LLMatcher:
    """Compile, and compute the first mask. Raises GrammarError with a message for the user. behind_space: of the same
    texts with a space before each.

    Python's lock is free meanwhile. Only use it on what has passed its trial: deep recursion in a grammar overflows
    the stack, and a set operation between regular expressions can take hours and all memory.
    """
    name = _NAMES[grammar.kind]
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_TEXT_BYTES:
        raise GrammarError(f"{name} has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are allowed")
    definition = _definition(grammar)
    if behind_space:
        definition = _behind_space(definition)
    matcher = LLMatcher(vocabulary, definition, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = readable(matcher.get_error())
        if reason == "NoExtensionBias":
            reason = "there is no text that it allows"
        raise GrammarError(f"{name} cannot be used: {reason}")
    return matcher


def readable(message: str) -> str:
    """llguidance's message on one line, without its excerpts of the grammar, its middle left out when it is long."""
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
            reason = "it must be a JSON object"
        raise GrammarError(f"{_NAMES[grammar.kind]} cannot be used: {reason}") from error


def _behind_space(definition: str) -> str:
    """definition: of any kind; those of JSON schemas and regular expressions are JSON, with one grammar in it."""
    if definition.lstrip().startswith("{"):
        (inner,) = json.loads(definition)["grammars"]
    else:
        inner = {"lark_grammar": definition}
    return json.dumps({"grammars": [{"lark_grammar": 'start: " " @text'}, {**inner, "name": "text"}]})


def _limits() -> LLParserLimits:
    # A mask's worst step: 14 ms of lexer and 2.5 ms of parser. States: 1 to 2 kB each, 250,000 by default.
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
