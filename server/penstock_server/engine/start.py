"""Makes an engine ready: runs the most expensive steps, measures the memory that they leave, allocates the pool, and
records the graphs of decode steps."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock_server.engine import memory, warmup
from penstock_server.engine.capacity import CapacityProbe, Measured
from penstock_server.engine.device import usable_cores
from penstock_server.engine.device_progress import DeviceProgress
from penstock_server.engine.drafting.interface import Drafter
from penstock_server.engine.drafting.load import drafting_refusal
from penstock_server.engine.drafting.pooled import PooledDrafter
from penstock_server.engine.graphs import Bucket, CudaRecorder, StepGraphs, buckets, needed_bytes
from penstock_server.engine.offload import Offload
from penstock_server.engine.pool_blocks import pool_blocks
from penstock_server.engine.pooling import PoolingRunner
from penstock_server.engine.relay import RelayRunner
from penstock_server.engine.sampler import SampledTime, Sampler
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.engine.step import StepRunner
from penstock_server.engine.stream import Runner
from penstock_server.engine.watermark import Watermark
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.grammar.state import GrammarStates
from penstock_server.host.heap import return_free_pages
from penstock_server.models.interface import CausalModel
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import Capacity, WarmUpConfig
from penstock_server.protocol.phase import PhaseClock
from penstock_server.protocol.plan import Advances, NewSequence, Plan, StepTiming

logger = logging.getLogger(__name__)

_MAX_MASK_THREADS = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine consists of before it is ready."""

    model: CausalModel
    group: RankGroup
    device: torch.device
    block_tokens: int
    watermark: Watermark
    compiler: GrammarCompiler | None
    cpu_isa: str
    drafter: Drafter
    recent_answer_tokens: int
    progress: DeviceProgress | None  # on a GPU

    @property
    def pooled_drafter(self) -> PooledDrafter | None:
        return self.drafter if isinstance(self.drafter, PooledDrafter) else None


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine has once it is ready."""

    runner: Runner
    backing: threading.Thread | None  # touches the pages of the pool
    capacity: Capacity


class Start:
    """One warm-up of an engine."""

    def __init__(self, parts: Parts, config: WarmUpConfig) -> None:
        """Raises ConfigError if the limits cannot be served."""
        self._parts, self._config, self._clock = parts, config, PhaseClock()
        compiler, group, model = parts.compiler, parts.group, parts.model
        has_grammars = compiler is not None and compiler.rehearse(warmup.ANY_TEXT)
        has_grammars = group.minimum_of_all(-has_grammars) < 0  # the first rank alone has a compiler
        own = parts.pooled_drafter, parts.drafter.num_bytes
        probe = CapacityProbe(model, group, parts.device, parts.block_tokens, has_grammars, *own)
        probe.check_limits(config)
        self._probe = probe = replace(probe, num_state_slots=probe.agree_on_state_slots(config))
        self._num_snapshots = (config.num_snapshots or 0) if config.proven else 0
        probe.allocate_states(probe.num_state_slots, self._num_snapshots)
        self._longest = probe.longest_sequence(config)
        sampled = config.max_step_sequences, parts.watermark, parts.cpu_isa
        self._sampler = Sampler(model.traits.vocab_size, parts.device, *sampled)
        self._grammars = None
        if compiler is not None:
            self._grammars = GrammarStates(compiler, max(1, min(_MAX_MASK_THREADS, usable_cores() // 2)))
        self._offload: Offload | None = None

    def run(self) -> Started:
        parts, config, clock, probe = self._parts, self._config, self._clock, self._probe
        has_graphs = parts.model.traits.is_recordable and parts.model.pooler is None and config.records_graphs
        measured = self._measured(has_graphs=has_graphs)
        self._num_snapshots = measured.num_snapshots
        with clock.phase("allocate KV pool"):
            backing = self._allocate(measured.num_blocks)
        self._longest = probe.longest_in(measured.num_blocks, config)
        probe.serve_up_to(self._longest)
        graphs = None
        if has_graphs:
            with clock.phase("record graphs"):
                graphs, of_steps = self._graphs(measured.num_blocks)
                graphs.add(of_steps)
            logger.info("recorded %d graphs of decode steps", len(graphs))
        elif config.records_graphs and parts.device.type == "cuda" and parts.model.pooler is None:
            logger.warning("decode steps are not recorded as graphs: this model may wait for the device")
        runner = self._runner(parts.model, measured.num_blocks, graphs)
        with clock.phase("rehearse"):
            self._rehearse(runner)
        room = probe.standby_room(config, measured.step_bytes)
        # Few requests need them. They were in use when the pool was measured, so there is room for them later.
        self._sampler.release()
        return_free_pages()
        phases, slots = tuple(clock.phases), (probe.num_state_slots, measured.num_snapshots)
        capacity = Capacity(measured.num_blocks, phases, measured.worst_step_s, room, *slots)
        return Started(runner, backing, capacity)

    def _measured(self, *, has_graphs: bool) -> Measured:
        config, compiler = self._config, self._parts.compiler
        if config.proven:
            self._probe.check_room(config, config.num_blocks)
            return Measured(config.num_blocks, self._num_snapshots, 0.0, 0)
        later_bytes = 0 if compiler is None else compiler.later_bytes
        graph_bytes = self._graph_bytes if has_graphs else lambda: 0
        return self._probe.measure(config, self._time, later_bytes, graph_bytes, self._clock)

    def _allocate(self, num_blocks: int) -> threading.Thread | None:
        """Allocates states and pool, and touches their pages in the background: the memory is there, because it was
        measured. Requests wait for their first token, not for the last page."""
        config, probe, slots = self._config, self._probe, list[torch.Tensor]()
        probe.allocate_states(probe.num_state_slots, self._num_snapshots)
        probe.allocate_cache(num_blocks)
        if config.num_memory_slots or config.num_disk_slots:
            probe.check_offload(replace(config, num_blocks=num_blocks))
            blocks = pool_blocks(probe.caches, num_blocks, self._parts.device)
            sizes = config.num_memory_slots, config.num_disk_slots
            self._offload = Offload(blocks, *sizes, config.offload_folder)
            slots = self._offload.pages
        backing = memory.touch_pages_in_background([*probe.caches, *probe.state_tensors, *slots])
        return_free_pages()
        return backing

    def _limits(self, num_blocks: int) -> TableLimits:
        model = self._parts.model
        return TableLimits(
            vocab_size=model.traits.vocab_size,
            block_tokens=self._parts.block_tokens,
            num_blocks=num_blocks,
            max_sequence_tokens=self._longest,
            num_rows=self._config.max_step_sequences,
            num_state_slots=self._probe.num_state_slots,
            num_snapshots=self._num_snapshots,
            max_source_tokens=model.traits.max_source_tokens,
            has_answers=not model.traits.is_encoder,
            has_whole_prompts=model.images is not None and model.images.family.is_prompt_whole,
            has_token_types=model.pooler is not None and model.pooler.pooling.has_token_types,
        )

    def _runner(self, model: CausalModel, num_blocks: int, graphs: StepGraphs | None = None) -> Runner:
        """model: the engine's, or a sample of it."""
        parts, config = self._parts, self._config
        table = SequenceTable(self._limits(num_blocks), parts.model.adapters, parts.model.images)
        common = parts.device, config, table, parts.progress, self._offload
        if model.pooler is not None:
            return PoolingRunner(model, model.pooler, parts.group, *common)
        if not parts.group.stage.is_last:
            return RelayRunner(model, *common)
        return StepRunner(
            model,
            parts.group,
            parts.device,
            config,
            self._sampler,
            table,
            self._grammars,
            graphs,
            parts.progress,
            None if drafting_refusal(model, parts.group) else parts.drafter,
            self._offload,
            parts.recent_answer_tokens,
        )

    def _time(self, model: CausalModel, plan: Plan, num_blocks: int) -> StepTiming:
        """Implements `Run`."""
        runner, on_cpu = self._runner(model, num_blocks), self._parts.device.type == "cpu"
        with self._sampler.first_chunks_only() if on_cpu else nullcontext(SampledTime()) as sampled:
            timing = runner.collect(runner.launch(plan)).timing
        if self._parts.pooled_drafter is not None:
            self._parts.pooled_drafter.rehearse(SequenceTable(self._limits(num_blocks)), plan)
        runner.reset()
        return replace(timing, sample_s=timing.sample_s + sampled.skipped_s)

    def _graphs(self, num_blocks: int) -> tuple[StepGraphs, list[Bucket]]:
        model, limits = self._parts.model, self._limits(num_blocks)
        graphs = StepGraphs(model, limits, self._parts.device, CudaRecorder())
        return graphs, buckets(limits, self._config.graph_sizes, has_adapters=model.adapters is not None)

    def _graph_bytes(self) -> int:
        with self._clock.phase("measure graphs"):
            return needed_bytes(*self._graphs(num_blocks=1), partial(memory.free_bytes, self._parts.device))

    def _rehearse(self, runner: Runner) -> None:
        """Runs a prompt and a decode, if there is any, so that no request is the first to use any part."""
        traits = self._parts.model.traits
        num_source = 1 if traits.max_source_tokens else 0
        prompt = [0] * (num_source if traits.is_encoder else num_source + 1)
        blocks = range(-(-(len(prompt) + 1) // self._parts.block_tokens))
        started = -(-len(prompt) // self._parts.block_tokens)
        new = NewSequence(0, prompt, len(prompt), block_ids=blocks[:started], num_source_tokens=num_source)
        plans = [Plan(1, new_sequences=[new], advances=Advances.of([0], [len(prompt)], [True]))]
        if self._parts.model.pooler is None:
            plans.append(Plan(2, advances=Advances.of([0], [1], [True], [blocks[started:]])))
        for plan in plans:
            runner.collect(runner.launch(plan))
        runner.reset()
