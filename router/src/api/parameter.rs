//! What a generation can be asked for, whatever the dialect, and the bounds it must keep.
//!
//! The checks and their order are TGI's. What the engine cannot do yet is refused by name, never ignored.

use crate::config::RequestLimits;
use crate::engine::Sampling;

/// As the client sent them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parameters {
    pub(crate) best_of: Option<usize>,
    pub(crate) temperature: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) top_k: Option<i32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) typical_p: Option<f32>,
    pub(crate) do_sample: bool,
    pub(crate) max_new_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) truncate: Option<usize>,
    pub(crate) decoder_input_details: bool,
    pub(crate) seed: Option<u64>,
    pub(crate) top_n_tokens: Option<u32>,
    /// Asked for under this name, but not there yet.
    pub(crate) unsupported: Option<&'static str>,
}

/// Parameters that passed every check that needs no tokens.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    pub(crate) sampling: Sampling,
    /// What made the randomness; `None` when there is none.
    pub(crate) seed: Option<u64>,
    pub(crate) max_new_tokens: Option<u32>,
    pub(crate) stops: Vec<String>,
    pub(crate) truncate: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ValidationError {
    #[error("`best_of` must be > 0 and <= {max}. Given: {given}")]
    BestOf { max: usize, given: usize },
    #[error("`best_of` != 1 is not supported when streaming tokens")]
    BestOfStream,
    #[error("you must use sampling when `best_of` is > 1")]
    BestOfSampling,
    #[error("`seed` must not be set when `best_of` > 1")]
    BestOfSeed,
    #[error("`decoder_input_details` == true is not supported when streaming tokens")]
    PrefillDetailsStream,
    #[error("`temperature` must be strictly positive")]
    Temperature,
    #[error("`repetition_penalty` must be strictly positive")]
    RepetitionPenalty,
    #[error("`frequency_penalty` must be >= -2.0 and <= 2.0")]
    FrequencyPenalty,
    #[error("`presence_penalty` must be >= -2.0 and <= 2.0")]
    PresencePenalty,
    #[error("`top_p` must be > 0.0 and < 1.0")]
    TopP,
    #[error("`typical_p` must be > 0.0 and < 1.0")]
    TypicalP,
    #[error("`top_k` must be strictly positive")]
    TopK,
    #[error("`max_new_tokens` must be strictly positive")]
    NoNewTokens,
    #[error("`stop` supports up to {max} stop sequences. Given: {given}")]
    StopCount { max: usize, given: usize },
    #[error("`stop` must not contain an empty string")]
    EmptyStop,
    #[error("`top_n_tokens` must be >= 0 and <= {max}. Given: {given}")]
    TopNTokens { max: u32, given: u32 },
    #[error("`inputs` cannot be empty")]
    EmptyInput,
    #[error("`messages` cannot be empty")]
    NoMessages,
    #[error("`truncate` must be strictly positive and less than or equal to {max}. Given: {given}")]
    Truncate { max: usize, given: usize },
    #[error("{0}")]
    Tokenizer(String),
    #[error("token ids must be < {vocabulary}. Given: {given}")]
    TokenId { vocabulary: u32, given: u32 },
    #[error(
        "`inputs` tokens + `max_new_tokens` must be <= {max}. Given: {input} `inputs` tokens and {new} `max_new_tokens`"
    )]
    TotalTokens { max: usize, input: usize, new: u32 },
    #[error("`inputs` must have at most {max} tokens. Given: {given}")]
    InputTokens { max: usize, given: usize },
    #[error("`{0}` is not supported yet")]
    Unsupported(&'static str),
    #[error("`max_tokens` and `max_completion_tokens` are the same thing; send one of them")]
    TwoLengths,
    #[error("`top_logprobs` needs `logprobs` to be true")]
    TopLogprobs,
    #[error("`{part}` parts are not supported in a message's content by this model")]
    ContentPart { part: String },
}

impl ValidationError {
    /// The request's field, when it has the same name in both dialects.
    pub(crate) fn param(&self) -> Option<&'static str> {
        match self {
            Self::BestOf { .. } | Self::BestOfStream | Self::BestOfSampling => Some("best_of"),
            Self::BestOfSeed => Some("seed"),
            Self::Temperature => Some("temperature"),
            Self::RepetitionPenalty => Some("repetition_penalty"),
            Self::FrequencyPenalty => Some("frequency_penalty"),
            Self::PresencePenalty => Some("presence_penalty"),
            Self::TopP => Some("top_p"),
            Self::TypicalP => Some("typical_p"),
            Self::TopK => Some("top_k"),
            Self::NoNewTokens | Self::TotalTokens { .. } | Self::TwoLengths => Some("max_tokens"),
            Self::StopCount { .. } | Self::EmptyStop => Some("stop"),
            Self::TopNTokens { .. } | Self::TopLogprobs => Some("top_logprobs"),
            Self::Unsupported(name) => Some(name),
            Self::NoMessages | Self::ContentPart { .. } => Some("messages"),
            Self::TokenId { .. } => Some("prompt"),
            Self::PrefillDetailsStream
            | Self::EmptyInput
            | Self::Truncate { .. }
            | Self::Tokenizer(_)
            | Self::InputTokens { .. } => None,
        }
    }
}

impl Parameters {
    /// What cannot be asked of a stream; checked before anything else.
    pub(crate) fn check_stream(&self) -> Result<(), ValidationError> {
        if self.best_of.is_some_and(|best_of| best_of != 1) {
            return Err(ValidationError::BestOfStream);
        }
        if self.decoder_input_details {
            return Err(ValidationError::PrefillDetailsStream);
        }
        Ok(())
    }

    /// Checked before the request is admitted.
    pub(crate) fn check_best_of(&self, limits: &RequestLimits) -> Result<(), ValidationError> {
        match self.best_of {
            Some(given) if given > limits.max_best_of => {
                Err(ValidationError::BestOf { max: limits.max_best_of, given })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check(self, limits: &RequestLimits) -> Result<Checked, ValidationError> {
        let samples = self.samples();
        let best_of = self.best_of.unwrap_or(1);
        if best_of > 1 && !samples {
            return Err(ValidationError::BestOfSampling);
        }
        self.check_ranges()?;
        if self.stop.len() > limits.max_stop_sequences {
            return Err(ValidationError::StopCount { max: limits.max_stop_sequences, given: self.stop.len() });
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(ValidationError::EmptyStop);
        }
        if best_of > 1 && self.seed.is_some() {
            return Err(ValidationError::BestOfSeed);
        }
        if let Some(given) = self.top_n_tokens.filter(|&given| given > limits.max_top_n_tokens) {
            return Err(ValidationError::TopNTokens { max: limits.max_top_n_tokens, given });
        }
        if let Some(name) = self.first_unsupported() {
            return Err(ValidationError::Unsupported(name));
        }
        if let Some(given) = self.truncate.filter(|&given| given == 0 || given > limits.max_input_tokens) {
            return Err(ValidationError::Truncate { max: limits.max_input_tokens, given });
        }

        let seed = samples.then(|| self.seed.unwrap_or_else(rand::random));
        let sampling = Sampling {
            do_sample: samples,
            seed: seed.unwrap_or(0),
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.and_then(|top_k| u32::try_from(top_k).ok()).unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
        };
        let Self { max_new_tokens, stop, truncate, .. } = self;
        Ok(Checked { sampling, seed, max_new_tokens, stops: stop, truncate })
    }

    /// Whatever only makes sense with sampling turns it on.
    fn samples(&self) -> bool {
        self.do_sample
            || self.temperature.is_some_and(|temperature| temperature != 1.0)
            || self.top_k.is_some()
            || self.top_p.is_some_and(|top_p| top_p < 1.0)
            || self.typical_p.is_some_and(|typical_p| typical_p < 1.0)
    }

    fn check_ranges(&self) -> Result<(), ValidationError> {
        let positive = |value: Option<f32>| value.is_none_or(|value| value > 0.0 && value.is_finite());
        let fraction = |value: Option<f32>| value.is_none_or(|value| value > 0.0 && value < 1.0);
        if !positive(self.temperature) {
            return Err(ValidationError::Temperature);
        }
        if !positive(self.repetition_penalty) {
            return Err(ValidationError::RepetitionPenalty);
        }
        if self.frequency_penalty.is_some_and(|penalty| !(-2.0..=2.0).contains(&penalty)) {
            return Err(ValidationError::FrequencyPenalty);
        }
        if !fraction(self.top_p) {
            return Err(ValidationError::TopP);
        }
        if !fraction(self.typical_p) {
            return Err(ValidationError::TypicalP);
        }
        if self.top_k.is_some_and(|top_k| top_k <= 0) {
            return Err(ValidationError::TopK);
        }
        if self.max_new_tokens == Some(0) {
            return Err(ValidationError::NoNewTokens);
        }
        Ok(())
    }

    fn first_unsupported(&self) -> Option<&'static str> {
        let asked = [
            (self.best_of.is_some_and(|best_of| best_of > 1), "best_of"),
            (self.frequency_penalty.is_some_and(|penalty| penalty != 0.0), "frequency_penalty"),
            (self.typical_p.is_some(), "typical_p"),
            (self.decoder_input_details, "decoder_input_details"),
            (self.top_n_tokens.is_some_and(|number| number > 0), "top_n_tokens"),
        ];
        let first = asked.into_iter().find_map(|(is_asked, name)| is_asked.then_some(name));
        first.or(self.unsupported)
    }
}

impl Checked {
    /// Cuts and measures the prompt; returns how many tokens may be generated.
    pub(crate) fn fit(&self, prompt_token_ids: &mut Vec<u32>, limits: &RequestLimits) -> Result<u32, ValidationError> {
        if let Some(truncate) = self.truncate {
            // The end of a prompt matters most: the left goes.
            prompt_token_ids.drain(..prompt_token_ids.len().saturating_sub(truncate));
        }
        let num_input_tokens = prompt_token_ids.len();
        if num_input_tokens == 0 {
            return Err(ValidationError::EmptyInput);
        }
        let room = limits.max_total_tokens.saturating_sub(num_input_tokens);
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        if let Some(new) = self.max_new_tokens.filter(|&new| new > room) {
            return Err(ValidationError::TotalTokens { max: limits.max_total_tokens, input: num_input_tokens, new });
        }
        if num_input_tokens > limits.max_input_tokens || room == 0 {
            return Err(ValidationError::InputTokens { max: limits.max_input_tokens, given: num_input_tokens });
        }
        Ok(self.max_new_tokens.unwrap_or(room))
    }
}
