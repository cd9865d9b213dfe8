"""Execution of plans for models whose outputs are pooled: the result of a sequence is one vector, after its last token.

A prompt may be computed in several steps. The mean of its outputs needs the sum of those before, which stays on the
device until the sequence is freed.

INVARIANT: steps are collected in the order of their launch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine import batch
from penstock_server.engine.batch import Selection
from penstock_server.engine.device_progress import DeviceProgress
from penstock_server.engine.offload import Offload
from penstock_server.engine.sequence import SequenceTable
from penstock_server.engine.stream import apply_changes, check_plan
from penstock_server.engine.transfer import Download, Fetched, Put, Upload
from penstock_server.models.interface import CausalModel
from penstock_server.models.pooler import Pooler
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import NO_VECTORS, Failure, Plan, StepResult, StepTiming

BROKEN_OUTPUTS = "the model's outputs are not finite"


@dataclass(slots=True, eq=False)
class PendingVectors:
    """A launched step whose result has not been collected."""

    step: int
    sequence_ids: npt.NDArray[np.uint64]  # [pooled]
    failures: Sequence[Failure]
    vectors: Fetched | None = None  # [pooled, dimensions]; None: there are none
    timing: StepTiming = field(default_factory=StepTiming)


class PoolingRunner:
    """Runs the steps of one stream on one rank."""

    def __init__(
        self,
        model: CausalModel,
        pooler: Pooler,
        group: RankGroup,
        device: torch.device,
        limits: WarmUpConfig,
        table: SequenceTable,
        progress: DeviceProgress | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`pooler` is the model's. `progress` gets a mark behind each step."""
        self._model = model
        self._pooler = pooler
        self._group = group
        self._device = device
        self._limits = limits
        self._offload = offload
        self._table = table
        self._progress = progress
        self._sums: dict[int, Tensor] = {}  # [hidden] by sequence id: of the outputs of earlier steps
        self._in_flight: deque[PendingVectors] = deque()
        self._last_step = 0
        self._ended = time.perf_counter()

    def reset(self) -> None:
        """Forget every sequence, and steps that were not collected: a new stream begins."""
        self._table = SequenceTable(self._table.limits)
        self._sums.clear()
        self._in_flight.clear()
        self._last_step = 0
        self._ended = time.perf_counter()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingVectors:
        """Start one plan. Raises PlanError, before anything is done, when the plan as a whole breaks the protocol."""
        started = time.perf_counter()
        idle_s = started - self._ended
        check_plan(plan, self._last_step, self._limits, can_draft=False)
        self._last_step = plan.step
        for sequence_id in plan.freed_sequence_ids:
            self._sums.pop(sequence_id, None)
        apply_changes(self._table, plan, self._offload, self._model.states)
        chosen = batch.select(self._table, plan.advances)
        pending = PendingVectors(plan.step, chosen.sequence_ids[chosen.samples], chosen.failures)
        self._in_flight.append(pending)
        timing = self._run(pending, chosen, started) if len(chosen.rows) else StepTiming(time.perf_counter() - started)
        self._ended = time.perf_counter()
        pending.timing = replace(timing, idle_s=idle_s)
        return pending

    def _run(self, pending: PendingVectors, chosen: Selection, started: float) -> StepTiming:
        """Give a step with at least one advance to the device."""
        built = batch.build(self._table, chosen).batch
        upload, download = Upload(self._device), Download(self._device)
        starts = built.query_starts.astype(np.int64)
        wanted = {
            "cls": starts[:-1][chosen.samples],
            "mean": np.arange(starts[-1]),
            "last": starts[1:][chosen.samples] - 1,
        }
        built = replace(built, sample_rows=wanted[self._pooler.pooling.outputs])
        inputs = built.put(upload.add)
        owners = self._owners(chosen, upload.add)
        upload.start()
        prepared_at = time.perf_counter()
        outputs = self._model.forward(inputs).float()
        forwarded_at = time.perf_counter()
        if owners is not None:
            outputs = self._means(outputs, chosen, owners)
        self._table.computed[chosen.rows] += chosen.num_tokens
        if len(chosen.samples) and self._group.rank == 0:
            pending.vectors = download.add(self._pooler(outputs))
            download.start()
        if self._progress is not None:
            self._progress.mark()
        return StepTiming(prepared_at - started, forwarded_at - prepared_at, time.perf_counter() - forwarded_at)

    def _owners(self, chosen: Selection, put: Put) -> Tensor | None:
        """[tokens]: the advance that each token belongs to, if the outputs of all tokens are pooled."""
        if self._pooler.pooling.outputs != "mean":
            return None
        return put(np.repeat(np.arange(len(chosen.rows)), chosen.num_tokens))

    def _means(self, outputs: Tensor, chosen: Selection, owners: Tensor) -> Tensor:
        """outputs [tokens, hidden] → means [samples, hidden] over the tokens of this step and of earlier ones."""
        sums = outputs.new_zeros(len(chosen.rows), outputs.shape[1]).index_add_(0, owners, outputs)
        ends = self._table.computed[chosen.rows] + chosen.num_tokens
        samples = set(chosen.samples.tolist())
        for place, sequence_id in enumerate(chosen.sequence_ids.tolist()):
            earlier = self._sums.pop(sequence_id, None)
            if earlier is not None:
                sums[place] += earlier
            if place not in samples:
                self._sums[sequence_id] = sums[place].clone()
        return torch.stack([sums[place] / int(ends[place]) for place in sorted(samples)]) if samples else sums[:0]

    def collect(self, pending: PendingVectors) -> StepResult:
        """The result of the oldest launched step; waits for the device."""
        started = time.perf_counter()
        assert self._in_flight.popleft() is pending, "steps are collected in the order of their launch"
        sequence_ids, vectors, failures = pending.sequence_ids, NO_VECTORS, list(pending.failures)
        if pending.vectors is not None:
            vectors = pending.vectors.wait()
            is_whole = np.isfinite(vectors).all(axis=1)
            failures += [Failure(each, BROKEN_OUTPUTS) for each in sequence_ids[~is_whole].tolist()]
            sequence_ids, vectors = sequence_ids[is_whole], vectors[is_whole]
        self._ended = time.perf_counter()
        timing = replace(pending.timing, sample_s=pending.timing.sample_s + self._ended - started)
        if self._group.rank != 0:
            return StepResult(pending.step, timing)
        return StepResult(pending.step, timing, sequence_ids, failures=failures, vectors=vectors)
