//! Draft tokens in the answers' counts, and each draft where the client asks.

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

/// The objects of a stream's events, without `[DONE]`.
fn events(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data:")?).ok()).collect()
}

#[tokio::test]
async fn each_draft_is_shown_where_the_client_asks() {
    let first = json!({"token_index": 0, "verified": 4, "accepted": 1});
    let second = json!({"token_index": 2, "verified": 2, "accepted": 1});
    let server = speculating(true).await;
    let routes = [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})),
        ("/v1/completions", json!({"prompt": "Hi"})),
    ];
    for (route, mut body) in routes {
        assert!(server.post(route, body.clone()).await.json()["choices"][0].get("drafts").is_none(), "{route}");
        body["return_drafts"] = json!(true);
        let plain = server.post(route, body.clone()).await.json();
        assert_eq!(plain["choices"][0]["drafts"], json!([first, second]), "{route}");
        body["stream"] = json!(true);
        let streamed = events(&server.post(route, body).await.body);
        let drafts: Vec<_> = streamed.iter().map(|event| event["choices"][0]["drafts"].clone()).collect();
        assert_eq!(drafts, [json!([first]), Value::Null, json!([second]), Value::Null], "{route}");
    }
    for stream in [false, true] {
        let mut body = json!({"inputs": "Hi", "stream": stream, "parameters": {"details": true}});
        let details = |body: Value| {
            let server = &server;
            async move {
                let answer = server.post("/", body).await;
                if stream { last_event(&answer.body)["details"].clone() } else { answer.json()[0]["details"].clone() }
            }
        };
        assert!(details(body.clone()).await.get("drafts").is_none());
        body["parameters"]["return_drafts"] = json!(true);
        assert_eq!(details(body).await["drafts"], json!([first, second]));
    }
}

#[tokio::test]
async fn an_answer_without_drafts_shows_none() {
    let server = speculating(false).await;
    let body = json!({"prompt": "Hi", "return_drafts": true});
    assert!(server.post("/v1/completions", body).await.json()["choices"][0].get("drafts").is_none());
}
