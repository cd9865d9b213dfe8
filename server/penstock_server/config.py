"""What the worker is told at start, at load and at warm-up, and what it answers. Leaf: no torch, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock_server.phase import Phase


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The process's own flags."""

    socket: Path
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Which model to load, and how. Empty and 0: the worker chooses."""

    model_path: Path
    block_tokens: int
    dtype: str = ""
    device: str = ""
    rendezvous: str = ""
    quantize: str = ""
    trust_remote_code: bool = False
    deterministic: bool = False
    num_threads: int = 0
    watermark_gamma: float = 0.0
    watermark_delta: float = 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """A loaded model, as the router needs to know it."""

    architecture: str
    dtype: str
    device: str
    attention: str
    vocab_size: int
    max_position_tokens: int
    weight_bytes: int
    kv_bytes_per_block: int
    phases: tuple[Phase, ...]
    window_tokens: int = 0  # no layer sees more of the last tokens; 0: some layer sees all
    decoder_prefix: tuple[int, ...] = ()  # token ids behind every source; empty: there is no encoder
    max_source_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """The limits that every later plan keeps, and the memory to use. 0: as many as fit."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int = 0
    num_blocks: int = 0
    memory_fraction: float = 0.9
    proven: bool = False  # others with the same limits did the rest; num_blocks are to be allocated


@dataclass(frozen=True, slots=True)
class Capacity:
    """What warm-up found."""

    num_blocks: int
    phases: tuple[Phase, ...]
    worst_step_s: float = 0.0  # the slowest step of the warm-up; 0: none was run
