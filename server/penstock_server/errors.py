"""The errors with a meaning. Everything else that is raised is a fault of ours and ends the worker."""

from __future__ import annotations


class ConfigError(Exception):
    """The model cannot be served as asked; the message is for the user."""


class PlanError(Exception):
    """A plan as a whole breaks the protocol; it ends the stream, not the worker."""


class GrammarError(Exception):
    """A grammar cannot be used; the message is for the user."""


class SequenceError(Exception):
    """One sequence cannot go on; it becomes that sequence's output and touches nobody else."""

    def __init__(self, sequence_id: int, reason: str) -> None:
        super().__init__(f"sequence {sequence_id}: {reason}")
        self.sequence_id = sequence_id
        self.reason = reason
