"""Drafts from recent answers of other sequences, as well as from the sequence's own text.

Right drafts make tokens come faster, so a client could learn from the time what another one was answered. Therefore
this is off unless asked for, and the salt that separates cached prefixes also separates answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock_server.engine.drafting.interface import Tokens
from penstock_server.engine.drafting.ngram import MIN_MATCH, NgramDrafter, longest_match, own_match
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable

_LEAST_MATCH = 4  # tokens; shorter ends of a text occur in many answers that go on differently
_PROMPT_TOKENS = 32  # last tokens of its prompt, which are kept with an answer so that its beginning is found
_END: Tokens = np.full(1, -1, np.int32)  # behind each answer; negative, because it is no token


class RecentAnswers:
    """The last answers, at most `max_tokens` tokens in all. Takes 4 bytes a token."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._texts: dict[int | None, Tokens] = {}  # by salt, least recently extended first

    def add(self, salt: int | None, answer: Tokens) -> None:
        """Adds an answer. Drops the oldest tokens: first those of the salt that was not extended for longest."""
        text = self._texts.pop(salt, _END)
        self._texts[salt] = np.concatenate((text, answer, _END))
        self._num_tokens += len(self._texts[salt]) - (0 if text is _END else len(text))
        while (excess := self._num_tokens - self._max_tokens) > 0:
            oldest = next(iter(self._texts))
            text = self._texts[oldest]
            self._texts[oldest] = text[excess:]
            if excess >= len(text):
                del self._texts[oldest]
            self._num_tokens -= min(excess, len(text))

    def match(self, salt: int | None, history: Tokens, most: int) -> tuple[int, Tokens]:
        """Like `longest_match`, for the end of `history` in the answers with this salt."""
        num_matched, tokens = longest_match(self._texts.get(salt, _END), history, most)
        is_end = tokens == _END
        return num_matched, tokens[: is_end.argmax()] if is_end.any() else tokens

    def clear(self) -> None:
        self._texts.clear()
        self._num_tokens = 0


class RecentDrafter(NgramDrafter):
    """Takes the longer match of two: in the sequence's tokens, and in recent answers. All ranks have the same."""

    def __init__(self, max_tokens: int) -> None:
        self._answers = RecentAnswers(max_tokens)

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        return [self._draft(table, row, limit) for row, limit in zip(rows.tolist(), most.tolist(), strict=True)]

    def _draft(self, table: SequenceTable, row: int, most: int) -> Tokens:
        history = table.known_ids(row)
        num_matched, tokens = own_match(history, most)
        num_in_answers, others = self._answers.match(table.cache_salt(row), history, most)
        if num_in_answers >= _LEAST_MATCH and num_in_answers > num_matched:
            return others
        return tokens if num_matched >= MIN_MATCH else tokens[:0]

    def end(self, table: SequenceTable, sequence_ids: Sequence[int]) -> None:
        """Adds the answers of sequences that are freed: of those that end, and so far as they are known, of those that
        are preempted. Their tokens must be in the table."""
        rows = table.rows(sequence_ids)
        for row in rows[(rows >= 0) & (table.known[rows] > table.prompt[rows])].tolist():
            first = max(0, int(table.prompt[row]) - _PROMPT_TOKENS)
            self._answers.add(table.cache_salt(row), table.known_ids(row)[first:])

    def clear(self) -> None:
        self._answers.clear()
