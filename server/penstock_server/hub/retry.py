"""Transient failures of the hub, and how long to wait before asking it again. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

from penstock_server.errors import ConfigError
from penstock_server.hub.disk import FORBIDDEN, FULL

VARIABLE = "PENSTOCK_HUB_RETRIES"
DEFAULT_RETRIES = 5
MAX_RETRIES = 1000
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0
TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)


class Passing(ConnectionError):  # noqa: N818
    """A failure of the hub that may pass. wait_s: what the hub asks for, or None."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def as_passing(error: BaseException) -> Passing | None:
    """The error as one that may pass; None if asking again would give the same answer."""
    if isinstance(error, Passing):
        return error
    if isinstance(error, LocalEntryNotFoundError):  # the library's wrapper of a failed request for a file's metadata
        return as_passing(error.__cause__) if error.__cause__ is not None else None
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status not in TRANSIENT_STATUSES:
            return None
        return Passing(f"the hub answered {status} {error.response.reason_phrase}", _asked_wait(error.response.headers))
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return Passing(f"the hub cannot be reached ({error})")
    return None


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Converts the errors of hf_xet, through which huggingface_hub gets most large files: RuntimeErrors, and OSErrors
    and ValueErrors without a number. One of writing becomes the system's error; any other may pass."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        kind = type(error)  # huggingface_hub's own errors are subclasses
        is_of_xet = kind in (RuntimeError, OSError, ValueError) or kind.__module__.partition(".")[0] == "hf_xet"
        if not is_of_xet or getattr(error, "errno", None) is not None:
            raise
        text = " ".join(str(error).split())
        found = re.search(r"\(os error (\d+)\)", text)
        if found and (number := int(found[1])) in FULL + FORBIDDEN:
            raise OSError(number, os.strerror(number)) from error
        raise Passing(f"the transfer from the hub failed ({text})") from error


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds of `Retry-After`; its form with a date is not used by the hub."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() else None


class Retries:
    """Counts failures in a row. `$PENSTOCK_HUB_RETRIES` sets the limit. Raises ConfigError when it is invalid."""

    def __init__(self) -> None:
        given = os.environ.get(VARIABLE) or str(DEFAULT_RETRIES)
        if not (given.isascii() and given.isdigit() and int(given) <= MAX_RETRIES):
            raise ConfigError(f"{VARIABLE} is {given!r}, must be a number from 0 to {MAX_RETRIES}")
        self.limit = int(given)
        self.count = 0

    def reset(self) -> None:
        """Begins a new series, after a file arrived."""
        self.count = 0

    def wait(self, failure: Passing) -> bool:
        """Waits and returns True, or returns False at once when the limit is reached."""
        if self.count == self.limit:
            return False
        wait_s = FIRST_WAIT_S * 2**self.count if failure.wait_s is None else failure.wait_s
        wait_s = min(wait_s, MAX_WAIT_S)
        self.count += 1
        print(f"{failure}; retry {self.count} of {self.limit} in {wait_s:.0f} s", file=sys.stderr, flush=True)
        time.sleep(wait_s)
        return True
