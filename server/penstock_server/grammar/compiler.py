"""Grammars to where their texts start, beside the steps, and a memory of the last ones.

Every grammar is tried in a process of its own once, then compiled here, where Python's lock is held for less than a
millisecond, so that no step waits. INVARIANT: no more than MAX_RUNNING compile at a time, whatever is asked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from queue import LifoQueue

from penstock_server.errors import GrammarError
from penstock_server.grammar.start import Start, build_start
from penstock_server.grammar.trial import TIME_LIMIT_S, Trial
from penstock_server.grammar.vocabulary import Vocabulary, read_vocabulary
from penstock_server.plan import Grammar

MAX_RUNNING = 2
MAX_WAITING = 24  # calls of `compile`, each of which holds a thread
MAX_REMEMBERED = 64
_WAIT_LIMIT_S = 5 * TIME_LIMIT_S
_STACK_BYTES = 64 << 20  # of threads that compile or make masks: sixteen times what a trial has; touched when needed


class GrammarCompiler:
    """Compiles, and remembers the most recently used. Any thread may call. first: a trial whose process was begun."""

    def __init__(
        self, folder: Path, vocab_size: int, time_limit_s: float = TIME_LIMIT_S, first: Trial | None = None
    ) -> None:
        self._vocabulary: Vocabulary | None = None
        self._unusable = ""
        try:
            self._vocabulary = read_vocabulary(folder, vocab_size)
        except GrammarError as error:
            self._unusable = str(error)
        self._known: OrderedDict[Grammar, Future[Start]] = OrderedDict()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._pool = threads_with_stack(MAX_RUNNING, "grammar")
        # The one that was used last is used next: others are started when several grammars compile at a time.
        self._trials: LifoQueue[Trial] = LifoQueue()
        for _ in range(MAX_RUNNING - 1):
            self._trials.put(Trial(folder, time_limit_s))
        self._first = first or Trial(folder, time_limit_s)
        self._trials.put(self._first)

    @property
    def vocab_size(self) -> int:
        """Bits in a mask: at least the model's logits. 0: no grammar can be used."""
        return 0 if self._vocabulary is None else self._vocabulary.tokenizer.vocab_size

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a text of any sequence."""
        return [] if self._vocabulary is None else self._vocabulary.tokenizer.eos_tokens

    def wait(self) -> int:
        """Wait until the first trial's process is ready, if it was begun. The bytes that the others would have."""
        return self._first.wait() * (MAX_RUNNING - 1)

    def rehearse(self, grammar: Grammar) -> bool:
        """Whether there is a vocabulary; then this grammar, which needs no trial, is compiled and remembered."""
        if self._vocabulary is None:
            return False
        with self._lock:
            self._known[grammar] = self._pool.submit(build_start, self._vocabulary, grammar)
        return True

    def compile(self, grammar: Grammar) -> bool:
        """Wait until it is compiled; whether it was there already. Raises GrammarError when it cannot be used."""
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise GrammarError(f"{self._num_waiting} grammars are being compiled already; try again later")
            self._num_waiting += 1
        try:
            start = self._start(grammar, self._try_and_compile)
            was_there = start.done()
            start.result(_WAIT_LIMIT_S)
        except FutureTimeoutError:
            raise GrammarError(f"the grammar was not compiled within {_WAIT_LIMIT_S:g} s; try again later") from None
        finally:
            with self._lock:
                self._num_waiting -= 1
        return was_there

    def start(self, grammar: Grammar) -> Future[Start]:
        """Where the texts of a grammar begin that `compile` took, here or in a worker that has died; now or later, or a
        GrammarError. Returns at once."""
        return self._start(grammar, self._compile)

    def _start(self, grammar: Grammar, compile_it: Callable[[Grammar], Start]) -> Future[Start]:
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known
            if self._unusable:
                failed: Future[Start] = Future()
                failed.set_exception(GrammarError(self._unusable))
                return failed
            future = self._known[grammar] = self._pool.submit(compile_it, grammar)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        future.add_done_callback(partial(self._forget_failed, grammar))
        return future

    def close(self) -> None:
        """End the processes; nothing may be asked afterwards."""
        self._pool.shutdown(cancel_futures=True)
        for _ in range(MAX_RUNNING):
            self._trials.get().close()

    def _try_and_compile(self, grammar: Grammar) -> Start:
        trial = self._trials.get()
        try:
            trial.check(grammar)
        finally:
            self._trials.put(trial)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> Start:
        assert self._vocabulary is not None
        return build_start(self._vocabulary, grammar)

    def _forget_failed(self, grammar: Grammar, future: Future[Start]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._known.get(grammar) is future:
                    del self._known[grammar]


def threads_with_stack(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads can recurse deeper than any grammar's trial could."""

    def start(begun: threading.Barrier) -> None:
        begun.wait()

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    before = threading.stack_size(_STACK_BYTES)
    try:
        # The pool starts threads as work comes: so much work at once that all are started here.
        begun = threading.Barrier(num_threads)
        for job in [pool.submit(start, begun) for _ in range(num_threads)]:
            job.result()
    finally:
        threading.stack_size(before)
    return pool
