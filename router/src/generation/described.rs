//! A request's parameters as its trace shows them: numbers and switches, and none of the client's text.

use std::fmt;

use super::parameter::{Constraint, Parameters};
use crate::sequence::Grammar;
use crate::telemetry::{Operation, RequestParameters};

/// COMPAT: its `Debug` is TGI's field `parameters`, without what is a matter of the answer's shape.
#[derive(Debug)]
#[allow(dead_code, reason = "read by Debug only")]
struct GenerateParameters {
    best_of: Option<usize>,
    temperature: Option<f32>,
    repetition_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    top_k: Option<i32>,
    top_p: Option<f32>,
    typical_p: Option<f32>,
    do_sample: bool,
    max_new_tokens: Option<u32>,
    stop: Vec<Hidden>,
    truncate: Option<usize>,
    watermark: bool,
    decoder_input_details: bool,
    seed: Option<u64>,
    top_n_tokens: Option<u32>,
    grammar: Option<GrammarKind>,
}

/// The number of stop strings is not checked yet.
const MAX_SHOWN_STOPS: usize = 16;

/// Text of the client.
struct Hidden;

impl fmt::Debug for Hidden {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("(hidden)")
    }
}

#[derive(Debug)]
enum GrammarKind {
    Json,
    Regex,
    Lark,
}

impl Parameters {
    pub(super) fn described(&self, operation: Operation, streams: bool) -> RequestParameters {
        let kind = |constraint: &Constraint| match &constraint.grammar {
            Grammar::JsonSchema(_) => GrammarKind::Json,
            Grammar::Regex(_) => GrammarKind::Regex,
            // No request states a limit of thoughts in its grammar.
            Grammar::Lark(_) | Grammar::Thoughts(_) => GrammarKind::Lark,
        };
        let tgi = GenerateParameters {
            best_of: self.best_of,
            temperature: self.temperature,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            top_k: self.top_k,
            top_p: self.top_p,
            typical_p: self.typical_p,
            do_sample: self.do_sample,
            max_new_tokens: self.max_new_tokens,
            stop: self.stop.iter().take(MAX_SHOWN_STOPS).map(|_| Hidden).collect(),
            truncate: self.truncate,
            watermark: self.watermark,
            decoder_input_details: self.decoder_input_details,
            seed: self.seed,
            top_n_tokens: self.top_n_tokens,
            grammar: self.grammar.as_ref().map(kind),
        };
        RequestParameters {
            operation,
            streams,
            num_choices: self.extension.n.unwrap_or(1).max(self.best_of.unwrap_or(1)),
            max_new_tokens: self.max_new_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.extension.presence_penalty,
            seed: self.seed,
            tgi: format!("{tgi:?}"),
        }
    }
}
