//! What a generation yields: each token with the text that it settled.

use std::time::Duration;

use crate::sequence::{self, DraftCount};

/// One generated token, and the text that it made final.
#[derive(Clone, Debug)]
pub(crate) struct TextDelta {
    pub(crate) token: TextToken,
    /// Text that no stop string can remove any more. The generation's text is the concatenation of all deltas' `text`.
    pub(crate) text: String,
    /// With the first token of a step that verified a draft.
    pub(crate) draft: Option<Draft>,
    /// Set on the last delta.
    pub(crate) finish: Option<Finish>,
}

/// A draft that a step verified: the tokens from `token_index` on are its right ones, `count.num_right` in number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Draft {
    /// Position among the generated tokens, from 0, of the step's first token.
    pub(crate) token_index: u32,
    pub(crate) count: DraftCount,
}

/// A generated token.
#[derive(Clone, Debug)]
pub(crate) struct TextToken {
    pub(crate) id: u32,
    /// Also of special tokens; empty while a character is incomplete.
    pub(crate) text: String,
    /// Natural logarithm.
    pub(crate) logprob: f32,
    pub(crate) special: bool,
    /// The most probable tokens at this position, best first.
    pub(crate) top: Vec<TopToken>,
}

/// An alternative at one position.
#[derive(Clone, Debug)]
pub(crate) struct TopToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) logprob: f32,
    pub(crate) special: bool,
}

/// A token of the prompt.
#[derive(Clone, Debug)]
pub(crate) struct PromptToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    /// `None` for the first token, and for those that the model prescribes.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<TopToken>,
}

/// The end of a generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    pub(crate) num_generated_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub(crate) num_cached_tokens: usize,
    pub(crate) drafts: DraftCount,
    pub(crate) timings: Timings,
}

/// Why a generation ended. The engine knows all reasons but the stop string, which only the decoded text shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinishReason {
    /// The limit of new tokens, or the end of the context.
    Length,
    /// One of the model's end-of-sequence tokens or of the client's stop tokens.
    StopToken,
    /// The client's stop string at this position in its list.
    StopString(usize),
}

impl FinishReason {
    /// TGI's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::StopToken => "eos_token",
            Self::StopString(_) => "stop_sequence",
        }
    }
}

impl From<sequence::FinishReason> for FinishReason {
    fn from(reason: sequence::FinishReason) -> Self {
        match reason {
            sequence::FinishReason::Length => Self::Length,
            sequence::FinishReason::StopToken => Self::StopToken,
        }
    }
}

/// The phases of one generation, one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timings {
    /// From the request's arrival to the sequence's submission.
    pub(crate) validation: Duration,
    /// From submission to the first step.
    pub(crate) queue: Duration,
    /// From the first step to the last token.
    pub(crate) inference: Duration,
}
