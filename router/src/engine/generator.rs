//! What the rest of the router needs of an engine; tests script their own.

use std::sync::Arc;

use futures::future::BoxFuture;
use penstock_scheduler::Stats;

use super::health::Health;
use super::stream::SequenceStream;
use crate::replica::Routed;
use crate::sequence::{
    Adapter, AdapterError, AdapterHash, EncodedImage, Grammar, GrammarError, Image, ImageError, SequenceRequest,
};

/// One of several engines at this moment, and what went there.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaReport {
    /// Below `Replicas::MAX_ENGINES`.
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
