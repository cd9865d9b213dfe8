"""What the worker is told at start, load and warm-up, and what it returns. Leaf: no torch, no protobuf."""

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
    block_tokens: int = 0
    dtype: str = ""
    device: str = ""
    rendezvous: str = ""
    trust_remote_code: bool = False
    num_threads: int = 0
    watermark_gamma: float = 0.0
    watermark_delta: float = 0.0
    attention: str = ""
    cpu_isa: str = ""
    dequantize: bool = False  # quantized weights at load
    quantize: str = ""
    activation_bits: int = 0
    kv_cache_dtype: str = ""
    deterministic: bool = False  # a row's bits must not depend on its batch
    background: bool = False  # yield the processors while loading


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
    block_tokens: int
    window_tokens: int = 0  # the widest sliding window, when every layer has one; 0: some layer attends to all tokens
    decoder_prefix: tuple[int, ...] = ()  # token ids that follow every source; empty: the model has no encoder
    max_source_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """The limits of every later plan, and the memory to use. 0: as many as fit."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int = 0
    num_blocks: int = 0
    memory_fraction: float = 0.9
    graph_sizes: tuple[int, ...] = ()  # sequences of the decode steps that a GPU records; (): chosen by us, (0,): none
    proven: bool = False  # an earlier group with these limits allocated num_blocks: measure nothing, allocate them

    @property
    def records_graphs(self) -> bool:
        """Whether decode steps are recorded where the device and the model allow it."""
        return not self.graph_sizes or any(self.graph_sizes)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The KV pool after warm-up."""

    num_blocks: int
    phases: tuple[Phase, ...]
    worst_step_s: float = 0.0  # the slowest step that warm-up ran; 0: it ran no step
