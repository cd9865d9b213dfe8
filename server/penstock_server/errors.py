"""Errors that callers handle. Any other exception is a defect and ends the worker."""

from __future__ import annotations


class ConfigError(Exception):
    """The model cannot be served as asked; the message is for the user."""


class FullMemoryError(ConfigError):
    """A device's memory is full now; it may have room later."""


class PlanError(Exception):
    """A plan as a whole breaks the protocol. It ends the stream of steps, not the worker."""


class GrammarError(Exception):
    """A grammar cannot be used; the message is for the user."""


class ImageError(Exception):
    """An image cannot be used; the message is for the user."""


class ImagesOverloadError(ImageError):
    """Too many calls wait for their images."""
