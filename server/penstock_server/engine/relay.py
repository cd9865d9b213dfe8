"""Execution of plans on a pipeline stage before the last one: it computes its layers and samples nothing.

The sampled tokens come back with later plans (`Advances.last_token_ids`).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from penstock_server.engine import batch
from penstock_server.engine.batch import Selection
from penstock_server.engine.device_progress import DeviceProgress
from penstock_server.engine.offload import Offload
from penstock_server.engine.sequence import SequenceTable
from penstock_server.engine.stream import apply_changes, check_plan
from penstock_server.engine.transfer import Upload
from penstock_server.models.interface import CausalModel
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Plan, StepResult, StepTiming


class RelayRunner:
    """Runs the steps of one stream on one rank. A launched step is its result: that of rank 0 counts."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        limits: WarmUpConfig,
        table: SequenceTable,
        progress: DeviceProgress | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`progress` gets a mark behind each step."""
        self._model = model
        self._device = device
        self._limits = limits
        self._offload = offload
        self._table = table
        self._progress = progress
        self._last_step = 0
        self._ended = time.perf_counter()

    def reset(self) -> None:
        """Forget every sequence: a new stream begins."""
        self._table = SequenceTable(self._table.limits)
        self._last_step = 0
        self._ended = time.perf_counter()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepResult:
        """Start one plan. Raises PlanError, before anything is done, when the plan as a whole breaks the protocol."""
        started = time.perf_counter()
        idle_s = started - self._ended
        check_plan(plan, self._last_step, self._limits, can_draft=False)
        self._last_step = plan.step
        apply_changes(self._table, plan, self._offload, self._model.states)
        chosen = batch.select(self._table, plan.advances)
        timing = self._run(chosen, started) if len(chosen.rows) else StepTiming(time.perf_counter() - started)
        self._ended = time.perf_counter()
        return StepResult(plan.step, replace(timing, idle_s=idle_s))

    def _run(self, chosen: Selection, started: float) -> StepTiming:
        """Give a step with at least one advance to the device."""
        upload = Upload(self._device)
        inputs = batch.build(self._table, chosen).batch.put(upload.add)
        upload.start()
        prepared_at = time.perf_counter()
        self._model.forward(inputs)
        if self._progress is not None:
            self._progress.mark()
        self._table.computed[chosen.rows] += chosen.num_tokens
        self._table.known[chosen.rows[chosen.samples]] += 1
        return StepTiming(prepared_at - started, time.perf_counter() - prepared_at)

    def collect(self, pending: StepResult) -> StepResult:
        """The result of a launched step."""
        return pending
