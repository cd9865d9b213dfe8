//! What `submit` refuses, and what is wrong with a worker's result.

use crate::plan::SequenceId;

/// Why a sequence was not taken. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("the prompt has no tokens, at least 1 is needed")]
    EmptyPrompt,
    #[error("max_new_tokens is 0, at least 1 is needed")]
    NoNewTokens,
    #[error(
        "{num_prompt_tokens} prompt tokens and {max_new_tokens} new tokens were asked for, \
         at most {max_sequence_tokens} are allowed together"
    )]
    TooLong { num_prompt_tokens: usize, max_new_tokens: u32, max_sequence_tokens: u32 },
    /// Not even alone in the pool.
    #[error(
        "the sequence can grow to {num_required_blocks} KV blocks, the pool has {num_blocks}; ask for fewer tokens"
    )]
    TooManyBlocks { num_required_blocks: u32, num_blocks: u32 },
    /// It is computed in one step, and the prompt begins with it.
    #[error("the source has {num_source_tokens} tokens, at most {max_source_tokens} are allowed")]
    SourceTooLong { num_source_tokens: u32, max_source_tokens: u32 },
    #[error("sequence {} is already known", id.0)]
    AlreadyKnown { id: SequenceId },
}

/// Why a result cannot be that of the step it names: a fault of the worker. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error("a result came for step {step}, but no step is in flight")]
    NothingInFlight { step: u64 },
    #[error("a result came for step {step}, the next one due is that of step {expected}")]
    UnexpectedStep { step: u64, expected: u64 },
    #[error("the result of step {step} has an output for sequence {}, which was not in it", id.0)]
    UnknownSequence { step: u64, id: SequenceId },
    #[error("the result of step {step} has more than one output for sequence {}", id.0)]
    RepeatedSequence { step: u64, id: SequenceId },
    #[error("the result of step {step} has no output for sequence {}, which was to sample", id.0)]
    MissingOutput { step: u64, id: SequenceId },
    #[error("the result of step {step} has {got} tokens for sequence {}, {expected} were planned", id.0)]
    TokenCount { step: u64, id: SequenceId, expected: usize, got: usize },
}
