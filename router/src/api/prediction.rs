//! What answers say of draft tokens: their numbers in the usage, under the names that OpenAI gives predicted outputs, and
//! each draft where the client asks for it.

use serde::Serialize;
use utoipa::ToSchema;

use crate::generation::Draft;
use crate::sequence::DraftCount;

/// Left out if no step verified drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct PredictionTokens {
    /// Draft tokens that were right, and so are part of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted_prediction_tokens: Option<u32>,
    /// Draft tokens that were wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    rejected_prediction_tokens: Option<u32>,
}

impl From<DraftCount> for PredictionTokens {
    fn from(DraftCount { num_verified, num_right }: DraftCount) -> Self {
        let if_drafted = |num| (num_verified > 0).then_some(num);
        Self {
            accepted_prediction_tokens: if_drafted(num_right),
            rejected_prediction_tokens: if_drafted(num_verified.saturating_sub(num_right)),
        }
    }
}

/// A draft that a step verified. Right draft tokens are part of the answer, except those behind a stop string; the step's
/// last token was no draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct VerifiedDraft {
    /// Position among the generated tokens, from 0, of the step's first token.
    token_index: u32,
    /// Draft tokens that the step verified.
    verified: u32,
    /// Predicted tokens that were right: the generated tokens from `token_index` on.
    accepted: u32,
}

impl From<Draft> for VerifiedDraft {
    fn from(Draft { token_index, count }: Draft) -> Self {
        Self { token_index, verified: count.num_verified, accepted: count.num_right }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_without_drafts_says_nothing_of_them() {
        let shown = |num_verified, num_right| {
            serde_json::to_value(PredictionTokens::from(DraftCount { num_verified, num_right })).unwrap()
        };
        assert_eq!(shown(0, 0), json!({}));
        assert_eq!(shown(5, 3), json!({"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}));
        assert_eq!(shown(5, 0), json!({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 5}));
    }
}
