"""Runs a program in native calls: one per step, or one between two visitors.

The result equals that of `Interpreter` with native operators to the bit. PERF: a call saves some 40 µs a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock_server.device.native.attention import NativeAttention, native_batch
from penstock_server.device.native.ops import NativeOps
from penstock_server.device.ops import Ops
from penstock_server.layers.interpreter import Interpreter
from penstock_server.layers.native_compiler import NotNativeError, compiled
from penstock_server.layers.operation import (
    AdvanceStates,
    AttendLatents,
    Copy,
    Operation,
    Program,
    Select,
    Visit,
    Write,
)
from penstock_server.layers.step import StepContext

if TYPE_CHECKING:
    from penstock_server.device.native.build import NativeBuild

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs a program."""

    def run(self, residual: Tensor, caches: Sequence[Tensor], step: StepContext, *, visits: bool = False) -> Tensor:
        """residual: the input of the program [tokens, hidden], overwritten. caches: one for each write of the program.
        visits: whether visitors see the residual. Returns the output of the sampled rows [samples, hidden]. Raises
        RuntimeError when another rank's process has exited."""
        ...


def executor_of(program: Program, ops: Ops, what: str, *, adapts: bool = False) -> Executor:
    """The fastest with these operators. what: is computed, for the log; empty: the log knows it already.
    adapts: steps may have adapters. Raises NotNativeError if native operators cannot add them."""
    executor: Executor
    if not isinstance(ops, NativeOps):
        return Interpreter(program, ops)
    try:
        executor, level, how = NativeExecutor(program, ops.build, adapts=adapts), logging.DEBUG, "one native call"
    except NotNativeError as reason:
        if adapts:
            raise
        executor, level = Interpreter(program, ops), logging.INFO
        how = f"one operation after the other (no native {reason})"
    if what:
        logger.log(level, "%s: %s", what, how)
    return executor


class NativeExecutor:
    """Implements `Executor`. Steps with adapters or visitors run stacks of their own, so that the others have no more
    operations than they need."""

    def __init__(self, program: Program, build: NativeBuild, *, adapts: bool = False) -> None:
        """adapts: steps may have adapters. Raises NotNativeError."""
        self.program = program
        self.build = build
        self._pieces: dict[tuple[bool, bool], list[Visit | NativeStack]] = {}
        for kind in {False, adapts}:
            self._compiled(adapts=kind, visits=False)

    def _compiled(self, *, adapts: bool, visits: bool) -> list[Visit | NativeStack]:
        """The visits, and what is computed between them."""
        if (adapts, visits) not in self._pieces:
            operations = [each for each in self.program.operations if visits or not isinstance(each, Visit)]
            pieces: list[Visit | NativeStack] = []
            for is_visit, group in groupby(operations, lambda operation: isinstance(operation, Visit)):
                part = list(group)
                if is_visit:
                    pieces += [each for each in part if isinstance(each, Visit)]
                    continue
                if part[-1] is not operations[-1]:
                    part += [Select("residual", "residual", ()), Copy("residual", "output")]
                pieces.append(NativeStack(part, self.program.hidden_size, self.build, adapts=adapts))
            self._pieces[adapts, visits] = pieces
        return self._pieces[adapts, visits]

    def run(self, residual: Tensor, caches: Sequence[Tensor], step: StepContext, *, visits: bool = False) -> Tensor:
        pieces = self._compiled(adapts=step.adapters is not None, visits=visits)
        whole = step
        if len(pieces) > 1:
            whole = replace(step, batch=replace(step.batch, sample_rows=torch.arange(len(residual))))
        first = 0
        for piece in pieces:
            if isinstance(piece, Visit):
                piece.visitor(residual, step)
            else:
                context = step if piece is pieces[-1] else whole
                residual = piece.run(residual, caches[first : first + piece.num_caches], context)
                first += piece.num_caches
        return residual


class NativeStack:
    """Operations in one native call."""

    def __init__(
        self, operations: Sequence[Operation], hidden_size: int, build: NativeBuild, *, adapts: bool = False
    ) -> None:
        """The parameters and errors are as of `compiled`."""
        self.num_caches = sum(isinstance(operation, Write | AttendLatents | AdvanceStates) for operation in operations)
        self._build = build
        self._run = compiled(operations, hidden_size, build, adapts=adapts)

    def run(self, residual: Tensor, caches: Sequence[Tensor], step: StepContext) -> Tensor:
        """Implements `Executor.run`."""
        # A stage of a pipeline may have no attention.
        batch = step.batch
        metadata = step.metadata.get(NativeAttention.name) or native_batch(self._build, batch)
        output = residual.new_empty((batch.sample_rows.shape[0], residual.shape[1]))
        adapters = step.adapters
        adapted = None if adapters is None else ([each.packed for each in adapters.loaded], adapters.of_tokens)
        rows, slots = (batch.positions, batch.slots), batch.state_slots
        self._run(residual, *rows, metadata, list(caches), batch.sample_rows, output, adapted, slots)
        return output
