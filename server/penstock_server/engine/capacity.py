"""The number of KV blocks that a rank can hold: run the most expensive steps, and measure the memory that is left.

All ranks agree on one number, or refuse with the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock_server.engine import memory, warmup
from penstock_server.engine.drafting.pooled import PooledDrafter
from penstock_server.errors import ConfigError
from penstock_server.models.adapter import NEUTRAL
from penstock_server.models.interface import CausalModel
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.phase import PhaseClock
from penstock_server.protocol.plan import Plan, StepTiming

# Memory that one step frees in the C library's heap may be too fragmented for the next step: all of it in the worst
# case; 30 % was observed.
_HEAP_FACTOR = 2
# A prompt token with 20 alternatives on its way to the router, as Python objects and as a message.
_RESULT_BYTES = 4 << 10
_MAX_RESULTS = 2  # one is converted to a message while the next one is computed
# On a GPU, beside the weights of a standby group: CUDA's context, the kernels, and what loading needs temporarily.
_STANDBY_BYTES = 2 << 30
# The default pool of an encoder on a CPU holds this many of the largest steps: some are planned, running or ending.
_ENCODER_STEPS = 4
# A known token: in the sequence table, and in the plan that brings it, as protobuf's number and Python's.
_KNOWN_BYTES = 4 + 4 + 8 + 32


@dataclass(frozen=True, slots=True)
class Measured:
    """What the most expensive steps took."""

    num_blocks: int
    num_snapshots: int
    worst_step_s: float  # estimated from the layers that ran
    step_bytes: int  # the most memory that a step needs temporarily


Run = Callable[[CausalModel, Plan, int], StepTiming]  # runs a first plan over a pool of this many blocks


@dataclass(frozen=True, slots=True)
class CapacityProbe:
    """Measures one rank before it has its pool."""

    model: CausalModel
    group: RankGroup
    device: torch.device
    block_tokens: int
    has_grammars: bool  # whether grammars can be used already
    pooled_drafter: PooledDrafter | None = None  # with as many blocks as the model
    drafter_bytes: int = 0  # bytes of the drafter's weights
    num_state_slots: int = 0  # slots that were allocated; 0: the model keeps no states

    def measure(
        self, config: WarmUpConfig, run: Run, later_bytes: int, graph_bytes: Callable[[], int], clock: PhaseClock
    ) -> Measured:
        """Run the most expensive steps over a small pool, and count the blocks that fit in the memory left.
        later_bytes: host memory that the worker and its processes will take for grammars. graph_bytes: returns the
        memory that recorded steps will take."""
        longest = self.longest_sequence(config)
        per_block = self.counted_bytes_per_block
        on_cpu = self.device.type == "cpu"
        share = memory.Share(
            config.memory_fraction,
            self.num_sharing(config) if on_cpu else 1,
            cap_bytes=self.default_pool_bytes(config) if on_cpu and not config.num_blocks else None,
        )
        hoped_blocks = config.num_blocks
        if not hoped_blocks:
            with clock.phase("measure memory"):
                free = memory.MemoryMeter(self.device).measure()
            hoped_blocks = memory.usable_bytes(free, share) // per_block
        hoped_blocks = self.group.minimum_of_all(max(1, hoped_blocks))
        self.serve_up_to(self.longest_in(hoped_blocks, config))  # first, so that what it writes counts
        worst = warmup.WorstStep(
            config.max_step_tokens,
            min(config.max_step_sequences, self.num_state_slots or config.max_step_sequences),
            longest,
            self.contexts_in(hoped_blocks, longest),
            self.block_tokens,
            max_source_tokens=self.model.traits.max_source_tokens,
            max_answer_tokens=self.model.max_position_tokens - self.model.traits.max_source_tokens,
            is_pooled=self.model.pooler is not None,
            has_grammars=self.has_grammars,
            adapter=None if self.model.adapters is None else NEUTRAL,
        )
        self.allocate_cache(worst.num_blocks())
        memory.touch_pages([*self.caches, *self.state_tensors])
        with clock.phase("first step"):
            # Memory that is allocated once, or touched for the first time, is not part of a step.
            run(self.model, warmup.plan(worst, warmup.first(worst)), worst.num_blocks())
        # PERF: on a CPU, all layers took most of the time from start to ready, in proportion to the model's size. A GPU
        # is fast enough, and loads its kernels here.
        sample = self.model.sample() if on_cpu else self.model
        plans = warmup.worst_steps(worst)
        meter = memory.MemoryMeter(self.device)
        seconds = []
        for name, plan in plans:
            with clock.phase(name):
                timing = run(sample, plan, worst.num_blocks())
            forward_s = timing.forward_s * self.model.traits.num_layers / sample.traits.num_layers
            seconds.append(timing.prepare_s + forward_s + timing.sample_s)
        recorded_bytes = graph_bytes()
        with clock.phase("measure what is left"):
            left = meter.measure(releasing=worst.num_blocks() * self.kv_bytes_per_block)
        step_bytes = left.transient * (_HEAP_FACTOR if on_cpu else 1)
        unseen = later_bytes + unseen_bytes(worst) if on_cpu else 0
        reserved_bytes = self.standby_bytes if config.reserves_standby and not on_cpu else 0
        if self.model.adapters is not None:
            reserved_bytes += self.model.adapters.max_bytes
        if self.model.images is not None:
            reserved_bytes += self.model.images.max_bytes
        left = replace(
            left,
            available=left.available - reserved_bytes * share.num_ranks,
            transient=step_bytes + recorded_bytes + unseen,
        )
        usable = memory.usable_bytes(left, share)
        num_snapshots = self.agree_on_snapshots(config, usable, memory.left_bytes(left, share))
        if num_snapshots:
            usable = min(usable, memory.left_bytes(left, share) - num_snapshots * self.snapshot_bytes)
        num_blocks = self.agree_on_blocks(config, usable // per_block, left)
        return Measured(num_blocks, num_snapshots, max(seconds), step_bytes)

    def agree_on_state_slots(self, config: WarmUpConfig) -> int:
        """The number of slots of every rank: one for each sequence of a step, as far as they take half of the memory
        that is left. 0: the model keeps no states. Raises the same ConfigError on all ranks when too few fit."""
        if config.proven:
            return config.num_state_slots
        if not self.group.minimum_of_all(-self.slot_bytes):
            return 0  # on any rank
        share = memory.Share(config.memory_fraction, self.num_sharing(config) if self.device.type == "cpu" else 1)
        left = max(0, memory.left_bytes(memory.MemoryMeter(self.device).measure(), share))
        fitting = self.group.minimum_of_all(left // 2 // max(1, self.slot_bytes))
        wanted = config.num_state_slots or min(config.max_step_sequences, max(1, fitting))
        if wanted > fitting:
            fewer = "lower --replicas, " if config.num_groups > 1 else ""
            raise ConfigError(
                f"{fitting} state slots fit, but {wanted} {'is' if wanted == 1 else 'are'} needed: the model keeps "
                f"{memory.mib(self.slot_bytes)} for each sequence between tokens, and {memory.mib(left)} are free "
                f"after loading the model, half of them for states; {fewer}raise --cuda-memory-fraction, or free memory"
            )
        return wanted

    def agree_on_snapshots(self, config: WarmUpConfig, pool_bytes: int, left: int) -> int:
        """The number of snapshots of every rank: as many as take the memory of the pool, of at most `pool_bytes`, and
        at most half of what is left. Raises the same ConfigError on all ranks if fewer fit than were asked for."""
        per_snapshot = max(1, self.snapshot_bytes)
        if not self.num_state_slots:
            return 0
        if config.num_snapshots is None:
            pool = config.num_blocks * self.kv_bytes_per_block or min(pool_bytes, left // 2)
            return self.group.minimum_of_all(max(0, min(pool, left - pool)) // per_snapshot)
        fitting = self.group.minimum_of_all(max(0, left) // per_snapshot)
        if config.num_snapshots > fitting:
            raise ConfigError(
                f"{config.num_snapshots} snapshots of states were asked for "
                f"({memory.mib(config.num_snapshots * per_snapshot)}), but only {fitting} "
                f"({memory.mib(fitting * per_snapshot)}) fit next to the model and the largest step; "
                "lower --state-snapshots"
            )
        return config.num_snapshots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states on this rank."""
        return 0 if self.model.states is None else self.model.states.bytes_per_slot

    @property
    def snapshot_bytes(self) -> int:
        return 0 if self.model.states is None else self.model.states.bytes_per_snapshot

    @property
    def state_tensors(self) -> list[Tensor]:
        return [] if self.model.states is None else self.model.states.tensors

    def allocate_states(self, num_slots: int, num_snapshots: int) -> None:
        """Allocates the states, if the model keeps any, before the pools."""
        if self.model.states is not None:
            self.model.states.allocate(num_slots, num_snapshots)

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of a block on this rank, in the pools of the model and of the draft model."""
        drafting = self.pooled_drafter
        return self.model.kv_bytes_per_block + (0 if drafting is None else drafting.kv_bytes_per_block)

    @property
    def counted_bytes_per_block(self) -> int:
        """As which a block counts where blocks are limited by memory: those of layers that only keep states take
        none."""
        return self.kv_bytes_per_block or memory.MIN_TOKEN_BYTES * self.block_tokens

    def default_pool_bytes(self, config: WarmUpConfig) -> int:
        """The default pool of this rank on a CPU."""
        longest = self.num_required_blocks(self.longest_sequence(config))
        if not self.model.traits.is_encoder:
            return memory.default_cap_bytes(longest * self.counted_bytes_per_block)
        # A step computes whole sequences, and nothing of them is kept. The last block of each may be full in part.
        of_step = config.max_step_tokens // self.block_tokens + config.max_step_sequences
        return _ENCODER_STEPS * max(longest, of_step) * self.kv_bytes_per_block

    @property
    def caches(self) -> list[Tensor]:
        """The tensors of both pools, without states."""
        of_states = {id(tensor) for tensor in self.state_tensors}
        own = [cache for cache in self.model.caches if id(cache) not in of_states]
        return own + ([] if self.pooled_drafter is None else self.pooled_drafter.model.caches)

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocates both pools."""
        self.model.allocate_cache(num_blocks)
        if self.pooled_drafter is not None:
            self.pooled_drafter.allocate_cache(num_blocks)

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        """Prepares both models for sequences up to this length."""
        self.model.serve_up_to(max_sequence_tokens)
        if self.pooled_drafter is not None:
            drafting = self.pooled_drafter.model
            drafting.serve_up_to(min(max_sequence_tokens, drafting.max_position_tokens))

    @property
    def standby_bytes(self) -> int:
        """What a standby group takes of this rank's GPU."""
        return self.model.weight_bytes + self.drafter_bytes + _STANDBY_BYTES

    def standby_room(self, config: WarmUpConfig, step_bytes: int) -> int | None:
        """Standby room in bytes, measured now; None on a CPU. step_bytes: memory of the largest step."""
        if self.device.type == "cpu" or config.proven:
            return None
        left = replace(memory.MemoryMeter(self.device).measure(), transient=step_bytes + self.standby_bytes)
        return memory.left_bytes(left, memory.Share(config.memory_fraction, 1))

    def longest_sequence(self, config: WarmUpConfig) -> int:
        """The longest sequence in tokens that the limits allow, or that the model has by default."""
        return config.max_sequence_tokens or self.model.traits.default_position_tokens

    def num_required_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at a time, as the scheduler counts them: with a sliding
        window on every layer, the blocks that one window touches."""
        num_blocks = -(-num_tokens // self.block_tokens)
        window = self.model.traits.window_tokens
        return min(num_blocks, -(-(window - 1) // self.block_tokens) + 1) if window else num_blocks

    def longest_in(self, num_blocks: int, config: WarmUpConfig) -> int:
        """The longest sequence in tokens that a pool of `num_blocks` can hold."""
        longest = self.longest_sequence(config)
        return longest if self.num_required_blocks(longest) <= num_blocks else num_blocks * self.block_tokens

    def contexts_in(self, num_blocks: int, longest: int) -> int:
        """The sum of the contexts in tokens that a pool of `num_blocks` can hold, when none exceeds `longest`."""
        return max(num_blocks * self.block_tokens, num_blocks // self.num_required_blocks(longest) * longest)

    def num_sharing(self, config: WarmUpConfig) -> int:
        """The ranks of all groups that share this host's memory."""
        return self.group.num_local * config.num_groups

    def agree_on_blocks(self, config: WarmUpConfig, fitting: int, left: memory.Memory) -> int:
        """The number of blocks of every rank. Raises the same ConfigError on all ranks when too few fit."""
        fitting = self.group.minimum_of_all(fitting)
        divides = config.num_groups > 1 and self.device.type == "cpu"
        each = f" in each of {config.num_groups} replicas" if divides else ""
        fewer = "lower --replicas, " if divides else "lower "
        if fitting < 1:
            raise ConfigError(
                f"no KV block fits{each}: {memory.mib(left.available)} are free after loading the model, and the "
                f"largest step that the limits allow needs {memory.mib(left.transient)}; {fewer}"
                "--max-batch-prefill-tokens or --max-batch-size, raise --cuda-memory-fraction, or free memory"
            )
        if config.num_blocks > fitting:
            per_block = self.kv_bytes_per_block
            raise ConfigError(
                f"{config.num_blocks} KV blocks were asked for ({memory.mib(config.num_blocks * per_block)}), but only "
                f"{fitting} ({memory.mib(fitting * per_block)}) fit{each} next to the model and the largest step; "
                f"{fewer}--max-batch-total-tokens, or raise --cuda-memory-fraction"
            )
        num_blocks = config.num_blocks or fitting
        self.check_room(config, num_blocks)
        return num_blocks

    def check_room(self, config: WarmUpConfig, num_blocks: int) -> None:
        """Refuse a pool that cannot hold the longest sequence."""
        if num_blocks < 1 or self.longest_in(num_blocks, config) < config.max_sequence_tokens:
            room = num_blocks * self.block_tokens
            raise ConfigError(
                f"the KV pool has room for {room} tokens ({num_blocks} blocks), but one sequence may have "
                f"{config.max_sequence_tokens or 'as many as fit, at least 1'}; free memory or lower --max-total-tokens"
            )

    def check_offload(self, config: WarmUpConfig) -> None:
        """Refuse slots in host memory that it cannot hold beside the pools, whose pages may not be backed yet on a CPU.
        The first group decides for all."""
        if config.proven or not config.num_memory_slots:
            return
        on_cpu = self.device.type == "cpu"
        per_block = -self.group.minimum_of_all(-self.kv_bytes_per_block) * self.num_sharing(config)
        needed, pool = config.num_memory_slots * per_block, config.num_blocks * per_block if on_cpu else 0
        free = memory.free_bytes(torch.device("cpu")) - pool
        of_all, fewer = (f" of {config.num_groups} replicas", "--replicas or ") if config.num_groups > 1 else ("", "")
        if self.group.minimum_of_all(free) < needed:
            raise ConfigError(
                f"the KV offload{of_all} needs {memory.mib(needed)} of host memory, but {memory.mib(max(0, free))} are "
                f"free beside the KV cache; lower {fewer}--kv-offload-gib; --kv-offload-disk-gib uses a disk"
            )

    def check_limits(self, config: WarmUpConfig) -> None:
        """Refuse limits that no amount of memory could satisfy."""
        if config.max_step_tokens < 1 or config.max_step_sequences < 1:
            raise ConfigError(
                f"max_step_tokens is {config.max_step_tokens} and max_step_sequences {config.max_step_sequences}, "
                "both must be at least 1"
            )
        if config.max_sequence_tokens > self.model.max_position_tokens:
            raise ConfigError(
                f"sequences of {config.max_sequence_tokens} tokens were asked for, but the model supports at most "
                f"{self.model.max_position_tokens}; lower --max-total-tokens"
            )
        has_grid = self.model.images is not None and self.model.images.family.has_grid
        if has_grid and config.max_step_tokens > self.model.max_position_tokens:
            # The image tokens of a step have rows of their own in the rope tables, which are as many.
            raise ConfigError(
                f"steps of {config.max_step_tokens} tokens were asked for, but this model's images allow at most "
                f"{self.model.max_position_tokens}; lower --max-batch-prefill-tokens"
            )
        if not 0 < config.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {config.memory_fraction}, must be in (0, 1]")


def unseen_bytes(worst: warmup.WorstStep) -> int:
    """Host memory that warm-up's steps do not need but real ones may: results on their way to the router, and the known
    tokens of the most sequences at their longest."""
    num_results = _MAX_RESULTS * (worst.max_step_tokens + worst.max_step_sequences)
    longest = min(worst.max_sequence_tokens, worst.max_context_tokens)
    return num_results * _RESULT_BYTES + worst.max_step_sequences * longest * _KNOWN_BYTES
