//! One log line per request, with its ids and without its secrets, in a separate process, so that no other test logs.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests are tests")]

#[allow(dead_code, reason = "shared with tests/http")]
#[path = "http/model.rs"]
mod model;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "http/server.rs"]
mod server;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_router::Config;
use penstock_router::config::ApiKeys;
use tracing_subscriber::fmt::MakeWriter;

use crate::model::IM_END;
use crate::server::{Server, whole};

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
    // A record is closed just after its answer's last byte.
    let written = async {
        loop {
            let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
            if log.lines().count() >= 2 {
                return log;
            }
            tokio::task::yield_now().await;
        }
    };
    let log = tokio::time::timeout(Duration::from_secs(30), written).await.unwrap();
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
