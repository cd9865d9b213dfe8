//! A trace collector: OpenTelemetry's own gRPC service, which keeps the spans that it gets.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use penstock_router::config::TraceConfig;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status};

pub struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Vec<ResourceSpans>>>,
    _stop: DropGuard,
}

struct Service {
    /// Answers every export with this error.
    refusal: Option<Status>,
    received: Arc<Mutex<Vec<ResourceSpans>>>,
}

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone());
        }
        self.received.lock().unwrap().extend(request.into_inner().resource_spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub async fn start(refusal: Option<Status>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::default();
        let stop = CancellationToken::new();
        let service = TraceServiceServer::new(Service { refusal, received: Arc::clone(&received) });
        let stopped = stop.clone().cancelled_owned();
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), stopped));
        Self { address, received, _stop: stop.drop_guard() }
    }

    pub fn config(&self) -> TraceConfig {
        TraceConfig::new(&format!("http://{}", self.address), "the-service").unwrap()
    }

    /// Every message so far, as text.
    pub fn text(&self) -> String {
        format!("{:?}", self.received.lock().unwrap())
    }

    /// The attributes of the server that sent the first message.
    pub fn resource(&self) -> Vec<KeyValue> {
        self.received.lock().unwrap()[0].resource.clone().unwrap().attributes
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        let received = self.received.lock().unwrap();
        received.iter().flat_map(|resource| &resource.scope_spans).flat_map(|scope| scope.spans.clone()).collect()
    }
}

/// The value of an attribute as text.
pub fn attribute(attributes: &[KeyValue], name: &str) -> Option<String> {
    let value = attributes.iter().find(|attribute| attribute.key == name)?.value.clone()?.value?;
    Some(match value {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        Value::BoolValue(is_true) => is_true.to_string(),
        other => format!("{other:?}"),
    })
}

/// The spans below `parent`, in the order of their start.
pub fn children<'a>(spans: &'a [Span], parent: &Span) -> Vec<&'a Span> {
    let mut children: Vec<_> = spans.iter().filter(|span| span.parent_span_id == parent.span_id).collect();
    children.sort_by_key(|span| span.start_time_unix_nano);
    children
}

/// The names of the spans below `parent`.
pub fn names<'a>(spans: &'a [Span], parent: &Span) -> Vec<&'a str> {
    children(spans, parent).into_iter().map(|span| span.name.as_str()).collect()
}
