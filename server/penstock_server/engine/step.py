"""Execution of plans in two halves: `launch` gives a step to the device, `collect` returns its result.

The next step may be launched before the last one is collected. A sequence in both takes its input token from the device
tensor into which the last step sampled it. Only sequences whose sampling reads its own history (penalties, watermark,
grammar, bad words of several tokens) make `launch` wait for the tokens of earlier steps, and only after it has started
the model. On a CPU, `launch` does all the work.

Drafts continue tokens that the host knows. So a step with drafts waits for the steps before it, and the step after it
waits to learn which drafts were right: its positions depend on that. The time in which the GPU idles counts as time of
making drafts, so that the router drafts only where that pays.

All that a step needs of the host is copied to the device at once, before the model starts, and all its results at once
after it. What rows read of their history follows in a second copy.

INVARIANT: steps are collected in the order of their launch, and the results are those of collecting each at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine import batch, transfer
from penstock_server.engine.batch import Built, Selection
from penstock_server.engine.device_progress import DeviceProgress
from penstock_server.engine.drafting.interface import Drafter
from penstock_server.engine.drafting.ngram import NgramDrafter
from penstock_server.engine.drafting.recent import RecentDrafter
from penstock_server.engine.graphs import StepGraphs
from penstock_server.engine.logprob import Alternatives, tops_of
from penstock_server.engine.offload import Offload
from penstock_server.engine.prompt import PromptScores, prepare_prompt, score_prompt
from penstock_server.engine.restriction import NOTHING_LEFT
from penstock_server.engine.sampler import BROKEN, Prepared, Sampler
from penstock_server.engine.sequence import SequenceTable
from penstock_server.engine.speculation import drafts_of, keep_right_drafts, with_drafts, with_forced_tokens
from penstock_server.engine.stream import apply_changes, check_plan
from penstock_server.engine.transfer import Download, Fetched, Put, Upload
from penstock_server.grammar.state import NO_MASKS, GrammarStates, Masks, Refusal
from penstock_server.models.interface import CausalModel
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import NO_TOKENS, Failure, Fault, Plan, StepResult, StepTiming, Tokens

BROKEN_LOGITS = "the model's logits are not finite"
Ids = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Pending:
    """A launched step whose result has not been collected."""

    step: int
    chosen: Selection
    residencies: Ids  # [selected]
    failures: dict[int, Failure]  # by sequence id
    rows: Ids  # [samples] in the table
    positions: Ids  # [samples] of the sampled tokens
    is_kept: npt.NDArray[np.bool_] | None = None  # [samples] whether no draft before it is wrong; None: no drafts
    # On the device: [samples] ids, BROKEN where the logits are; then for each sequence of `prompt` its number of broken
    # rows. None: the step has neither.
    verdict: Tensor | None = None
    host_verdict: Fetched | None = None
    logprobs: Fetched | None = None  # [samples]
    alternatives: Sequence[Alternatives] = ()  # for the samples whose requests asked for them
    refusals: Mapping[int, Refusal] = field(default_factory=dict)  # by sample whose mask allows no token
    prompt: PromptScores | None = None
    outputs: Tensor | None = None  # [samples, hidden] for the drafter; until settling
    # GPU only: events around the idle time between the last step and the model, if `launch` waited because of drafts.
    waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    host_ids: Ids | None = None  # [samples]; set by settling
    timing: StepTiming = field(default_factory=StepTiming)

    def awaits_any(self, sequence_ids: Sequence[int]) -> bool:
        """Whether a token of one of these sequences is not on the host yet."""
        if self.host_verdict is None or self.host_ids is not None:
            return False
        return bool(np.isin(self.chosen.sequence_ids[self.chosen.samples], sequence_ids).any())


class StepRunner:
    """Runs the steps of one stream on one rank."""

    def __init__(
        self,
        model: CausalModel,
        group: RankGroup,
        device: torch.device,
        limits: WarmUpConfig,
        sampler: Sampler,
        table: SequenceTable,
        grammars: GrammarStates | None,
        graphs: StepGraphs | None = None,
        progress: DeviceProgress | None = None,
        drafter: Drafter | None = None,
        offload: Offload | None = None,
        recent_answer_tokens: int = 0,
    ) -> None:
        """`grammars` belong to the first rank, which makes all ranks' masks. `graphs` compute the model's decode steps.
        `progress` gets a mark behind the model and one behind each step. `drafter`: None if
        plans may not allow draft tokens. `offload`: None if plans move no blocks.
        `recent_answer_tokens`: of ended sequences, in which drafts are looked up."""
        self._model = model
        self._graphs = graphs
        self._progress = progress
        self._group = group
        self._device = device
        self._limits = limits
        self._offload = offload
        self._sampler = sampler
        self._table = table
        self._grammars = grammars
        self._drafter = drafter
        self._recent = RecentDrafter(recent_answer_tokens) if drafter and recent_answer_tokens else None
        self._lookup = self._recent or NgramDrafter()
        self._in_flight: deque[Pending] = deque()
        self._last_step = 0
        self._upload_bytes = 1024  # memory for the next step's upload
        self._ended = time.perf_counter()

    def reset(self) -> None:
        """Forget every sequence, and steps that were not collected: a new stream begins."""
        self._table = SequenceTable(self._table.limits, self._table.adapters, self._table.encoder)
        if self._grammars is not None:
            self._grammars.clear()
        if self._drafter is not None:
            self._drafter.clear()
        self._lookup.clear()
        self._in_flight.clear()
        self._last_step = 0
        self._ended = time.perf_counter()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """Start one plan. Raises PlanError, before anything is done, when the plan as a whole breaks the protocol."""
        started = time.perf_counter()
        idle_s, draft_s = started - self._ended, 0.0
        check_plan(plan, self._last_step, self._limits, can_draft=self._drafter is not None)
        self._last_step = plan.step
        table = self._table
        waits_from: torch.cuda.Event | None = None
        if any(earlier.chosen.has_drafts and earlier.host_ids is None for earlier in self._in_flight):
            waits_from = self._timed_event()
            self._settle_all()
        if self._recent is not None and plan.freed_sequence_ids:
            if steps := [step for step, each in enumerate(self._in_flight) if each.awaits_any(plan.freed_sequence_ids)]:
                waits_from = waits_from or self._timed_event()
                self._settle_first(steps[-1] + 1)
            self._recent.end(table, plan.freed_sequence_ids)
        apply_changes(table, plan, self._offload, self._model.states)
        if self._grammars is not None:
            self._grammars.apply(plan)
        chosen = batch.select(table, plan.advances)
        if self._drafter is not None and len(plan.advances.num_draft_tokens) and chosen.max_drafts.any():
            waits_from = waits_from or self._timed_event()
            self._settle_all()  # drafts continue the tokens that are known
            drafting, drafter = time.perf_counter(), self._drafter
            by_lookup = plan.drafts_by_lookup or drafter.is_lookup
            if plan.drafts_only_forced:
                chosen = with_forced_tokens(table, chosen, self._grammars, self._group, self._device)
            else:
                drafters: list[Drafter] = [self._lookup] if by_lookup or drafter.extends_lookup else []
                drafters += [] if by_lookup else [drafter]
                chosen = with_drafts(table, chosen, drafters, self._grammars, self._group, self._device)
            if not (plan.drafts_only_forced or by_lookup):
                draft_s = time.perf_counter() - drafting  # a lookup takes little, beside the wait for the other ranks
        failures = {failure.sequence_id: failure for failure in chosen.failures}
        sampled_rows = chosen.rows[chosen.samples]
        residencies, positions = table.residency[chosen.rows], table.known[sampled_rows] + chosen.offsets()
        pending = Pending(plan.step, chosen, residencies, failures, sampled_rows, positions)
        self._in_flight.append(pending)
        times = self._run(pending, waits_from) if len(chosen.rows) else None
        self._ended = time.perf_counter()
        prepared, forwarded = times or (self._ended, self._ended)
        pending.timing = StepTiming(
            prepared - started, forwarded - prepared, self._ended - forwarded, idle_s=idle_s, draft_s=draft_s
        )
        return pending

    def _run(self, pending: Pending, waits_from: torch.cuda.Event | None) -> tuple[float, float]:
        """Give a step with at least one advance to the device. waits_from: as of `Pending.waiting`. Returns when the
        step was prepared, and when the model had run."""
        table, chosen, rows = self._table, pending.chosen, pending.rows
        built = batch.build(table, chosen)
        upload, download = Upload(self._device, expected_bytes=self._upload_bytes), Download(self._device)
        bucket = None if self._graphs is None else self._graphs.bucket(built.batch)
        padded = built.batch if bucket is None else bucket.pad(built.batch, table.limits.block_tokens)
        inputs = padded.put(upload.add)  # first, because a graph copies the beginning of the upload
        links = self._links(pending, built, upload.add)
        prompt = None
        if built.prompt is not None:
            top_n = table.sampling["top_n"][chosen.rows][built.prompt.places]
            prompt = prepare_prompt(built.prompt, top_n, self._sampler, upload.add)
        # Without prompt logprobs, all outputs are samples.
        sample_rows = None if prompt is None else upload.add(built.samples)
        prepared = None
        if len(rows):
            prepared = self._sampler.prepare(
                table.composition(rows), _History(table, rows, pending.positions), upload.add
            )
        upload.start()
        self._upload_bytes = max(1024, 2 * upload.num_bytes)
        for verdict, source, target in links:
            inputs.token_ids[target] = verdict[source].clamp(min=0)
        prepared_at = time.perf_counter()

        masks = None
        if not self._awaits_history(prepared):
            masks = self._start_masks(chosen)  # they are made while the model computes
        if waits_from is not None and (model_starts := self._timed_event()) is not None:
            pending.waiting = waits_from, model_starts
        if self._graphs is None or bucket is None:
            hidden = self._model.forward(inputs)
        else:
            hidden = self._graphs.forward(bucket, upload.memory, built.batch.num_tokens)
        adapters = inputs.adapters and inputs.adapters.select(inputs.sample_rows[: len(hidden)])
        samples, its_adapters = hidden, adapters
        if sample_rows is not None:
            samples, its_adapters = hidden[sample_rows], adapters and adapters.select(sample_rows)
        if self._drafter is not None and self._drafter.reads_outputs:
            pending.outputs = samples.clone()  # the model uses its memory again
        logits = self._model.logits(samples, its_adapters) if len(rows) else None
        forwarded_at = time.perf_counter()
        self._mark()

        table.computed[chosen.rows] += chosen.num_tokens
        if prompt is not None:
            pending.prompt = score_prompt(self._model, self._sampler, hidden, adapters, prompt, download.add)
        if len(rows) or prompt is not None:
            if masks is None:
                self._settle_all()
                masks = self._start_masks(chosen)
            self._sample(pending, logits, prepared, masks, download)
            download.start()
            self._mark()
        return prepared_at, forwarded_at

    def collect(self, pending: Pending) -> StepResult:
        """The result of the oldest launched step; waits for the device."""
        started = time.perf_counter()
        assert self._in_flight[0] is pending, "steps are collected in the order of their launch"
        self._settle(pending)
        self._in_flight.popleft()
        self._ended = time.perf_counter()
        timing = pending.timing
        timing = replace(timing, sample_s=timing.sample_s + self._ended - started)
        if pending.waiting is not None:
            waits_from, model_starts = pending.waiting
            model_starts.synchronize()  # a step without results awaits nothing else
            timing = replace(timing, draft_s=waits_from.elapsed_time(model_starts) / 1000)
        if self._group.rank != 0:
            return StepResult(pending.step, timing)
        sequence_ids, sampled, advances = _sampled_tokens(pending)
        num_draft_tokens = pending.chosen.num_drafts[advances].astype(np.uint32)
        by_model = pending.chosen.by_model[advances]
        prompts = {} if pending.prompt is None else pending.prompt.tokens(pending.chosen.sequence_ids)
        prompts = {
            sequence_id: tokens for sequence_id, tokens in prompts.items() if sequence_id not in pending.failures
        }
        failures = list(pending.failures.values())
        return StepResult(pending.step, timing, sequence_ids, num_draft_tokens, by_model, sampled, prompts, failures)

    def _timed_event(self) -> torch.cuda.Event | None:
        """Behind the work that was given to a GPU so far."""
        return transfer.record_event(timed=True) if transfer.is_needed(self._device) else None

    def _mark(self) -> None:
        if self._progress is not None:
            self._progress.mark()

    def _links(self, pending: Pending, built: Built, put: Put) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The input tokens that are not on the host yet: verdicts of earlier steps, which of their ids, and the
        batch's tokens that these are."""
        links = []
        for earlier in self._in_flight:
            if earlier.verdict is None or earlier.host_ids is not None:
                continue
            sampled = earlier.residencies[earlier.chosen.samples]
            _, source, target = np.intersect1d(sampled, pending.residencies, assume_unique=True, return_indices=True)
            # A sequence samples after its last known token, so what it sampled is all that it has left to compute.
            if len(source):
                links.append((earlier.verdict, put(source), put(built.last_tokens[target])))
        return links

    def _awaits_history(self, prepared: Prepared | None) -> bool:
        """Whether a row reads tokens that are not on the host yet."""
        if prepared is None or not prepared.parameters.reads_history:
            return False
        return any(earlier.verdict is not None and earlier.host_ids is None for earlier in self._in_flight)

    def _start_masks(self, chosen: Selection) -> Masks:
        """Start the masks of this step's samples, so that they are made while the model computes."""
        if self._grammars is None or self._grammars.is_empty:
            return NO_MASKS
        sequence_ids = chosen.sequence_ids[np.unique(chosen.samples)].tolist()
        return self._grammars.start(sequence_ids, drafts_of(self._table, chosen))

    def _sample(
        self, pending: Pending, logits: Tensor | None, prepared: Prepared | None, masks: Masks, download: Download
    ) -> None:
        """Choose the tokens, the same on all ranks, and add the results to the download."""
        rows, prompt = pending.rows, pending.prompt
        if logits is not None and prepared is not None:
            upload = Upload(self._device)
            words = self._words(pending, prepared, masks, upload.add)
            context = self._sampler.read_context(prepared, words, upload.add)
            upload.start()
            if words is not None:
                self._group.broadcast(words)
            sampled = self._sampler.sample(logits, prepared, context, download.add)
            verdict = sampled.ids
            pending.logprobs, pending.alternatives = download.add(sampled.logprobs), sampled.alternatives
        else:
            verdict = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        if prompt is not None:
            verdict = torch.cat((verdict, prompt.num_broken))
        pending.verdict = self._group.agree(verdict)
        pending.host_verdict = download.add(verdict)
        self._table.known[rows] += 1

    def _words(self, pending: Pending, prepared: Prepared, masks: Masks, put: Put) -> Tensor | None:
        """The masks [masked, words] of the step. The first rank makes them; the others get them from it."""
        places = prepared.parameters.masked
        if not len(places):
            return None
        num_words = -(-self._model.traits.vocab_size // 32)
        if self._group.rank != 0:
            return torch.empty((len(places), num_words), dtype=torch.int32, device=self._device)
        of_grammars, refusals = masks.finish()
        pending.refusals = refusals
        restrictions = prepared.parameters.composition.restrictions
        if not restrictions:
            return put(np.ascontiguousarray(of_grammars[:, :num_words]))
        words = np.full((len(places), num_words), -1, np.int32)
        if len(masks.places):
            words[np.searchsorted(places, masks.places)] = of_grammars[:, :num_words]
        for place, restriction in restrictions.items():
            mask = words[np.searchsorted(places, place)]
            restriction.apply(mask, self._last_generated(pending, place, restriction.num_read))
            if not mask.any():
                refusals.setdefault(place, Refusal(NOTHING_LEFT, Fault.REQUEST))
        return put(words)

    def _last_generated(self, pending: Pending, sample: int, num_tokens: int) -> npt.NDArray[np.int32]:
        return self._table.last_generated(int(pending.rows[sample]), int(pending.positions[sample]), num_tokens)

    def _settle_all(self) -> None:
        self._settle_first(len(self._in_flight))

    def _settle_first(self, num_steps: int) -> None:
        """Settle the oldest steps in flight, in their order."""
        for pending in islice(self._in_flight, num_steps):
            self._settle(pending)

    def _settle(self, pending: Pending) -> None:
        """Bring a step's tokens into the table, and fail the sequences whose logits are broken."""
        if pending.host_verdict is None or pending.host_ids is not None:
            return
        chosen, verdict = pending.chosen, pending.host_verdict.wait()
        places, rows, positions = chosen.samples, pending.rows, pending.positions
        pending.host_ids = ids = verdict[: len(places)]
        broken = ids == BROKEN
        if chosen.has_drafts:
            pending.is_kept = keep_right_drafts(self._table, chosen, positions, ids)
            broken &= pending.is_kept
        for sample in np.flatnonzero(broken).tolist():
            refusal = pending.refusals.get(sample, Refusal(BROKEN_LOGITS, Fault.SERVER))
            self._fail(pending, int(places[sample]), refusal.reason, refusal.fault)
        if pending.prompt is not None:
            for place in pending.prompt.places[verdict[len(places) :] > 0].tolist():
                self._fail(pending, place, BROKEN_LOGITS)
        # The sequence may have failed, or a later plan freed it and gave its row to another.
        stays = (self._table.residency[rows] == pending.residencies[places]) & ~broken
        if pending.is_kept is not None:
            stays &= pending.is_kept
        if self._drafter is not None and pending.outputs is not None:
            kept = np.flatnonzero(stays)
            last = kept[np.diff(places[kept], append=len(pending.residencies)) > 0]  # the last row of each advance
            outputs = pending.outputs[transfer.upload(last, self._device)]
            self._drafter.observe(self._table, rows[last], positions[last] + 1, outputs)
            pending.outputs = None
        if not stays.all():
            places, rows, positions, ids = places[stays], rows[stays], positions[stays], ids[stays]
        self._table.token_ids[rows, positions] = ids
        if self._grammars is not None:
            self._grammars.chosen(chosen.sequence_ids[places].tolist(), ids.tolist())

    def _fail(self, pending: Pending, place: int, reason: str, fault: Fault = Fault.SERVER) -> None:
        """End the sequence of one of the step's advances, in later steps in flight too."""
        sequence_id, residency = int(pending.chosen.sequence_ids[place]), pending.residencies[place]
        failure = pending.failures.setdefault(sequence_id, Failure(sequence_id, reason, fault))
        if self._group.stage.size > 1:
            return  # the other stages do not know, and compute the sequence until the router has freed it
        if self._table.residency[pending.chosen.rows[place]] == residency:
            self._table.fail(sequence_id, failure.reason)
        for other in self._in_flight:
            if other.step > pending.step and (other.residencies == residency).any():
                other.failures[sequence_id] = Failure(sequence_id, failure.reason)


def _sampled_tokens(pending: Pending) -> tuple[npt.NDArray[np.uint64], Tokens, Ids]:
    """The sequence of each token of those that sampled and did not fail, the tokens, and the selected advance of each
    of these sequences; without advances if the step has no drafts."""
    chosen, advances = pending.chosen, np.zeros(0, np.int64)
    sequence_ids = chosen.sequence_ids[chosen.samples]
    if pending.host_ids is None or pending.logprobs is None:
        return sequence_ids[:0], NO_TOKENS, advances
    tokens = Tokens(pending.host_ids, pending.logprobs.wait(), tops_of(pending.alternatives))
    if not pending.failures and pending.is_kept is None:
        return sequence_ids, tokens, advances
    keep = np.isin(sequence_ids, np.array(list(pending.failures), np.uint64), invert=True)
    if pending.is_kept is not None:
        keep &= pending.is_kept
        advances = np.unique(chosen.samples[keep])
    index_of = np.cumsum(keep) - 1
    tops = {int(index_of[index]): top for index, top in tokens.tops.items() if keep[index]}
    return sequence_ids[keep], Tokens(tokens.ids[keep], tokens.logprobs[keep], tops), advances


@dataclass(frozen=True, slots=True)
class _History:
    """The tokens of some of the table's rows, for the sampler."""

    table: SequenceTable
    rows: Ids
    ends: Ids  # positions of the tokens to be sampled

    def positions(self, places: Ids) -> Ids:
        return self.ends[places]

    def num_generated(self, places: Ids) -> Ids:
        return self.positions(places) - self.table.prompt[self.rows[places]]

    def previous_ids(self, places: Ids) -> Ids:
        return self.table.token_ids[self.rows[places], self.positions(places) - 1].astype(np.int64)

    def known(self, places: Ids) -> Ids:
        return self.table.first_ids(self.rows[places], self.ends[places])

    def generated(self, places: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        return self.table.generated_ids(self.rows[places], self.ends[places])
