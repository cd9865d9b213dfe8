"""Compiles grammars concurrently with the steps, and caches the most recently used ones.

Each grammar is first compiled once in a trial process, then here, where Python's GIL is held for less than a
millisecond, so that no step waits. INVARIANT: at most MAX_RUNNING grammars compile at a time.
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
from penstock_server.grammar.text import Grammar
from penstock_server.grammar.trial import TIME_LIMIT_S, Trial
from penstock_server.grammar.vocabulary import Vocabulary, fast_vocabulary, read_vocabulary

MAX_RUNNING = 2
MAX_WAITING = 24  # concurrent calls of `compile`, each of which blocks a thread
MAX_CACHED = 64
# Twice what the grammars before it may take: trials have a low priority, so they wait for CPU time on a busy machine.
_WAIT_LIMIT_S = 2 * MAX_WAITING / MAX_RUNNING * TIME_LIMIT_S
_STACK_BYTES = 64 << 20  # of threads that compile or compute masks: 16 times a trial's; only touched pages count


class GrammarCompiler:
    """Compiles and caches grammars. Thread-safe. first: a trial whose process has already been started."""

    def __init__(
        self, folder: Path, vocab_size: int, time_limit_s: float = TIME_LIMIT_S, first: Trial | None = None
    ) -> None:
        self._vocabulary: Vocabulary | None = None
        self._unusable = ""
        try:
            self._vocabulary = fast_vocabulary(read_vocabulary(folder, vocab_size))
        except GrammarError as error:
            self._unusable = str(error)
        self._cached: OrderedDict[Grammar, Future[Start]] = OrderedDict()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._pool = threads_with_stack(MAX_RUNNING, "grammar")
        # Last in, first out: further processes are started only when several grammars compile at a time.
        self._trials: LifoQueue[Trial] = LifoQueue()
        for _ in range(MAX_RUNNING - 1):
            self._trials.put(Trial(folder, time_limit_s))
        self._first = first or Trial(folder, time_limit_s)
        self._trials.put(self._first)

    @property
    def vocab_size(self) -> int:
        """Bits in a mask, at least the number of logits. 0: the model's tokenizer cannot be constrained."""
        return 0 if self._vocabulary is None else self._vocabulary.tokenizer.vocab_size

    @property
    def eos_ids(self) -> list[int]:
        """The EOS tokens of the model."""
        return [] if self._vocabulary is None else self._vocabulary.tokenizer.eos_tokens

    def start_trial(self) -> None:
        """Starts the first trial's process if it is not running. No grammar may be compiling yet."""
        self._first.start()

    def wait(self) -> int:
        """Waits until the first trial's process is ready, if it was started. Returns the bytes the others will need."""
        return self._first.wait() * (MAX_RUNNING - 1)

    def rehearse(self, grammar: Grammar) -> bool:
        """Compiles and caches a trusted grammar without a trial. Returns whether the tokenizer can be constrained."""
        if self._vocabulary is None:
            return False
        with self._lock:
            self._cached[grammar] = self._pool.submit(build_start, self._vocabulary, grammar)
        return True

    def compile(self, grammar: Grammar) -> bool:
        """Waits until the grammar is compiled. Returns whether it was cached.

        Raises GrammarError when it cannot be used, or too many grammars are being compiled.
        """
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise GrammarError(f"{self._num_waiting} grammars are being compiled already; try again later")
            self._num_waiting += 1
        try:
            start = self._start(grammar, self._try_and_compile)
            was_cached = start.done()
            start.result(_WAIT_LIMIT_S)
        except FutureTimeoutError:
            raise GrammarError(f"the grammar was not compiled within {_WAIT_LIMIT_S:g} s; try again later") from None
        finally:
            with self._lock:
                self._num_waiting -= 1
        return was_cached

    def start(self, grammar: Grammar) -> Future[Start]:
        """The compiled form of a grammar that has passed its trial, in this worker or an earlier one. Returns at once.

        The future raises GrammarError when the grammar cannot be used.
        """
        return self._start(grammar, self._compile)

    def _start(self, grammar: Grammar, compile_it: Callable[[Grammar], Start]) -> Future[Start]:
        with self._lock:
            cached = self._cached.get(grammar)
            if cached is not None:
                self._cached.move_to_end(grammar)
                return cached
            if self._unusable:
                failed: Future[Start] = Future()
                failed.set_exception(GrammarError(self._unusable))
                return failed
            future = self._cached[grammar] = self._pool.submit(compile_it, grammar)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        future.add_done_callback(partial(self._forget_failed, grammar))
        return future

    def close(self) -> None:
        """Ends the processes. The compiler cannot be used afterwards."""
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
                if self._cached.get(grammar) is future:
                    del self._cached[grammar]


def threads_with_stack(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have a larger stack than a trial, so that no grammar that passed its trial overflows it."""

    def start(barrier: threading.Barrier) -> None:
        barrier.wait()

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    before = threading.stack_size(_STACK_BYTES)
    try:
        # The pool starts threads on demand. As many concurrent jobs as threads start all of them with this stack size.
        barrier = threading.Barrier(num_threads)
        for job in [pool.submit(start, barrier) for _ in range(num_threads)]:
            job.result()
    finally:
        threading.stack_size(before)
    return pool
