"""A grammar as a request states it. Imports no numpy, because the trial process loads it too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """How many tokens the thoughts at the beginning of a text may have."""

    max_tokens: int
    open: str  # begins the thoughts; empty: the prompt has begun them
    close: str  # ends the thoughts
    end_ids: tuple[int, ...]  # the tokens that follow when there were `max_tokens`; at least one
    reopens: bool = False  # whether thoughts may begin again, anywhere in the text


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a sequence must match."""

    kind: Literal["json_schema", "regex", "lark", "any"]  # any: every text
    text: str
    thoughts: ThoughtLimit | None = None  # within what the grammar allows; None: without a limit

    @property
    def without_limit(self) -> Grammar:
        """The same texts, with thoughts of any length."""
        return self if self.thoughts is None else replace(self, thoughts=None)
