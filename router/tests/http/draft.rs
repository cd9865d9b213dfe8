//! Draft tokens in the answers' counts.

use penstock_router::sequence::{DraftCount, FinishReason, SequenceEvent};
use serde_json::{Value, json};

use crate::model::{IM_END, word};
use crate::server::Server;

/// A server that answers `Hello world and more` in two steps with drafts of four and two tokens, if there are `drafts`.
async fn speculating(drafts: bool) -> Server {
    Server::scripted(move |sequence| {
        let send_drafts = |num_verified, num_right| {
            if drafts {
                sequence.send(SequenceEvent::Drafts(DraftCount { num_verified, num_right }));
            }
        };
        sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
        send_drafts(4, 1);
        sequence.send_token(word("Hello"));
        sequence.send_token(word(" world"));
        send_drafts(2, 1);
        sequence.send_token(word(" and more"));
        sequence.send_token(IM_END);
        sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
    })
    .await
}

fn last_event(text: &str) -> Value {
    let mut data = text.lines().filter_map(|line| line.strip_prefix("data:"));
    serde_json::from_str(data.next_back().expect("an event")).expect("JSON")
}

#[tokio::test]
async fn usage_counts_right_and_wrong_drafts() {
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let usage = |answer: Value| answer["usage"]["completion_tokens_details"].clone();
    let server = speculating(true).await;
    let expected = json!({"reasoning_tokens": 0, "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4});
    assert_eq!(usage(server.post("/v1/chat/completions", chat.clone()).await.json()), expected);
    let server = speculating(false).await;
    assert_eq!(usage(server.post("/v1/chat/completions", chat).await.json()), json!({"reasoning_tokens": 0}));
}

#[tokio::test]
async fn details_count_verified_and_accepted_drafts() {
    let request = json!({"inputs": "Hi", "parameters": {"details": true}});
    let server = speculating(true).await;
    let expected = json!({"verified": 6, "accepted": 2});
    assert_eq!(server.post("/generate", request.clone()).await.json()["details"]["draft_tokens"], expected);
    let streamed = server.post("/generate_stream", request.clone()).await;
    assert_eq!(last_event(&streamed.body)["details"]["draft_tokens"], expected);
    let server = speculating(false).await;
    assert!(server.post("/generate", request).await.json()["details"].get("draft_tokens").is_none());
}
