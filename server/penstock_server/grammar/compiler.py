"""Compiles grammars concurrently with the steps, and caches the most recently used ones.

Each grammar is first compiled once in a trial process, then here, where Python's GIL is held for less than a
millisecond, so that no step waits. The first grammar also reads the vocabulary, unless `read` was called before, and
starts the first trial process. INVARIANT: at most MAX_RUNNING grammars compile at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from queue import LifoQueue

from penstock_server.errors import GrammarError
from penstock_server.grammar.start import Start, build_start
from penstock_server.grammar.trial import TIME_LIMIT_S, Trial
from penstock_server.grammar.vocabulary import Vocabulary, fast_vocabulary, read_vocabulary
from penstock_server.protocol.grammar import Grammar

MAX_RUNNING = 2
MAX_WAITING = 24  # concurrent calls of `compile`, each of which blocks a thread
MAX_CACHED = 64
# Twice what the grammars before it may take: trials have a low priority, so they wait for CPU time on a busy machine.
_WAIT_LIMIT_S = 2 * MAX_WAITING / MAX_RUNNING * TIME_LIMIT_S
# What grammars take before any is compiled, at most: for each token in this process and in each trial process, and for
# a trial process itself.
TOKEN_BYTES, _TRIAL_BYTES = 1 << 10, 32 << 20
_STACK_BYTES = 64 << 20  # stack of threads that compile or compute masks: 16 times a trial's; only touched pages count


class GrammarCompiler:
    """Compiles and caches grammars. Thread-safe."""

    def __init__(self, folder: Path, num_logits: int, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._folder = folder
        self._num_logits = num_logits
        self._reading: Future[Vocabulary] | None = None
        self._cached: OrderedDict[Grammar, Future[Start]] = OrderedDict()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._pool = threads_with_stack(MAX_RUNNING, "grammar")
        # Last in, first out: further processes are started only when several grammars compile at a time.
        self._trials: LifoQueue[Trial] = LifoQueue()
        for _ in range(MAX_RUNNING):
            self._trials.put(Trial(folder, time_limit_s))

    def read(self) -> Future[Vocabulary]:
        """Starts to read the vocabulary, the first time. The future raises GrammarError when the tokenizer cannot be
        constrained."""
        with self._lock:
            if self._reading is None:
                # Before any job that waits for it, so that such jobs cannot take all threads.
                self._reading = self._pool.submit(_read, self._folder, self._num_logits)
            return self._reading

    @property
    def vocab_size(self) -> int:
        """Bits in a mask, at least the number of logits. 0: the model's tokenizer cannot be constrained. Reads the
        vocabulary."""
        reading = self.read()
        return reading.result().tokenizer.vocab_size if reading.exception() is None else 0

    @property
    def eos_ids(self) -> Sequence[int]:
        """The EOS tokens of the model. Reads the vocabulary."""
        reading = self.read()
        return reading.result().eos_ids if reading.exception() is None else ()

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token. Reads the vocabulary, which must be usable."""
        return self.read().result().tokenizer.decode_bytes([token_id])

    @property
    def later_bytes(self) -> int:
        """The most memory that grammars take before any is compiled."""
        return self._num_logits * TOKEN_BYTES * (1 + MAX_RUNNING) + _TRIAL_BYTES * MAX_RUNNING

    def rehearse(self, grammar: Grammar) -> bool:
        """Compiles and caches a trusted grammar without a trial, if a usable vocabulary has been read. Returns whether
        it has."""
        reading = self._reading
        if reading is None or reading.exception() is not None:
            return False
        with self._lock:
            self._cached[grammar] = self._pool.submit(build_start, reading.result(), grammar)
        return True

    def compile(self, grammar: Grammar) -> bool:
        """Waits until the grammar is compiled. Returns whether it was cached.

        Raises GrammarError when it cannot be used, or too many grammars are being compiled.
        """
        grammar = grammar.without_limit
        if grammar.kind == "any":
            reading = self.read()
            was_read = reading.done()
            reading.result()
            return was_read
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
        self.read()
        with self._lock:
            cached = self._cached.get(grammar)
            if cached is not None:
                self._cached.move_to_end(grammar)
                return cached
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
            trial.start()  # the first time, its process reads the vocabulary while this one does
            vocabulary = self.read().result()
            trial.check(grammar)
        finally:
            self._trials.put(trial)
        return build_start(vocabulary, grammar)

    def _compile(self, grammar: Grammar) -> Start:
        return build_start(self.read().result(), grammar)

    def _forget_failed(self, grammar: Grammar, future: Future[Start]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._cached.get(grammar) is future:
                    del self._cached[grammar]


def _read(folder: Path, num_logits: int) -> Vocabulary:
    return fast_vocabulary(read_vocabulary(folder, num_logits))


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
