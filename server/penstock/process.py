"""The server as a child process on a private unix socket.

INVARIANT: the server ends with this process, however this process ends: its standard input is a pipe of which only this
process holds the other end, and it stops when the pipe is closed (`--stop-with-stdin`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock import setting
from penstock.errors import PenstockError, SettingError, StartError, StoppedError
from penstock.progress import StartProgress
from penstock.server_log import ServerLog

# One line per request would cost as much as a small request itself.
_LOG_LEVEL = "warn,penstock=info,penstock_router=info,worker=info,penstock_router::telemetry::record=error"
_MAX_ADDRESS_BYTES = 100  # limit of a unix socket's path: 108 on Linux, less elsewhere
_SOCKET = "socket"
_STOP_TIMEOUT_S = 30.0
_WRONG_SETTING_STATUS = 2


def find_binary() -> Path:
    """The `penstock` of this environment. `PENSTOCK_BINARY` names another one."""
    if named := os.environ.get("PENSTOCK_BINARY"):
        return Path(named)
    user_scheme = sysconfig.get_preferred_scheme("user")
    scripts = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", user_scheme)]
    folders = [*map(Path, scripts), Path(sys.executable).parent]
    for folder in folders:
        binary = folder / "penstock"
        if binary.is_file():
            return binary
    raise StartError(
        f"there is no penstock in {', '.join(dict.fromkeys(map(str, folders)))}; run "
        "`pip install . ./kernels` in the source tree of Penstock, or set PENSTOCK_BINARY to a penstock that is built"
    )


class ServerProcess:
    """A running server. The constructor returns at once; `wait_until_ready` waits until the server answers."""

    def __init__(
        self, model: str | os.PathLike[str] | None, settings: Mapping[str, Any], use_tqdm: bool | None = None
    ) -> None:
        binary = find_binary()
        arguments = setting.command_line(binary, settings)
        if model is not None:
            arguments.append(f"--model-id={os.fspath(model)}")
        folder = _private_folder()
        self.socket = folder / _SOCKET
        fixed = [f"--uds={self.socket}", "--stop-with-stdin", "--json-output"]
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [binary, *fixed, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(setting.switched_off(binary, settings)),
                # Ctrl-C in a terminal reaches this process only, which stops the server in its own time.
                process_group=0,
            )
        except BaseException:
            shutil.rmtree(folder)
            raise
        assert self._process.stdout is not None
        self._log = ServerLog(self._process.stdout, StartProgress(shown=use_tqdm))
        # At the latest when the interpreter exits.
        self._finalizer = weakref.finalize(self, _stop, self._process, folder, os.getpid())
        _RUNNING.add(self)

    async def wait_until_ready(self) -> None:
        """Waits until the server answers. Raises StartError if it ends before that, SettingError for a wrong value."""
        # Shielded, because others may wait for it too.
        if await asyncio.shield(asyncio.wrap_future(self._log.is_ready)):
            return
        status = self.stop()
        message = _without_usage(self._log.reason()) or f"the server ended with status {status}"
        raise SettingError(message) if status == _WRONG_SETTING_STATUS else StartError(message)

    def stop(self) -> int:
        """Stops the server and waits for its end. Returns its exit status."""
        self._finalizer()
        return self._process.wait()

    def failure(self) -> PenstockError | None:
        """Why the server is not running, if it is not."""
        if not self._finalizer.alive:
            return StoppedError("the server was closed")
        if self._process.poll() is None:
            return None
        self._log.wait_for_end()
        return StoppedError(f"the server ended with status {self._process.returncode}: {self._log.reason()}")

    def release_after_fork(self) -> None:
        """In a forked child: lets go of the server, which belongs to the parent."""
        if self._finalizer.alive:
            assert self._process.stdin is not None
            self._process.stdin.close()


# A forked child would keep the pipes open, and with them the servers alive.
_RUNNING: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def _release_after_fork() -> None:
    for process in list(_RUNNING):
        process.release_after_fork()


os.register_at_fork(after_in_child=_release_after_fork)


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket's address."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    if len(os.fsencode(folder / _SOCKET)) > _MAX_ADDRESS_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    return folder


def _environment(dropped: set[str]) -> dict[str, str]:
    """The server's environment: without the variables that would contradict the private socket."""
    dropped = dropped | {"API_KEY", "API_KEY_FILE", "HOSTNAME", "PORT", "UDS"}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "PENSTOCK_PYTHON": sys.executable, "LOG_LEVEL": _LOG_LEVEL}


def _without_usage(message: str) -> str:
    """What the binary says of a command line, without the advice for people who typed it."""
    return message.partition("\n\n")[0].removeprefix("error: ")


def _stop(process: subprocess.Popen[str], folder: Path, owner_pid: int) -> None:
    """Ends the server: gently, then by force. Does nothing in a child that was forked after the start."""
    if os.getpid() != owner_pid:
        return
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdin is not None
    process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
