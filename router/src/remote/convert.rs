//! Converts between the engine protocol's messages and the router's types.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use penstock_proto::engine as proto;
use penstock_proto::engine::event::Kind;
use penstock_scheduler::Stats;

use super::{PROTOCOL_VERSION, Properties, RemoteError, STATUS_INTERVAL, ServerDescription, ServerState};
use crate::generator::Health;
use crate::sequence::{
    AdapterHash, ContentSalt, DraftCount, FinishReason, Grammar, Image, ImageSpan, LimitedThoughts, Matryoshka,
    Pooling, SequenceEvent, SequenceFailure, SequenceRequest, ServerAdapters, Task, ThoughtLimit, Token,
};
use crate::worker::{Description, convert};

pub(crate) fn description(description: &ServerDescription) -> proto::Description {
    let property = |(name, value): &(String, String)| proto::Property { name: name.clone(), value: value.clone() };
    proto::Description {
        protocol_version: PROTOCOL_VERSION,
        properties: description.properties.0.iter().map(property).collect(),
        model: Some(model(&description.model)),
        max_input_tokens: description.max_input_tokens,
        max_total_tokens: description.max_total_tokens,
        max_new_tokens: description.max_new_tokens,
        max_queued_tokens: description.max_queued_tokens,
        num_blocks: description.num_blocks,
        num_slots: description.num_slots,
        prefix_caching: description.prefix_caching,
        step_deadline_seconds: description.step_deadline.as_secs_f64(),
        status_interval_seconds: STATUS_INTERVAL.as_secs_f64(),
    }
}

pub(super) fn described(description: proto::Description) -> Result<ServerDescription, RemoteError> {
    if description.protocol_version != PROTOCOL_VERSION {
        return Err(RemoteError::Version { theirs: description.protocol_version, ours: PROTOCOL_VERSION });
    }
    let model = description.model.ok_or_else(|| garbled("a description without a model"))?;
    if model.block_tokens == 0 || description.num_blocks == 0 {
        return Err(garbled("a KV cache without blocks"));
    }
    let property = |property: proto::Property| (property.name, property.value);
    let step_deadline = Duration::try_from_secs_f64(description.step_deadline_seconds);
    Ok(ServerDescription {
        properties: Properties(description.properties.into_iter().map(property).collect()),
        model: convert::description(model),
        max_input_tokens: description.max_input_tokens,
        max_total_tokens: description.max_total_tokens,
        max_new_tokens: description.max_new_tokens,
        max_queued_tokens: description.max_queued_tokens,
        num_blocks: description.num_blocks,
        num_slots: description.num_slots,
        prefix_caching: description.prefix_caching,
        step_deadline: step_deadline.map_err(|_| garbled("a step deadline that is no duration"))?,
    })
}

fn model(model: &Description) -> penstock_proto::LoadResponse {
    penstock_proto::LoadResponse {
        architecture: model.architecture.clone(),
        dtype: model.dtype.clone(),
        device: model.device.clone(),
        device_name: model.device_name.clone(),
        libraries: model.libraries.clone(),
        attention: model.attention.clone(),
        vocab_size: model.vocab_size,
        block_tokens: model.block_tokens,
        max_position_tokens: model.max_position_tokens,
        default_position_tokens: model.default_position_tokens.unwrap_or(0),
        window_tokens: model.window_tokens.unwrap_or(0),
        decoder_prefix: model.decoder_prefix.to_vec(),
        max_source_tokens: model.max_source_tokens,
        can_draft: model.can_draft,
        drafts_with_model: model.drafts_with_model,
        drafts_extend_lookup: model.drafts_extend_lookup,
        weight_bytes: model.weight_bytes,
        kv_bytes_per_block: model.kv_bytes_per_block,
        state_bytes_per_sequence: model.state_bytes_per_sequence,
        snapshot_bytes: model.snapshot_bytes,
        snapshot_reach_tokens: model.snapshot_reach_tokens,
        image_input: model.image_input.as_ref().map(|input| penstock_proto::ImageInput {
            placeholder_id: input.placeholder_id,
            placeholder: input.placeholder.clone(),
            template_text: input.template_text.clone(),
            is_whole: input.is_whole,
            is_prompt_whole: input.is_prompt_whole,
            text_prefix: input.text_prefix.clone(),
            text_suffix: input.text_suffix.clone(),
            max_bytes: input.max_bytes,
            has_adapter: input.has_adapter,
        }),
        pooling: model.pooling.as_ref().map(pooling),
        ..Default::default()
    }
}

fn pooling(pooling: &Pooling) -> penstock_proto::Pooling {
    let task = match pooling.task {
        Task::Rerank => penstock_proto::Task::Rerank,
        Task::Embed | Task::Generate => penstock_proto::Task::Embed,
    };
    let matryoshka_dimensions = match &pooling.matryoshka {
        Matryoshka::Of(dimensions) => dimensions.iter().map(|&num| num as u32).collect(),
        Matryoshka::Any | Matryoshka::No => Vec::new(),
    };
    penstock_proto::Pooling {
        task: task.into(),
        num_dimensions: pooling.num_dimensions as u32,
        is_normalized: pooling.is_normalized,
        reads_all_outputs: pooling.reads_all_outputs,
        is_matryoshka: pooling.matryoshka != Matryoshka::No,
        matryoshka_dimensions,
        has_token_types: pooling.has_token_types,
    }
}

pub(crate) fn status(health: &Health, is_draining: bool, stats: &Stats) -> proto::Status {
    proto::Status {
        unhealthy: health.public_reason().unwrap_or_default(),
        is_draining,
        num_queued: stats.num_queued as u64,
        num_running: stats.num_running as u64,
        num_blocks: stats.num_blocks as u64,
        num_allocatable_blocks: stats.num_allocatable_blocks as u64,
        num_retiring_blocks: stats.num_retiring_blocks as u64,
        num_cached_blocks: stats.num_cached_blocks as u64,
        num_full_memory_slots: stats.num_full_memory_slots as u64,
        num_full_disk_slots: stats.num_full_disk_slots as u64,
        num_state_slots: stats.num_state_slots as u64,
        num_snapshots: stats.num_snapshots as u64,
        num_full_snapshots: stats.num_full_snapshots as u64,
        num_queried_tokens: stats.num_queried_tokens,
        num_hit_tokens: stats.num_hit_tokens,
        num_preemptions: stats.num_preemptions,
        num_steps_in_flight: stats.num_steps_in_flight as u64,
        max_running_tokens: stats.max_running_tokens,
        num_finished_steps: stats.num_finished_steps,
        adapters: None,
    }
}

pub(super) fn state(status: proto::Status) -> ServerState {
    let stats = Stats {
        num_queued: status.num_queued as usize,
        num_running: status.num_running as usize,
        num_blocks: status.num_blocks as usize,
        num_allocatable_blocks: status.num_allocatable_blocks as usize,
        num_retiring_blocks: status.num_retiring_blocks as usize,
        num_cached_blocks: status.num_cached_blocks as usize,
        num_full_memory_slots: status.num_full_memory_slots as usize,
        num_full_disk_slots: status.num_full_disk_slots as usize,
        num_state_slots: status.num_state_slots as usize,
        num_snapshots: status.num_snapshots as usize,
        num_full_snapshots: status.num_full_snapshots as usize,
        num_queried_tokens: status.num_queried_tokens,
        num_hit_tokens: status.num_hit_tokens,
        num_preemptions: status.num_preemptions,
        num_steps_in_flight: status.num_steps_in_flight as usize,
        max_running_tokens: status.max_running_tokens,
        num_finished_steps: status.num_finished_steps,
    };
    let unhealthy = (!status.unhealthy.is_empty()).then_some(status.unhealthy);
    let adapters = status.adapters.map(|list| Arc::new(adapters(list)));
    ServerState { unhealthy, is_draining: status.is_draining, stats, adapters }
}

fn adapters(list: proto::AdapterList) -> ServerAdapters {
    let named = |adapter: proto::Adapter| Some((adapter.name, adapter_hash(&adapter.hash).ok()?));
    let by_name: HashMap<_, _> = list.adapters.into_iter().filter_map(named).collect();
    ServerAdapters { hashes: by_name.values().copied().collect(), by_name }
}

fn adapter_hash(bytes: &[u8]) -> Result<AdapterHash, String> {
    bytes.try_into().map_err(|_| format!("an adapter hash of {} bytes, must be 32", bytes.len()))
}

pub(super) fn sequence(request: &SequenceRequest) -> proto::Sequence {
    proto::Sequence {
        token_ids: request.prompt_token_ids.iter().chain(&request.generated_token_ids).copied().collect(),
        num_prompt_tokens: request.prompt_token_ids.len() as u32,
        num_source_tokens: request.num_source_tokens,
        max_new_tokens: request.max_new_tokens,
        sampling: Some(request.sampling.clone()),
        grammar: request.grammar.as_ref().map(convert::grammar),
        images: request.images.iter().map(image_span).collect(),
        num_second_text_tokens: request.num_second_text_tokens,
        needs_prompt_outputs: request.needs_prompt_outputs,
        priority: request.priority,
        group: request.group,
        cache_salt: request.cache_salt,
        content_salts: request.content_salts.iter().map(content_salt).collect(),
        adapter_hash: request.adapter_hash.map(Vec::from).unwrap_or_default(),
    }
}

fn image_span(span: &ImageSpan) -> proto::ImageSpan {
    let ImageSpan { image, offset, num_tokens, is_whole, num_bytes } = span.clone();
    proto::ImageSpan { data: image.data().to_vec(), offset, num_tokens, is_whole, num_bytes }
}

fn content_salt(content: &ContentSalt) -> proto::ContentSalt {
    proto::ContentSalt { offset: content.offset, salt: content.salt }
}

/// Fails with what is wrong with the sequence. The lengths are checked where it is submitted, and there the sum of its images, each of
/// which may take `max_image_bytes`.
pub(crate) fn request(sequence: proto::Sequence, max_image_bytes: u64) -> Result<SequenceRequest, String> {
    let mut prompt_token_ids = sequence.token_ids;
    let (num_tokens, num_prompt_tokens) = (prompt_token_ids.len(), sequence.num_prompt_tokens as usize);
    if num_prompt_tokens > num_tokens || sequence.num_source_tokens > sequence.num_prompt_tokens {
        return Err(format!(
            "a sequence of {num_tokens} tokens with a prompt of {num_prompt_tokens} and a source of {}",
            sequence.num_source_tokens
        ));
    }
    if let Some(num_bytes) = sequence.images.iter().map(|span| span.num_bytes).find(|num| *num > max_image_bytes) {
        return Err(format!("an image that takes {num_bytes} bytes, at most {max_image_bytes} are allowed"));
    }
    let hash = Some(&sequence.adapter_hash).filter(|hash| !hash.is_empty());
    let salt = |content: proto::ContentSalt| ContentSalt { offset: content.offset, salt: content.salt };
    let span = |proto::ImageSpan { data, offset, num_tokens, is_whole, num_bytes }| ImageSpan {
        image: Image::new(data),
        offset,
        num_tokens,
        is_whole,
        num_bytes,
    };
    Ok(SequenceRequest {
        generated_token_ids: prompt_token_ids.split_off(num_prompt_tokens),
        prompt_token_ids,
        num_source_tokens: sequence.num_source_tokens,
        max_new_tokens: sequence.max_new_tokens,
        sampling: sequence.sampling.ok_or("a sequence without sampling parameters")?,
        grammar: sequence.grammar.map(grammar).transpose()?,
        adapter: None,
        adapter_hash: hash.map(|hash| adapter_hash(hash)).transpose()?,
        images: sequence.images.into_iter().map(span).collect(),
        num_second_text_tokens: sequence.num_second_text_tokens,
        needs_prompt_outputs: sequence.needs_prompt_outputs,
        priority: sequence.priority,
        group: sequence.group,
        cache_salt: sequence.cache_salt,
        content_salts: sequence.content_salts.into_iter().map(salt).collect(),
        timeline: None,
    })
}

pub(crate) fn grammar(grammar: penstock_proto::Grammar) -> Result<Grammar, String> {
    use penstock_proto::grammar::Kind;
    let penstock_proto::Grammar { kind, thoughts } = grammar;
    let grammar = kind.map(|kind| match kind {
        Kind::JsonSchema(schema) => Grammar::JsonSchema(schema),
        Kind::Regex(regex) => Grammar::Regex(regex),
        Kind::Lark(lark) => Grammar::Lark(lark),
    });
    let Some(limit) = thoughts else { return grammar.ok_or_else(|| "a grammar of an unknown kind".to_owned()) };
    let penstock_proto::ThoughtLimit { max_tokens, open, close, end_ids, reopens } = limit;
    if close.is_empty() || end_ids.is_empty() {
        return Err("a limit of thoughts has no tokens that end them, or no marker".to_owned());
    }
    let limit = ThoughtLimit { max_tokens, open, close, end_ids, reopens };
    Ok(Grammar::Thoughts(Box::new(LimitedThoughts { limit, grammar })))
}

pub(crate) fn event(event: SequenceEvent) -> proto::Event {
    let kind = match event {
        SequenceEvent::Started { num_cached_tokens } => {
            Kind::Started(proto::Started { num_cached_tokens: num_cached_tokens as u64 })
        }
        SequenceEvent::PromptTokens(tokens) => Kind::PromptTokens(packed(&tokens)),
        SequenceEvent::Drafts(DraftCount { num_verified, num_right }) => {
            Kind::Drafts(proto::Drafts { num_verified, num_right })
        }
        SequenceEvent::Token(token) => Kind::Tokens(packed(&[token])),
        SequenceEvent::Vector(vector) => Kind::Vector(vector.iter().flat_map(|number| number.to_le_bytes()).collect()),
        SequenceEvent::Finished(FinishReason::Length) => Kind::Finished(proto::FinishReason::Length.into()),
        SequenceEvent::Finished(FinishReason::StopToken) => Kind::Finished(proto::FinishReason::StopToken.into()),
        SequenceEvent::Failed(failure) => {
            let (cause, reason) = match failure {
                SequenceFailure::Sequence(reason) => (proto::Cause::Sequence, reason),
                SequenceFailure::Request(reason) => (proto::Cause::Request, reason),
                SequenceFailure::Worker(reason) => (proto::Cause::Server, reason),
                failure => (proto::Cause::Server, failure.to_string()),
            };
            Kind::Failed(proto::Failure { cause: cause.into(), reason })
        }
    };
    proto::Event { kind: Some(kind) }
}

/// Several tokens of one event become several events.
pub(super) fn events(event: proto::Event) -> Result<Vec<SequenceEvent>, RemoteError> {
    let tokens = |packed| convert::tokens(packed).map_err(|error| garbled(error.to_string()));
    let event = match event.kind.ok_or_else(|| garbled("an event of an unknown kind"))? {
        Kind::Started(started) => SequenceEvent::Started { num_cached_tokens: started.num_cached_tokens as usize },
        Kind::PromptTokens(packed) => SequenceEvent::PromptTokens(tokens(packed)?),
        Kind::Drafts(proto::Drafts { num_verified, num_right }) => {
            SequenceEvent::Drafts(DraftCount { num_verified, num_right })
        }
        Kind::Tokens(packed) => return Ok(tokens(packed)?.into_iter().map(SequenceEvent::Token).collect()),
        Kind::Vector(bytes) => {
            let vector = convert::column(&bytes, f32::from_le_bytes).map_err(|error| garbled(error.to_string()))?;
            SequenceEvent::Vector(vector)
        }
        Kind::Finished(reason) => match proto::FinishReason::try_from(reason) {
            Ok(proto::FinishReason::Length) => SequenceEvent::Finished(FinishReason::Length),
            Ok(proto::FinishReason::StopToken) => SequenceEvent::Finished(FinishReason::StopToken),
            Err(_) => return Err(garbled(format!("finish reason {reason}"))),
        },
        Kind::Failed(failure) => SequenceEvent::Failed(match failure.cause() {
            proto::Cause::Sequence => SequenceFailure::Sequence(failure.reason),
            proto::Cause::Request => SequenceFailure::Request(failure.reason),
            proto::Cause::Server => SequenceFailure::Worker(failure.reason),
        }),
    };
    Ok(vec![event])
}

fn packed(tokens: &[Token]) -> penstock_proto::Tokens {
    let top = |(index, token): (usize, &Token)| {
        (!token.top.is_empty()).then(|| penstock_proto::TopTokens {
            index: index as u32,
            ids: token.top.iter().flat_map(|top| top.id.to_le_bytes()).collect(),
            logprobs: token.top.iter().flat_map(|top| top.logprob.to_le_bytes()).collect(),
        })
    };
    penstock_proto::Tokens {
        ids: tokens.iter().flat_map(|token| token.id.to_le_bytes()).collect(),
        logprobs: tokens.iter().flat_map(|token| token.logprob.to_le_bytes()).collect(),
        top: tokens.iter().enumerate().filter_map(top).collect(),
    }
}

fn garbled(what: impl Into<String>) -> RemoteError {
    RemoteError::Garbled(what.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::{TopToken, greedy};

    #[test]
    fn each_event_is_the_same_on_the_other_side() {
        let token = |id, top| Token { id, logprob: -0.5, top };
        let top = vec![TopToken { id: 7, logprob: -0.5 }, TopToken { id: 9, logprob: f32::NEG_INFINITY }];
        for sent in [
            SequenceEvent::Started { num_cached_tokens: 32 },
            SequenceEvent::PromptTokens(vec![token(1, vec![]), token(2, top.clone())]),
            SequenceEvent::Drafts(DraftCount { num_verified: 4, num_right: 2 }),
            SequenceEvent::Token(token(7, top)),
            SequenceEvent::Vector(vec![0.25, -1.0]),
            SequenceEvent::Finished(FinishReason::Length),
            SequenceEvent::Finished(FinishReason::StopToken),
            SequenceEvent::Failed(SequenceFailure::Sequence("broken".to_owned())),
            SequenceEvent::Failed(SequenceFailure::Request("impossible".to_owned())),
            SequenceEvent::Failed(SequenceFailure::Worker("gone".to_owned())),
        ] {
            assert_eq!(events(event(sent.clone())).unwrap(), [sent]);
        }
    }

    #[test]
    fn a_sequence_keeps_what_decides_its_tokens() {
        let sent = SequenceRequest {
            prompt_token_ids: vec![1, 2, 3],
            generated_token_ids: vec![4, 5],
            num_source_tokens: 2,
            max_new_tokens: 9,
            sampling: penstock_proto::Sampling { seed: 77, temperature: 0.5, ..greedy() },
            grammar: Some(Grammar::Thoughts(Box::new(LimitedThoughts {
                limit: ThoughtLimit {
                    max_tokens: 5,
                    open: "<think>".to_owned(),
                    close: "</think>".to_owned(),
                    end_ids: vec![6, 7],
                    reopens: true,
                },
                grammar: Some(Grammar::Regex("[a-z]+".to_owned())),
            }))),
            adapter: None,
            adapter_hash: Some([8; 32]),
            images: [ImageSpan {
                image: Image::new(b"PNG".to_vec()),
                offset: 1,
                num_tokens: 2,
                is_whole: true,
                num_bytes: 9,
            }]
            .into(),
            num_second_text_tokens: 1,
            needs_prompt_outputs: true,
            priority: -3,
            group: Some(5),
            cache_salt: Some(6),
            content_salts: [ContentSalt { offset: 1, salt: 7 }].into(),
            timeline: None,
        };
        assert_eq!(format!("{:?}", request(sequence(&sent), 9).unwrap()), format!("{sent:?}"));
    }

    #[test]
    fn a_sequence_that_cannot_be_is_refused() {
        let sequence = proto::Sequence { token_ids: vec![1], num_prompt_tokens: 2, ..Default::default() };
        assert!(request(sequence, 0).unwrap_err().contains("1 tokens with a prompt of 2"));
        assert!(request(proto::Sequence::default(), 0).unwrap_err().contains("without sampling"));
        let short = proto::Sequence { adapter_hash: vec![0; 31], sampling: Some(greedy()), ..Default::default() };
        assert_eq!(request(short, 0).unwrap_err(), "an adapter hash of 31 bytes, must be 32");
        let images = vec![proto::ImageSpan { num_bytes: u64::MAX, ..Default::default() }];
        let refusal = request(proto::Sequence { images, ..Default::default() }, 10).unwrap_err();
        assert_eq!(refusal, "an image that takes 18446744073709551615 bytes, at most 10 are allowed");
    }
}
