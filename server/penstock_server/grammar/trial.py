"""Compiles each grammar first in a separate process, so that a hostile grammar cannot harm the worker.

llguidance bounds most grammars itself. But a grammar of 100 kB can overflow the stack by recursion, which kills the
process, and one of 2 kB can compile for hours. Some limits show only when tokens follow, so a trial
also begins a few texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock_server.errors import GrammarError
from penstock_server.host.limited_process import Job, LimitedProcess, Limits, ProcessDiedError, serve
from penstock_server.protocol.grammar import Grammar

TIME_LIMIT_S = 2.0
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 4 << 20  # less than the worker compiles with


class Trial(LimitedProcess):
    """A trial process. Not thread-safe."""

    def __init__(self, folder: Path, time_limit_s: float = TIME_LIMIT_S) -> None:
        super().__init__(__name__, [str(folder), str(time_limit_s)])
        self._time_limit_s = time_limit_s

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError when the grammar cannot be compiled within the limits."""
        try:
            answer, _ = self.ask({"kind": grammar.kind, "text": grammar.text})
        except ProcessDiedError as died:
            if died.ran_out_of_time:
                limit = f"{self._time_limit_s:g} s"
                raise GrammarError(f"compiling the grammar takes more than {limit}; make it simpler") from None
            raise GrammarError("the grammar is nested too deeply or needs too much memory; make it simpler") from None
        if answer["error"]:
            raise GrammarError(answer["error"])


def main(folder: str, time_limit_s: str) -> None:
    """The process."""

    def prepare() -> Callable[[dict[str, Any], bytes], Job]:
        from penstock_server.grammar.start import build_start
        from penstock_server.grammar.vocabulary import read_vocabulary, small_vocabulary
        from penstock_server.grammar.walk import walk
        from penstock_server.host.heap import return_free_pages

        try:
            vocabulary = small_vocabulary(read_vocabulary(Path(folder)))
        except GrammarError:
            sys.exit()  # the worker reports the same error
        return_free_pages()

        def compile_grammar(values: dict[str, Any], _: bytes) -> Job:
            grammar = Grammar(**values)
            try:
                walk(build_start(vocabulary, grammar), grammar)
            except GrammarError as refusal:
                return {"error": str(refusal)}, b""
            return {"error": ""}, b""

        return compile_grammar

    serve(Limits(float(time_limit_s), _MEMORY_BYTES, _STACK_BYTES), prepare)


if __name__ == "__main__":
    main(*sys.argv[1:])
