"""The cache of folders that are made from models. Imports no torch.

INVARIANT: a folder under its final name is complete. One process at a time writes it under another name, syncs it to
disk and renames it. The next process that makes the same folder removes what a killed process left behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_server.errors import ConfigError


def cache_root() -> Path:
    """$HF_HOME/penstock, so that a volume mounted for the hub's cache also holds this one."""
    home = os.environ.get("HF_HOME")
    base = (
        Path(home).expanduser()
        if home
        else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"
    )
    return base / "penstock"


def content_key(version: int, paths: Iterable[Path]) -> str:
    """A hash that changes with `version`, and with the path, size or modification time of any of the files."""
    facts = [str(version)]
    for path in paths:
        status = path.stat()
        facts += [str(path), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def made_folder(name: str, key: str, write: Callable[[Path], None], required_bytes: int = 0) -> Path:
    """The cached folder with this name and key; `write` fills it if it is missing.

    Raises ConfigError when the cache cannot be written or has no room for `required_bytes`.
    """
    folder = cache_root() / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{key}"
    while not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(folder, write, required_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(_full_message(folder.parent, required_bytes)) from error
            raise ConfigError(
                f"cannot write to the model cache {folder.parent}: {error.strerror}; set HF_HOME"
            ) from error
    return folder


def _make(folder: Path, write: Callable[[Path], None], required_bytes: int) -> None:
    """Returns when the folder exists, or when another process failed to make it."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    with _locked(unfinished) as is_locked:
        if not is_locked or folder.is_dir():
            return
        try:
            for path in unfinished.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if required_bytes > shutil.disk_usage(unfinished).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(unfinished)
            sync(unfinished)
            unfinished.rename(folder)
            sync(folder.parent)
        except BaseException:
            # Also on KeyboardInterrupt and SystemExit, so that no unfinished gigabytes stay behind.
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Creates the folder if needed and locks it against other processes.

    Yields False when another process renamed or removed the folder meanwhile. The lock ends with its process.
    """
    folder.mkdir(exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        _lock(descriptor, folder.name.removeprefix(".unfinished-"))
        yield folder.exists() and os.path.samestat(folder.stat(), os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _lock(descriptor: int, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another process is preparing {name}; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        # A file system without locks: of concurrent processes, one rename succeeds and the others fail.
        return


def sync(path: Path) -> None:
    """Syncs a folder's entries to disk, so that a power failure cannot leave a renamed folder incomplete."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full_message(root: Path, required_bytes: int) -> str:
    need = f" for {required_bytes / 1e9:.1f} GB" if required_bytes else ""
    free = shutil.disk_usage(root).free / 1e9
    return (
        f"the disk of the model cache {root} has no room{need}: {free:.1f} GB are free; "
        "make room, or set HF_HOME to a folder on a larger disk"
    )
