//! A server on a free port with the real engine, and clients that are plain sockets.

use std::time::Duration;

use penstock_router::engine::{Engine, EngineOptions};
use penstock_router::generator::Generator;
use penstock_scheduler::{Limits, Stats};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fake_worker::fleet::Fleet;
use crate::fake_worker::setting::limits;
use crate::http_server;

pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Two sequences in a step; a prompt of more than 16 tokens takes several steps.
pub const LIMITS: Limits =
    Limits { max_step_tokens: 16, max_step_sequences: 2, num_blocks: 64, max_overtaking: 4, ..limits() };

pub struct Server(http_server::Server<Engine>);

impl Server {
    pub async fn start(fleet: &Fleet) -> Self {
        let options = EngineOptions { limits: LIMITS, step_deadline: TIMEOUT, max_failures: 5 };
        let adjust = |config: &mut penstock_router::Config| config.limits.max_concurrent_requests = 1;
        Self(http_server::Server::serve(fleet.engine(options).await, adjust).await)
    }

    pub fn engine(&self) -> &Engine {
        &self.0.engine
    }

    /// Sends a request. Dropping the stream disconnects the client.
    pub async fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut connection = TcpStream::connect(self.0.address).await.unwrap();
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        connection.write_all((head + &body).as_bytes()).await.unwrap();
        connection
    }

    /// The status of a complete response.
    pub async fn status(&self, path: &str, body: &Value) -> String {
        let mut answer = String::new();
        self.send(path, body).await.read_to_string(&mut answer).await.unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    }

    pub async fn wait_until(&self, what: &str, satisfied: impl Fn(&Stats) -> bool) {
        let poll = async {
            while !satisfied(&self.0.engine.stats()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(TIMEOUT, poll).await;
        assert!(waited.is_ok(), "not {what}: {:?}", self.0.engine.stats());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.shutdown.cancel();
    }
}
