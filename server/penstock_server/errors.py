"""The errors that mean something to somebody outside. Everything else is a fault of ours."""

from __future__ import annotations


class ConfigError(Exception):
    """What was asked for cannot be served; the message is for the user. The worker refuses to start."""


class SequenceError(Exception):
    """One sequence cannot go on; it becomes that sequence's result and touches nobody else."""

    def __init__(self, sequence_id: int, reason: str) -> None:
        super().__init__(reason)
        self.sequence_id = sequence_id
        self.reason = reason
