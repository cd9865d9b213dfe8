"""The errors with a meaning. Everything else that is raised is a fault of ours and ends the worker."""

from __future__ import annotations


class ConfigError(Exception):
    """The model cannot be served as asked; the message is for the user."""


class PlanError(Exception):
    """A plan as a whole breaks the protocol; it ends the stream, not the worker."""


class GrammarError(Exception):
    """A grammar cannot be used; the message is for the user."""
