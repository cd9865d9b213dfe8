"""Compiles each grammar first in a separate process, so that a hostile grammar cannot harm the worker.

llguidance bounds most grammars itself. But a grammar of 100 kB can overflow the stack by recursion, which kills the
process, and one of 2 kB can compile for hours. Native code in a thread can be neither caught nor stopped. A process has
limits of CPU time (a timer) and memory; when it dies, the next grammar gets a new process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from penstock_server.errors import GrammarError
from penstock_server.grammar.text import Grammar

TIME_LIMIT_S = 5.0  # of CPU time, so that a busy machine accepts the same grammars as an idle one
_START_LIMIT_S = 60.0  # until the process has read the vocabulary
_MEMORY_BYTES = 1 << 30  # of address space
_STACK_BYTES = 4 << 20  # less than the worker compiles with
_READY = "ready\n"


class Trial:
    """A trial process. `start` or the first grammar starts it; after a grammar that killed it, the next one does.

    Not thread-safe.
    """

    def __init__(self, folder: Path, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._arguments = [str(folder), str(time_limit_s)]
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False  # the process has read the vocabulary

    def start(self) -> None:
        """Starts the process if it is not running. Does not wait until it has read the vocabulary."""
        if self._process is None:
            self._process = self._spawn()

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError when the grammar cannot be compiled within the limits."""
        self.start()
        process = self._process
        assert process is not None
        line = ""
        try:
            line = self._ask(process, grammar)
        finally:
            if not line:
                self.close()
        if not line:
            if process.returncode == -signal.SIGPROF:
                raise GrammarError(f"compiling the grammar takes more than {self._time_limit_s:g} s; make it simpler")
            raise GrammarError("the grammar is nested too deeply or needs too much memory; make it simpler")
        error: str = json.loads(line)["error"]
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        self._is_ready = False
        if process is None:
            return
        process.terminate()  # a process that has already ended keeps its exit status
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _spawn(self) -> subprocess.Popen[str]:
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(  # noqa: S603 - this program itself
            [sys.executable, "-m", __name__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def _ask(self, process: subprocess.Popen[str], grammar: Grammar) -> str:
        """Returns the reply line; empty when the process died."""
        assert process.stdin is not None
        assert process.stdout is not None
        if not self._is_ready:
            self._is_ready = process.stdout.readline() == _READY
            if not self._is_ready:
                return ""
        try:
            process.stdin.write(json.dumps({"kind": grammar.kind, "text": grammar.text}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()


def main(folder: str, time_limit_s: str) -> None:
    """The process: reads a grammar per line and prints an error per line, until the worker exits."""
    # When memory runs out, the kernel should kill this process, not the worker.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    from penstock_server.grammar.start import build_start
    from penstock_server.grammar.vocabulary import read_vocabulary, small_vocabulary
    from penstock_server.heap import return_free_pages

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, _START_LIMIT_S)
    try:
        vocabulary = small_vocabulary(read_vocabulary(Path(folder)))
    except GrammarError:
        return  # the worker reports the same error
    return_free_pages()
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.nice(10)  # for grammars, which may take long; the first one waits for the vocabulary
    print(_READY, end="", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, float(time_limit_s))
        try:
            build_start(vocabulary, Grammar(**json.loads(line)))
            error = ""
        except GrammarError as refusal:
            error = str(refusal)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
