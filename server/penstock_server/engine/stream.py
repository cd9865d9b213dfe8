"""What every runner of a stream of steps does with a plan before it computes."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from penstock_server.engine.offload import Offload
from penstock_server.engine.sequence import SequenceTable
from penstock_server.errors import PlanError
from penstock_server.models.interface import States
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Plan, StepResult

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the steps of one stream: `launch` gives a plan to the device, `collect` returns its result."""

    def launch(self, plan: Plan) -> Any: ...
    def collect(self, pending: Any) -> StepResult: ...
    def reset(self) -> None: ...


def apply_changes(table: SequenceTable, plan: Plan, offload: Offload | None, states: States | None = None) -> None:
    """Save the snapshots, forget the freed sequences, make the transfers, then add the new sequences with their states.
    Raises PlanError for a snapshot or a transfer that cannot be made. states: None: no layer of this rank keeps any."""
    for save in plan.saves:
        if save.snapshot >= table.limits.num_snapshots:
            raise PlanError(
                f"the plan saves snapshot {save.snapshot}, but there are {table.limits.num_snapshots} snapshots"
            )
        row = int(table.rows([save.sequence_id])[0])
        if states is not None and row >= 0:
            states.save(row, save.num_tokens, save.snapshot)
    for sequence_id in plan.freed_sequence_ids:
        if not table.free(sequence_id):
            logger.warning("step %d frees sequence %d, which is unknown", plan.step, sequence_id)
    if plan.transfers:
        if offload is None:
            raise PlanError("the plan moves blocks, but there are no slots beside the pool")
        offload.move(plan.transfers)
    for new in plan.new_sequences:
        table.add(new)
        row = int(table.rows([new.sequence_id])[0])
        if states is not None and row >= 0 and new.snapshot is not None:
            states.restore(new.snapshot, row, new.num_computed_tokens)


def check_plan(plan: Plan, last_step: int, limits: WarmUpConfig, *, can_draft: bool) -> None:
    """Raises PlanError when the plan as a whole breaks the protocol."""
    columns = plan.advances
    if plan.step != last_step + 1:
        raise PlanError(f"step is {plan.step}, must be {last_step + 1}")
    lengths = {len(column) for column in (columns.num_tokens, columns.sample, columns.num_new_blocks)}
    if lengths != {len(columns)} or int(columns.num_new_blocks.sum()) != len(columns.new_block_ids):
        raise PlanError("the columns of the advances do not have the same length")
    if len(columns.num_draft_tokens) not in (0, len(columns)):
        raise PlanError("the column of draft tokens has neither the length of the others nor 0")
    if len(columns.last_token_ids) not in (0, len(columns)):
        raise PlanError("the column of last tokens has neither the length of the others nor 0")
    num_drafts = int(columns.num_draft_tokens.sum())
    if num_drafts and not can_draft:
        raise PlanError(f"plan asks for {num_drafts} draft tokens, but the model verifies none here")
    with_drafts = f" and {num_drafts} draft tokens" if num_drafts else ""
    if len(columns) + num_drafts > limits.max_step_sequences:
        raise PlanError(
            f"plan has {len(columns)} advances{with_drafts}, at most {limits.max_step_sequences} are allowed"
        )
    num_tokens = int(columns.num_tokens.sum())
    if num_tokens + num_drafts > limits.max_step_tokens:
        raise PlanError(f"plan advances {num_tokens} tokens{with_drafts}, at most {limits.max_step_tokens} are allowed")
