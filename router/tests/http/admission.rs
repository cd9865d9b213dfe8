//! Who comes in, and that everybody who leaves makes room.

use axum::http::StatusCode;
use http_body_util::BodyExt;
use penstock_router::Config;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::model::{IM_END, word};
use crate::server::{Sequence, Server};

async fn one_at_a_time() -> (Server, mpsc::UnboundedReceiver<Sequence>) {
    let (sender, sequences) = mpsc::unbounded_channel();
    let script = move |sequence| sender.send(sequence).unwrap();
    let server = Server::start(script, |config: &mut Config| config.limits.max_concurrent_requests = 1).await;
    (server, sequences)
}

#[tokio::test]
async fn too_many_are_refused_at_once_on_every_route() {
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
    first.into_body().collect().await.unwrap();
    let (answer, ()) = tokio::join!(server.post("/generate", json!({"inputs": "Hi"})), async {
        sequences.recv().await.unwrap().answer(&[IM_END]);
    });
    assert_eq!(answer.status, StatusCode::OK);
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
async fn a_client_that_leaves_its_stream_aborts_its_sequence() {
    let (server, mut sequences) = one_at_a_time().await;
    let mut response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    sequence.send_token(word("Hello"));
    response.body_mut().frame().await.unwrap().unwrap();
    drop(response);
    sequence.aborted.await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_before_its_answer_aborts_its_sequence() {
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
async fn a_stop_string_aborts_what_the_engine_would_go_on_with() {
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
