//! Failures during generation, and the status that each dialect gives them.

use axum::http::StatusCode;
use penstock_router::sequence::{FinishReason, SequenceEvent, SequenceFailure};
use serde_json::{Value, json};

use crate::model::word;
use crate::server::{Sequence, Server};

const REASON: &str = "the grammar leaves no way on";

type Fault = fn(String) -> SequenceFailure;

/// Every sequence fails after one token.
async fn failing(fault: Fault) -> Server {
    Server::scripted(move |sequence: Sequence| {
        sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
        sequence.send_token(word("Hello"));
        sequence.send(SequenceEvent::Failed(fault(REASON.to_owned())));
    })
    .await
}

/// A model without stop tokens. Every sequence sends these tokens, and then how it ends.
async fn without_stop_tokens(token_ids: &'static [u32], end: SequenceEvent) -> Server {
    let script = move |sequence: Sequence| {
        sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
        token_ids.iter().for_each(|id| sequence.send_token(*id));
        sequence.send(end.clone());
    };
    Server::start(script, |config| {
        for name in ["tokenizer_config.json", "generation_config.json"] {
            std::fs::write(config.model_folder.join(name), "{}").unwrap();
        }
    })
    .await
}

fn constrained(streams: bool) -> Value {
    json!({"prompt": "Hi", "guided_regex": "a*", "stream": streams})
}

#[tokio::test]
async fn a_grammar_that_ends_before_the_first_token_is_the_request_s_fault() {
    let server = without_stop_tokens(&[], SequenceEvent::Finished(FinishReason::StopToken)).await;
    let answer = server.post("/v1/completions", constrained(false)).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.body);
    let message = answer.json()["error"]["message"].clone();
    assert!(message.as_str().unwrap().ends_with("no token of the model can begin a text of this grammar"), "{message}");
}

#[tokio::test]
async fn a_failure_behind_a_token_that_may_be_the_last_one_costs_no_token() {
    let failed = SequenceEvent::Failed(SequenceFailure::Worker(REASON.to_owned()));
    let server = without_stop_tokens(&[97, 98], failed).await;
    let events = server.post("/v1/completions", constrained(true)).await.events();
    let [first, second, failure, done] = &events[..] else { panic!("{events:?}") };
    let text = |event: &str| serde_json::from_str::<Value>(event).unwrap()["choices"][0]["text"].clone();
    assert_eq!((text(first), text(second), done.as_str()), (json!("a"), json!("b"), "[DONE]"));
    assert!(failure.contains(REASON), "{failure}");
}

fn chat(streams: bool) -> Value {
    json!({"messages": [{"role": "user", "content": "Hi"}], "stream": streams})
}

fn completion(streams: bool) -> Value {
    json!({"prompt": "Hi", "stream": streams})
}

#[tokio::test]
async fn on_tgi_s_routes_every_failed_generation_is_424() {
    for (fault, error) in [
        (SequenceFailure::Request as Fault, format!("Request failed during generation: {REASON}")),
        (SequenceFailure::Sequence, format!("Request failed during generation: {REASON}")),
        (SequenceFailure::Worker, format!("Request failed during generation: the model workers stopped: {REASON}")),
    ] {
        let server = failing(fault).await;
        let body = json!({"error": error, "error_type": "generation"});
        for path in ["/generate", "/", "/invocations"] {
            let answer = server.post(path, json!({"inputs": "Hi"})).await;
            assert_eq!((answer.status, answer.json()), (StatusCode::FAILED_DEPENDENCY, body.clone()), "{path}");
        }
        for path in ["/generate_stream", "/", "/invocations"] {
            let answer = server.post(path, json!({"inputs": "Hi", "stream": true})).await;
            let events = answer.events();
            assert_eq!((answer.status, events.len()), (StatusCode::OK, 2), "{path}");
            assert_eq!(events[1], body.to_string(), "{path}");
        }
    }
}

#[tokio::test]
async fn on_openai_s_routes_the_request_s_fault_is_400_and_the_server_s_is_500() {
    for (fault, status, kind) in [
        (SequenceFailure::Request as Fault, StatusCode::BAD_REQUEST, "invalid_request_error"),
        (SequenceFailure::Sequence, StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
        (SequenceFailure::Worker, StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
    ] {
        let server = failing(fault).await;
        for (path, body) in [("/v1/chat/completions", chat as fn(bool) -> Value), ("/v1/completions", completion)] {
            let answer = server.post(path, body(false)).await;
            let error = &answer.json()["error"];
            assert_eq!((answer.status, &error["type"], &error["code"]), (status, &json!(kind), &json!("generation")));
            assert!(error["message"].as_str().unwrap().ends_with(REASON), "{path}: {error}");
            assert!(error.get("http_status_code").is_none(), "{path}: {error}");

            let answer = server.post(path, body(true)).await;
            let events = answer.events();
            let [_, failure, done] = &events[..] else { panic!("{path}: {events:?}") };
            let failure: Value = serde_json::from_str(failure).unwrap();
            assert_eq!((answer.status, done.as_str()), (StatusCode::OK, "[DONE]"), "{path}");
            assert_eq!(failure["error"]["type"], kind, "{path}");
            assert_eq!(failure["error"]["http_status_code"], status.as_u16(), "{path}");
        }
    }
}
