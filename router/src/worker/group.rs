//! All ranks that hold one model. Whatever one of them must do, all must do at the same time: they meet inside it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use penstock_proto as proto;

use super::grammar::GrammarCompiler;
use super::rank::{Rank, RankHealth};
use super::step::Steps;
use super::{PROTOCOL_VERSION, WorkerError};

#[derive(Debug)]
pub struct Group {
    /// Not empty.
    ranks: Vec<Rank>,
}

/// What to load, and how.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Prepared model folder.
    pub model_folder: PathBuf,
    /// `float32`, `float16` or `bfloat16`; `None`: the worker chooses.
    pub dtype: Option<String>,
    pub block_tokens: u32,
    /// Where the ranks meet, as a torch.distributed init method; unused with one rank.
    pub rendezvous: String,
    pub trust_remote_code: bool,
    /// CPU threads of each rank; `None`: the worker chooses.
    pub num_threads: Option<u32>,
    /// Part of the vocabulary that a watermark prefers, in (0, 1); `None`: the worker's default.
    pub watermark_gamma: Option<f32>,
    /// What a watermark adds to the logits of that part; `None`: the worker's default.
    pub watermark_delta: Option<f32>,
}

/// What was loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    pub worker_version: String,
    pub architecture: String,
    pub dtype: String,
    /// Of rank 0.
    pub device: String,
    pub attention: String,
    pub vocab_size: u32,
    /// The longest sequence the model was made for.
    pub max_position_tokens: u32,
    /// Every layer sees at most so many of the last tokens; `None`: some layer sees all.
    pub window_tokens: Option<u32>,
    /// Of an encoder–decoder: the tokens that stand behind every source, before the answer. Empty: a decoder alone.
    pub decoder_prefix: Arc<[u32]>,
    /// Of an encoder–decoder: the longest source. Its answers have what that leaves of the longest sequence.
    pub max_source_tokens: u32,
    /// Of all ranks together.
    pub weight_bytes: u64,
    /// Of all ranks together.
    pub kv_bytes_per_block: u64,
    /// Of rank 0, in order.
    pub phases: Vec<Phase>,
}

/// A part of the start and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    pub name: String,
    pub duration: Duration,
}

/// The bounds within which the workers must be able to do any step.
#[derive(Clone, Copy, Debug)]
pub struct WarmUpOptions {
    pub max_step_tokens: u32,
    pub max_step_sequences: u32,
    /// `None`: as long as the model and the pool allow.
    pub max_sequence_tokens: Option<u32>,
    /// `None`: as many as fit.
    pub num_blocks: Option<u64>,
    /// Of the device's memory that may be used in all, in (0, 1].
    pub memory_fraction: f64,
    /// A group of the same machine, model and limits did all this before; `num_blocks` are to be allocated.
    pub proven: bool,
}

/// The KV pool after warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    pub num_blocks: u32,
    /// The slowest rank's slowest step of the warm-up; zero when it was proven before.
    pub worst_step: Duration,
    pub phases: Vec<Phase>,
}

impl Description {
    pub fn is_encoder_decoder(&self) -> bool {
        !self.decoder_prefix.is_empty()
    }

    /// The hub's name for what the model does, as far as its kind tells.
    pub fn pipeline_tag(&self) -> Option<&'static str> {
        self.is_encoder_decoder().then_some("text2text-generation")
    }

    /// Input and answer of the longest sequence.
    pub fn max_total_tokens(&self) -> u32 {
        self.max_position_tokens.saturating_sub(self.num_prefix_tokens())
    }

    pub fn num_prefix_tokens(&self) -> u32 {
        self.decoder_prefix.len() as u32
    }

    /// The longest answer that does not depend on its input's length; `None`: each is as long as its input leaves it.
    pub fn max_new_tokens(&self) -> Option<u32> {
        self.is_encoder_decoder().then(|| self.max_total_tokens().saturating_sub(self.max_source_tokens))
    }
}

impl Group {
    /// Waits until every rank listens and answers. Drop the future to give up early, as when a worker's process ended.
    pub async fn connect(sockets: &[PathBuf], patience: Duration) -> Result<Self, WorkerError> {
        let connect = sockets.iter().enumerate().map(|(index, socket)| Rank::connect(index, socket, patience));
        let ranks = try_join_all(connect).await?;
        Ok(Self { ranks })
    }

    /// Loads the model on all ranks. No deadline: reading a large model may take any time.
    pub async fn load(&mut self, options: &LoadOptions) -> Result<Description, WorkerError> {
        let request = proto::LoadRequest {
            protocol_version: PROTOCOL_VERSION,
            model_path: options.model_folder.to_string_lossy().into_owned(),
            dtype: options.dtype.clone().unwrap_or_default(),
            device: String::new(),
            block_tokens: options.block_tokens,
            rendezvous: options.rendezvous.clone(),
            quantize: String::new(),
            trust_remote_code: options.trust_remote_code,
            deterministic: false,
            num_threads: options.num_threads.unwrap_or(0),
            watermark_gamma: options.watermark_gamma.unwrap_or(0.0),
            watermark_delta: options.watermark_delta.unwrap_or(0.0),
        };
        let answers = try_join_all(self.ranks.iter_mut().map(|rank| rank.load(request.clone()))).await?;
        agree("the vocabulary size", answers.iter().map(|answer| answer.vocab_size))?;
        agree("the data type", answers.iter().map(|answer| &answer.dtype))?;
        agree("the decoder's prefix", answers.iter().map(|answer| &answer.decoder_prefix))?;
        let weight_bytes = answers.iter().map(|answer| answer.weight_bytes).sum();
        let kv_bytes_per_block = answers.iter().map(|answer| answer.kv_bytes_per_block).sum();
        let first = first_rank(answers);
        Ok(Description {
            worker_version: first.worker_version,
            architecture: first.architecture,
            dtype: first.dtype,
            device: first.device,
            attention: first.attention,
            vocab_size: first.vocab_size,
            max_position_tokens: first.max_position_tokens,
            window_tokens: (first.window_tokens > 0).then_some(first.window_tokens),
            decoder_prefix: first.decoder_prefix.into(),
            max_source_tokens: first.max_source_tokens,
            weight_bytes,
            kv_bytes_per_block,
            phases: phases(first.phases),
        })
    }

    /// Runs the worst step that the options allow on all ranks, and allocates the KV pool.
    pub async fn warm_up(&mut self, options: &WarmUpOptions) -> Result<Pool, WorkerError> {
        let request = proto::WarmUpRequest {
            max_step_tokens: options.max_step_tokens,
            max_step_sequences: options.max_step_sequences,
            max_sequence_tokens: options.max_sequence_tokens.unwrap_or(0),
            num_blocks: options.num_blocks.unwrap_or(0),
            memory_fraction: options.memory_fraction,
            proven: options.proven,
        };
        let answers = try_join_all(self.ranks.iter_mut().map(|rank| rank.warm_up(request))).await?;
        agree("the number of KV blocks", answers.iter().map(|answer| answer.num_blocks))?;
        let worst_step_seconds = answers.iter().map(|answer| answer.worst_step_seconds).fold(0.0, f64::max);
        let worst_step = Duration::try_from_secs_f64(worst_step_seconds).unwrap_or_default();
        let first = first_rank(answers);
        let num_blocks = u32::try_from(first.num_blocks).map_err(|_| WorkerError::Garbled {
            rank: 0,
            reason: format!("{} KV blocks, at most {} can be numbered", first.num_blocks, u32::MAX),
        })?;
        Ok(Pool { num_blocks, worst_step, phases: phases(first.phases) })
    }

    /// Asks the ranks about themselves beside their steps.
    pub fn probe(&self) -> HealthProbe {
        HealthProbe { ranks: self.ranks.clone() }
    }

    /// Grammars are compiled where tokens are sampled.
    pub fn grammars(&self) -> GrammarCompiler {
        GrammarCompiler::new(self.ranks.first().expect("invariant: a group has at least one rank").clone())
    }

    /// Opens the stream of steps on all ranks; they forget every sequence of an earlier one.
    pub fn steps(&self) -> Steps {
        Steps::new(self.ranks.iter().map(Rank::steps))
    }
}

/// Asks every rank of a group about itself.
#[derive(Clone, Debug)]
pub struct HealthProbe {
    ranks: Vec<Rank>,
}

impl HealthProbe {
    /// What each rank says about itself, in their order; `None`: it did not answer in time, or not at all.
    pub async fn ask(&mut self, patience: Duration) -> Vec<Option<RankHealth>> {
        let ask = |rank| async move { tokio::time::timeout(patience, Rank::health(rank)).await.ok()?.ok() };
        join_all(self.ranks.iter_mut().map(ask)).await
    }
}

fn first_rank<T>(answers: Vec<T>) -> T {
    answers.into_iter().next().expect("invariant: a group has at least one rank")
}

fn phases(phases: Vec<proto::Phase>) -> Vec<Phase> {
    let phase = |phase: proto::Phase| Phase {
        name: phase.name,
        duration: Duration::try_from_secs_f64(phase.seconds).unwrap_or_default(),
    };
    phases.into_iter().map(phase).collect()
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
