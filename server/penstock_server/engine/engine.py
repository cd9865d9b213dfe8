"""Load, warm up, step: what the service asks of a rank. Everything here runs on the service's one compute thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.config import Capacity, Description, LoadConfig, WarmUpConfig
from penstock_server.engine import batch, memory, warmup
from penstock_server.engine.capacity import CapacityProbe, Measured
from penstock_server.engine.constraint import Constraints
from penstock_server.engine.device import DTYPES, choose_device, choose_dtype, choose_num_threads, usable_cores
from penstock_server.engine.logprob import NO_TOP, Top
from penstock_server.engine.prompt import score_prompt
from penstock_server.engine.sampler import BROKEN, Sampler, SampleRequest
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.engine.watermark import Watermark
from penstock_server.errors import ConfigError, GrammarError, PlanError
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.grammar.state import NO_MASKS, GrammarStates, Masks
from penstock_server.grammar.trial import Trial
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.phase import PhaseClock
from penstock_server.plan import Advance, Grammar, NewSequence, Plan, SequenceOutput, StepResult, StepTiming, Token

logger = logging.getLogger(__name__)

_MAX_MASK_THREADS = 8
BROKEN_LOGITS = "the model's logits are not finite"


class LoadModel(Protocol):
    """How a model comes from a prepared folder; `penstock_server.models.load_model` outside of tests."""

    def __call__(self, options: LoadOptions, group: RankGroup) -> CausalModel: ...


def _load_model(options: LoadOptions, group: RankGroup) -> CausalModel:
    from penstock_server.models import load_model

    return load_model(options, group)


@dataclass(slots=True)
class _Ready:
    """What there is after warm-up."""

    limits: WarmUpConfig
    sampler: Sampler
    table: SequenceTable
    grammars: GrammarStates | None  # on the first rank, which samples


class Engine:
    """One rank of a model. `load` makes it, `warm_up` makes it ready, then `step` executes plans in order."""

    def __init__(
        self,
        model: CausalModel,
        group: RankGroup,
        device: torch.device,
        block_tokens: int,
        watermark: Watermark | None = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self.model = model
        self._group = group
        self._device = device
        self._block_tokens = block_tokens
        self._watermark = watermark or Watermark.of(model.vocab_size, device)
        self._compiler = compiler
        self._ready: _Ready | None = None
        self._last_step = 0
        self._ended = time.perf_counter()

    @classmethod
    def load(
        cls, config: LoadConfig, rank: int = 0, world_size: int = 1, load_model: LoadModel = _load_model
    ) -> tuple[Engine, Description]:
        """Choose device and dtype, meet the other ranks, load. Raises ConfigError for what cannot be served."""
        clock = PhaseClock()
        if config.quantize:
            raise ConfigError(f'quantize is "{config.quantize}"; this version serves unquantized models only')
        if config.block_tokens < 1:
            raise ConfigError(f"block_tokens is {config.block_tokens}, must be at least 1")
        if world_size > 1 and not config.rendezvous:
            raise ConfigError(f"{world_size} ranks need a rendezvous, none was given")
        device = choose_device(config.device, rank)
        if config.deterministic and device.type != "cpu":
            raise ConfigError(f"deterministic arithmetic is not available on {device} in this version")
        dtype = choose_dtype(config.dtype, device)
        torch.set_num_threads(choose_num_threads(config, world_size))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        trial = None
        if rank == 0 and (config.model_path / "tokenizer.json").is_file():
            # Its process starts beside the loading, so that no grammar waits for it.
            trial = Trial(config.model_path)
            trial.start()
        with clock.phase("meet ranks"):
            backend = "nccl" if device.type == "cuda" else "gloo"
            group = RankGroup.join(rank, world_size, config.rendezvous, backend)
        options = LoadOptions(
            config.model_path,
            dtype,
            device,
            config.block_tokens,
            trust_remote_code=config.trust_remote_code,
            deterministic=config.deterministic,
        )
        with clock.phase("load model"), torch.inference_mode():
            model = load_model(options, group)
        watermark = Watermark.of(model.vocab_size, device, config.watermark_gamma, config.watermark_delta)
        compiler = None
        if rank == 0:
            with clock.phase("read vocabulary"):
                compiler = GrammarCompiler(config.model_path, model.vocab_size, first=trial)
        description = Description(
            architecture=model.architecture,
            dtype=next(name for name, value in DTYPES.items() if value == dtype),
            device=str(device),
            attention=model.attention_name,
            vocab_size=model.vocab_size,
            max_position_tokens=model.max_position_tokens,
            weight_bytes=model.weight_bytes,
            kv_bytes_per_block=model.kv_bytes_per_block,
            phases=tuple(clock.phases),
            window_tokens=model.window_tokens,
            decoder_prefix=model.decoder_prefix,
            max_source_tokens=model.max_source_tokens,
        )
        return cls(model, group, device, config.block_tokens, watermark, compiler), description

    def compile_grammar(self, grammar: Grammar) -> bool:
        """Any thread, beside the steps: whether it was there already. Raises GrammarError when it cannot be used."""
        if self._compiler is None:
            raise GrammarError("grammars are compiled by the first rank only")
        return self._compiler.compile(grammar)

    def close(self) -> None:
        """End the processes that belong to this engine; it may not be used afterwards."""
        if self._compiler is not None:
            self._compiler.close()

    @torch.inference_mode()
    def warm_up(self, config: WarmUpConfig) -> Capacity:
        """Run the worst step, measure what is left, allocate the pool. Raises ConfigError when it cannot serve."""
        clock = PhaseClock()
        has_grammars = self._compiler is not None and self._compiler.rehearse(warmup.ANY_TEXT)
        probe = CapacityProbe(self.model, self._group, self._device, self._block_tokens, has_grammars)
        probe.check_limits(config)
        longest = probe.longest_sequence(config)
        sampler = Sampler(self.model.vocab_size, self._device, config.max_step_sequences, self._watermark)
        grammars = None
        if self._compiler is not None:
            grammars = GrammarStates(self._compiler, max(1, min(_MAX_MASK_THREADS, usable_cores() // 2)))

        def open_table(num_blocks: int) -> None:
            limits = TableLimits(
                vocab_size=self.model.vocab_size,
                block_tokens=self._block_tokens,
                num_blocks=num_blocks,
                max_sequence_tokens=longest,
                num_rows=config.max_step_sequences,
                max_source_tokens=self.model.max_source_tokens,
            )
            self._ready = _Ready(config, sampler, SequenceTable(limits), grammars)

        def run(plan: Plan, num_blocks: int) -> None:
            open_table(num_blocks)
            self.step(plan)
            self.reset()

        measured = Measured(config.num_blocks, 0.0, 0)
        if config.proven:
            probe.check_room(config, config.num_blocks)
        else:
            measured = probe.measure(config, run, self._wait_beside, clock)
        num_blocks = measured.num_blocks
        with clock.phase("allocate KV pool"):
            self.model.allocate_cache(num_blocks)
            if config.proven:
                # What the group before gave back is free. Streams wait for the first token, not for the last page.
                memory.touch_pages_beside(self.model.caches)
            else:
                memory.touch_pages(self.model.caches)
            memory.return_free_pages()
        longest = probe.longest_in(num_blocks, config)
        self.model.serve_up_to(longest)
        open_table(num_blocks)
        with clock.phase("rehearse"):
            self._rehearse()
        return Capacity(num_blocks, tuple(clock.phases), measured.worst_step_s)

    def _wait_beside(self) -> int:
        """Until everything that starts beside the warm-up has its memory; the bytes that will be asked for later."""
        return 0 if self._compiler is None else self._compiler.wait()

    def _rehearse(self) -> None:
        """A prompt and a decode through everything that a request passes: nothing is used for the first time by one."""
        num_source = 1 if self.model.max_source_tokens else 0
        prompt = [0] * (num_source + 1)
        blocks = range(-(-(len(prompt) + 1) // self._block_tokens))
        started = -(-len(prompt) // self._block_tokens)
        new = NewSequence(0, prompt, len(prompt), block_ids=blocks[:started], num_source_tokens=num_source)
        self.step(Plan(1, new_sequences=[new], advances=[Advance(0, len(prompt), sample=True)]))
        self.step(Plan(2, advances=[Advance(0, 1, blocks[started:], sample=True)]))
        self.reset()

    def reset(self) -> None:
        """Forget every sequence: a new stream begins."""
        assert self._ready is not None, "warm_up comes first"
        self._ready.table = SequenceTable(self._ready.table.limits)
        if self._ready.grammars is not None:
            self._ready.grammars.clear()
        self._last_step = 0
        self._ended = time.perf_counter()

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepResult:
        """Execute one plan. Raises PlanError when the plan as a whole breaks the protocol, before anything is done."""
        started = time.perf_counter()
        idle_s = started - self._ended
        ready = self._ready
        assert ready is not None, "warm_up comes first"
        table = ready.table
        self._check(plan, ready)
        self._last_step = plan.step
        for sequence_id in plan.freed_sequence_ids:
            if not table.free(sequence_id):
                logger.warning("step %d frees sequence %d, which is unknown", plan.step, sequence_id)
        for new in plan.new_sequences:
            table.add(new)
        if ready.grammars is not None:
            ready.grammars.apply(plan)
        chosen = batch.select(table, plan.advances)
        outputs: list[SequenceOutput | None] = [None] * len(plan.advances)
        for index, error in chosen.errors.items():
            outputs[index] = SequenceOutput(error.sequence_id, error=error.reason)
        prepared = forwarded = time.perf_counter()
        if len(chosen.rows):
            built = batch.build(table, chosen, self._device)
            prepared = time.perf_counter()
            masks = self._start_masks(plan, ready, chosen)
            hidden = self.model.forward(built.batch)
            # Without prompt logprobs the outputs are the samples.
            sampled = hidden if built.prompt is None else hidden[torch.from_numpy(built.samples).to(hidden.device)]
            logits = self.model.logits(sampled) if len(built.samples) else None
            forwarded = time.perf_counter()
            table.computed[chosen.rows] += chosen.num_tokens
            if built.prompt is not None:
                self._score_prompt(plan, ready, chosen, built.prompt, hidden, outputs)
            if chosen.sample.any():
                self._sample(plan, ready, chosen, logits, masks, outputs)
        self._ended = time.perf_counter()
        timing = StepTiming(prepared - started, forwarded - prepared, self._ended - forwarded, idle_s)
        if self._group.rank != 0:
            return StepResult(plan.step, (), timing)
        return StepResult(plan.step, [output for output in outputs if output is not None], timing)

    def _sample(
        self,
        plan: Plan,
        ready: _Ready,
        chosen: batch.Selection,
        logits: torch.Tensor | None,
        masks: Masks,
        outputs: list[SequenceOutput | None],
    ) -> None:
        """Choose the tokens (first rank) or hear which they are, append them, and write them into `outputs`."""
        rows, indexes = chosen.rows[chosen.sample], chosen.indexes[chosen.sample].tolist()
        sequence_ids = [plan.advances[index].sequence_id for index in indexes]
        logprobs: Sequence[float] = ()
        tops: dict[int, Top] = {}
        reasons: dict[int, str] = {}
        if logits is None:
            ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        else:
            words, reasons = masks.finish()
            sampled = ready.sampler.sample(logits, _request(ready.table, rows, Constraints(masks.places, words)))
            for place in reasons:
                sampled.ids[place] = BROKEN
            ids, logprobs, tops = sampled.ids, sampled.logprobs.tolist(), sampled.tops
        token_ids: npt.NDArray[np.int64] = self._group.broadcast(ids).cpu().numpy()
        healthy = token_ids != BROKEN
        ready.table.append_tokens(rows[healthy], token_ids[healthy])
        if ready.grammars is not None:
            ready.grammars.chosen(sequence_ids, token_ids.tolist())
        for place in np.flatnonzero(~healthy).tolist():
            reason = reasons.get(place, BROKEN_LOGITS)
            ready.table.fail(sequence_ids[place], reason)
            # A grammar ends where it grows over its limits or leaves nothing to say; it came with the request.
            outputs[indexes[place]] = SequenceOutput(
                sequence_ids[place], error=reason, request_is_at_fault=place in reasons
            )
        for place, (index, token_id, logprob) in enumerate(zip(indexes, token_ids.tolist(), logprobs, strict=False)):
            if token_id != BROKEN:
                token = Token(token_id, logprob, tops.get(place, NO_TOP))
                before = outputs[index]
                prompt_tokens = () if before is None else before.prompt_tokens
                outputs[index] = SequenceOutput(plan.advances[index].sequence_id, (token,), prompt_tokens)

    def _score_prompt(
        self,
        plan: Plan,
        ready: _Ready,
        chosen: batch.Selection,
        prompt: batch.PromptRows,
        hidden: torch.Tensor,
        outputs: list[SequenceOutput | None],
    ) -> None:
        """Write prompt tokens' logprobs into `outputs`; every rank comes here, the first has the results."""
        top_n = ready.table.sampling["top_n"][chosen.rows][prompt.places]
        tokens = score_prompt(self.model, ready.sampler, hidden, prompt, top_n)
        if not tokens:
            return
        starts = np.searchsorted(prompt.places, np.arange(len(chosen.rows) + 1)).tolist()
        for place, index in enumerate(chosen.indexes.tolist()):
            mine = tokens[starts[place] : starts[place + 1]]
            if mine:
                outputs[index] = SequenceOutput(plan.advances[index].sequence_id, prompt_tokens=mine)

    def _start_masks(self, plan: Plan, ready: _Ready, chosen: batch.Selection) -> Masks:
        """The masks of this step's samples are made while the model computes."""
        if ready.grammars is None:
            return NO_MASKS
        sampled = chosen.indexes[chosen.sample].tolist()
        return ready.grammars.start([plan.advances[index].sequence_id for index in sampled])

    def _check(self, plan: Plan, ready: _Ready) -> None:
        limits = ready.limits
        if plan.step != self._last_step + 1:
            raise PlanError(f"step is {plan.step}, must be {self._last_step + 1}")
        if len(plan.advances) > limits.max_step_sequences:
            raise PlanError(f"plan has {len(plan.advances)} advances, at most {limits.max_step_sequences} are allowed")
        num_tokens = sum(advance.num_tokens for advance in plan.advances)
        if num_tokens > limits.max_step_tokens:
            raise PlanError(f"plan advances {num_tokens} tokens, at most {limits.max_step_tokens} are allowed")


@dataclass(frozen=True, slots=True)
class _History:
    """The tokens of some of the table's rows, for the sampler."""

    table: SequenceTable
    rows: npt.NDArray[np.int64]

    def known(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self.table.known_ids(self.rows[places])

    def generated(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        return self.table.generated_ids(self.rows[places])


def _request(table: SequenceTable, rows: npt.NDArray[np.int64], constraints: Constraints) -> SampleRequest:
    known = table.known[rows]
    return SampleRequest(
        table.composition(rows),
        known,
        known - table.prompt[rows],
        table.token_ids[rows, known - 1].astype(np.int64),
        _History(table, rows),
        constraints,
    )
