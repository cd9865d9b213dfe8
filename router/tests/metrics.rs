//! The metrics after a known number of requests, in a separate process, so that no other test adds to the counts.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests are tests")]

#[allow(dead_code, reason = "shared with tests/http")]
#[path = "http/model.rs"]
mod model;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "http/server.rs"]
mod server;

use http_body_util::BodyExt;
use penstock_router::sequence::{SequenceEvent, SequenceFailure};
use serde_json::json;

use crate::model::{IM_END, word};
use crate::server::Server;

#[tokio::test]
async fn every_request_is_counted_once_and_ends_once() {
    let (server, mut sequences) = Server::manual_with(|config| config.limits.max_concurrent_requests = 2).await;
    let tokens = [word("Hello"), IM_END];

    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let _ = tokio::join!(server.post("/v1/chat/completions", chat), async {
        sequences.recv().await.unwrap().answer(&tokens);
    });
    let _ = tokio::join!(server.post("/v1/completions", json!({"prompt": ["a", "b"]})), async {
        sequences.recv().await.unwrap().answer(&tokens);
        sequences.recv().await.unwrap().answer(&tokens);
    });
    let _ = tokio::join!(server.post("/generate", json!({"inputs": "Hi"})), async {
        let failure = SequenceFailure::Sequence("NaN".to_owned());
        sequences.recv().await.unwrap().send(SequenceEvent::Failed(failure));
    });
    server.post("/generate", json!({"inputs": ""})).await;
    server.post_text("/generate", "application/json", "{").await;

    // Two leave while others wait outside.
    for _ in 0..2 {
        let mut left = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
        let _other = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
        let (sequence, other) = (sequences.recv().await.unwrap(), sequences.recv().await.unwrap());
        server.post("/generate", json!({"inputs": "Hi"})).await;
        sequence.send_token(word("Hello"));
        left.body_mut().frame().await.unwrap().unwrap();
        drop((left, _other));
        sequence.aborted.await.unwrap();
        other.aborted.await.unwrap();
    }

    let text = loop {
        // A record is closed just after its answer's last byte, or the client's leaving.
        let text = server.get("/metrics").await.body;
        if text.contains(r#"tgi_request_failure{err="dropped"} 4"#) {
            break text;
        }
        tokio::task::yield_now().await;
    };
    for line in [
        "tgi_request_count 10",
        "tgi_request_success 2",
        r#"tgi_request_failure{err="generation"} 1"#,
        r#"tgi_request_failure{err="validation"} 1"#,
        r#"tgi_request_failure{err="overloaded"} 2"#,
        "tgi_request_duration_count 2",
        "tgi_request_generated_tokens_sum 6",
        "tgi_request_input_length_count 8",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}
