"""The disk below the hub's cache: room for a download, files that killed downloads left, and errors of writing."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_server.errors import ConfigError

# A running download writes to its file all the time; the library gives up on a silent connection after a minute.
ABANDONED_AFTER_S = 3600.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def check_room(folder: Path, model_id: str, required_bytes: int) -> None:
    """Raises ConfigError when the disk of `folder`, which may not exist yet, has no room for the missing files."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if required_bytes > free:
        raise ConfigError(_full_message(folder, model_id, required_bytes, free))


def remove_abandoned(repository: Path) -> None:
    """Removes unfinished files of killed downloads: the library writes each to a new name and never continues it."""
    for path in (repository / "blobs").glob("*.incomplete"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                path.unlink()
        except OSError:
            continue  # finished meanwhile, or not ours to remove


@contextmanager
def write_errors(cache: Path, model_id: str) -> Iterator[None]:
    """Converts errors of writing to the cache to ConfigErrors with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ConfigError(_full_message(cache, model_id, None, None, error)) from error
        if error.errno in FORBIDDEN:
            raise ConfigError(_forbidden_message(cache, model_id, error)) from error
        raise


def _full_message(
    cache: Path, model_id: str, required_bytes: int | None, free: int | None, error: OSError | None = None
) -> str:
    needs = f"{model_id} needs {required_bytes / 1e9:.2f} GB more" if required_bytes else f"{model_id} does not fit"
    has = f"{free / 1e9:.2f} GB are free" if free is not None else str(error and error.strerror)
    return (
        f"the disk of the hub's cache {cache} is full: {needs}, {has}; "
        "make room, mount a larger volume there, or set HF_HOME to a folder on a larger disk"
    )


def _forbidden_message(cache: Path, model_id: str, error: OSError) -> str:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    owner, user = existing.stat().st_uid, os.geteuid()
    is_read_only = error.errno == errno.EROFS
    remedy = (
        "mount it writable"
        if is_read_only
        else f"make it writable for user {user} (chown -R {user} on the host), or run the server as user {owner}"
    )
    return (
        f"{model_id} is not in the hub's cache {cache}, which user {user} may not write: {existing} "
        f"{'is on a read-only file system' if is_read_only else f'belongs to user {owner}'}; "
        f"{remedy}, or set HF_HOME to another folder"
    )
