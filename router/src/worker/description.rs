//! The model that a worker group has loaded.

use std::sync::Arc;
use std::time::Duration;

use crate::sequence::{ImageInput, Pooling, Task};

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
    /// What states between tokens take for each sequence, on all ranks together. 0: the model keeps none.
    pub state_bytes_per_sequence: u64,
    /// Size of a snapshot of such states on all ranks together.
    pub snapshot_bytes: u64,
    /// Tokens behind a snapshot's position that may have been computed before it is saved.
    pub snapshot_reach_tokens: u32,
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
