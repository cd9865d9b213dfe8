"""The C library's heap."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)
_M_ARENA_MAX = -8  # malloc.h of glibc


def use_one_arena() -> None:
    """Let all threads allocate from one arena, where the C library has several; before the first thread starts. Of any
    other one, glibc's `malloc_trim` keeps the free pages at its end: up to 64 MiB."""
    set_option = getattr(_LIBC, "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


def return_free_pages() -> None:
    """Give freed pages back to the system, where the C library can. glibc keeps most of them."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
