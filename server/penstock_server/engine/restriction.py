"""The tokens that a sequence may sample: `allowed_tokens` and `bad_words`, as masks like those of grammars."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock_server.protocol.plan import Sampling

# [words]: bit b of word w stands for token 32·w + b (little-endian)
Mask = npt.NDArray[np.int32]

NOTHING_LEFT = "`allowed_token_ids` and `bad_words` leave no token that could follow"


class Restriction:
    """The mask of one sequence, and how it depends on the generated tokens."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        """The sampling's `refusal` is empty."""
        is_allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        if sampling.allowed_tokens:
            bits = np.unpackbits(np.frombuffer(sampling.allowed_tokens, np.uint8), bitorder="little")[:vocab_size]
            is_allowed[: len(bits)] = bits
            # A grammar alone decides when the text ends.
            if sampling.grammar is not None and sampling.grammar.kind != "any":
                is_allowed[list(sampling.stop_token_ids)] = True
        else:
            is_allowed[:vocab_size] = True
        # By number of tokens before the last one, and by these: the last tokens.
        self._forbidden: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in sampling.bad_words:
            if before:
                self._forbidden.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
            else:
                is_allowed[last] = False
        self._mask = np.packbits(is_allowed, bitorder="little").view(np.int32)

    @property
    def num_read(self) -> int:
        """The most generated tokens that the mask depends on."""
        return max(self._forbidden, default=0)

    def apply(self, mask: Mask, generated: npt.NDArray[np.int32]) -> None:
        """Removes tokens from the mask [words] in place. generated: the last `num_read` tokens, if there are."""
        mask &= self._mask
        for num_before, last_ids in self._forbidden.items():
            if num_before <= len(generated):
                for token_id in last_ids.get(tuple(generated[-num_before:].tolist()), ()):
                    mask.view(np.uint32)[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))


def refusal(sampling: Sampling, vocab_size: int) -> str:
    """Why the restriction is invalid; empty: it is valid."""
    if sampling.allowed_tokens:
        (allowed,) = np.unpackbits(np.frombuffer(sampling.allowed_tokens, np.uint8), bitorder="little").nonzero()
        if not len(allowed):
            return "allowed_tokens allow no token"
        if allowed[-1] >= vocab_size:
            return f"allowed_tokens name token {allowed[-1]}, outside of the vocabulary of {vocab_size}"
    if not all(sampling.bad_words):
        return "bad_words have one without tokens"
    outside = [token_id for word in sampling.bad_words for token_id in word if not 0 <= token_id < vocab_size]
    return f"bad_words name token {outside[0]}, outside of the vocabulary of {vocab_size}" if outside else ""
