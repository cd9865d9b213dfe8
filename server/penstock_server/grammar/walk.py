"""Begins a few texts of a grammar: a limit that shows after the first tokens is found before a stream starts."""

from __future__ import annotations

from llguidance import LLMatcher

from penstock_server.grammar.language import refusal
from penstock_server.grammar.start import Start
from penstock_server.protocol.grammar import Grammar

# PERF: each text costs one mask beyond the first, which takes up to 15 ms without the sets of `fast_vocabulary`.
_NUM_TEXTS = 4
_NUM_TOKENS = 2


def walk(start: Start, grammar: Grammar) -> None:
    """Raises GrammarError when the engine's limits end one of the texts."""
    mask = int.from_bytes(start.mask, "little")
    for text in range(_NUM_TEXTS):
        matcher, allowed = None, mask
        for position in range(_NUM_TOKENS):
            token_id = _one_of(allowed, (text + 1) / (_NUM_TEXTS + 1))
            if token_id is None:
                break
            matcher = start.matcher(token_id) if matcher is None else matcher
            if matcher is None:
                break
            matcher.consume_token(token_id)
            if _is_over(matcher, grammar):
                break
            if position + 1 < _NUM_TOKENS:
                allowed = int.from_bytes(matcher.compute_bitmask(), "little")
                if _is_over(matcher, grammar):
                    break


def _is_over(matcher: LLMatcher, grammar: Grammar) -> bool:
    """Whether no token may follow. Raises GrammarError when a limit is the reason."""
    if matcher.is_error() and not matcher.get_error().startswith("NoExtensionBias"):
        raise refusal(grammar, matcher)
    return matcher.is_stopped()


def _one_of(mask: int, share: float) -> int | None:
    """An allowed token: of the ids in order, the one after this share of all. None: no token is allowed."""
    if not mask:
        return None
    ids = [position for position, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
    return ids[int(len(ids) * share)]
