//! A server on a free port with the real engine, and clients that are plain sockets.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use penstock_router::config::{ApiKeys, ConnectionLimits, QueueLimits, RequestLimits, VertexRoutes};
use penstock_router::engine::{Engine, EngineOptions, Generator};
use penstock_router::telemetry::metrics::Exporter;
use penstock_router::text::TextModel;
use penstock_router::{Config, Services, serve};
use penstock_scheduler::{Limits, Stats};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::fake_worker::fleet::Fleet;
use crate::model;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Two sequences in a step; a prompt of more than 16 tokens takes several steps.
pub const LIMITS: Limits = Limits {
    max_step_tokens: 16,
    max_step_sequences: 2,
    max_sequence_tokens: 512,
    num_blocks: 64,
    block_tokens: 16,
    max_steps_in_flight: 2,
    prefix_caching: false,
    priority_ageing: Duration::MAX,
    max_inter_token: None,
    max_overtaking: 4,
    window_tokens: None,
};
const REQUEST_LIMITS: RequestLimits = RequestLimits {
    max_concurrent_requests: 1,
    max_best_of: 1,
    max_stop_sequences: 1,
    max_top_n_tokens: 1,
    max_input_tokens: 256,
    max_total_tokens: 512,
    max_new_tokens: None,
    max_client_batch_size: 1,
};

pub struct Server {
    pub address: SocketAddr,
    pub engine: Engine,
    shutdown: CancellationToken,
    _folder: tempfile::TempDir,
}

impl Server {
    pub async fn start(fleet: &Fleet) -> Self {
        let options = EngineOptions { limits: LIMITS, step_deadline: TIMEOUT, max_failures: 5 };
        let engine = fleet.engine(options).await;
        let folder = tempfile::tempdir().unwrap();
        model::write(folder.path());
        let text = TextModel::load(folder.path(), 1, None, Path::new(env!("CARGO_BIN_EXE_chat-renderer"))).unwrap();
        let config = Config {
            model_id: "test/model".to_owned(),
            model_sha: None,
            pipeline_tag: None,
            decoder_prefix: Arc::default(),
            model_folder: folder.path().to_owned(),
            limits: REQUEST_LIMITS,
            queue: QueueLimits { max_tokens: u64::MAX, timeout: None },
            validation_workers: 1,
            payload_limit_bytes: 1_000_000,
            cors_allow_origins: Vec::new(),
            api_keys: ApiKeys::default(),
            compute_type: "1-cpu".to_owned(),
            grammar_support: true,
            prefill_logprobs: false,
            vertex_routes: VertexRoutes::default(),
            connections: ConnectionLimits::new(&REQUEST_LIMITS),
            graceful_termination_timeout: TIMEOUT,
        };
        let services = Services { engine: Arc::new(engine.clone()), text, metrics: exporter() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        tokio::spawn(serve(config, services, listener, shutdown.clone()));
        Self { address, engine, shutdown, _folder: folder }
    }

    /// Sends a request. Dropping the stream disconnects the client.
    pub async fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut connection = TcpStream::connect(self.address).await.unwrap();
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
            while !satisfied(&self.engine.stats()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(TIMEOUT, poll).await;
        assert!(waited.is_ok(), "not {what}: {:?}", self.engine.stats());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// The process's metrics recorder.
fn exporter() -> Exporter {
    static EXPORTER: OnceLock<Exporter> = OnceLock::new();
    EXPORTER.get_or_init(|| Exporter::install(&REQUEST_LIMITS).unwrap()).clone()
}
