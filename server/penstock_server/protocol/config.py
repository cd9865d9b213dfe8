"""What the worker is told at start, load and warm-up, and what it returns. Leaf: no torch, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock_server.protocol.endpoint import Endpoint, Tls
from penstock_server.protocol.phase import Phase


@dataclass(frozen=True, slots=True)
class Node:
    """One of several machines with the ranks of a model: this rank's place on it, and how the other ranks reach it."""

    local_rank: int  # among the machine's ranks
    local_size: int
    listen: tuple[str, int]  # address that the other ranks connect to
    tls: Tls
    token: str = field(repr=False)  # that the ranks of this group know
    uses_gpu: bool = False  # the rank runs on a GPU, and exchanges tensors by NCCL, without encryption


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The process's own flags."""

    endpoint: Endpoint
    rank: int = 0
    world_size: int = 1
    token: str = field(default="", repr=False)  # that Load must have; empty: none
    node: Node | None = None  # None: all ranks are on this machine


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The model to load, and settings of the load. Empty and 0: the worker chooses."""

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
    max_adapters: int = 0  # LoRA adapters loaded at a time; 0: none
    max_adapter_rank: int = 0
    speculative_model: Path | None = None  # the folder of a draft model or of heads; None: there is none
    drafts_with_mtp: bool = False  # without a speculative_model, with a layer of the checkpoint if it has one
    recent_answer_tokens: int = 0  # tokens of ended answers, in which drafts are looked up; 0: none
    num_stages: int = 1  # stages of the pipeline


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooled outputs, as sentence-transformers saves it."""

    weights: Path  # model.safetensors or pytorch_model.bin
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model makes of a whole sequence instead of generating tokens: one vector."""

    task: Literal["embed", "rerank"]
    outputs: Literal["cls", "mean", "last"]  # the outputs that it is made of: of the first token, of all, of the last
    is_normalized: bool = False  # the model's files ask for vectors of length 1
    is_matryoshka: bool = False  # the first numbers of a vector are a vector, too, ...
    matryoshka_dimensions: tuple[int, ...] = ()  # ... if there are this many of them; empty: any number
    max_tokens: int | None = None  # longest sequence, where the files limit it; None: the model's own limit
    dense: tuple[Dense, ...] = ()  # in the order of their use
    has_token_types: bool = False  # the tokens of a second text have an embedding of their own added


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How a prompt has images; see the message `ImageInput`."""

    placeholder_id: int
    placeholder: str
    template_text: str
    is_whole: bool
    is_prompt_whole: bool
    text_prefix: str
    text_suffix: str
    max_bytes: int
    has_adapter: bool


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
    default_position_tokens: int = 0  # the longest sequence unless longer ones are asked for; 0: max_position_tokens
    window_tokens: int = 0  # the widest sliding window, when every layer has one; 0: some layer attends to all tokens
    decoder_prefix: tuple[int, ...] = ()  # token ids that follow every source; empty: the model has no encoder
    max_source_tokens: int = 0
    pooling: Pooling | None = None  # None: the model generates tokens
    num_dimensions: int = 0  # dimensions of a pooled vector
    can_draft: bool = False  # plans may allow draft tokens
    drafts_with_model: bool = False  # drafts come from a model or heads, and not only by lookup
    drafts_extend_lookup: bool = False  # see `Drafter.extends_lookup`
    image_input: ImageInput | None = None  # None: the model reads no images
    device_name: str = ""  # the GPU's model; empty: the model runs on CPUs
    libraries: str = ""  # versions of what computes
    # What states between tokens take for each sequence, and for a snapshot of them; 0: the model keeps none.
    state_bytes_per_sequence: int = 0
    snapshot_bytes: int = 0
    snapshot_reach_tokens: int = 0  # see `States.reach_tokens`


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """The limits of every later plan, and the memory to use. 0: as many as fit."""

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int = 0
    num_blocks: int = 0
    memory_fraction: float = 0.9
    graph_sizes: tuple[int, ...] = ()  # sequences of the decode steps that a GPU records; (): chosen by us, (0,): none
    proven: bool = False  # another group with these limits measured that num_blocks fit: measure nothing, allocate them
    reserves_standby: bool = False  # on a GPU: leave room for a second copy of the weights
    num_memory_slots: int = 0  # beside the pool, for the content of evicted blocks
    num_disk_slots: int = 0  # in a file, for what has no room in memory
    offload_folder: Path | None = None  # folder of that file
    num_groups: int = 1  # on this machine, with this one, that divide its host memory; all have loaded the model
    num_state_slots: int = 0  # slots for the states of sequences
    num_snapshots: int | None = None  # snapshots of such states; None: as many as take the memory of the KV pool

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
    # GPU only: usable memory that is left beside the pool, the largest step and a second copy of the weights;
    # negative: what is missing. None: not a GPU, or nothing was measured.
    standby_room_bytes: int | None = None
    num_state_slots: int = 0  # 0: the model keeps no states
    num_snapshots: int = 0
