//! What the rest of the router needs of an engine; tests script their own.

use futures::future::BoxFuture;
use penstock_scheduler::Stats;

use super::health::Health;
use super::stream::SequenceStream;
use crate::sequence::{Adapter, AdapterError, Grammar, GrammarError, Image, ImageError, SequenceRequest};

/// Generates token sequences.
pub trait Generator: Send + Sync + 'static {
    /// Queues a sequence. Never blocks: every failure arrives as the stream's terminal event.
    fn submit(&self, request: SequenceRequest) -> SequenceStream;
    /// Compiles a grammar. Must be complete before a sequence with this grammar is submitted.
    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>>;
    /// Loads an adapter, after freeing those with `unloaded_ids`. Must be complete before a sequence with this adapter is submitted.
    fn load_adapter(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>>;
    /// The tokens that stand for each image. Must be complete before a sequence with these images is submitted.
    fn encode_images(&self, images: Vec<Image>) -> BoxFuture<'static, Result<Vec<Vec<u32>>, ImageError>>;
    /// Whether steps are being taken at this moment.
    fn health(&self) -> Health;
    /// Queue length, running sequences and KV blocks at this moment.
    fn stats(&self) -> Stats;
}
