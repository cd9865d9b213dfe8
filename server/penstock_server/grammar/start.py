"""A compiled grammar: the mask of the first token, and the matchers that continue from there.

PERF: without numpy, which would be a third of the trial process's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from penstock_server.errors import GrammarError
from penstock_server.grammar.language import build_matcher
from penstock_server.grammar.metaspace import FirstTokens
from penstock_server.grammar.vocabulary import Vocabulary
from penstock_server.protocol.grammar import Grammar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Start:
    """A compiled grammar, shared by its sequences. Its matchers are never advanced; sequences copy them."""

    mask: bytes  # mask of the first token: words of 32 bits, as in `FirstTokens`
    is_accepting: bool  # whether the empty text matches
    bare: LLMatcher | None
    after_space: LLMatcher | None = None  # for the same texts, each preceded by a space
    first_tokens: FirstTokens | None = None
    never_ids: tuple[int, ...] = ()  # tokens that no mask allows, and no draft has

    def matcher(self, first_id: int) -> LLMatcher | None:
        """A fresh matcher for texts that begin with this token. None: no text begins with it."""
        found = self.bare
        if self.first_tokens is not None and self.first_tokens.is_spaced(first_id):
            found = self.after_space
        return None if found is None else found.deep_copy()

    def fill(self, matcher: LLMatcher, mask: npt.NDArray[np.int32]) -> None:
        """Writes the tokens that may follow into the mask [words]."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        for token_id in self.never_ids:
            # When only one text remains, llguidance allows its tokenization, which may contain the unknown token.
            mask.view("u4")[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF


def build_start(vocabulary: Vocabulary, grammar: Grammar) -> Start:
    """Compiles a grammar. Raises GrammarError with a message for the user. The grammar must have passed its trial, see
    `build_matcher`."""
    first, never_ids = vocabulary.first_tokens, vocabulary.never_ids
    bare, after_space = _build(vocabulary, grammar)
    mask = _mask(bare, vocabulary)
    if first is not None:
        mask = mask & first.bare | _mask(after_space, vocabulary) & first.spaced
    is_accepting = bare is not None and bare.is_accepting()
    if not is_accepting and not mask:
        raise GrammarError("no token of the model can begin a text of this grammar")
    num_bytes = -(-vocabulary.tokenizer.vocab_size // 32) * 4
    return Start(mask.to_bytes(num_bytes, "little"), is_accepting, bare, after_space, first, never_ids)


def _build(vocabulary: Vocabulary, grammar: Grammar) -> tuple[LLMatcher | None, LLMatcher | None]:
    """Builds a matcher for the texts and, if a first token loses its space, one for the texts preceded by a space.

    One of them may be None, when the vocabulary can begin the texts only in the other way.
    """
    if vocabulary.first_tokens is None:
        return build_matcher(vocabulary.tokenizer, grammar), None
    built: list[LLMatcher | GrammarError] = []
    for after_space in (False, True):
        try:
            built.append(build_matcher(vocabulary.tokenizer, grammar, after_space=after_space))
        except GrammarError as error:
            built.append(error)
    bare, spaced = built
    if isinstance(bare, GrammarError) and isinstance(spaced, GrammarError):
        raise bare
    return (None if isinstance(bare, GrammarError) else bare, None if isinstance(spaced, GrammarError) else spaced)


def _mask(matcher: LLMatcher | None, vocabulary: Vocabulary) -> int:
    """The tokens that may come first, as in `FirstTokens`."""
    mask = 0 if matcher is None else int.from_bytes(matcher.compute_bitmask(), "little")
    for token_id in vocabulary.never_ids:
        mask &= ~(1 << token_id)
    return mask
