//! The interface between requests and what computes their sequences: an engine, several of them as one, or a test's script.

mod event;
mod health;
mod routed_queue;
mod stream;

use std::sync::Arc;

use futures::future::BoxFuture;
use penstock_scheduler::Stats;

pub(crate) use event::Alarm;
pub use event::{EventReceiver, EventSender, event_channel};
pub use health::Health;
pub use routed_queue::RoutedQueue;
pub use stream::SequenceStream;

use crate::sequence::{
    Adapter, AdapterError, AdapterHash, EncodedImage, Grammar, GrammarError, Image, ImageError, SequenceRequest,
};

/// Most engines that a generator may have, each with a number below this. A limit of metrics' labels and of the sets of engines.
pub const MAX_ENGINES: usize = 1024;

/// What went to an engine's number since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Routed {
    /// What the engine has to compute at this moment, with the tokens that its sequences are expected to generate.
    pub num_work_tokens: u64,
    /// Sequences that were routed there when they arrived.
    pub num_sequences: u64,
    /// Sequences that left the engine for another one.
    pub num_handovers: u64,
    /// Tokens of the prompts of the routed sequences.
    pub num_prompt_tokens: u64,
    /// Prompt tokens that the engine computed before, as far as is known here.
    pub num_cached_tokens: u64,
}

/// One of several engines at this moment, and what went there.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaReport {
    /// Below `MAX_ENGINES`.
    pub number: usize,
    /// Whether it takes steps; `None`: it has left, and no other engine has its number yet.
    pub is_healthy: Option<bool>,
    /// Its queue, running sequences and KV blocks.
    pub stats: Stats,
    /// Since the start.
    pub routed: Routed,
    /// Mean seconds between two tokens of a sequence there, if known.
    pub seconds_per_token: Option<f64>,
}

/// Generates token sequences.
pub trait Generator: Send + Sync + 'static {
    /// Queues a sequence. Never blocks: every failure arrives as the stream's terminal event.
    fn submit(&self, request: SequenceRequest) -> SequenceStream;
    /// Compiles a grammar. Must be complete before a sequence with this grammar is submitted.
    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>>;
    /// Loads an adapter, after freeing those with `unloaded_ids`. Must be complete before a sequence with this adapter is submitted.
    fn load_adapter(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>>;
    /// The adapter of this name that servers elsewhere have. A sequence with it goes only to servers that have the same files.
    fn adapter_hash(&self, _name: &str) -> Option<AdapterHash> {
        None
    }
    /// The names of all adapters that servers elsewhere have.
    fn adapter_names(&self) -> Vec<Arc<str>> {
        Vec::new()
    }
    /// What the workers make of each image. Must be complete before a sequence with these images is submitted.
    fn encode_images(&self, images: Vec<Image>) -> BoxFuture<'static, Result<Vec<EncodedImage>, ImageError>>;
    /// Whether steps are being taken at this moment.
    fn health(&self) -> Health;
    /// Queue length, running sequences and KV blocks at this moment.
    fn stats(&self) -> Stats;
    /// Its engines, if there may be several.
    fn replicas(&self) -> Vec<ReplicaReport> {
        Vec::new()
    }
}
