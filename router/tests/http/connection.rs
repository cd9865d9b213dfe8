//! Both versions of HTTP on one port, and the limits of connections.

use std::io;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, Response, StatusCode, Version};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use penstock_router::Config;
use penstock_router::config::VertexRoutes;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::model::{IM_END, word};
use crate::server::{Server, whole, within};

fn http2_client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).http2_only(true).build_http()
}

async fn stream(client: &Client<HttpConnector, Full<Bytes>>, server: &Server) -> Response<hyper::body::Incoming> {
    let body = Full::new(Bytes::from_static(br#"{"inputs": "Hi"}"#));
    let uri = format!("http://{}/generate_stream", server.address);
    let request = Request::post(uri).header("content-type", "application/json").body(body).unwrap();
    client.request(request).await.unwrap()
}

#[tokio::test]
async fn http2_with_prior_knowledge_and_http1_are_served_on_one_port() {
    let (server, mut sequences) = Server::manual().await;
    let client = http2_client();
    // Three streams of one connection, answered in the opposite order.
    let mut streams = Vec::new();
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let response = stream(&client, &server).await;
        assert_eq!((response.status(), response.version()), (StatusCode::OK, Version::HTTP_2));
        streams.push(response);
        waiting.push(sequences.recv().await.unwrap());
    }
    while let (Some(sequence), Some(response)) = (waiting.pop(), streams.pop()) {
        sequence.answer(&[word("Hello"), IM_END]);
        assert!(whole(response).await.body.contains(r#""generated_text":"Hello""#));
    }
    let answer = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    assert_eq!(answer.version(), Version::HTTP_11);
}

#[tokio::test]
async fn a_reset_http2_stream_aborts_its_sequence() {
    let (server, mut sequences) = Server::manual().await;
    let client = http2_client();
    let mut left = stream(&client, &server).await;
    let kept = stream(&client, &server).await;
    let (first, second) = (sequences.recv().await.unwrap(), sequences.recv().await.unwrap());
    first.send_token(word("Hello"));
    left.body_mut().frame().await.unwrap().unwrap();
    drop(left);
    first.aborted.await.unwrap();
    second.answer(&[word("Hello"), IM_END]);
    assert!(whole(kept).await.body.contains(r#""generated_text":"Hello""#));
}

#[tokio::test]
async fn draining_lets_both_versions_finish_and_leaves_no_connection() {
    let (mut server, mut sequences) = Server::manual().await;
    let client = http2_client();
    let new = stream(&client, &server).await;
    let old = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    // A connection without a request must not delay the shutdown.
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    let running = [sequences.recv().await.unwrap(), sequences.recv().await.unwrap()];
    server.shutdown.cancel();
    assert_eq!(server.get("/health").await.status, StatusCode::SERVICE_UNAVAILABLE);
    for sequence in running {
        sequence.answer(&[word("Hello"), IM_END]);
    }
    for response in [new, old] {
        assert!(whole(response).await.body.contains(r#""generated_text":"Hello""#));
    }
    (&mut server.served).await.unwrap().unwrap();
    assert_eq!(idle.read(&mut [0]).await.unwrap(), 0);
    assert!(TcpStream::connect(server.address).await.is_err());
}

/// Longer than a busy machine takes to send a request.
const LONG: Duration = Duration::from_secs(3);

/// Everything that the server sends until it closes the connection.
async fn until_closed(server: &Server, sent: &str) -> io::Result<String> {
    let mut connection = TcpStream::connect(server.address).await?;
    connection.write_all(sent.as_bytes()).await?;
    let mut said = String::new();
    connection.read_to_string(&mut said).await?;
    Ok(said)
}

async fn hurried(idle_timeout: Duration) -> Server {
    let adjust = |config: &mut Config| {
        config.connections.idle_timeout = idle_timeout;
        config.connections.body_timeout = Duration::from_millis(300);
        config.connections.max_head_bytes = 2000;
    };
    Server::start(|sequence| sequence.answer(&[IM_END]), adjust).await
}

#[tokio::test]
async fn a_head_that_is_late_ends_the_connection() {
    let server = hurried(Duration::from_millis(300)).await;
    for sent in ["", "P", "PR", "PRI * HTTP/2.0\r\n", "GET /heal", "GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "] {
        // Closing a socket with unread input resets the connection.
        let said = until_closed(&server, sent).await.unwrap_or_default();
        assert!(!said.contains("200 OK"), "{sent:?}: {said}");
    }
    // Kept alive until the idle timeout.
    let server = hurried(LONG).await;
    let said = until_closed(&server, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert!(said.starts_with("HTTP/1.1 200 OK"), "{said}");
}

/// A connection whose client answers pings, and the task that ends when the server closes it.
async fn http2_connection(server: &Server) -> (http2::SendRequest<Full<Bytes>>, JoinHandle<hyper::Result<()>>) {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    (sender, tokio::spawn(connection))
}

#[tokio::test]
async fn an_idle_http2_connection_is_closed_and_one_with_an_open_stream_is_not() {
    let adjust = |config: &mut Config| config.connections.idle_timeout = LONG;
    let (server, mut sequences) = Server::manual_with(adjust).await;
    let (mut busy, _busy_connection) = http2_connection(&server).await;
    let body = Full::new(Bytes::from_static(br#"{"inputs": "Hi"}"#));
    let request = Request::post("http://test/generate_stream").header("content-type", "application/json");
    let open = busy.send_request(request.body(body).unwrap()).await.unwrap();
    let sequence = sequences.recv().await.unwrap();

    let (_never_used, connection) = http2_connection(&server).await;
    within("the end of an unused connection", connection).await.unwrap().unwrap();
    let (mut used, connection) = http2_connection(&server).await;
    let request = Request::get("http://test/health").body(Full::default()).unwrap();
    assert_eq!(whole(used.send_request(request).await.unwrap()).await.status, StatusCode::OK);
    within("the end of an idle connection", connection).await.unwrap().unwrap();

    // Older than both connections that were closed.
    sequence.answer(&[word("Hello"), IM_END]);
    assert!(whole(open).await.body.contains(r#""generated_text":"Hello""#));
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_and_counted() {
    let (server, _sequences) = Server::manual_with(|config| config.connections.max_connections = 2).await;
    let ask = async |connection: &mut TcpStream| {
        connection.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await?;
        let mut said = vec![0; 1 << 20];
        let count = connection.read(&mut said).await?;
        io::Result::Ok(String::from_utf8_lossy(&said[..count]).into_owned())
    };
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut connection = TcpStream::connect(server.address).await.unwrap();
        assert!(ask(&mut connection).await.unwrap().starts_with("HTTP/1.1 200"));
        open.push(connection);
    }
    let mut refused = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(refused.read(&mut [0]).await.unwrap_or(0), 0);
    drop(open.pop());
    let again = async {
        loop {
            let mut connection = TcpStream::connect(server.address).await.unwrap();
            match ask(&mut connection).await {
                Ok(said) if said.starts_with("HTTP/1.1 200") => break,
                // The server has not seen yet that the other connection is closed.
                _ => {}
            }
        }
    };
    within("a free connection", again).await;
    drop(open);
    let counted = async {
        loop {
            let uri = format!("http://{}/metrics", server.address);
            let request = Request::get(uri).body(Full::<Bytes>::default()).unwrap();
            if let Ok(response) = Client::builder(TokioExecutor::new()).build_http().request(request).await {
                break whole(response).await.body;
            }
        }
    };
    let metrics = within("metrics", counted).await;
    assert!(metrics.contains("\npenstock_connections_refused "), "{metrics}");
}

#[tokio::test]
async fn a_body_that_is_late_is_answered_408() {
    let server = hurried(LONG).await;
    let head = "HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    let said = until_closed(&server, &format!("POST /generate {head}")).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 408"), "{said}");
    assert!(said.contains("the request's body was not complete after 0.3 s"), "{said}");
    let said = until_closed(&server, &format!("POST /v1/completions {head}")).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 408") && said.contains(r#""code":"malformed_request""#), "{said}");
    assert!(server.engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    let server = hurried(LONG).await;
    let said =
        until_closed(&server, &format!("GET /health HTTP/1.1\r\nx-large: {}\r\n\r\n", "x".repeat(3000))).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 431"), "{said}");
}

#[tokio::test]
async fn a_client_that_is_still_sending_reads_its_refusal() {
    let server = hurried(LONG).await;
    let large = "x".repeat(8 << 20);
    let said = until_closed(&server, &format!("GET /health HTTP/1.1\r\nx-large: {large}\r\n\r\n")).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 431"), "{said}");
    let head = format!("host: x\r\ncontent-type: application/json\r\ncontent-length: {}", large.len());
    let said = until_closed(&server, &format!("POST /generate HTTP/1.1\r\n{head}\r\n\r\n{large}")).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 413"), "{said}");
}

#[tokio::test]
async fn health_is_served_on_vertex_s_path() {
    let adjust = |config: &mut Config| {
        config.vertex_routes = VertexRoutes { predict: None, health: Some("/a/health".to_owned()) };
    };
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), adjust).await;
    assert_eq!(server.get("/a/health").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_connection_serves_on_after_a_request_was_refused_with_its_body_unread() {
    let server = Server::answering(&[IM_END]).await;
    for (path, status) in [("/nowhere", "404"), ("/health", "405"), ("/v1/nowhere", "404")] {
        let body = "x".repeat(300_000);
        let refused = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let next = "GET /info HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        let said = within("both answers", until_closed(&server, &(refused + next))).await.unwrap();
        assert!(said.starts_with(&format!("HTTP/1.1 {status}")), "{said}");
        assert_eq!(said.matches("HTTP/1.1 200").count(), 1, "{said}");
    }
}

#[tokio::test]
async fn a_refused_request_whose_body_is_too_long_ends_its_connection() {
    let server = Server::answering(&[IM_END]).await;
    let refused = format!("POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 2 << 20);
    let said = within("an answer", until_closed(&server, &refused)).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 404"), "{said}");
}
