//! The engine: owns the scheduler and the stream of steps; hands every request its own stream of tokens.
//!
//! INVARIANT: every submitted sequence's stream yields exactly one terminal event (`Finished` or `Failed`), unless its
//! receiver was dropped first; dropping the stream is the abort. Workers that are lost are no reason for `Failed` as long as
//! others can be started in their place.

mod end;
mod grammar;
mod handle;
mod health;
mod open_sequence;
mod record;
mod recovery;
mod restart;
mod step_loop;
mod stream;
mod watch;

pub use handle::{Engine, EngineOptions};
pub use health::Health;
pub use restart::{RestartError, RestartGroup, RestartTimes, Restarted};
pub use stream::SequenceStream;

use futures::future::BoxFuture;

use crate::sequence::{Grammar, GrammarError, SequenceRequest};

/// Losses of the workers in a row after which what was there each time is given up: a sequence, or a grammar. It may be what
/// they are lost by.
const MAX_LOSSES: u32 = 3;

/// What the text room needs of an engine; tests script their own.
pub trait Generator: Send + Sync + 'static {
    /// Never blocks; whatever goes wrong arrives as the stream's terminal event.
    fn submit(&self, request: SequenceRequest) -> SequenceStream;
    /// To be awaited before a sequence with this grammar is submitted.
    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>>;
    fn health(&self) -> Health;
    fn load(&self) -> Load;
}

/// How full the engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub queued_sequences: usize,
    pub running_sequences: usize,
    pub free_blocks: usize,
    /// Kept in case that a prompt begins like theirs; those that nobody uses are free as well.
    pub cached_blocks: usize,
    /// Since the start: tokens looked up when their sequence started, and those of them that were there.
    pub prefix_queried_tokens: u64,
    pub prefix_hit_tokens: u64,
    pub num_blocks: usize,
    /// Tokens, prompt and generated, that the running sequences can grow to.
    pub max_running_tokens: u64,
}
