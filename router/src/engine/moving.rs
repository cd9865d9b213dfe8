//! A sequence on its way from one engine to another, and who finds that other engine.

use std::sync::Arc;

use penstock_scheduler::SequenceId;
use tokio::time::Instant;

use super::open_sequence::{OpenSequence, Terms};
use super::owner::Owner;
use crate::generator::EventSender;
use crate::sequence::{Constants, SequenceRequest, Timeline};

/// An open sequence with everything that is needed to continue it.
pub struct MovingSequence {
    pub(super) id: SequenceId,
    /// The prompt, and the generated tokens that were sent to its stream.
    pub(super) token_ids: Vec<u32>,
    pub(super) sequence: OpenSequence,
    pub(super) timeline: Option<Timeline>,
}

impl MovingSequence {
    /// A new sequence on its way to its first engine.
    pub(super) fn new(id: SequenceId, request: SequenceRequest, owner: Arc<Owner>, events: EventSender) -> Self {
        let terms = Terms {
            num_prompt_tokens: request.prompt_token_ids.len(),
            num_source_tokens: request.num_source_tokens,
            max_new_tokens: request.max_new_tokens,
            needs_prompt_outputs: request.sampling.prompt_logprobs || request.needs_prompt_outputs,
            priority: request.priority,
            group: request.group,
            content_salts: request.content_salts,
            arrived_at: Instant::now(),
        };
        let SequenceRequest {
            sampling,
            grammar,
            adapter,
            adapter_hash,
            images,
            num_second_text_tokens,
            cache_salt,
            timeline,
            ..
        } = request;
        let constants =
            Constants { sampling, grammar, adapter, adapter_hash, images, num_second_text_tokens, cache_salt };
        let mut token_ids = request.prompt_token_ids;
        token_ids.extend(request.generated_token_ids);
        Self { id, token_ids, sequence: OpenSequence::new(terms, constants, owner, events), timeline }
    }

    /// What another engine needs to continue the sequence.
    pub(crate) fn request(&self) -> SequenceRequest {
        let (terms, constants) = (self.sequence.terms(), self.sequence.constants().clone());
        let (prompt, generated) = self.token_ids.split_at(terms.num_prompt_tokens);
        SequenceRequest {
            prompt_token_ids: prompt.to_vec(),
            generated_token_ids: generated.to_vec(),
            num_source_tokens: terms.num_source_tokens,
            max_new_tokens: terms.max_new_tokens,
            sampling: constants.sampling,
            grammar: constants.grammar,
            adapter: constants.adapter,
            adapter_hash: constants.adapter_hash,
            images: constants.images,
            num_second_text_tokens: constants.num_second_text_tokens,
            needs_prompt_outputs: terms.needs_prompt_outputs,
            priority: terms.priority,
            group: terms.group,
            cache_salt: constants.cache_salt,
            content_salts: Arc::clone(&terms.content_salts),
            timeline: None,
        }
    }

    /// Unique among the engines that it may move between.
    pub fn id(&self) -> SequenceId {
        self.id
    }
}

/// Takes the sequences of an engine when its worker group or its server is lost.
pub trait Handover: Send + Sync + 'static {
    /// Passes the sequences on to other engines (`Engine::adopt`). Returns those that none takes, because none takes steps.
    /// `has_lost_cache`: this engine has lost its KV cache and its encoded images.
    fn hand_over(&self, sequences: Vec<MovingSequence>, has_lost_cache: bool) -> Vec<MovingSequence>;
}
