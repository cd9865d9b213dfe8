//! Default limits and requests of the engine's tests.

use std::time::Duration;

use penstock_router::sequence::{SequenceRequest, greedy};
use penstock_scheduler::Limits;

pub fn limits() -> Limits {
    Limits {
        max_step_tokens: 64,
        max_step_sequences: 16,
        max_sequence_tokens: 512,
        num_blocks: 256,
        block_tokens: 16,
        max_steps_in_flight: 2,
        prefix_caching: false,
        priority_ageing: Duration::MAX,
        max_inter_token: None,
        max_overtaking: 0,
        window_tokens: None,
    }
}

/// A greedy request to a model without an encoder.
pub fn request(prompt: &[u32], max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        prompt_token_ids: prompt.to_vec(),
        num_source_tokens: 0,
        max_new_tokens,
        sampling: greedy(),
        grammar: None,
        priority: 0,
        group: None,
    }
}
