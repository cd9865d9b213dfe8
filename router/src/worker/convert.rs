//! Converts between the protocol's messages and the types of scheduler and engine.

use std::time::Duration;

use penstock_proto as proto;
use penstock_scheduler::{Advance, NewSequence, Plan, Save, SequenceId, Transfer};

use super::report::{Fault, Output, OutputError, StepReport, WorkerTiming};
use super::{Description, Phase, WorkerError};
use crate::sequence::{
    Adapter, Constants, EncodedImage, Grammar, Image, ImageError, ImageInput, ImageSpan, Matryoshka, Pooling, Task,
    ThoughtLimit, Token, TopToken,
};

pub(super) fn plan<'a>(plan: Plan, constants: impl Fn(SequenceId) -> &'a Constants) -> proto::Plan {
    proto::Plan {
        step: plan.step,
        freed_sequence_ids: plan.freed_sequence_ids.into_iter().map(|id| id.0).collect(),
        new_sequences: plan.new_sequences.into_iter().map(|new| new_sequence(constants(new.id), new)).collect(),
        advances: Some(advances(&plan.advances)),
        drafts_by_lookup: plan.drafts_by_lookup,
        drafts_only_forced: plan.drafts_only_forced,
        transfers: (!plan.transfers.is_empty()).then(|| transfers(&plan.transfers)),
        saves: (!plan.saves.is_empty()).then(|| saves(&plan.saves)),
    }
}

fn saves(saves: &[Save]) -> proto::Saves {
    proto::Saves {
        sequence_ids: saves.iter().flat_map(|save| save.id.0.to_le_bytes()).collect(),
        num_tokens: saves.iter().flat_map(|save| save.num_tokens.to_le_bytes()).collect(),
        snapshots: saves.iter().flat_map(|save| save.snapshot.to_le_bytes()).collect(),
    }
}

fn transfers(transfers: &[Transfer]) -> proto::Transfers {
    let mut columns = proto::Transfers::default();
    for transfer in transfers {
        let (kind, source, target) = match transfer {
            Transfer::Store { block_id, slot } => (0, block_id, slot),
            Transfer::Load { slot, block_id } => (1, slot, block_id),
            Transfer::Demote { from, to } => (2, from, to),
        };
        columns.sources.extend(source.to_le_bytes());
        columns.targets.extend(target.to_le_bytes());
        columns.kinds.push(kind);
    }
    columns
}

fn new_sequence(constants: &Constants, new: NewSequence) -> proto::NewSequence {
    proto::NewSequence {
        sequence_id: new.id.0,
        token_ids: new.token_ids,
        num_prompt_tokens: new.num_prompt_tokens,
        num_computed_tokens: new.num_computed_tokens,
        block_ids: new.block_ids,
        sampling: Some(constants.sampling.clone()),
        num_source_tokens: new.num_source_tokens,
        grammar: constants.grammar.as_ref().map(grammar),
        num_second_text_tokens: constants.num_second_text_tokens,
        adapter: constants.adapter.as_ref().map(adapter),
        images: constants.images.iter().map(image_span).collect(),
        cache_salt: constants.cache_salt,
        snapshot: new.snapshot,
    }
}

pub(super) fn adapter(adapter: &Adapter) -> proto::Adapter {
    proto::Adapter { id: adapter.id, path: adapter.path.to_string_lossy().into_owned() }
}

pub(crate) fn image(image: &Image) -> proto::Image {
    proto::Image { hash: image.hash().to_vec(), data: image.data().to_vec() }
}

fn image_span(span: &ImageSpan) -> proto::ImageSpan {
    let proto::Image { hash, data } = image(&span.image);
    proto::ImageSpan { hash, offset: span.offset, data }
}

fn image_input(input: proto::ImageInput) -> ImageInput {
    let proto::ImageInput {
        placeholder_id,
        placeholder,
        template_text,
        is_whole,
        is_prompt_whole,
        text_prefix,
        text_suffix,
        max_bytes,
        has_adapter,
    } = input;
    ImageInput {
        placeholder_id,
        placeholder,
        template_text,
        is_whole,
        is_prompt_whole,
        text_prefix,
        text_suffix,
        max_bytes,
        has_adapter,
    }
}

/// The error of an answer that has one.
pub(crate) fn image_error(answer: &proto::EncodeImagesResponse) -> ImageError {
    let error = if answer.is_overloaded { ImageError::Overloaded } else { ImageError::Unusable };
    error(answer.error.clone())
}

pub(crate) fn encoded_image(image: proto::EncodedImage) -> EncodedImage {
    let proto::EncodedImage { token_ids, num_bytes } = image;
    EncodedImage { token_ids, num_bytes }
}

pub(crate) fn grammar(grammar: &Grammar) -> proto::Grammar {
    let kind = match grammar {
        Grammar::JsonSchema(schema) => proto::grammar::Kind::JsonSchema(schema.clone()),
        Grammar::Regex(regex) => proto::grammar::Kind::Regex(regex.clone()),
        Grammar::Lark(lark) => proto::grammar::Kind::Lark(lark.clone()),
        Grammar::Thoughts(limited) => {
            let kind = limited.grammar.as_ref().and_then(|inner| self::grammar(inner).kind);
            return proto::Grammar { kind, thoughts: Some(thought_limit(&limited.limit)) };
        }
    };
    proto::Grammar { kind: Some(kind), thoughts: None }
}

fn thought_limit(limit: &ThoughtLimit) -> proto::ThoughtLimit {
    let ThoughtLimit { max_tokens, open, close, end_ids, reopens } = limit.clone();
    proto::ThoughtLimit { max_tokens, open, close, end_ids, reopens }
}

fn pooling(pooling: &proto::Pooling, is_encoder: bool) -> Pooling {
    let task = match pooling.task() {
        proto::Task::Embed => Task::Embed,
        proto::Task::Rerank => Task::Rerank,
    };
    let dimensions = &pooling.matryoshka_dimensions;
    Pooling {
        task,
        num_dimensions: pooling.num_dimensions as usize,
        is_normalized: pooling.is_normalized,
        reads_all_outputs: pooling.reads_all_outputs,
        is_encoder,
        has_token_types: pooling.has_token_types,
        matryoshka: match pooling.is_matryoshka {
            false => Matryoshka::No,
            true if dimensions.is_empty() => Matryoshka::Any,
            true => Matryoshka::Of(dimensions.iter().map(|&num| num as usize).collect()),
        },
    }
}

/// Rank 0's answer to `Load`, with the sizes of rank 0.
pub(crate) fn description(answer: proto::LoadResponse) -> Description {
    Description {
        architecture: answer.architecture,
        dtype: answer.dtype,
        device: answer.device,
        device_name: answer.device_name,
        libraries: answer.libraries,
        attention: answer.attention,
        vocab_size: answer.vocab_size,
        block_tokens: answer.block_tokens,
        max_position_tokens: answer.max_position_tokens,
        default_position_tokens: Some(answer.default_position_tokens).filter(|tokens| *tokens > 0),
        window_tokens: (answer.window_tokens > 0).then_some(answer.window_tokens),
        decoder_prefix: answer.decoder_prefix.into(),
        max_source_tokens: answer.max_source_tokens,
        can_draft: answer.can_draft,
        drafts_with_model: answer.drafts_with_model,
        drafts_extend_lookup: answer.drafts_extend_lookup,
        weight_bytes: answer.weight_bytes,
        kv_bytes_per_block: answer.kv_bytes_per_block,
        state_bytes_per_sequence: answer.state_bytes_per_sequence,
        snapshot_bytes: answer.snapshot_bytes,
        snapshot_reach_tokens: answer.snapshot_reach_tokens,
        phases: phases(answer.phases),
        image_input: answer.image_input.map(image_input),
        pooling: answer.pooling.map(|it| pooling(&it, answer.max_source_tokens > 0)),
    }
}

pub(super) fn phases(phases: Vec<proto::Phase>) -> Vec<Phase> {
    let phase = |phase: proto::Phase| Phase {
        name: phase.name,
        duration: Duration::try_from_secs_f64(phase.seconds).unwrap_or_default(),
    };
    phases.into_iter().map(phase).collect()
}

fn advances(advances: &[Advance]) -> proto::Advances {
    proto::Advances {
        sequence_ids: advances.iter().flat_map(|advance| advance.id.0.to_le_bytes()).collect(),
        num_tokens: advances.iter().flat_map(|advance| advance.num_tokens.to_le_bytes()).collect(),
        sample: advances.iter().map(|advance| u8::from(advance.sample)).collect(),
        num_new_blocks: advances
            .iter()
            .flat_map(|advance| (advance.new_block_ids.len() as u32).to_le_bytes())
            .collect(),
        new_block_ids: advances
            .iter()
            .flat_map(|advance| &advance.new_block_ids)
            .flat_map(|id| id.to_le_bytes())
            .collect(),
        num_draft_tokens: drafts(advances),
        last_token_ids: advances
            .iter()
            .filter_map(|advance| advance.last_token_id)
            .flat_map(u32::to_le_bytes)
            .collect(),
    }
}

/// Empty without drafts, so that a server without speculation sends nothing for them.
fn drafts(advances: &[Advance]) -> Vec<u8> {
    match advances.iter().any(|advance| advance.num_draft_tokens > 0) {
        true => advances.iter().flat_map(|advance| advance.num_draft_tokens.to_le_bytes()).collect(),
        false => Vec::new(),
    }
}

/// Rank 0's result, checked as far as the protocol alone can tell. Sampled sequences come first, in the order of the
/// advances.
pub(super) fn report(result: proto::StepResult) -> Result<StepReport, WorkerError> {
    let timing = result.timing.unwrap_or_default();
    let sequence_ids = column(&result.sequence_ids, u64::from_le_bytes)?;
    let sampled = tokens(result.sampled.unwrap_or_default())?;
    let vectors = column(&result.vectors, f32::from_le_bytes)?;
    if !vectors.is_empty() {
        return Ok(StepReport {
            step: result.step,
            outputs: pooled(&sequence_ids, &vectors, result.errors)?,
            timing: worker_timing(timing)?,
        });
    }
    if sequence_ids.len() != sampled.len() {
        return Err(garbled(format!("{} tokens of {} sequences", sampled.len(), sequence_ids.len())));
    }
    let mut outputs: Vec<Output> = Vec::with_capacity(sequence_ids.len() + result.errors.len());
    for (id, token) in sequence_ids.into_iter().zip(sampled) {
        match outputs.last_mut() {
            Some(Output { id: last, tokens: Ok(tokens), .. }) if last.0 == id => tokens.push(token),
            _ => outputs.push(output(id, vec![token])),
        }
    }
    let num_draft_tokens = column(&result.num_draft_tokens, u32::from_le_bytes)?;
    if !num_draft_tokens.is_empty() && num_draft_tokens.len() != outputs.len() {
        return Err(garbled(format!(
            "draft tokens of {} sequences, {} sampled",
            num_draft_tokens.len(),
            outputs.len()
        )));
    }
    let drafted_by_model = result.drafted_by_model;
    if !drafted_by_model.is_empty() && drafted_by_model.len() != num_draft_tokens.len() {
        return Err(garbled(format!(
            "draft tokens of {} sequences, and of {} whether a model made them",
            num_draft_tokens.len(),
            drafted_by_model.len()
        )));
    }
    for (output, num_draft_tokens) in outputs.iter_mut().zip(num_draft_tokens) {
        output.num_draft_tokens = num_draft_tokens;
    }
    for (output, by_model) in outputs.iter_mut().zip(drafted_by_model) {
        output.drafted_by_model = by_model != 0;
    }
    for prompt in result.prompts {
        let id = SequenceId(prompt.sequence_id);
        let prompt_tokens = tokens(prompt.tokens.unwrap_or_default())?;
        match outputs.iter_mut().find(|output| output.id == id) {
            Some(output) => output.prompt_tokens = prompt_tokens,
            None => outputs.push(Output { prompt_tokens, ..output(id.0, Vec::new()) }),
        }
    }
    for output in &mut outputs {
        fail_unless_numbers(output);
    }
    outputs.extend(result.errors.into_iter().map(failed));
    Ok(StepReport { step: result.step, outputs, timing: worker_timing(timing)? })
}

/// The outputs of a step whose sequences are pooled: as many numbers for each.
fn pooled(
    sequence_ids: &[u64],
    vectors: &[f32],
    errors: Vec<proto::SequenceError>,
) -> Result<Vec<Output>, WorkerError> {
    let num_sequences = sequence_ids.len();
    let Some(num_dimensions) =
        vectors.len().checked_div(num_sequences).filter(|num| num * num_sequences == vectors.len())
    else {
        return Err(garbled(format!("{} numbers in the vectors of {num_sequences} sequences", vectors.len())));
    };
    let output = |(&id, vector): (&u64, &[f32])| Output { vector: Some(vector.to_vec()), ..output(id, Vec::new()) };
    let outputs = sequence_ids.iter().zip(vectors.chunks(num_dimensions)).map(output);
    Ok(outputs.chain(errors.into_iter().map(failed)).collect())
}

fn worker_timing(timing: proto::StepTiming) -> Result<WorkerTiming, WorkerError> {
    Ok(WorkerTiming {
        prepare: duration(timing.prepare_seconds)?,
        forward: duration(timing.forward_seconds)?,
        sample: duration(timing.sample_seconds)?,
        idle: duration(timing.idle_seconds)?,
        draft: duration(timing.draft_seconds)?,
    })
}

fn output(id: u64, tokens: Vec<Token>) -> Output {
    Output {
        id: SequenceId(id),
        tokens: Ok(tokens),
        num_draft_tokens: 0,
        drafted_by_model: false,
        prompt_tokens: Vec::new(),
        vector: None,
    }
}

fn failed(error: proto::SequenceError) -> Output {
    let fault = match error.fault() {
        proto::Fault::Server => Fault::Server,
        proto::Fault::Request => Fault::Request,
        proto::Fault::None => Fault::None,
    };
    Output { tokens: Err(OutputError { reason: error.reason, fault }), ..output(error.sequence_id, Vec::new()) }
}

/// Fails a sequence with a logprob that is not a number. Its logits were not finite, which says nothing about the group.
fn fail_unless_numbers(output: &mut Output) {
    // Rounding may take a logprob a little above 0.
    let is_logprob = |logprob: f32| logprob < 0.01;
    let has_numbers = |token: &Token| is_logprob(token.logprob) && token.top.iter().all(|top| is_logprob(top.logprob));
    if !output.tokens.iter().flatten().chain(&output.prompt_tokens).all(has_numbers) {
        let reason = "the worker returned a logprob that is not a number, or above 0".to_owned();
        output.tokens = Err(OutputError { reason, fault: Fault::Server });
        output.prompt_tokens.clear();
    }
}

/// Tokens with their logprobs.
pub(crate) fn tokens(tokens: proto::Tokens) -> Result<Vec<Token>, WorkerError> {
    let ids = column(&tokens.ids, u32::from_le_bytes)?;
    let logprobs = column(&tokens.logprobs, f32::from_le_bytes)?;
    if ids.len() != logprobs.len() {
        return Err(garbled(format!("{} tokens with {} logprobs", ids.len(), logprobs.len())));
    }
    let token = |(id, logprob)| Token { id, logprob, top: Vec::new() };
    let mut listed: Vec<Token> = ids.into_iter().zip(logprobs).map(token).collect();
    for top in tokens.top {
        let ids = column(&top.ids, u32::from_le_bytes)?;
        let logprobs = column(&top.logprobs, f32::from_le_bytes)?;
        let token = listed.get_mut(top.index as usize).filter(|_| ids.len() == logprobs.len());
        let token = token.ok_or_else(|| garbled(format!("unusable alternatives to token {}", top.index)))?;
        token.top = ids.into_iter().zip(logprobs).map(|(id, logprob)| TopToken { id, logprob }).collect();
    }
    Ok(listed)
}

/// A packed array of little-endian numbers.
pub(crate) fn column<T, const WIDTH: usize>(bytes: &[u8], number: fn([u8; WIDTH]) -> T) -> Result<Vec<T>, WorkerError> {
    let (numbers, rest) = bytes.as_chunks::<WIDTH>();
    if !rest.is_empty() {
        return Err(garbled(format!("a column of {} bytes, which is not a multiple of {WIDTH}", bytes.len())));
    }
    Ok(numbers.iter().map(|bytes| number(*bytes)).collect())
}

fn duration(seconds: f64) -> Result<Duration, WorkerError> {
    Duration::try_from_secs_f64(seconds).map_err(|error| garbled(format!("a timing of {seconds} s ({error})")))
}

fn garbled(reason: String) -> WorkerError {
    WorkerError::Garbled { rank: 0, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(logprobs: &[f32]) -> proto::Tokens {
        proto::Tokens {
            ids: (1..=logprobs.len() as u32).flat_map(u32::to_le_bytes).collect(),
            logprobs: logprobs.iter().flat_map(|logprob| logprob.to_le_bytes()).collect(),
            top: Vec::new(),
        }
    }

    fn result_of(sequence_ids: &[u64], sampled: proto::Tokens) -> proto::StepResult {
        let sequence_ids = sequence_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        proto::StepResult { step: 1, sequence_ids, sampled: Some(sampled), ..Default::default() }
    }

    #[test]
    fn a_logprob_that_is_not_a_number_fails_its_sequence_alone() {
        let with_top = |logprob: f32| {
            let top = proto::TopTokens { index: 1, ids: vec![1, 0, 0, 0], logprobs: logprob.to_le_bytes().into() };
            proto::Tokens { top: vec![top], ..packed(&[-0.5, -0.5]) }
        };
        let prompt = proto::PromptTokens { sequence_id: 8, tokens: Some(packed(&[-0.5, f32::NAN])) };
        for broken in [
            result_of(&[7, 8], packed(&[-0.5, f32::NAN])),
            result_of(&[7, 8], packed(&[-0.5, f32::INFINITY])),
            result_of(&[7, 8], with_top(f32::NAN)),
            proto::StepResult { prompts: vec![prompt.clone()], ..result_of(&[7, 8], packed(&[-0.5, -0.5])) },
            proto::StepResult { prompts: vec![prompt], ..result_of(&[7], packed(&[-0.5])) },
        ] {
            let outputs = report(broken).unwrap().outputs;
            assert_eq!(outputs.iter().map(|output| output.id.0).collect::<Vec<_>>(), [7, 8]);
            assert!(outputs[0].tokens.is_ok(), "{outputs:?}");
            let error = outputs[1].tokens.as_ref().unwrap_err();
            assert_eq!((error.fault, outputs[1].prompt_tokens.len()), (Fault::Server, 0));
        }
    }

    #[test]
    fn neighbouring_tokens_of_one_sequence_are_one_output() {
        let outputs = report(result_of(&[7, 7, 8], packed(&[-0.5, -1.5, f32::NEG_INFINITY]))).unwrap().outputs;
        let ids = |output: &Output| output.tokens.as_ref().unwrap().iter().map(|token| token.id).collect::<Vec<_>>();
        assert_eq!(
            outputs.iter().map(|output| (output.id.0, ids(output))).collect::<Vec<_>>(),
            [(7, vec![1, 2]), (8, vec![3])]
        );
    }

    #[test]
    fn draft_tokens_are_counted_for_each_sequence() {
        let drafted = |num: &[u32]| proto::StepResult {
            num_draft_tokens: num.iter().flat_map(|num| num.to_le_bytes()).collect(),
            ..result_of(&[7, 7, 8], packed(&[-0.5; 3]))
        };
        let counts = |result| report(result).unwrap().outputs.iter().map(|it| it.num_draft_tokens).collect::<Vec<_>>();
        assert_eq!(counts(drafted(&[4, 1])), [4, 1]);
        assert_eq!(counts(drafted(&[])), [0, 0]);
        assert!(report(drafted(&[4, 4, 1])).is_err());
    }

    #[test]
    fn a_plan_s_advances_are_columns() {
        let advance = |id, new_block_ids, sample| Advance {
            id: SequenceId(id),
            num_tokens: 3,
            num_draft_tokens: u32::from(sample) * id as u32,
            new_block_ids,
            sample,
            last_token_id: sample.then_some(id as u32 + 1),
        };
        let packed = advances(&[advance(1, vec![5, 6], false), advance(256, vec![], true), advance(2, vec![7], true)]);
        assert_eq!(column(&packed.num_draft_tokens, u32::from_le_bytes).unwrap(), [0, 256, 2]);
        assert!(advances(&[advance(1, vec![], false)]).num_draft_tokens.is_empty());
        assert_eq!(column(&packed.sequence_ids, u64::from_le_bytes).unwrap(), [1, 256, 2]);
        assert_eq!(column(&packed.num_tokens, u32::from_le_bytes).unwrap(), [3, 3, 3]);
        assert_eq!(packed.sample, [0, 1, 1]);
        assert_eq!(column(&packed.last_token_ids, u32::from_le_bytes).unwrap(), [257, 3]);
        assert_eq!(column(&packed.num_new_blocks, u32::from_le_bytes).unwrap(), [2, 0, 1]);
        assert_eq!(column(&packed.new_block_ids, u32::from_le_bytes).unwrap(), [5, 6, 7]);
    }
}
