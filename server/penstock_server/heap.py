"""The C library's heap."""

from __future__ import annotations

import ctypes


def return_free_pages() -> None:
    """Give freed pages back to the system, where the C library can. glibc keeps most of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
