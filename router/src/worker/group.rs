//! All ranks of one model copy. Every call goes to all ranks at the same time, because they wait for each other inside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use penstock_proto::{self as proto, Message as _};

use super::adapter::{self, AdapterLoader};
use super::endpoint::Endpoint;
use super::grammar::GrammarCompiler;
use super::image::ImageEncoder;
use super::progress::RankProgress;
use super::rank::Rank;
use super::step::Steps;
use super::{PROTOCOL_VERSION, WorkerError, convert};
use crate::sequence::{ImageInput, Pooling, Task};

/// The connections to all ranks of one model copy.
#[derive(Debug)]
pub struct Group {
    /// Not empty.
    ranks: Vec<Rank>,
}

/// Which model to load, and how.
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
    /// Where the ranks meet, as in the message; unused with one rank.
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

    fn request(&self) -> proto::LoadRequest {
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

/// The model that was loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The model's architecture, as `llama`.
    pub architecture: String,
    /// Data type of weights and computation.
    pub dtype: String,
    /// Device of rank 0, as `cpu` or `cuda:0`.
    pub device: String,
    /// Model of rank 0's GPU; empty: the model runs on CPUs.
    pub device_name: String,
    /// Versions of the libraries that compute.
    pub libraries: String,
    /// The attention implementation, as `native`.
    pub attention: String,
    /// Tokens that the model has embeddings and logits for. 0: unknown.
    pub vocab_size: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// The longest sequence that the model supports.
    pub max_position_tokens: u32,
    /// The longest sequence unless a longer one is asked for; `None`: `max_position_tokens`.
    pub default_position_tokens: Option<u32>,
    /// The sliding window, when every layer has one: the widest. `None`: some layer attends to all tokens.
    pub window_tokens: Option<u32>,
    /// Encoder–decoder models: the tokens between every source and its answer. Empty for decoder-only models.
    pub decoder_prefix: Arc<[u32]>,
    /// Encoder–decoder models: the longest source.
    pub max_source_tokens: u32,
    /// Whether steps can verify draft tokens.
    pub can_draft: bool,
    /// Whether drafts come from a model or heads, and not only by lookup.
    pub drafts_with_model: bool,
    /// Whether they are heads that draft only where lookup finds nothing, and read no text before.
    pub drafts_extend_lookup: bool,
    /// Size of the weights on all ranks together.
    pub weight_bytes: u64,
    /// Size of one KV block on all ranks together.
    pub kv_bytes_per_block: u64,
    /// Phases of loading on rank 0, in order.
    pub phases: Vec<Phase>,
    /// What the model makes of a sequence; `None`: it generates tokens.
    pub pooling: Option<Pooling>,
    /// How prompts have images; `None`: the model reads none.
    pub image_input: Option<ImageInput>,
}

/// A phase of the start.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// What was done.
    pub name: String,
    /// How long it took.
    pub duration: Duration,
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
}

/// The KV pool after warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// KV blocks on each rank.
    pub num_blocks: u32,
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

impl Description {
    /// Whether the model has an encoder.
    pub fn is_encoder_decoder(&self) -> bool {
        !self.decoder_prefix.is_empty()
    }

    /// The hub's pipeline tag, if the kind of model determines it.
    pub fn pipeline_tag(&self) -> Option<&'static str> {
        match self.pooling.as_ref().map(|pooling| pooling.task) {
            Some(Task::Embed) => Some("feature-extraction"),
            Some(Task::Rerank) => Some("text-ranking"),
            Some(Task::Generate) | None => self.is_encoder_decoder().then_some("text2text-generation"),
        }
    }

    /// Most tokens of input and answer together. A vector counts as one token.
    pub fn max_total_tokens(&self) -> u32 {
        self.total_tokens(self.max_position_tokens)
    }

    /// The same, unless more are asked for.
    pub fn default_total_tokens(&self) -> u32 {
        self.total_tokens(self.default_position_tokens.unwrap_or(self.max_position_tokens))
    }

    /// Most tokens of input and answer in a sequence of `position_tokens`.
    fn total_tokens(&self, position_tokens: u32) -> u32 {
        position_tokens.saturating_sub(self.num_prefix_tokens()).saturating_add(self.num_uncomputed_tokens())
    }

    /// Tokens of a sequence at its full length that have no position in the model.
    pub fn num_uncomputed_tokens(&self) -> u32 {
        u32::from(self.pooling.is_some())
    }

    /// What the images of the sequences that a worker knows may take. 0: it reads none.
    pub fn max_image_bytes(&self) -> u64 {
        self.image_input.as_ref().map_or(0, |input| input.max_bytes)
    }

    /// Whether all tokens of a prompt attend to each other.
    pub fn is_prompt_whole(&self) -> bool {
        self.image_input.as_ref().is_some_and(|input| input.is_prompt_whole)
    }

    /// Most tokens of an input that is read in one step: an encoder's source, or a whole prompt. 0: inputs are cut into chunks.
    pub fn max_whole_tokens(&self) -> u32 {
        if self.is_prompt_whole() { self.max_position_tokens } else { self.max_source_tokens }
    }

    /// Length of `decoder_prefix`.
    pub fn num_prefix_tokens(&self) -> u32 {
        self.decoder_prefix.len() as u32
    }

    /// Most tokens of an answer, when that does not depend on the input's length. `None`: what the input leaves of the total.
    pub fn max_new_tokens(&self) -> Option<u32> {
        self.is_encoder_decoder().then(|| self.max_total_tokens().saturating_sub(self.max_source_tokens))
    }
}

impl Group {
    /// Waits until every rank listens and answers, for at most `timeout`. Dropping the future cancels it.
    pub async fn connect(endpoints: &[Endpoint], timeout: Duration) -> Result<Self, WorkerError> {
        let connect = endpoints.iter().enumerate().map(|(index, endpoint)| Rank::connect(index, endpoint, timeout));
        Ok(Self { ranks: try_join_all(connect).await? })
    }

    /// Opens new connections to the same ranks, which the current runtime drives.
    pub(crate) async fn reconnect(&self) -> Result<Self, WorkerError> {
        Ok(Self { ranks: try_join_all(self.ranks.iter().map(Rank::reconnect)).await? })
    }

    /// Loads the model on all ranks. Without a deadline, because reading a large model can take arbitrarily long.
    pub async fn load(&mut self, options: &LoadOptions) -> Result<Description, WorkerError> {
        let request = options.request();
        let answers = try_join_all(self.ranks.iter_mut().map(|rank| rank.load(request.clone()))).await?;
        agree("the vocabulary size", answers.iter().map(|answer| answer.vocab_size))?;
        agree("the tokens per KV block", answers.iter().map(|answer| answer.block_tokens))?;
        agree("the data type", answers.iter().map(|answer| &answer.dtype))?;
        agree("the decoder's prefix", answers.iter().map(|answer| &answer.decoder_prefix))?;
        let weight_bytes = answers.iter().map(|answer| answer.weight_bytes).sum();
        let kv_bytes_per_block = answers.iter().map(|answer| answer.kv_bytes_per_block).sum();
        let first = first_rank(answers);
        if first.block_tokens == 0 {
            return Err(WorkerError::Garbled { rank: 0, reason: "KV blocks of 0 tokens".to_owned() });
        }
        Ok(Description { weight_bytes, kv_bytes_per_block, ..convert::description(first) })
    }

    /// Runs the largest steps within the limits on all ranks, and allocates the KV pool.
    pub async fn warm_up(&mut self, options: &WarmUpOptions) -> Result<Pool, WorkerError> {
        let request = proto::WarmUpRequest {
            max_step_tokens: options.max_step_tokens,
            max_step_sequences: options.max_step_sequences,
            max_sequence_tokens: options.max_sequence_tokens.unwrap_or(0),
            num_blocks: options.num_blocks.unwrap_or(0),
            memory_fraction: options.memory_fraction,
            proven: options.proven,
            graph_sizes: options.graph_sizes.clone(),
            reserves_standby: options.reserves_standby,
            num_memory_slots: options.num_memory_slots,
            num_disk_slots: options.num_disk_slots,
            offload_folder: text_of(options.offload_folder.as_deref()),
            num_groups: options.num_groups,
        };
        let answers = try_join_all(self.ranks.iter_mut().map(|rank| rank.warm_up(request.clone()))).await?;
        agree("the number of KV blocks", answers.iter().map(|answer| answer.num_blocks))?;
        let worst_step_seconds = answers.iter().map(|answer| answer.worst_step_seconds).fold(0.0, f64::max);
        let worst_step = Duration::try_from_secs_f64(worst_step_seconds).unwrap_or_default();
        let standby_room_bytes = answers.iter().filter_map(|answer| answer.standby_room_bytes).min();
        let first = first_rank(answers);
        let num_blocks = u32::try_from(first.num_blocks).map_err(|_| WorkerError::Garbled {
            rank: 0,
            reason: format!("{} KV blocks, at most {} are supported", first.num_blocks, u32::MAX),
        })?;
        Ok(Pool { num_blocks, worst_step, phases: convert::phases(first.phases), standby_room_bytes })
    }

    /// Health checks, which the ranks answer while steps are running.
    pub fn probe(&self) -> HealthProbe {
        HealthProbe { ranks: self.ranks.clone() }
    }

    /// Compiles grammars on rank 0, which makes the masks of all ranks.
    pub(crate) fn grammars(&self) -> GrammarCompiler {
        GrammarCompiler::new(self.ranks.first().expect("invariant: a group has at least one rank").clone())
    }

    /// Whether the adapter in `folder` can be used with this model, by its configuration and the shapes of its tensors. The
    /// inner error says why not, for people.
    pub async fn check_adapter(&self, folder: &Path) -> Result<Result<(), String>, WorkerError> {
        adapter::check(self.ranks.first().expect("invariant: a group has at least one rank").clone(), folder).await
    }

    /// Loads adapters on all ranks.
    pub(crate) fn adapters(&self) -> AdapterLoader {
        AdapterLoader::new(self.ranks.clone())
    }

    /// Encodes images on all ranks.
    pub(crate) fn images(&self) -> ImageEncoder {
        ImageEncoder::new(self.ranks.clone())
    }

    /// Opens the stream of steps on all ranks. They forget every sequence of an earlier stream.
    pub(crate) fn steps(&self) -> Steps {
        Steps::new(self.ranks.iter().map(Rank::steps))
    }
}

/// Sends health checks to every rank of a group.
#[derive(Clone, Debug)]
pub struct HealthProbe {
    ranks: Vec<Rank>,
}

impl HealthProbe {
    /// Each rank's progress, by rank; `None`: it did not answer within `timeout`.
    pub async fn progress(&mut self, timeout: Duration) -> Vec<Option<RankProgress>> {
        let ask = |rank| async move { tokio::time::timeout(timeout, Rank::health(rank)).await.ok()?.ok() };
        join_all(self.ranks.iter_mut().map(ask)).await
    }
}

fn first_rank<T>(answers: Vec<T>) -> T {
    answers.into_iter().next().expect("invariant: a group has at least one rank")
}

fn agree<T: PartialEq + std::fmt::Debug>(
    what: &'static str,
    values: impl Iterator<Item = T>,
) -> Result<(), WorkerError> {
    let values: Vec<T> = values.collect();
    if values.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(());
    }
    Err(WorkerError::Disagreement { what, values: format!("{values:?}") })
}
