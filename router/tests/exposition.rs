//! A scrape of a whole router after every kind of traffic: all of TGI's metrics, with TGI's types and labels.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests are tests")]

#[allow(dead_code, reason = "shared with tests/engine.rs")]
mod fake_worker;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "http/model.rs"]
mod model;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "http/server.rs"]
mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::http::StatusCode;
use fake_worker::fleet::Fleet;
use fake_worker::setting::{PATIENCE, limits};
use fake_worker::{FakeGroup, Script};
use http_body_util::BodyExt;
use penstock_router::engine::{Engine, EngineOptions};
use penstock_router::telemetry::metrics::kv_pool;
use penstock_scheduler::Limits;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::server::Server;

/// Name, type and label of TGI's metrics. `skipped_tokens` is a summary in TGI, whose own dashboard expects a histogram.
const TGI: [(&str, &str, &str); 27] = [
    ("tgi_request_count", "counter", ""),
    ("tgi_request_success", "counter", ""),
    ("tgi_request_failure", "counter", "err"),
    ("tgi_request_duration", "histogram", ""),
    ("tgi_request_validation_duration", "histogram", ""),
    ("tgi_request_queue_duration", "histogram", ""),
    ("tgi_request_inference_duration", "histogram", ""),
    ("tgi_request_mean_time_per_token_duration", "histogram", ""),
    ("tgi_request_generated_tokens", "histogram", ""),
    ("tgi_request_input_length", "histogram", ""),
    ("tgi_request_max_new_tokens", "histogram", ""),
    ("tgi_request_skipped_tokens", "histogram", ""),
    ("tgi_queue_size", "gauge", ""),
    ("tgi_batch_current_size", "gauge", ""),
    ("tgi_batch_current_max_tokens", "gauge", ""),
    ("tgi_batch_next_size", "histogram", ""),
    ("tgi_batch_inference_count", "counter", "method"),
    ("tgi_batch_inference_success", "counter", "method"),
    ("tgi_batch_inference_failure", "counter", "method"),
    ("tgi_batch_inference_duration", "histogram", "method"),
    ("tgi_batch_forward_duration", "histogram", "method"),
    ("tgi_batch_decode_duration", "histogram", "method"),
    ("tgi_batch_filter_duration", "histogram", "method"),
    ("tgi_batch_concat_duration", "histogram", "method"),
    ("tgi_batch_concat", "counter", "reason"),
    ("tgi_batch_max_total_tokens", "gauge", ""),
    ("tgi_batch_total_tokens", "gauge", ""),
];

/// Sequences whose prompt begins with this byte fail in the worker.
const BROKEN: u8 = b'!';

struct Router {
    server: Server<Engine>,
    group: Arc<FakeGroup>,
    fleet: Fleet,
    open_gate: watch::Sender<u64>,
}

impl Router {
    async fn start() -> Self {
        let (open_gate, script) = Script::gated(u64::MAX);
        let script = Script { broken_first_token: Some(BROKEN.into()), ..script };
        let fleet = Fleet::new([vec![script.clone()], vec![script]]);
        let limits = Limits { max_sequence_tokens: 256, ..limits() };
        let options = EngineOptions { limits, step_deadline: PATIENCE, max_failures: 2 };
        let server = Server::serve(fleet.engine(options).await, |config| {
            model::write_with_template(&config.model_folder, &json!("{{ raise_exception('no chat') }}"));
            config.limits.max_concurrent_requests = 2;
        });
        let server = server.await;
        kv_pool(256, 16);
        Self { server, group: fleet.started(1).await, fleet, open_gate }
    }

    async fn status(&self, path: &str, body: Value) -> StatusCode {
        self.server.post(path, body).await.status
    }

    /// Scrapes until the line appears: a request is counted just after the end of its response.
    async fn scrape_until(&self, line: &str) -> String {
        let wait = async {
            loop {
                let text = self.server.get("/metrics").await.body;
                if text.lines().any(|found| found == line) {
                    return text;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{line} never came"))
    }

    fn last_step(&self) -> u64 {
        self.group.ranks[0].look(|seen| seen.plans.last().map_or(0, |plan| plan.step))
    }
}

fn generate(inputs: &str, max_new_tokens: u32) -> Value {
    json!({"inputs": inputs, "parameters": {"max_new_tokens": max_new_tokens}})
}

/// Every outcome of requests and steps.
async fn traffic(router: &Router) -> String {
    assert_eq!(router.status("/generate", generate("Hi", 5)).await, StatusCode::OK);
    assert_eq!(router.status("/generate", generate("", 5)).await, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(router.status("/generate", generate("!", 5)).await, StatusCode::FAILED_DEPENDENCY);
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(router.status("/v1/chat/completions", chat).await, StatusCode::BAD_REQUEST);

    // The worker holds one request while another joins it and a third is refused.
    let before = router.last_step();
    router.open_gate.send_replace(before);
    let first = router.server.open("/generate_stream", generate("Hi", 100)).await;
    router.group.ranks[0].wait_until(|seen| seen.plans.last().is_some_and(|plan| plan.step > before)).await;
    let second = router.server.open("/generate_stream", generate("Ho", 100)).await;
    assert_eq!(router.status("/generate", generate("Hi", 5)).await, StatusCode::TOO_MANY_REQUESTS);
    router.open_gate.send_replace(u64::MAX);
    for response in [first, second] {
        response.into_body().collect().await.unwrap();
    }

    let mut left = router.server.open("/generate_stream", generate("Hi", 200)).await;
    left.body_mut().frame().await.unwrap().unwrap();
    drop(left);
    router.scrape_until(r#"tgi_request_failure{err="dropped"} 1"#).await;

    // The worker dies during a step and is replaced. The second one dies as well, and there is no third.
    router.open_gate.send_replace(router.last_step() + 4);
    let cut = router.server.open("/generate_stream", generate("Hi", 200)).await;
    router.group.ranks[0].kill();
    let second = router.fleet.started(2).await;
    second.ranks[0].wait_until(|seen| seen.plans.len() > 3).await;
    router.scrape_until("penstock_worker_restarts 1").await;
    second.ranks[0].kill();
    cut.into_body().collect().await.unwrap();
    router.scrape_until(r#"tgi_request_failure{err="generation"} 2"#).await
}

#[tokio::test]
async fn every_metric_of_tgi_appears_with_its_type_and_labels() {
    let router = Router::start().await;
    let text = traffic(&router).await;
    for (name, kind, label) in TGI {
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name} is not a {kind} in\n{text}");
        let labels = labels(&text, name, kind);
        let expected: Vec<&str> = [label].into_iter().filter(|label| !label.is_empty()).collect();
        assert_eq!(labels.keys().collect::<Vec<_>>(), expected, "the labels of {name}");
    }
    for err in ["overloaded", "validation", "template", "generation", "dropped"] {
        assert!(text.contains(&format!("tgi_request_failure{{err=\"{err}\"}}")), "{err}");
    }
    for line in [r#"tgi_batch_concat{reason="chunking"} 1"#, "tgi_batch_max_total_tokens 4096"] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    for name in ["penstock_time_to_first_token_seconds", "penstock_inter_token_seconds"] {
        let count = text.lines().find_map(|line| line.strip_prefix(&format!("{name}_count "))?.parse::<u64>().ok());
        assert!(count > Some(0), "{name} in\n{text}");
    }

    // The documentation lists every series, ours included, with the same type and labels.
    let page = include_str!("../../docs/metrics.md");
    for (name, kind) in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')) {
        let row = page.lines().find(|row| row.starts_with(&format!("| `{name}` | {kind}")));
        let row = row.unwrap_or_else(|| panic!("{name}, a {kind}, is not in docs/metrics.md"));
        for (label, values) in labels(&text, name, kind) {
            assert!(row.contains(&format!("`{label}`: ")), "{row} does not name {label}");
            let is_any = row.contains(&format!("`{label}`: any"));
            assert!(is_any || values.iter().all(|value| row.contains(value)), "{row} does not name all of {values:?}");
        }
    }
}

/// The labels of a metric's series and their values, without the format's own (`le`).
fn labels(text: &str, name: &str, kind: &str) -> BTreeMap<String, BTreeSet<String>> {
    let series = if kind == "histogram" { format!("{name}_count") } else { name.to_owned() };
    let mut labels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix(&series)?.strip_prefix('{')) {
        let inside = line.split_once('}').unwrap().0;
        for (label, value) in inside.split(',').map(|pair| pair.split_once('=').unwrap()) {
            labels.entry(label.to_owned()).or_default().insert(value.trim_matches('"').to_owned());
        }
    }
    labels
}
