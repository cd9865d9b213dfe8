//! Every answer carries the id of its request, and so does its line in the log.

use std::io::Write;
use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;
use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use crate::model::IM_END;
use crate::server::{Answer, Server, whole};

async fn with_id(server: &Server, method: &str, path: &str, id: &str) -> Answer {
    let request = server.request(method, path).header("x-request-id", id).header("content-type", "application/json");
    let body = if method == "POST" { json!({"inputs": "Hi"}).to_string() } else { String::new() };
    whole(server.send(request, &body).await).await
}

#[tokio::test]
async fn an_id_comes_back_on_every_answer() {
    let server = Server::answering(&[IM_END]).await;
    for (method, path, status) in [
        ("GET", "/health", StatusCode::OK),
        ("POST", "/generate", StatusCode::OK),
        ("POST", "/generate_stream", StatusCode::OK),
        ("GET", "/nowhere", StatusCode::NOT_FOUND),
        ("GET", "/v1/nowhere", StatusCode::NOT_FOUND),
        ("GET", "/generate", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/v1/completions", StatusCode::BAD_REQUEST),
        ("OPTIONS", "/generate", StatusCode::OK),
    ] {
        let answer = with_id(&server, method, path, "mine-1").await;
        assert_eq!(answer.status, status, "{method} {path}");
        assert_eq!(answer.header("x-request-id"), "mine-1", "{method} {path}");
    }
    let keys = |config: &mut Config| config.api_keys = ApiKeys::new(["key".to_owned()]);
    let server = Server::start(|_| panic!("unlucky"), keys).await;
    let answer = with_id(&server, "POST", "/generate", "mine-2").await;
    assert_eq!((answer.status, answer.header("x-request-id")), (StatusCode::UNAUTHORIZED, "mine-2"));
    let request = server.request("POST", "/generate").header("authorization", "Bearer key");
    let request = request.header("content-type", "application/json").header("x-request-id", "mine-3");
    let answer = whole(server.send(request, r#"{"inputs": "Hi"}"#).await).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (StatusCode::INTERNAL_SERVER_ERROR, "mine-3"));
}

#[tokio::test]
async fn an_id_that_cannot_be_logged_is_replaced() {
    let server = Server::answering(&[IM_END]).await;
    let longest = "x".repeat(128);
    assert_eq!(with_id(&server, "GET", "/health", &longest).await.header("x-request-id"), longest);
    let mut made = Vec::new();
    for id in ["", "a b", &"x".repeat(129)] {
        let answer = with_id(&server, "GET", "/health", id).await;
        let id = answer.header("x-request-id").to_owned();
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        made.push(id);
    }
    made.push(server.get("/health").await.header("x-request-id").to_owned());
    made.sort_unstable();
    made.dedup();
    assert_eq!(made.len(), 4, "every request has an id of its own");
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The server runs in this test's only thread, so its log is all here.
#[tokio::test]
async fn the_log_line_has_the_id_and_the_trace_but_no_key_and_no_text() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().json().with_writer(log.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let keys = |config: &mut Config| config.api_keys = ApiKeys::new(["hidden-key".to_owned()]);
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), keys).await;
    for authorization in ["Bearer hidden-key", "Bearer other-key"] {
        let request = server
            .request("POST", "/generate")
            .header("content-type", "application/json")
            .header("authorization", authorization)
            .header("x-request-id", "mine-4")
            .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        whole(server.send(request, r#"{"inputs": "SECRET TEXT"}"#).await).await;
    }
    let log = loop {
        // A record is closed just after its answer's last byte.
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        if log.lines().count() >= 2 {
            break log;
        }
        tokio::task::yield_now().await;
    };
    for (line, message) in log.lines().zip(["request", "request refused"]) {
        let fields = &serde_json::from_str::<serde_json::Value>(line).unwrap()["fields"];
        assert_eq!(fields["message"], message);
        assert_eq!(fields["request_id"], "mine-4");
        assert_eq!(fields["trace_id"], "0af7651916cd43dd8448eb211c80319c");
    }
    for secret in ["hidden-key", "other-key", "SECRET"] {
        assert!(!log.contains(secret), "{log}");
    }
}
