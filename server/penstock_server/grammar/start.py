"""Where a grammar's texts begin: the first mask, and the matcher that goes on behind each first token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from penstock_server.errors import GrammarError
from penstock_server.grammar.language import build_matcher
from penstock_server.grammar.metaspace import Bits, FirstTokens
from penstock_server.grammar.vocabulary import Vocabulary
from penstock_server.plan import Grammar


@dataclass(frozen=True, slots=True)
class Start:
    """Only read: matchers are to be copied."""

    mask: Bits  # [words] of the first token
    is_accepting: bool  # whether a text may be empty
    bare: LLMatcher | None
    behind_space: LLMatcher | None = None  # of the same texts with a space before them
    first_tokens: FirstTokens | None = None
    unknown_id: int | None = None

    def matcher(self, first_id: int) -> LLMatcher | None:
        """One that has taken nothing, for texts that begin with this token. None: there is no such text."""
        found = self.bare
        if self.first_tokens is not None and self.first_tokens.is_spaced(first_id):
            found = self.behind_space
        return None if found is None else found.deep_copy()

    def fill(self, matcher: LLMatcher, mask: Bits) -> None:
        """Write what may follow into the mask [words]."""
        _fill(matcher, mask, self.unknown_id)


def build_start(vocabulary: Vocabulary, grammar: Grammar) -> Start:
    """Compile a grammar. Raises GrammarError with a message for the user; only for what has passed its trial, see
    `build_matcher`."""
    first, unknown_id = vocabulary.first_tokens, vocabulary.unknown_id
    bare, behind_space = _build(vocabulary, grammar)
    mask = _mask(bare, vocabulary)
    if first is not None:
        mask = mask & first.bare | _mask(behind_space, vocabulary) & first.spaced
    is_accepting = bare is not None and bare.is_accepting()
    if not is_accepting and not mask.any():
        raise GrammarError("the model has no token that a text of this grammar could begin with")
    return Start(mask, is_accepting, bare, behind_space, first, unknown_id)


def _build(vocabulary: Vocabulary, grammar: Grammar) -> tuple[LLMatcher | None, LLMatcher | None]:
    """Of the texts as they are and, where a first token's space is no part of them, of the same with a space before.
    What the vocabulary cannot begin in one way it may in the other."""
    if vocabulary.first_tokens is None:
        return build_matcher(vocabulary.tokenizer, grammar), None
    built: list[LLMatcher | GrammarError] = []
    for behind_space in (False, True):
        try:
            built.append(build_matcher(vocabulary.tokenizer, grammar, behind_space=behind_space))
        except GrammarError as error:
            built.append(error)
    bare, behind = built
    if isinstance(bare, GrammarError) and isinstance(behind, GrammarError):
        raise bare
    return (None if isinstance(bare, GrammarError) else bare, None if isinstance(behind, GrammarError) else behind)


def _mask(matcher: LLMatcher | None, vocabulary: Vocabulary) -> Bits:
    mask = np.zeros(-(-vocabulary.tokenizer.vocab_size // 32), np.int32)
    if matcher is not None:
        _fill(matcher, mask, vocabulary.unknown_id)
    return mask


def _fill(matcher: LLMatcher, mask: Bits, unknown_id: int | None) -> None:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if unknown_id is not None:
        # Where one text is left, llguidance proposes the tokens that the tokenizer makes of it, this one too.
        mask.view(np.uint32)[unknown_id // 32] &= ~np.uint32(1 << unknown_id % 32)
