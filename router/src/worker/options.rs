//! How a worker group loads its model and warms up.

use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_proto::{self as proto, Message as _};

use super::PROTOCOL_VERSION;
use super::description::Phase;

/// The model to load, and how to load it.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Prepared model folder.
    pub model_folder: PathBuf,
    /// `float32`, `float16` or `bfloat16`; `None`: the worker chooses.
    pub dtype: Option<String>,
    /// Data type of the KV cache: `fp8_e4m3fn` or `fp8_e5m2`; `None`: that of the computation.
    pub kv_cache_dtype: Option<String>,
    /// Tokens per KV block; `None`: the worker chooses.
    pub block_tokens: Option<u32>,
    /// Meeting point of the ranks, as in the message; unused with one rank.
    pub rendezvous: String,
    /// What the workers were started with.
    pub token: String,
    /// Whether Python code of the model folder may run.
    pub trust_remote_code: bool,
    /// CPU threads of each rank; `None`: the worker chooses.
    pub num_threads: Option<u32>,
    /// Fraction of the vocabulary that a watermark prefers, in (0, 1); `None`: the worker's default.
    pub watermark_gamma: Option<f32>,
    /// What a watermark adds to the logits of that fraction; `None`: the worker's default.
    pub watermark_delta: Option<f32>,
    /// Attention implementation, as `triton`; `None`: the worker chooses the fastest for each layer.
    pub attention: Option<String>,
    /// Instruction set of the CPU kernels, as `avx2`; `None`: the fastest that each rank's CPU has.
    pub cpu_isa: Option<String>,
    /// Whether quantized weights are dequantized at load.
    pub dequantize: bool,
    /// Method of quantization, as `gptq`; `None`: as the checkpoint says.
    pub quantize: Option<String>,
    /// Bits of the inputs that quantized weights are multiplied with, 8 or 16; `None`: the worker's default.
    pub activation_bits: Option<u32>,
    /// Whether a token's bits must not depend on the other sequences of its steps.
    pub deterministic: bool,
    /// Whether the load yields the processors to other work.
    pub background: bool,
    /// LoRA adapters that are loaded at a time; 0: none.
    pub max_adapters: u32,
    /// The highest rank of an adapter.
    pub max_adapter_rank: u32,
    /// Folder of a draft model, an EAGLE-3 head or Medusa heads, which propose draft tokens.
    pub speculative_model: Option<PathBuf>,
    /// Whether the checkpoint's multi-token prediction layer proposes them, if it has one and there is no
    /// `speculative_model`; otherwise they come from n-grams.
    pub drafts_with_mtp: bool,
    /// Tokens of ended answers in which drafts are looked up as well; 0: none.
    pub recent_answer_tokens: u32,
    /// Stages of the pipeline, each with as many ranks.
    pub num_stages: u32,
}

impl LoadOptions {
    /// The message that asks a worker for this load, serialized.
    pub fn message(&self) -> Vec<u8> {
        self.request().encode_to_vec()
    }

    pub(super) fn request(&self) -> proto::LoadRequest {
        proto::LoadRequest {
            protocol_version: PROTOCOL_VERSION,
            model_path: self.model_folder.to_string_lossy().into_owned(),
            dtype: self.dtype.clone().unwrap_or_default(),
            kv_cache_dtype: self.kv_cache_dtype.clone().unwrap_or_default(),
            block_tokens: self.block_tokens.unwrap_or(0),
            rendezvous: self.rendezvous.clone(),
            token: self.token.clone(),
            trust_remote_code: self.trust_remote_code,
            num_threads: self.num_threads.unwrap_or(0),
            watermark_gamma: self.watermark_gamma.unwrap_or(0.0),
            watermark_delta: self.watermark_delta.unwrap_or(0.0),
            attention: self.attention.clone().unwrap_or_default(),
            cpu_isa: self.cpu_isa.clone().unwrap_or_default(),
            dequantize: self.dequantize,
            quantize: self.quantize.clone().unwrap_or_default(),
            activation_bits: self.activation_bits.unwrap_or(0),
            deterministic: self.deterministic,
            background: self.background,
            max_adapters: self.max_adapters,
            max_adapter_rank: self.max_adapter_rank,
            speculative_model: text_of(self.speculative_model.as_deref()),
            drafts_with_mtp: self.drafts_with_mtp,
            recent_answer_tokens: self.recent_answer_tokens,
            num_stages: self.num_stages,
        }
    }
}

/// The limits of the steps that the group must be able to execute.
#[derive(Clone, Debug)]
pub struct WarmUpOptions {
    /// Most tokens in one step.
    pub max_step_tokens: u32,
    /// Most sequences in one step.
    pub max_step_sequences: u32,
    /// Most tokens in one sequence; `None`: as many as the model and the pool allow.
    pub max_sequence_tokens: Option<u32>,
    /// KV blocks to allocate; `None`: as many as fit.
    pub num_blocks: Option<u64>,
    /// Fraction of the device's memory that may be used in all, in (0, 1].
    pub memory_fraction: f64,
    /// A group on the same machine with the same model and limits was warmed up before, for all `num_groups`: only allocate
    /// `num_blocks` blocks.
    pub proven: bool,
    /// On a GPU: numbers of sequences for which decode steps are recorded. Empty: the workers choose; only zeros: none.
    pub graph_sizes: Vec<u32>,
    /// On a GPU: leave room for a second copy of the weights.
    pub reserves_standby: bool,
    /// Slots in host memory for the content of evicted blocks, on each rank.
    pub num_memory_slots: u32,
    /// Slots on disk, behind those in memory, on each rank.
    pub num_disk_slots: u32,
    /// Folder of a file with the slots on disk.
    pub offload_folder: Option<PathBuf>,
    /// Groups on the same machine, with this one, that divide its host memory. All have loaded the model.
    pub num_groups: u32,
    /// Slots for the states of sequences; `None`: the workers choose.
    pub num_state_slots: Option<u32>,
    /// Snapshots of such states; `None`: the workers choose.
    pub num_snapshots: Option<u32>,
}

impl WarmUpOptions {
    pub(super) fn request(&self) -> proto::WarmUpRequest {
        proto::WarmUpRequest {
            max_step_tokens: self.max_step_tokens,
            max_step_sequences: self.max_step_sequences,
            max_sequence_tokens: self.max_sequence_tokens.unwrap_or(0),
            num_blocks: self.num_blocks.unwrap_or(0),
            memory_fraction: self.memory_fraction,
            proven: self.proven,
            graph_sizes: self.graph_sizes.clone(),
            reserves_standby: self.reserves_standby,
            num_memory_slots: self.num_memory_slots,
            num_disk_slots: self.num_disk_slots,
            offload_folder: text_of(self.offload_folder.as_deref()),
            num_groups: self.num_groups,
            num_state_slots: self.num_state_slots.unwrap_or(0),
            num_snapshots: self.num_snapshots,
        }
    }
}

/// The KV pool after warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// KV blocks on each rank.
    pub num_blocks: u32,
    /// Sequences that the worker can know at a time, because their states have slots; 0: the model keeps no states.
    pub num_state_slots: u32,
    /// Snapshots of such states.
    pub num_snapshots: u32,
    /// Duration of the slowest warm-up step on the slowest rank; zero with `WarmUpOptions::proven`.
    pub worst_step: Duration,
    /// Phases of the warm-up on rank 0, in order.
    pub phases: Vec<Phase>,
    /// Bytes that the fullest GPU has left after a second copy of the weights. A negative number: the bytes that it lacks.
    /// `None`: the model runs on CPUs, or with `WarmUpOptions::proven`.
    pub standby_room_bytes: Option<i64>,
}

/// Empty for `None`.
fn text_of(path: Option<&Path>) -> String {
    path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}
