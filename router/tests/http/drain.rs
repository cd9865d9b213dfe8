//! Shutdown: unhealthy at once, no new requests, running answers finish, then the port closes.

use std::time::Duration;

use axum::http::StatusCode;
use penstock_router::Config;
use serde_json::json;

use crate::model::{IM_END, word};
use crate::server::{Server, whole};

#[tokio::test]
async fn running_requests_finish_and_new_ones_are_refused() {
    let (mut server, mut sequences) = Server::manual().await;
    let response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    server.shutdown.cancel();

    assert_eq!(server.get("/health").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(server.get("/health/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
    let answer = server.get("/health/live").await;
    assert_eq!(
        (answer.status, &answer.json()["ready"]["reason"]),
        (StatusCode::OK, &json!("the server is shutting down"))
    );
    let answer = server.post("/generate", json!({"inputs": "Hi"})).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.json()["error_type"], "shutting_down");

    sequence.answer(&[word("Hello"), IM_END]);
    let answer = whole(response).await;
    assert!(answer.body.contains(r#""generated_text":"Hello""#), "{}", answer.body);
    (&mut server.served).await.unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn requests_that_outlive_the_grace_period_end_with_an_error() {
    let hurry = |config: &mut Config| config.graceful_termination_timeout = Duration::from_millis(10);
    let (server, mut sequences) = Server::manual_with(hurry).await;
    let response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    server.shutdown.cancel();
    let answer = whole(response).await;
    assert_eq!(answer.events(), [r#"{"error":"the server is shutting down","error_type":"shutting_down"}"#]);
    sequence.aborted.await.unwrap();
    server.served.await.unwrap().unwrap();
}
