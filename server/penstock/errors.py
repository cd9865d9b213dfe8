"""What can go wrong. Every message that the server wrote is passed on as it is."""

from __future__ import annotations


class PenstockError(Exception):
    """The base of all errors of this package."""


class SettingError(PenstockError, ValueError):
    """A setting is unknown, or its value is not allowed."""


class StartError(PenstockError):
    """The server did not start. The message has the errors of its log."""


class StoppedError(PenstockError):
    """The server is not running: it was closed, or it failed."""


class RequestError(PenstockError):
    """The server refused a request, or failed to answer it.

    `status` is the HTTP status, `code` the server's name of the error, and `param` the parameter at fault, if one is.
    `index` is the position of the prompt.
    """

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.index: int | None = None

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.index is None else f"prompt {self.index}: {message}"
