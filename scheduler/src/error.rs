//! Why `submit` rejects a sequence and `apply` rejects a result.

use std::ops::Range;

use crate::plan::SequenceId;

/// Why a submission was rejected. The scheduler's state is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum SubmitError {
    /// The prompt is empty.
    #[error("the prompt has no tokens, at least 1 is needed")]
    EmptyPrompt,
    /// No tokens are to be generated.
    #[error("max_new_tokens is 0, at least 1 is needed")]
    NoNewTokens,
    /// No tokens are left to be generated.
    #[error("{num_generated_tokens} of {max_new_tokens} new tokens were generated before, fewer are needed")]
    Complete { num_generated_tokens: usize, max_new_tokens: u32 },
    /// The sequence can exceed `Limits::max_sequence_tokens`.
    #[error(
        "{num_prompt_tokens} prompt tokens and {max_new_tokens} new tokens were asked for, \
         at most {max_sequence_tokens} are allowed together"
    )]
    TooLong { num_prompt_tokens: usize, max_new_tokens: u32, max_sequence_tokens: u32 },
    /// The sequence can outgrow the whole KV pool.
    #[error(
        "the sequence can grow to {num_required_blocks} KV blocks, the pool has {num_blocks}; ask for fewer tokens"
    )]
    TooManyBlocks { num_required_blocks: u32, num_blocks: u32 },
    /// The source does not fit into one step, or is longer than the prompt.
    #[error("the source has {num_source_tokens} tokens, at most {max_source_tokens} are allowed")]
    SourceTooLong { num_source_tokens: u32, max_source_tokens: u32 },
    /// Tokens that attend to each other are out of order, outside of the prompt, or do not fit into one step.
    #[error(
        "the image at tokens {} to {} must be computed in one step, which has at most {max_step_tokens} tokens; \
         raise --max-batch-prefill-tokens",
        span.start, span.end
    )]
    WholeSpan { span: Range<u32>, max_step_tokens: u32 },
    /// The tokens of a prompt attend to each other, and do not fit into one step.
    #[error(
        "the prompt has {num_prompt_tokens} tokens, which this model computes in one step of at most {max_step_tokens}; \
         send a shorter prompt, or raise --max-batch-prefill-tokens"
    )]
    WholePrompt { num_prompt_tokens: u32, max_step_tokens: u32 },
    /// The worker has no room for the images, even if it has no others.
    #[error(
        "the images take {num_bytes} bytes of the workers' room for images, at most {max_image_bytes} are allowed; \
         send fewer or smaller images"
    )]
    ImagesTooLarge { num_bytes: u64, max_image_bytes: u64 },
    /// A sequence with this id is queued or running.
    #[error("sequence {} is already known", id.0)]
    AlreadyKnown { id: SequenceId },
}

/// Why a result was rejected: the worker broke the protocol. The scheduler's state is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum ApplyError {
    /// No step is in flight.
    #[error("a result came for step {step}, but no step is in flight")]
    NothingInFlight { step: u64 },
    /// The result is not that of the oldest step in flight.
    #[error("a result came for step {step}, the next one due is that of step {expected}")]
    UnexpectedStep { step: u64, expected: u64 },
    /// The sequence did not advance in the step.
    #[error("the result of step {step} has an output for sequence {}, which was not in it", id.0)]
    UnknownSequence { step: u64, id: SequenceId },
    /// The sequence has two outputs.
    #[error("the result of step {step} has more than one output for sequence {}", id.0)]
    RepeatedSequence { step: u64, id: SequenceId },
    /// The sequence was to sample and has no output.
    #[error("the result of step {step} has no output for sequence {}, which was to sample", id.0)]
    MissingOutput { step: u64, id: SequenceId },
    /// The output has more or fewer tokens than were planned: one, and one more for each draft token that was verified.
    #[error("the result of step {step} has {got} tokens for sequence {}, {expected} were planned", id.0)]
    TokenCount { step: u64, id: SequenceId, expected: usize, got: usize },
    /// The worker verified more draft tokens than were planned.
    #[error("the result of step {step} has {got} draft tokens for sequence {}, at most {most} were planned", id.0)]
    DraftCount { step: u64, id: SequenceId, most: u32, got: u32 },
}
