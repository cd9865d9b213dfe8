//! Limits on sequences, once the model and its memory are known.

use penstock_router::worker::Description;
use penstock_scheduler::BlockLayout;

use super::{Choice, ResolveError, Settings};
use crate::flag::args::Args;

/// Default limit on queued tokens, in sequences of maximum length: the default of `--max-concurrent-requests`, so that by
/// default this limit refuses no request that the other one admits.
const QUEUED_SEQUENCES: u64 = 128;
/// The same limit in sizes of the KV cache, for a cache that is large compared with the sequences.
const QUEUED_POOLS: u64 = 16;

/// Limits on the length of sequences, and on the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SequenceLimits {
    pub(crate) max_input_tokens: u32,
    pub(crate) max_total_tokens: u32,
    /// Limit on generated tokens alone, for an encoder–decoder.
    pub(crate) max_new_tokens: Option<u32>,
    pub(crate) max_queued_tokens: u64,
    pub(crate) choices: Vec<Choice>,
}

impl SequenceLimits {
    /// Checks the flags against the model and the KV cache. `step_tokens` is the limit on the tokens of one step.
    pub(crate) fn resolve(
        args: &Args,
        settings: &Settings,
        model: &Description,
        step_tokens: u32,
        num_blocks: u32,
    ) -> Result<Self, ResolveError> {
        let mut choices = Vec::new();
        let capacity = u64::from(num_blocks) * u64::from(model.block_tokens);
        let capacity = capacity.saturating_sub(u64::from(model.num_prefix_tokens()));
        let model_limit = model.max_total_tokens();
        // If every layer has a sliding window, a sequence never holds more of the cache than the window.
        let layout = BlockLayout { block_tokens: model.block_tokens, window_tokens: model.window_tokens };
        let fits = |tokens| layout.num_required_blocks(tokens + model.num_prefix_tokens()) <= num_blocks as usize;
        let (max_total_tokens, reason) = match args.max_total_tokens {
            Some(given) if given > model_limit => {
                return Err(ResolveError::BeyondModel { given, allowed: model_limit });
            }
            Some(given) if !fits(given) => {
                return Err(ResolveError::BeyondMemory { name: "max-total-tokens", given, capacity });
            }
            Some(given) => (given, "set by --max-total-tokens".to_owned()),
            None => {
                let longest = model.default_total_tokens();
                let tokens = if fits(longest) { longest } else { u32::try_from(capacity).unwrap_or(u32::MAX) };
                let reason = if tokens != longest {
                    format!("the KV cache's capacity; the model's limit is {longest}")
                } else if longest == model_limit {
                    format!("the model's limit; the KV cache holds {capacity} tokens")
                } else {
                    format!(
                        "longer sequences change the answers to short ones, because the rope scaling is dynamic; \
                         --max-total-tokens allows up to {model_limit}"
                    )
                };
                let choose = if tokens == model_limit { Choice::usual } else { Choice::new };
                choices.push(choose("max-total-tokens", tokens, reason.clone()));
                (tokens, reason)
            }
        };
        let max_input_tokens = match settings.max_input_tokens {
            Some(given) if given >= max_total_tokens => {
                return Err(ResolveError::InputBeyondTotal { given, max_total_tokens, reason });
            }
            Some(given) => check_source(given, model, step_tokens)?,
            None => {
                let (tokens, reason) = default_input(settings, model, step_tokens, max_total_tokens);
                choices.push(Choice::usual("max-input-tokens", tokens, reason));
                tokens
            }
        };
        let max_queued_tokens = args.max_queued_tokens.unwrap_or_else(|| {
            let tokens = (QUEUED_POOLS * capacity).max(QUEUED_SEQUENCES * u64::from(max_total_tokens));
            let reason = "128 sequences of maximum length or 16 times the KV cache, whichever is larger";
            choices.push(Choice::usual("max-queued-tokens", tokens, reason));
            tokens
        });
        let max_new_tokens = model.max_new_tokens();
        Ok(Self { max_input_tokens, max_total_tokens, max_new_tokens, max_queued_tokens, choices })
    }
}

/// Checks `--max-input-tokens` against an encoder, which reads its source in one step.
fn check_source(given: u32, model: &Description, step_tokens: u32) -> Result<u32, ResolveError> {
    let longest = model.max_whole_tokens();
    let (allowed, reason) = if longest <= step_tokens {
        (longest, "the model's maximum length of an input")
    } else {
        (step_tokens, "max-batch-prefill-tokens: this model reads an input in one step")
    };
    if longest > 0 && given > allowed {
        return Err(ResolveError::InputBeyondSource { given, allowed, reason });
    }
    Ok(given)
}

/// The default of `--max-input-tokens`, and its reason.
fn default_input(
    settings: &Settings,
    model: &Description,
    step_tokens: u32,
    max_total_tokens: u32,
) -> (u32, &'static str) {
    let total = (max_total_tokens.saturating_sub(1), "max-total-tokens - 1");
    if model.max_whole_tokens() == 0 {
        return total;
    }
    let remaining = match model.pooling {
        Some(_) => step_tokens,
        None => step_tokens.saturating_sub(settings.max_step_sequences).max(step_tokens / 2),
    };
    let step = (remaining, "what one step can read along with the other sequences' tokens");
    let source = (model.max_whole_tokens(), "the model's maximum length of an input");
    [source, step, total].into_iter().min_by_key(|(tokens, _)| *tokens).unwrap_or(total)
}
