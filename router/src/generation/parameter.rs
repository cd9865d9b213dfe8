//! The parameters of a generation, the same for all dialects, and the limits they are checked against.
//!
//! The checks and their order are TGI's. Parameters that TGI does not have are checked last, before the prompt.

use std::time::Duration;

use super::validation::ValidationError;
use crate::limits::RequestLimits;
use crate::sequence::{BadWord, Grammar, LimitedThoughts, LogitBias, Sampling, ThoughtLimit};
use crate::telemetry::Warnings;

/// The most generations of one prompt, whatever the server's limits.
const MAX_GENERATIONS: usize = 128;
const MAX_STOP_TOKENS: usize = 128;
pub(crate) const MAX_LOGIT_BIASES: usize = 1024;
pub(crate) const MAX_LOGIT_BIAS: f32 = 100.0;
const MAX_BAD_WORDS: usize = 1024;
/// Bytes of all bad words together.
const MAX_BAD_WORD_BYTES: usize = 16_384;
const MAX_PRIORITY: i32 = 100;
const MAX_TIMEOUT_S: f64 = 86_400.0;

/// Parameters as the client sent them.
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
    /// Limit of an answer without `max_new_tokens`; `None`: the room that the context leaves.
    pub(crate) default_new_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) truncate: Option<usize>,
    pub(crate) watermark: bool,
    /// Whether logprobs of the prompt are wanted.
    pub(crate) decoder_input_details: bool,
    pub(crate) seed: Option<u64>,
    pub(crate) top_n_tokens: Option<u32>,
    /// The limit of `top_n_tokens`, unless the dialect has checked it.
    pub(crate) max_top_n_tokens: Option<u32>,
    pub(crate) grammar: Option<Constraint>,
    pub(crate) adapter_id: Option<String>,
    /// Whether logprobs are the model's own (OpenAI) or those of the distribution that was sampled from (TGI), which costs less.
    pub(crate) model_logprobs: bool,
    pub(crate) extension: Extension,
    /// What the client should know of the request, although it is served.
    pub(crate) warnings: Warnings,
}

/// What the answer must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Constraint {
    pub(crate) grammar: Grammar,
    /// What of a schema the grammar does not enforce, one sentence each.
    pub(crate) left_out: Vec<String>,
}

impl From<Grammar> for Constraint {
    fn from(grammar: Grammar) -> Self {
        Self { grammar, left_out: Vec::new() }
    }
}

/// The most tokens that an answer's thoughts may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasoningBudget {
    pub(crate) max_tokens: u32,
    /// What the request calls it.
    pub(crate) field: &'static str,
}

impl ReasoningBudget {
    pub(crate) fn given(field: &'static str, max_tokens: Option<u32>) -> Option<Self> {
        max_tokens.map(|max_tokens| Self { max_tokens, field })
    }
}

/// Parameters that TGI does not have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extension {
    pub(crate) min_p: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    /// As given: a token may occur twice.
    pub(crate) logit_bias: Vec<(u32, f32)>,
    pub(crate) min_tokens: Option<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) n: Option<usize>,
    pub(crate) priority: Option<i32>,
    /// Seconds.
    pub(crate) timeout: Option<f64>,
    /// Alternatives to each token of the prompt; `None`: as many as to generated tokens.
    pub(crate) prompt_top_n_tokens: Option<u32>,
    /// Whether the tokenizer adds special tokens to the prompt; `None`: unless it is a chat.
    pub(crate) add_special_tokens: Option<bool>,
    /// Whether special tokens are part of the text.
    pub(crate) shows_special_tokens: bool,
    /// Sequences share cached prefixes only with those of the same salt.
    pub(crate) cache_salt: Option<String>,
    /// The only tokens that may be sampled; `None`: all.
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    /// Texts that are not written.
    pub(crate) bad_words: Vec<String>,
    /// The most tokens of a chat's thoughts; `None`: the server's limit.
    pub(crate) reasoning_budget: Option<ReasoningBudget>,
}

/// Parameters that passed every check that does not need the encoded prompt.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    /// With the request's seed ([`Checked::seed_of`] has each generation's) and the client's stop tokens only.
    pub(super) sampling: Sampling,
    pub(super) grammar: Option<Grammar>,
    /// `None` if nothing is sampled.
    pub(super) seed: Option<u64>,
    /// At least 1.
    pub(super) num_generations: usize,
    pub(super) max_new_tokens: Option<u32>,
    default_new_tokens: Option<u32>,
    pub(super) stop_strings: Vec<String>,
    pub(super) truncate: Option<usize>,
    pub(super) ignore_eos: bool,
    pub(super) priority: i32,
    pub(super) timeout: Option<Duration>,
    pub(super) num_alternatives: NumAlternatives,
    pub(super) add_special_tokens: Option<bool>,
    pub(super) shows_special_tokens: bool,
    pub(super) cache_salt: Option<String>,
    pub(super) adapter_id: Option<String>,
    /// Empty: all.
    allowed_token_ids: Vec<u32>,
    pub(super) bad_words: Vec<String>,
    pub(super) reasoning_budget: Option<ReasoningBudget>,
}

/// Alternatives to show with each token. The worker returns the larger number of both.
#[derive(Clone, Copy, Debug)]
pub(super) struct NumAlternatives {
    pub(super) of_generated: usize,
    pub(super) of_prompt: usize,
}

impl Parameters {
    /// Generations per prompt: `n`, or `best_of` if that is larger. Checked before the request is admitted.
    pub(super) fn num_generations(&self, limits: &RequestLimits, num_prompts: usize) -> Result<usize, ValidationError> {
        if let Some(given) = self.best_of.filter(|&given| given > limits.max_best_of) {
            return Err(ValidationError::BestOf { max: limits.max_best_of, given });
        }
        if let (Some(n), Some(best_of)) = (self.extension.n, self.best_of)
            && best_of > 1
            && n > best_of
        {
            return Err(ValidationError::BestOfBelowN { best_of, n });
        }
        let max = MAX_GENERATIONS.min(limits.max_concurrent_requests / num_prompts.max(1));
        let given = match self.extension.n {
            Some(0) => 0,
            n => n.unwrap_or(1).max(self.best_of.unwrap_or(1)),
        };
        if given == 0 || given > max { Err(ValidationError::Generations { max, given }) } else { Ok(given) }
    }

    /// Checks everything that does not need the encoded prompt. `num_generations`: per prompt.
    pub(super) fn check(self, limits: &RequestLimits, num_generations: usize) -> Result<Checked, ValidationError> {
        let samples = self.samples();
        let best_of = self.best_of.unwrap_or(1);
        ensure(best_of <= 1 || samples, ValidationError::BestOfSampling)?;
        self.check_ranges()?;
        let (max, given) = (limits.max_stop_sequences, self.stop.len());
        ensure(given <= max, ValidationError::StopCount { max, given })?;
        ensure(!self.stop.iter().any(String::is_empty), ValidationError::EmptyStop)?;
        ensure(best_of <= 1 || self.seed.is_none(), ValidationError::BestOfSeed)?;
        if let (Some(given), Some(max)) = (self.top_n_tokens, self.max_top_n_tokens) {
            ensure(given <= max, ValidationError::TopNTokens { max, given })?;
        }
        self.extension.check(self.max_new_tokens)?;
        ensure(!self.extension.ignore_eos || self.grammar.is_none(), ValidationError::IgnoreEosWithGrammar)?;
        let seed = samples.then(|| self.seed.unwrap_or_else(rand::random));
        Ok(self.into_checked(samples, seed, num_generations))
    }

    fn into_checked(self, do_sample: bool, seed: Option<u64>, num_generations: usize) -> Checked {
        let Self { extension, .. } = self;
        let top_n = self.top_n_tokens.unwrap_or(0);
        let prompt_top_n = extension.prompt_top_n_tokens.unwrap_or(top_n);
        let sampling = Sampling {
            do_sample,
            seed: seed.unwrap_or(0),
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.and_then(|top_k| u32::try_from(top_k).ok()).unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            typical_p: self.typical_p.unwrap_or(1.0),
            min_p: extension.min_p.unwrap_or(0.0),
            // A factor beyond these bounds changes nothing more, and could take logits to infinity.
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0).clamp(1e-6, 1e6),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            presence_penalty: extension.presence_penalty.unwrap_or(0.0),
            logit_bias: extension.logit_bias.into_iter().map(|(token_id, bias)| LogitBias { token_id, bias }).collect(),
            stop_token_ids: extension.stop_token_ids,
            min_new_tokens: extension.min_tokens.unwrap_or(0),
            watermark: self.watermark,
            top_n: top_n.max(prompt_top_n),
            prompt_logprobs: self.decoder_input_details,
            model_logprobs: self.model_logprobs,
            // Made of token ids when these are known to be in the vocabulary.
            allowed_tokens: Vec::new(),
            bad_words: Vec::new(),
        };
        Checked {
            sampling,
            grammar: self.grammar.map(|constraint| constraint.grammar),
            seed,
            num_generations,
            max_new_tokens: self.max_new_tokens,
            default_new_tokens: self.default_new_tokens,
            stop_strings: self.stop,
            truncate: self.truncate,
            ignore_eos: extension.ignore_eos,
            priority: extension.priority.unwrap_or(0),
            timeout: extension.timeout.map(Duration::from_secs_f64),
            num_alternatives: NumAlternatives { of_generated: top_n as usize, of_prompt: prompt_top_n as usize },
            add_special_tokens: extension.add_special_tokens,
            shows_special_tokens: extension.shows_special_tokens,
            cache_salt: extension.cache_salt,
            adapter_id: self.adapter_id,
            allowed_token_ids: extension.allowed_token_ids.unwrap_or_default(),
            bad_words: extension.bad_words,
            reasoning_budget: extension.reasoning_budget,
        }
    }

    /// Any parameter that only makes sense with sampling turns sampling on.
    fn samples(&self) -> bool {
        self.do_sample
            || self.temperature.is_some_and(|temperature| temperature != 1.0)
            || self.top_k.is_some()
            || self.top_p.is_some_and(|top_p| top_p < 1.0)
            || self.typical_p.is_some_and(|typical_p| typical_p < 1.0)
            || self.extension.min_p.is_some_and(|min_p| min_p > 0.0)
    }

    fn check_ranges(&self) -> Result<(), ValidationError> {
        let positive = |value: Option<f32>| value.is_none_or(|value| value > 0.0 && value.is_finite());
        let fraction = |value: Option<f32>| value.is_none_or(|value| value > 0.0 && value < 1.0);
        for (field, value) in [("temperature", self.temperature), ("repetition_penalty", self.repetition_penalty)] {
            ensure(value != Some(f32::INFINITY), ValidationError::TooLarge { field })?;
        }
        ensure(positive(self.temperature), ValidationError::Temperature)?;
        ensure(positive(self.repetition_penalty), ValidationError::RepetitionPenalty)?;
        ensure(is_penalty(self.frequency_penalty), ValidationError::FrequencyPenalty)?;
        ensure(fraction(self.top_p), ValidationError::TopP)?;
        ensure(fraction(self.typical_p), ValidationError::TypicalP)?;
        ensure(self.top_k.is_none_or(|top_k| top_k > 0), ValidationError::TopK)?;
        ensure(self.max_new_tokens != Some(0), ValidationError::NoNewTokens)
    }
}

/// A bit for each token.
fn mask(token_ids: &[u32]) -> Vec<u8> {
    let mut mask = vec![0; token_ids.iter().max().map_or(0, |&last| last as usize / 8 + 1)];
    token_ids.iter().for_each(|&id| mask[id as usize / 8] |= 1 << (id % 8));
    mask
}

fn ensure(holds: bool, error: ValidationError) -> Result<(), ValidationError> {
    if holds { Ok(()) } else { Err(error) }
}

/// Whether this is a penalty that is subtracted from logits, or none.
fn is_penalty(value: Option<f32>) -> bool {
    value.is_none_or(|penalty| (-2.0..=2.0).contains(&penalty))
}

impl Extension {
    fn check(&self, max_new_tokens: Option<u32>) -> Result<(), ValidationError> {
        ensure(self.min_p.is_none_or(|min_p| (0.0..=1.0).contains(&min_p)), ValidationError::MinP)?;
        ensure(is_penalty(self.presence_penalty), ValidationError::PresencePenalty)?;
        let (max, given) = (MAX_LOGIT_BIASES, self.logit_bias.len());
        ensure(given <= max, ValidationError::LogitBiasCount { max, given })?;
        let beyond = |(_, bias): &&(u32, f32)| !(-MAX_LOGIT_BIAS..=MAX_LOGIT_BIAS).contains(bias);
        if let Some(&(token_id, bias)) = self.logit_bias.iter().find(beyond) {
            return Err(ValidationError::LogitBias { token_id, bias });
        }
        if let (Some(min), Some(max)) = (self.min_tokens, max_new_tokens) {
            ensure(min <= max, ValidationError::MinTokens { min, max })?;
        }
        let (max, given) = (MAX_STOP_TOKENS, self.stop_token_ids.len());
        ensure(given <= max, ValidationError::StopTokenCount { max, given })?;
        ensure(self.allowed_token_ids.as_ref().is_none_or(|ids| !ids.is_empty()), ValidationError::NoAllowedTokens)?;
        ensure(!self.bad_words.iter().any(|word| word.trim().is_empty()), ValidationError::EmptyBadWord)?;
        let num_bytes = self.bad_words.iter().map(String::len).sum();
        for (unit, max, given) in
            [("words", MAX_BAD_WORDS, self.bad_words.len()), ("bytes together", MAX_BAD_WORD_BYTES, num_bytes)]
        {
            ensure(given <= max, ValidationError::BadWords { unit, max, given })?;
        }
        if let Some(given) = self.priority.filter(|priority| !(-MAX_PRIORITY..=MAX_PRIORITY).contains(priority)) {
            return Err(ValidationError::Priority { max: MAX_PRIORITY, given });
        }
        if let Some(given) = self.timeout.filter(|&timeout| !(timeout > 0.0 && timeout <= MAX_TIMEOUT_S)) {
            return Err(ValidationError::Timeout { max: MAX_TIMEOUT_S, given });
        }
        Ok(())
    }
}

impl Checked {
    /// The seed of generation `index`. The first generation has the request's seed, as a single generation would.
    pub(super) fn seed_of(&self, index: usize) -> u64 {
        // Multiples of the golden ratio's bits: seeds s and s + 1 have no generation in common.
        self.sampling.seed.wrapping_add((index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// Every token id in the parameters must be in the vocabulary.
    pub(super) fn check_token_ids(&self, vocabulary: u32) -> Result<(), ValidationError> {
        let given = self.allowed_token_ids.len();
        ensure(given <= vocabulary as usize, ValidationError::AllowedTokenCount { max: vocabulary, given })?;
        let biased = self.sampling.logit_bias.iter().map(|entry| ("logit_bias", entry.token_id));
        let stops = self.sampling.stop_token_ids.iter().map(|&id| ("stop_token_ids", id));
        let allowed = self.allowed_token_ids.iter().map(|&id| ("allowed_token_ids", id));
        match stops.chain(biased).chain(allowed).find(|&(_, id)| id >= vocabulary) {
            Some((field, given)) => Err(ValidationError::TokenId { field, vocabulary, given }),
            None => Ok(()),
        }
    }

    /// Limits the answer's thoughts, whatever tokens the request allows.
    pub(super) fn limit_thoughts(&mut self, limit: ThoughtLimit) {
        if !self.allowed_token_ids.is_empty() {
            self.allowed_token_ids.extend(&limit.end_ids);
        }
        let grammar = self.grammar.take();
        self.grammar = Some(Grammar::Thoughts(Box::new(LimitedThoughts { limit, grammar })));
    }

    /// Masks the tokens that the request does not allow. `bad_words`: the tokens of each.
    pub(super) fn restrict(&mut self, bad_words: Vec<Vec<u32>>) {
        self.sampling.allowed_tokens = mask(&self.allowed_token_ids);
        self.sampling.bad_words = bad_words.into_iter().map(|token_ids| BadWord { token_ids }).collect();
    }

    /// Checks `truncate`. As in TGI, after the check for an empty prompt and before encoding.
    pub(super) fn check_truncate(&self, limits: &RequestLimits) -> Result<(), ValidationError> {
        match self.truncate {
            Some(given) if given == 0 || given > limits.max_input_tokens => {
                Err(ValidationError::Truncate { max: limits.max_input_tokens, given })
            }
            _ => Ok(()),
        }
    }

    /// Truncates the prompt, checks its length, and returns the largest number of new tokens.
    pub(super) fn fit(&self, prompt_token_ids: &mut Vec<u32>, limits: &RequestLimits) -> Result<u32, ValidationError> {
        if let Some(truncate) = self.truncate {
            // The end of a prompt matters most, so the beginning is cut off.
            prompt_token_ids.drain(..prompt_token_ids.len().saturating_sub(truncate));
        }
        let num_input_tokens = prompt_token_ids.len();
        ensure(num_input_tokens > 0, ValidationError::EmptyInput)?;
        let max_new_tokens = limits.max_new_tokens.unwrap_or(u32::MAX);
        if let Some(given) = self.max_new_tokens.filter(|&given| given > max_new_tokens) {
            return Err(ValidationError::NewTokens { max: max_new_tokens, given });
        }
        let room = limits.max_total_tokens.saturating_sub(num_input_tokens);
        let room = u32::try_from(room).unwrap_or(u32::MAX).min(max_new_tokens);
        if let Some(new) = self.max_new_tokens.filter(|&new| new > room) {
            return Err(ValidationError::TotalTokens { max: limits.max_total_tokens, input: num_input_tokens, new });
        }
        if num_input_tokens > limits.max_input_tokens || room == 0 {
            return Err(ValidationError::InputTokens { max: limits.max_input_tokens, given: num_input_tokens });
        }
        Ok(self.max_new_tokens.unwrap_or(self.default_new_tokens.map_or(room, |default| room.min(default))))
    }
}
