//! Admission: which requests are refused, and that every request returns its permit.

use std::time::Duration;

use axum::http::StatusCode;
use http_body_util::BodyExt;
use penstock_router::Config;
use penstock_router::sequence::SequenceEvent;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::model::{IM_END, word};
use crate::server::{Answer, Sequences, Server, whole, within};

async fn one_at_a_time() -> (Server, Sequences) {
    Server::manual_with(|config| config.limits.max_concurrent_requests = 1).await
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused_on_every_route() {
    let (server, mut sequences) = one_at_a_time().await;
    let first = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    for path in ["/generate", "/generate_stream", "/"] {
        let answer = server.post(path, json!({"inputs": "Hi"})).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.header("retry-after"), "1");
        assert_eq!(answer.body, r#"{"error":"Model is overloaded","error_type":"overloaded"}"#);
    }
    let answer = server.post("/v1/completions", json!({"prompt": "Hi", "stream": true})).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    insta::assert_snapshot!(answer.body, @r#"{"error":{"message":"Model is overloaded","type":"rate_limit_error","param":null,"code":"overloaded"}}"#);

    sequence.answer(&[IM_END]);
    whole(first).await;
    let (answer, ()) = tokio::join!(server.post("/generate", json!({"inputs": "Hi"})), async {
        sequences.recv().await.unwrap().answer(&[IM_END]);
    });
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn tokenizing_takes_a_permit() {
    let (server, mut sequences) = one_at_a_time().await;
    let first = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    let requests = [
        ("/tokenize", json!({"inputs": "Hi"})),
        ("/chat_tokenize", json!({"messages": [{"role": "user", "content": "Hi"}]})),
    ];
    for (path, body) in &requests {
        let answer = server.post(path, body.clone()).await;
        assert!(is_overloaded(path, &answer), "{path}: {}", answer.body);
    }
    sequence.answer(&[IM_END]);
    whole(first).await;
    for (path, body) in requests {
        assert_eq!(server.post(path, body).await.status, StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_refused_request_gives_its_permit_back() {
    let (server, mut sequences) = one_at_a_time().await;
    for _ in 0..3 {
        let answer = server.post("/generate", json!({"inputs": ""})).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    }
    assert!(sequences.try_recv().is_err());
}

#[tokio::test]
async fn a_disconnect_during_a_stream_aborts_the_sequence() {
    let (server, mut sequences) = one_at_a_time().await;
    let mut response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    sequence.send_token(word("Hello"));
    within("an event", response.body_mut().frame()).await.unwrap().unwrap();
    drop(response);
    sequence.aborted.await.unwrap();
}

#[tokio::test]
async fn a_disconnect_before_the_answer_aborts_the_sequence() {
    let (server, mut sequences) = one_at_a_time().await;
    let mut connection = TcpStream::connect(server.address).await.unwrap();
    let body = json!({"inputs": "Hi"}).to_string();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).await.unwrap();
    let sequence = sequences.recv().await.unwrap();
    drop(connection);
    sequence.aborted.await.unwrap();
}

#[tokio::test]
async fn a_stop_string_aborts_the_engine_s_sequence() {
    let (server, mut sequences) = one_at_a_time().await;
    let body = json!({"inputs": "Hi", "parameters": {"stop": ["END"]}});
    let (answer, sequence) = tokio::join!(server.post("/generate", body), async {
        let sequence = sequences.recv().await.unwrap();
        sequence.send_token(word("END"));
        sequence
    });
    assert_eq!(answer.json()["generated_text"], "END");
    sequence.aborted.await.unwrap();
}

fn endless_grammar() -> Value {
    json!({"type": "regex", "value": "endless"})
}

/// A request for every generating route, streamed where the route can.
fn generating(max_new_tokens: u32) -> [(&'static str, Value); 7] {
    let parameters = json!({"max_new_tokens": max_new_tokens});
    let message = json!([{"role": "user", "content": "Hi"}]);
    [
        ("/generate", json!({"inputs": "Hi", "parameters": parameters})),
        ("/generate_stream", json!({"inputs": "Hi", "parameters": parameters})),
        ("/", json!({"inputs": "Hi", "stream": true, "parameters": parameters})),
        ("/invocations", json!({"inputs": "Hi", "parameters": parameters})),
        ("/v1/completions", json!({"prompt": "Hi", "stream": true, "max_tokens": max_new_tokens})),
        ("/v1/chat/completions", json!({"messages": message, "max_tokens": max_new_tokens})),
        ("/v1/chat/completions", json!({"messages": message, "max_tokens": max_new_tokens, "stream": true})),
    ]
}

fn is_overloaded(path: &str, answer: &Answer) -> bool {
    let body = answer.json();
    let code = if path.starts_with("/v1") { &body["error"]["code"] } else { &body["error_type"] };
    let retry_after_s: u64 = answer.header("retry-after").parse().unwrap();
    answer.status == StatusCode::TOO_MANY_REQUESTS && code == "overloaded" && (1..=60).contains(&retry_after_s)
}

#[tokio::test]
async fn the_queue_is_bounded_by_its_tokens() {
    let (server, mut sequences) = Server::manual_with(|config: &mut Config| config.queue.max_tokens = 100).await;
    // An empty queue accepts any size.
    let body = json!({"inputs": "Hi", "parameters": {"max_new_tokens": 90}});
    let mut first = server.open("/generate_stream", body).await;
    let sequence = sequences.recv().await.unwrap();
    for (path, body) in generating(60) {
        let answer = server.post(path, body).await;
        assert!(is_overloaded(path, &answer), "{path}: {}", answer.body);
    }
    assert!(sequences.try_recv().is_err());

    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    sequence.send_token(word("Hello"));
    within("an event", first.body_mut().frame()).await.unwrap().unwrap();
    let body = json!({"inputs": "Hi", "parameters": {"max_new_tokens": 60}});
    let (answer, ()) = tokio::join!(server.post("/generate", body), async {
        sequences.recv().await.unwrap().answer(&[IM_END]);
    });
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn a_full_queue_refuses_before_the_prompt_is_checked() {
    let (server, mut sequences) = Server::manual_with(|config: &mut Config| config.queue.max_tokens = 1).await;
    let _first = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let _sequence = sequences.recv().await.unwrap();
    let answer = server.post("/generate", json!({"inputs": ""})).await;
    assert!(is_overloaded("/generate", &answer), "{}", answer.body);
}

#[tokio::test]
async fn a_queue_timeout_is_a_status_and_not_an_event() {
    let soon = |config: &mut Config| config.queue.timeout = Some(Duration::from_millis(20));
    let (server, mut sequences) = Server::manual_with(soon).await;
    for (path, body) in generating(5) {
        let answer = server.post(path, body).await;
        assert!(is_overloaded(path, &answer), "{path}: {}", answer.body);
        if let Ok(sequence) = sequences.try_recv() {
            sequence.aborted.await.unwrap();
        }
    }
    let body = json!({"inputs": "Hi", "parameters": {"grammar": endless_grammar()}});
    let answer = server.post("/generate", body).await;
    assert!(is_overloaded("/generate", &answer), "{}", answer.body);
}

#[tokio::test]
async fn with_a_queue_timeout_a_stream_begins_with_the_first_step() {
    let late = |config: &mut Config| config.queue.timeout = Some(Duration::from_secs(600));
    let (server, mut sequences) = Server::manual_with(late).await;
    for (path, body) in generating(5).into_iter().skip(1).step_by(2) {
        let mut answer = std::pin::pin!(server.open(path, body));
        let sequence = tokio::select! {
            _ = &mut answer => panic!("{path} began before the first step"),
            sequence = sequences.recv() => sequence.unwrap(),
        };
        assert!(futures::poll!(&mut answer).is_pending());
        sequence.answer(&[word("Hello"), IM_END]);
        assert_eq!(whole(answer.await).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_request_s_timeout_covers_the_time_before_its_first_step() {
    let (server, mut sequences) = Server::manual().await;
    let parameters = json!({"timeout": 0.02, "grammar": endless_grammar()});
    for path in ["/generate", "/generate_stream"] {
        let answer = server.post(path, json!({"inputs": "Hi", "parameters": parameters})).await;
        assert_eq!((answer.status, &answer.json()["error_type"]), (StatusCode::GATEWAY_TIMEOUT, &json!("timeout")));
    }
    assert!(sequences.try_recv().is_err());
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": {"timeout": 0.02}})).await;
    assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
}
