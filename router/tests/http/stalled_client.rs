//! Clients that do not read their responses.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use penstock_router::sequence::SequenceEvent;

use crate::model::{IM_END, word};
use crate::server::{Sequences, Server, whole, within};

/// A server with one permit that gives up on a client after a fifth of a second.
async fn with_short_timeout() -> (Server, Sequences) {
    Server::manual_with(|config| {
        config.limits.max_concurrent_requests = 1;
        config.limits.max_total_tokens = 100_000;
        config.connections.client_timeout = Duration::from_millis(200);
    })
    .await
}

/// Starts an answer and returns when the server gives up on its client.
async fn is_given_up(sequences: &mut Sequences, num_tokens: usize) {
    let sequence = sequences.recv().await.unwrap();
    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    (0..num_tokens).for_each(|_| sequence.send_token(word("Hello")));
    sequence.aborted.await.unwrap();
}

/// Checks that the permit is free and the client was counted.
async fn has_made_room(server: &Server, sequences: &mut Sequences) {
    let body = serde_json::json!({"inputs": "Hi"});
    let (answer, ()) = tokio::join!(server.post("/generate", body), async {
        sequences.recv().await.unwrap().answer(&[IM_END]);
    });
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let metrics = server.get("/metrics").await.body;
    assert!(metrics.contains("\npenstock_clients_given_up "), "{metrics}");
}

#[tokio::test]
async fn an_unread_http2_stream_is_given_up_and_its_connection_continues() {
    let (server, mut sequences) = with_short_timeout().await;
    let client: Client<_, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).http2_only(true).http2_initial_stream_window_size(1024).build_http();
    let send = || {
        let request = Request::post(format!("http://{}/generate_stream", server.address));
        let body = Full::new(Bytes::from_static(br#"{"inputs": "Hi"}"#));
        client.request(request.header("content-type", "application/json").body(body).unwrap())
    };
    let unread = send().await.unwrap();
    // About ten times the window.
    is_given_up(&mut sequences, 100).await;
    has_made_room(&server, &mut sequences).await;
    // A client that reads it after all sees an error.
    assert!(within("its end", unread.into_body().collect()).await.is_err());
    let read = send().await.unwrap();
    sequences.recv().await.unwrap().answer(&[word("Hello"), IM_END]);
    assert!(whole(read).await.body.contains(r#""generated_text":"Hello""#));
}

/// The kernel detects it, because its buffers hold the whole response so far.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn an_http1_client_that_does_not_read_loses_its_connection() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let (server, mut sequences) = with_short_timeout().await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2048).unwrap();
    let mut client = socket.connect(server.address).await.unwrap();
    let head = "POST /generate_stream HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: 16";
    client.write_all(format!("{head}\r\n\r\n{{\"inputs\": \"Hi\"}}").as_bytes()).await.unwrap();
    is_given_up(&mut sequences, 100).await;
    has_made_room(&server, &mut sequences).await;
    let mut read = Vec::new();
    // Either a reset or the end.
    let _ = within("the connection's end", client.read_to_end(&mut read)).await;
    assert!(read.len() < 9000, "{} bytes of some 11,000 arrived", read.len());
}
