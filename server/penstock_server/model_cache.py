"""The cache for what is made from models: folders that are written once, whole or not at all. Imports no torch.

INVARIANT: a folder under its final name is complete. It is written under another name, by one process at a time, put
on the disk and renamed. What a killed process left unfinished is cleared away by the next that makes the same folder.
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
    """$HF_HOME/penstock, so that a volume mounted for the hub's cache holds ours too."""
    home = os.environ.get("HF_HOME")
    base = (
        Path(home).expanduser()
        if home
        else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"
    )
    return base / "penstock"


def content_key(version: int, paths: Iterable[Path]) -> str:
    """Changes when one of the files does, or what is made of them (`version`)."""
    facts = [str(version)]
    for path in paths:
        status = path.stat()
        facts += [str(path), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def made_folder(name: str, key: str, write: Callable[[Path], None], need_bytes: int = 0) -> Path:
    """The folder of that name and key, filled by `write` if it is not there yet.

    Raises ConfigError when the cache cannot be written or has no room for `need_bytes`.
    """
    folder = cache_root() / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{key}"
    while not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(folder, write, need_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(_full_message(folder.parent, need_bytes)) from error
            raise ConfigError(
                f"cannot write to the model cache {folder.parent}: {error.strerror}; set HF_HOME"
            ) from error
    return folder


def _make(folder: Path, write: Callable[[Path], None], need_bytes: int) -> None:
    """Returns when the folder is there, or another process gave its own try up."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    with _locked(unfinished) as is_mine:
        if not is_mine or folder.is_dir():
            return
        try:
            for path in unfinished.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if need_bytes > shutil.disk_usage(unfinished).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(unfinished)
            sync(unfinished)
            unfinished.rename(folder)
            sync(folder.parent)
        except BaseException:
            # Also when the process is told to end: gigabytes are not left for nobody.
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds a folder that is being written: made if need be, and free of other processes.

    False when somebody renamed or removed it while we waited. A lock ends with its process, however that ends.
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
        print(f"another process is making {name}; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        # A file system without locks: two at once spoil each other's work, and the rename decides.
        return


def sync(path: Path) -> None:
    """Put a folder's entries on the disk; a rename is worth nothing when the power fails before them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full_message(root: Path, need_bytes: int) -> str:
    need = f" for {need_bytes / 1e9:.1f} GB" if need_bytes else ""
    free = shutil.disk_usage(root).free / 1e9
    return (
        f"the disk of the model cache {root} has no room{need}: {free:.1f} GB are free; "
        "make room, or set HF_HOME to a folder on a larger disk"
    )
