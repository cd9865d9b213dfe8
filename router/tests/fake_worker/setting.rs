//! Default limits and requests of the engine's tests, and what their streams must give.

use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use penstock_router::generator::{Generator, SequenceStream};
use penstock_router::sequence::{FinishReason, SequenceEvent, SequenceFailure, SequenceRequest, greedy};
use penstock_scheduler::Limits;

use super::expected_tokens;

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub const FINISHED: SequenceEvent = SequenceEvent::Finished(FinishReason::Length);

pub const fn limits() -> Limits {
    Limits {
        max_step_tokens: 64,
        max_step_sequences: 16,
        max_sequence_tokens: 512,
        num_blocks: 256,
        block_tokens: 16,
        max_steps_in_flight: 2,
        max_image_bytes: 100,
        ..Limits::PLAIN
    }
}

pub async fn wait_until(condition: impl Fn() -> bool) {
    let check = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, check).await.expect("the condition holds in time");
}

/// A greedy request to a model without an encoder.
pub fn request(prompt: &[u32], max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        prompt_token_ids: prompt.to_vec(),
        generated_token_ids: Vec::new(),
        num_source_tokens: 0,
        max_new_tokens,
        sampling: greedy(),
        grammar: None,
        images: [].into(),
        num_second_text_tokens: 0,
        needs_prompt_outputs: false,
        priority: 0,
        group: None,
        cache_salt: None,
        content_salts: [].into(),
        adapter: None,
        adapter_hash: None,
        timeline: None,
    }
}

/// The tokens and the terminal event. Fails unless the start comes first, and exactly one terminal event, last.
pub async fn collect(stream: SequenceStream) -> (Vec<u32>, SequenceEvent) {
    let mut events: Vec<SequenceEvent> = stream.collect().await;
    let terminal = events.pop().expect("a stream has at least its terminal event");
    let is_terminal = matches!(terminal, SequenceEvent::Finished(_) | SequenceEvent::Failed(_));
    assert!(is_terminal, "the last event is {terminal:?}");
    let mut tokens = Vec::new();
    for (index, event) in events.into_iter().enumerate() {
        match event {
            SequenceEvent::Started { .. } => assert_eq!(index, 0, "it started twice"),
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::Drafts(count) => assert!(count.num_right <= count.num_verified, "{count:?}"),
            other => panic!("{other:?} before the end"),
        }
    }
    (tokens, terminal)
}

/// Submits the prompts at once. The future checks that each stream gets its `num_tokens` tokens.
pub fn streams_are_complete(
    engine: &impl Generator,
    prompts: Vec<Vec<u32>>,
    num_tokens: u32,
) -> impl Future<Output = ()> {
    let streams: Vec<_> = prompts.iter().map(|prompt| collect(engine.submit(request(prompt, num_tokens)))).collect();
    async move {
        for (prompt, stream) in prompts.iter().zip(join_all(streams).await) {
            assert_eq!(stream, (expected_tokens(prompt, num_tokens as usize), FINISHED));
        }
    }
}

pub fn worker_failure(event: SequenceEvent) -> String {
    match event {
        SequenceEvent::Failed(SequenceFailure::Worker(reason)) => reason,
        other => panic!("{other:?} is not a failure of the worker"),
    }
}
