//! Sends spans to an OpenTelemetry collector (OTLP over gRPC), without ever delaying a request.
//!
//! INVARIANT: memory is bounded by `MAX_QUEUED_SPANS`. Spans of a request that find no room are dropped, all of them, and
//! counted; so are those that the collector does not take within `EXPORT_TIMEOUT`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, RetryPolicy, SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::TraceConfig;
use crate::telemetry::metrics::{self, SpanLoss};

/// About a thousand requests, and some megabytes.
const MAX_QUEUED_SPANS: usize = 8192;
const MAX_BATCH_SPANS: usize = 512;
/// How long the first span of a batch waits for others.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// Limit of an export with its retries.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses of 0.5, 1, 2 and 4 s outlast the restart of a collector.
const MAX_RETRIES: usize = 4;
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(500);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(4);
/// The log says at most this often that spans are lost.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The queue of finished spans. Clones share the queue and its exporter.
#[derive(Clone, Debug)]
pub(crate) struct Traces(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    queue: Sender<SpanData>,
    /// Spans that were lost, for whatever reason.
    num_lost: Arc<AtomicU64>,
    model_name: String,
    scope: InstrumentationScope,
    closing: CancellationToken,
    exporter: TaskTracker,
}

/// Why no spans can be exported.
#[derive(Debug, thiserror::Error)]
#[error("cannot export traces to {endpoint}: {error}")]
pub struct TracesError {
    endpoint: String,
    error: ExporterBuildError,
}

impl Traces {
    /// Starts a task that exports spans. The collector need not be there yet. `model_name` is part of each request's span.
    pub(crate) fn start(config: &TraceConfig, model_name: &str) -> Result<Self, TracesError> {
        let TraceConfig { endpoint, service_name } = config;
        let retries = RetryPolicy::recommended()
            .with_max_retries(MAX_RETRIES)
            .with_initial_delay(FIRST_RETRY_DELAY)
            .with_max_delay(MAX_RETRY_DELAY);
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint.to_string())
            .with_timeout(EXPORT_TIMEOUT)
            .with_retry_policy(retries)
            .build();
        let mut exporter = exporter.map_err(|error| TracesError { endpoint: endpoint.to_string(), error })?;
        let version = env!("CARGO_PKG_VERSION");
        let resource = Resource::builder().with_service_name(service_name.clone());
        exporter.set_resource(&resource.with_attribute(KeyValue::new("service.version", version)).build());
        let (queue, spans) = mpsc::channel(MAX_QUEUED_SPANS);
        let num_lost = Arc::default();
        let closing = CancellationToken::new();
        let task = ExportTask {
            exporter,
            spans,
            num_lost: Arc::clone(&num_lost),
            report: LossReport { endpoint: endpoint.to_string(), num_reported: 0, last: None, error: None },
        };
        let tracker = TaskTracker::new();
        tracker.spawn(task.run(closing.clone()));
        tracker.close();
        let scope = InstrumentationScope::builder("penstock").with_version(version).build();
        let model_name = model_name.to_owned();
        Ok(Self(Arc::new(Inner { queue, num_lost, model_name, scope, closing, exporter: tracker })))
    }

    /// The served model's name in answers.
    pub(super) fn model_name(&self) -> &str {
        &self.0.model_name
    }

    pub(super) fn scope(&self) -> &InstrumentationScope {
        &self.0.scope
    }

    /// Queues the spans of a request, or drops them if there is no room for all of them.
    pub(in crate::telemetry) fn send(&self, spans: Vec<SpanData>) {
        match self.0.queue.try_reserve_many(spans.len()) {
            Ok(permits) => permits.zip(spans).for_each(|(permit, span)| permit.send(span)),
            Err(_) => lose(&self.0.num_lost, SpanLoss::QueueFull, spans.len()),
        }
    }

    /// Exports what is queued, for at most `timeout`, and takes no more.
    pub(crate) async fn shut_down(&self, timeout: Duration) {
        self.0.closing.cancel();
        if tokio::time::timeout(timeout, self.0.exporter.wait()).await.is_err() {
            let timeout_s = timeout.as_secs_f64();
            tracing::warn!(timeout_s, "the last trace spans are lost: the collector did not take them in time");
        }
    }
}

fn lose(num_lost: &AtomicU64, loss: SpanLoss, num_spans: usize) {
    metrics::spans_lost(loss, num_spans as u64);
    num_lost.fetch_add(num_spans as u64, Ordering::Relaxed);
}

struct ExportTask {
    exporter: SpanExporter,
    spans: Receiver<SpanData>,
    num_lost: Arc<AtomicU64>,
    report: LossReport,
}

impl ExportTask {
    /// Ends when `closing` is cancelled and the queue is empty.
    async fn run(mut self, closing: CancellationToken) {
        loop {
            let batch = self.next_batch(&closing).await;
            if batch.is_empty() {
                return;
            }
            let num_spans = batch.len();
            let exported = tokio::time::timeout(EXPORT_TIMEOUT, self.exporter.export(batch)).await;
            let error = match exported {
                Ok(Ok(())) => None,
                Ok(Err(OTelSdkError::InternalFailure(reason))) => Some(reason),
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {} s", EXPORT_TIMEOUT.as_secs())),
            };
            match &error {
                None => metrics::spans_exported(num_spans as u64),
                Some(_) => lose(&self.num_lost, SpanLoss::ExportFailed, num_spans),
            }
            self.report.update(self.num_lost.load(Ordering::Relaxed), error);
        }
    }

    /// The next spans; none once `closing` is cancelled and the queue is empty.
    async fn next_batch(&mut self, closing: &CancellationToken) -> Vec<SpanData> {
        let mut batch = Vec::new();
        let mut is_due = std::pin::pin!(tokio::time::sleep(Duration::MAX));
        loop {
            let room = MAX_BATCH_SPANS - batch.len();
            tokio::select! {
                biased;
                () = closing.cancelled(), if !self.spans.is_closed() => self.spans.close(),
                num_new = self.spans.recv_many(&mut batch, room) => {
                    if num_new == 0 || num_new == room {
                        return batch;
                    }
                    if batch.len() == num_new {
                        is_due.as_mut().reset(tokio::time::Instant::now() + BATCH_DELAY);
                    }
                }
                () = &mut is_due => return batch,
            }
        }
    }
}

/// Tells the log that spans are lost, rarely.
struct LossReport {
    endpoint: String,
    num_reported: u64,
    last: Option<Instant>,
    /// Why the newest failed export since then failed.
    error: Option<String>,
}

impl LossReport {
    /// `num_lost` spans were lost since the start, and the newest export may have failed.
    fn update(&mut self, num_lost: u64, error: Option<String>) {
        self.error = error.or(self.error.take());
        if !self.is_due(num_lost, Instant::now()) {
            return;
        }
        let error = self.error.take();
        let (endpoint, reason) = (&self.endpoint, error.as_deref().unwrap_or("it is slower than the spans arrive"));
        tracing::warn!(
            lost_spans = num_lost,
            "the trace collector at {endpoint} does not take all spans; serving goes on without them: {reason}"
        );
    }

    /// Whether to report now.
    fn is_due(&mut self, num_lost: u64, now: Instant) -> bool {
        let is_recent = self.last.is_some_and(|last| now.saturating_duration_since(last) < REPORT_INTERVAL);
        let is_due = num_lost > self.num_reported && !is_recent;
        if is_due {
            (self.num_reported, self.last) = (num_lost, Some(now));
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status};
    use opentelemetry_sdk::trace::{SpanEvents, SpanLinks};

    use super::*;

    #[allow(clippy::disallowed_methods)] // any time will do
    fn span() -> SpanData {
        let now = std::time::SystemTime::now();
        SpanData {
            span_context: SpanContext::NONE,
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: Cow::Borrowed("test"),
            start_time: now,
            end_time: now,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::default(),
        }
    }

    /// The collector's port is open, but it never answers.
    #[tokio::test(start_paused = true)]
    async fn a_full_queue_drops_all_spans_of_a_request_and_delays_nothing() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", silent.local_addr().unwrap());
        let traces = Traces::start(&TraceConfig::new(&endpoint, "test").unwrap(), "model").unwrap();
        let lost = || traces.0.num_lost.load(Ordering::Relaxed);
        traces.send(vec![span(); 5000]);
        assert_eq!(lost(), 0);
        traces.send(vec![span(); 5000]);
        assert_eq!(lost(), 5000);
        traces.send(vec![span(); 3000]);
        assert_eq!(lost(), 5000);
        let began = tokio::time::Instant::now();
        traces.shut_down(Duration::from_secs(2)).await;
        assert!(began.elapsed() < Duration::from_secs(3), "the exit does not wait for the collector");
        traces.send(vec![span()]);
        assert_eq!(lost(), 5001);
    }

    #[test]
    fn losses_are_reported_once_a_minute() {
        let mut report = LossReport { endpoint: String::new(), num_reported: 0, last: None, error: None };
        let began = Instant::now();
        let dues = [(0, 0), (3, 1), (5, 2), (9, 60), (9, 61), (9, 200), (10, 201)];
        let reported: Vec<_> = dues
            .into_iter()
            .filter(|&(num_lost, seconds)| report.is_due(num_lost, began + Duration::from_secs(seconds)))
            .collect();
        assert_eq!(reported, [(3, 1), (9, 61), (10, 201)]);
    }
}
