"""Gives freed memory back to the operating system while a model loads."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """glibc keeps what was freed between blocks in use, and loading frees as much as it packs."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
