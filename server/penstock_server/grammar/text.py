"""A grammar as a request states it. Imports no numpy, because the trial process loads it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of a sequence must match."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
