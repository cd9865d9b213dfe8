"""How many KV blocks a rank can have: the worst steps are run, and what is left is measured.

Every rank comes to the same number, or refuses with the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from penstock_server.config import WarmUpConfig
from penstock_server.engine import memory, warmup
from penstock_server.errors import ConfigError
from penstock_server.models.interface import CausalModel
from penstock_server.parallel import RankGroup
from penstock_server.phase import PhaseClock
from penstock_server.plan import Plan

# What a step leaves free in the C library's heap may not fit the next one's pieces: at most all of it. 30 % were seen.
_HEAP_FACTOR = 2
# Of a prompt token with its alternatives, on its way to the router: 2.6 kB as Python's objects, 1.1 kB as protobuf's.
_RESULT_BYTES = 4 << 10
_MAX_RESULTS = 2  # one is translated while the next is made
# Of a token that is known: in the sequence table, and in the plan that brings it, as protobuf's number and Python's.
_KNOWN_BYTES = 4 + 4 + 8 + 32


@dataclass(frozen=True, slots=True)
class Measured:
    """What the worst steps showed."""

    num_blocks: int
    worst_step_s: float
    step_bytes: int  # what a step takes at most above what stays


Run = Callable[[Plan, int], object]  # a first plan, over a pool of so many blocks
Wait = Callable[[], int]  # for what starts beside; the bytes that it will ask for later


@dataclass(frozen=True, slots=True)
class CapacityProbe:
    """One rank, before it has its pool."""

    model: CausalModel
    group: RankGroup
    device: torch.device
    block_tokens: int
    has_grammars: bool  # whether this model's output can be constrained

    def measure(self, config: WarmUpConfig, run: Run, wait: Wait, clock: PhaseClock) -> Measured:
        """Run the worst steps over a small pool, and count the blocks that fit beside them."""
        longest = self.longest_sequence(config)
        per_block = self.model.kv_bytes_per_block
        on_cpu = self.device.type == "cpu"
        longest_bytes = self.needed_blocks(longest) * per_block
        share = memory.Share(
            config.memory_fraction,
            self.group.size if on_cpu else 1,
            cap_bytes=memory.default_cap_bytes(longest_bytes) if on_cpu and not config.num_blocks else None,
        )
        hoped_blocks = config.num_blocks
        if not hoped_blocks:
            with clock.phase("measure memory"):
                free = memory.MemoryMeter(self.device).measure()
            hoped_blocks = memory.usable_bytes(free, share) // per_block
        worst = warmup.WorstStep(
            config.max_step_tokens,
            config.max_step_sequences,
            longest,
            self.contexts_in(self.group.minimum(max(1, hoped_blocks)), longest),
            self.block_tokens,
            max_source_tokens=self.model.max_source_tokens,
            max_answer_tokens=self.model.max_position_tokens - self.model.max_source_tokens,
            has_grammars=self.has_grammars,
        )
        self.model.allocate_cache(worst.num_blocks())
        memory.touch_pages(self.model.caches)
        with clock.phase("first step"):
            # What is made once, or touched for the first time, is no part of a step.
            run(warmup.plan(worst, warmup.first(worst)), worst.num_blocks())
        plans = warmup.worst_steps(worst)
        meter = memory.MemoryMeter(self.device)
        seconds = []
        for name, plan in plans:
            with clock.phase(name):
                run(plan, worst.num_blocks())
            seconds.append(clock.phases[-1].seconds)
        with clock.phase("wait for grammars"):
            beside = wait()
        with clock.phase("measure what is left"):
            left = meter.measure(releasing=worst.num_blocks() * per_block)
        step_bytes = left.transient
        if on_cpu:
            step_bytes = _HEAP_FACTOR * step_bytes
            left = replace(left, transient=step_bytes + beside + unseen_bytes(worst))
        num_blocks = self.agree_on_blocks(config, memory.usable_bytes(left, share) // per_block, left)
        return Measured(num_blocks, max(seconds), step_bytes)

    def longest_sequence(self, config: WarmUpConfig) -> int:
        """In tokens, as far as the model and the limits say."""
        return config.max_sequence_tokens or self.model.max_position_tokens

    def needed_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at a time, as the scheduler counts: with a window on every
        layer those that one window touches."""
        num_blocks = -(-num_tokens // self.block_tokens)
        window = self.model.window_tokens
        return min(num_blocks, -(-(window - 1) // self.block_tokens) + 1) if window else num_blocks

    def longest_in(self, num_blocks: int, config: WarmUpConfig) -> int:
        """In tokens, the longest sequence that such a pool can hold."""
        longest = self.longest_sequence(config)
        return longest if self.needed_blocks(longest) <= num_blocks else num_blocks * self.block_tokens

    def contexts_in(self, num_blocks: int, longest: int) -> int:
        """In tokens, the contexts of all sequences together that such a pool can hold, none longer than that."""
        return max(num_blocks * self.block_tokens, num_blocks // self.needed_blocks(longest) * longest)

    def agree_on_blocks(self, config: WarmUpConfig, fitting: int, left: memory.Memory) -> int:
        """The same number on every rank, or the same refusal."""
        fitting = self.group.minimum(fitting)
        if fitting < 1:
            raise ConfigError(
                f"no KV block fits: beside the model {memory.mib(left.available)} are free, and the largest step that "
                f"the limits allow takes {memory.mib(left.transient)} of them; lower --max-batch-prefill-tokens or "
                "--max-batch-size, raise --cuda-memory-fraction, or free memory"
            )
        if config.num_blocks > fitting:
            per_block = self.model.kv_bytes_per_block
            raise ConfigError(
                f"{config.num_blocks} KV blocks were asked for ({memory.mib(config.num_blocks * per_block)}), but only "
                f"{fitting} fit ({memory.mib(fitting * per_block)}) beside the model and the largest step; "
                "lower --max-batch-total-tokens, or raise --cuda-memory-fraction"
            )
        num_blocks = config.num_blocks or fitting
        self.check_room(config, num_blocks)
        return num_blocks

    def check_room(self, config: WarmUpConfig, num_blocks: int) -> None:
        """Refuse a pool that the longest sequence would outgrow."""
        if num_blocks < 1 or self.longest_in(num_blocks, config) < config.max_sequence_tokens:
            room = num_blocks * self.block_tokens
            raise ConfigError(
                f"the KV pool has room for {room} tokens ({num_blocks} blocks), but one sequence may have "
                f"{config.max_sequence_tokens or 'as many as fit, at least 1'}; free memory or lower --max-total-tokens"
            )

    def check_limits(self, config: WarmUpConfig) -> None:
        """Refuse what no memory could make possible."""
        if config.max_step_tokens < 1 or config.max_step_sequences < 1:
            raise ConfigError(
                f"max_step_tokens is {config.max_step_tokens} and max_step_sequences {config.max_step_sequences}, "
                "both must be at least 1"
            )
        if config.max_sequence_tokens > self.model.max_position_tokens:
            raise ConfigError(
                f"sequences of {config.max_sequence_tokens} tokens were asked for, but the model was made for at most "
                f"{self.model.max_position_tokens}; lower --max-total-tokens"
            )
        if not 0 < config.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {config.memory_fraction}, must be in (0, 1]")


def unseen_bytes(worst: warmup.WorstStep) -> int:
    """The most of the host's memory that the worst steps do not show: results on their way, and the tokens of every
    sequence at its longest, which share their blocks."""
    num_results = _MAX_RESULTS * (worst.max_step_tokens + worst.max_step_sequences)
    longest = min(worst.max_sequence_tokens, worst.max_context_tokens)
    return num_results * _RESULT_BYTES + worst.max_step_sequences * longest * _KNOWN_BYTES
