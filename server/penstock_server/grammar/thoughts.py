"""How far the thoughts of one sequence are, and the tokens that must follow when they have had their tokens.

The state is a function of the generated tokens alone, so that drafts, preemption and a new worker do not change it. The
markers are texts, as the router's parser reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

from penstock_server.protocol.grammar import ThoughtLimit

_MAX_CONTINUATION_BYTES = 3  # continuation bytes of a character in UTF-8


class _Stage(Enum):
    BEFORE = auto()  # the thoughts may begin
    WITHIN = auto()
    FORCED = auto()  # the tokens that end the thoughts are being written
    AFTER = auto()


class Thoughts:
    """The thoughts of one sequence, as far as its tokens are known."""

    def __init__(
        self,
        limit: ThoughtLimit,
        decode: Callable[[int], bytes],
        generated: Iterable[int],
        *,
        ends_characters: bool = False,
    ) -> None:
        """decode: returns the bytes of a token. ends_characters: allow the few tokens more that complete a character,
        because a grammar allows nothing within one."""
        self._limit = limit
        self._ends_characters = ends_characters
        self._open, self._close = limit.open.encode(), limit.close.encode()
        self._decode = decode
        self._stage = _Stage.BEFORE if self._open else _Stage.WITHIN
        self._text = b""  # that may begin or contain the next marker
        self._num_tokens = 0  # tokens of thoughts, without their markers
        self._num_forced = 0
        self._enforce()
        for token_id in generated:
            self.push(token_id)

    def copy(self) -> Thoughts:
        """A copy that consumes other tokens."""
        copied = object.__new__(Thoughts)
        copied.__dict__.update(self.__dict__)
        return copied

    @property
    def are_over(self) -> bool:
        """Whether no token will be forced any more."""
        return self._stage is _Stage.AFTER and not self._limit.reopens

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow."""
        return self._limit.end_ids[self._num_forced :] if self._stage is _Stage.FORCED else ()

    def push(self, token_id: int) -> None:
        """Consumes a generated token."""
        if self._stage is _Stage.FORCED:
            self._num_forced += 1
            if self._num_forced == len(self._limit.end_ids):
                self._stage, self._text = _Stage.AFTER, b""
            return
        if self.are_over:
            return
        self._text += self._decode(token_id)
        if self._stage is _Stage.WITHIN:
            if self._close in self._text:
                self._stage, self._text = _Stage.AFTER, b""
            else:
                self._num_tokens += 1
                self._text = self._text[-len(self._close) :]
        elif self._stage is _Stage.AFTER:
            self._reopen()
        else:
            self._begin()
        self._enforce()

    def _begin(self) -> None:
        """Thoughts are the beginning of the text, after whitespace."""
        text = self._text.lstrip()
        if text.startswith(self._open):
            self._stage, self._text = _Stage.WITHIN, b""
        elif not self._open.startswith(text):
            self._stage = _Stage.AFTER
            self._reopen()

    def _reopen(self) -> None:
        if self._limit.reopens and self._open in self._text:
            self._stage, self._text = _Stage.WITHIN, b""
        else:
            self._text = self._text[-len(self._open) :] if self._open else b""

    def _enforce(self) -> None:
        num_over = self._num_tokens - self._limit.max_tokens
        if self._stage is not _Stage.WITHIN or num_over < 0:
            return
        if self._ends_characters and num_over < _MAX_CONTINUATION_BYTES and _is_within_character(self._text):
            return
        self._stage, self._num_forced = _Stage.FORCED, 0


def _is_within_character(text: bytes) -> bool:
    """Whether UTF-8 text ends within a character."""
    for num_bytes, byte in enumerate(reversed(text[-_MAX_CONTINUATION_BYTES:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character says how many it has
            return num_bytes < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return False
