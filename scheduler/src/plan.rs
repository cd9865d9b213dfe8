//! What goes in and out of the scheduler. Plain data, the same terms as proto/worker.proto.

use std::sync::Arc;
use std::time::Duration;

/// One generation. Chosen by the caller, never reused while known to the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

pub type TokenId = u32;
pub type BlockId = u32;

/// Hash of a block of token ids that follow a prefix with the hash `parent`. Equal arguments, equal results; that is all
/// that correctness needs, a poor one only shares less.
pub type BlockHash = fn(parent: u64, token_ids: &[TokenId]) -> u64;

/// The bounds every plan keeps.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens that one step may advance in all (`--max-batch-prefill-tokens`).
    pub max_step_tokens: u32,
    /// Sequences in one step (`--max-batch-size`).
    pub max_step_sequences: u32,
    /// Tokens of one sequence, prompt and generated (`--max-total-tokens`).
    pub max_sequence_tokens: u32,
    /// Size of the KV pool; ids are `0..num_blocks`.
    pub num_blocks: u32,
    /// Tokens in one block.
    pub block_tokens: u32,
    /// Plans that may be out without their result (run-ahead depth), at least 1.
    pub max_steps_in_flight: u32,
    /// Whether blocks are kept and shared between all sequences. Without, only those of one `Submission::group` share.
    pub prefix_caching: bool,
    /// Waiting this long counts as one priority level, so that no sequence starves. Zero: only the arrival decides.
    pub priority_ageing: Duration,
    /// How long a step with decodes may take, as far as it depends on prompts beside them. `None`: a small multiple of
    /// what the decodes take alone. Without measurements (`Scheduler::observe`) there is no such bound.
    pub max_inter_token: Option<Duration>,
    /// Of several prompts the one with the least left to compute goes first, until so many tokens of later ones were
    /// computed ahead of an earlier one for each token that it has left. 0: strictly in line.
    pub max_overtaking: u32,
    /// A token is computed from so many of the last ones, itself included; what stands before them is given up. `None`:
    /// from all before it.
    pub window_tokens: Option<u32>,
}

/// A sequence to generate.
#[derive(Clone, Debug)]
pub struct Submission {
    pub id: SequenceId,
    /// Not empty.
    pub prompt_token_ids: Vec<TokenId>,
    /// At least 1; prompt + this is at most `max_sequence_tokens`.
    pub max_new_tokens: u32,
    /// The sequence ends after one of these (it is still reported as a token).
    pub stop_token_ids: Arc<[TokenId]>,
    /// The higher one is served first and preempted last; 0 is the usual one.
    pub priority: i32,
    /// Sequences of one group (`n`, `best_of`) share blocks with each other even without prefix caching. Never reused
    /// while a sequence of the group is known.
    pub group: Option<u64>,
    /// All of the prompt is computed, whatever is cached, until a token has come back.
    pub needs_prompt_logprobs: bool,
    /// So many tokens at the beginning of the prompt are an encoder's: they are computed in one step, and shared with
    /// nobody. At most the prompt; 0: none.
    pub num_source_tokens: u32,
}

/// What one step does; only differences to what the worker already knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// 1, 2, 3, …
    pub step: u64,
    pub freed_sequence_ids: Vec<SequenceId>,
    pub new_sequences: Vec<NewSequence>,
    pub advances: Vec<Advance>,
}

/// A sequence the worker does not know (any more).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSequence {
    pub id: SequenceId,
    /// Every token known: the prompt, and what was generated before a preemption.
    pub token_ids: Vec<TokenId>,
    pub num_prompt_tokens: u32,
    /// The first advance covers so many at least.
    pub num_source_tokens: u32,
    /// How many stand in `block_ids` already, shared: in whole blocks, and never all. In a sequence's first start these
    /// are the cached tokens of its prompt.
    pub num_computed_tokens: u32,
    pub block_ids: Vec<BlockId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    pub id: SequenceId,
    /// At least 1.
    pub num_tokens: u32,
    pub new_block_ids: Vec<BlockId>,
    /// Whether a token is sampled after the last one.
    pub sample: bool,
}

/// What came back for one step: one output for each advance that sampled or failed; others may have one without tokens.
#[derive(Clone, Debug)]
pub struct StepResult {
    pub step: u64,
    pub outputs: Vec<SequenceOutput>,
}

#[derive(Clone, Debug)]
pub struct SequenceOutput {
    pub id: SequenceId,
    /// `None`: the worker could not go on with this sequence.
    pub token_ids: Option<Vec<TokenId>>,
}

/// What a result means for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first `num_tokens` tokens of `StepResult::outputs[output_index]` belong to the sequence; the rest is discarded.
    Advanced {
        id: SequenceId,
        output_index: usize,
        num_tokens: usize,
        /// Terminal when set.
        finish_reason: Option<FinishReason>,
    },
    /// Terminal: the worker reported an error for this sequence at `outputs[output_index]`.
    Failed { id: SequenceId, output_index: usize },
}

/// Why a sequence has ended, other than by a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_new_tokens` reached.
    Length,
    /// One of `stop_token_ids` was sampled.
    StopToken,
}
