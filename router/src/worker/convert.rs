//! Between the scheduler's and the engine's types and the protocol's. Nothing else does this.

use std::time::Duration;

use penstock_proto as proto;
use penstock_scheduler::{Advance, NewSequence, Plan, SequenceId};

use super::step::{Fault, Output, OutputError, StepReport};
use super::{WorkerError, WorkerTiming};
use crate::sequence::{Grammar, LogprobSource, Sampling, Token, TopToken};

pub(super) fn plan<'a>(plan: Plan, sampling: impl Fn(SequenceId) -> &'a Sampling) -> proto::Plan {
    proto::Plan {
        step: plan.step,
        freed_sequence_ids: plan.freed_sequence_ids.into_iter().map(|id| id.0).collect(),
        new_sequences: plan.new_sequences.into_iter().map(|start| new_sequence(sampling(start.id), start)).collect(),
        advances: plan.advances.into_iter().map(advance).collect(),
    }
}

fn new_sequence(sampling: &Sampling, start: NewSequence) -> proto::NewSequence {
    proto::NewSequence {
        sequence_id: start.id.0,
        token_ids: start.token_ids,
        num_prompt_tokens: start.num_prompt_tokens,
        num_computed_tokens: start.num_computed_tokens,
        block_ids: start.block_ids,
        sampling: Some(message(sampling)),
        adapter_id: String::new(),
        num_source_tokens: start.num_source_tokens,
    }
}

fn message(sampling: &Sampling) -> proto::Sampling {
    let bias = |&(token_id, bias): &(u32, f32)| proto::LogitBias { token_id, bias };
    let source = match sampling.logprob_source {
        LogprobSource::Processed => proto::LogprobSource::Processed,
        LogprobSource::Model => proto::LogprobSource::Model,
    };
    proto::Sampling {
        do_sample: sampling.do_sample,
        seed: sampling.seed,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        typical_p: sampling.typical_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        logit_bias: sampling.logit_bias.iter().map(bias).collect(),
        min_new_tokens: sampling.min_new_tokens,
        stop_token_ids: sampling.stop_token_ids.to_vec(),
        watermark: sampling.watermark,
        top_n: sampling.top_n,
        prompt_logprobs: sampling.prompt_logprobs,
        logprob_source: source.into(),
        grammar: sampling.grammar.as_ref().map(grammar),
    }
}

pub(super) fn grammar(grammar: &Grammar) -> proto::Grammar {
    let kind = match grammar {
        Grammar::JsonSchema(schema) => proto::grammar::Kind::JsonSchema(schema.clone()),
        Grammar::Regex(regex) => proto::grammar::Kind::Regex(regex.clone()),
        Grammar::Lark(lark) => proto::grammar::Kind::Lark(lark.clone()),
    };
    proto::Grammar { kind: Some(kind) }
}

fn advance(advance: Advance) -> proto::Advance {
    proto::Advance {
        sequence_id: advance.id.0,
        num_tokens: advance.num_tokens,
        new_block_ids: advance.new_block_ids,
        sample: advance.sample,
    }
}

/// Rank 0's result, checked as far as the protocol alone can tell.
pub(super) fn report(result: proto::StepResult) -> Result<StepReport, WorkerError> {
    let timing = result.timing.unwrap_or_default();
    Ok(StepReport {
        step: result.step,
        outputs: result.outputs.into_iter().map(output).collect::<Result<_, _>>()?,
        timing: WorkerTiming {
            prepare: duration(timing.prepare_seconds)?,
            forward: duration(timing.forward_seconds)?,
            sample: duration(timing.sample_seconds)?,
            idle: duration(timing.idle_seconds)?,
        },
    })
}

fn output(output: proto::SequenceOutput) -> Result<Output, WorkerError> {
    let id = SequenceId(output.sequence_id);
    let are_numbers = output.tokens.iter().chain(&output.prompt_tokens).all(has_numbers);
    if !are_numbers {
        return Err(garbled(format!("sequence {} has a logprob that is not a number, or above 0", id.0)));
    }
    let fault = match output.fault() {
        proto::Fault::Server => Fault::Server,
        proto::Fault::Request => Fault::Request,
    };
    let prompt_tokens = output.prompt_tokens.into_iter().map(token).collect::<Vec<_>>();
    if !output.error.is_empty() {
        let error = OutputError { reason: output.error, fault };
        return Ok(Output { id, tokens: Err(error), prompt_tokens });
    }
    if output.tokens.is_empty() && prompt_tokens.is_empty() {
        return Err(garbled(format!("sequence {} has neither a token nor an error", id.0)));
    }
    Ok(Output { id, tokens: Ok(output.tokens.into_iter().map(token).collect()), prompt_tokens })
}

fn token(token: proto::Token) -> Token {
    let top = token.top.into_iter().map(|top| TopToken { id: top.id, logprob: top.logprob }).collect();
    Token { id: token.id, logprob: token.logprob, top }
}

/// Whether every logprob is one. Rounding may take it a little above 0.
fn has_numbers(token: &proto::Token) -> bool {
    let is_logprob = |logprob: f32| logprob < 0.01;
    is_logprob(token.logprob) && token.top.iter().all(|top| is_logprob(top.logprob))
}

fn duration(seconds: f64) -> Result<Duration, WorkerError> {
    Duration::try_from_secs_f64(seconds).map_err(|error| garbled(format!("a timing of {seconds} s ({error})")))
}

fn garbled(reason: String) -> WorkerError {
    WorkerError::Garbled { rank: 0, reason }
}
