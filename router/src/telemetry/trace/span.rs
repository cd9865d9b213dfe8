//! The spans of one request: the request itself, its validation, and for each sequence its queue, prefill and decode.
//!
//! COMPAT: the root span has TGI's name and fields, in TGI's form. Names beginning with `gen_ai.`, `http.` or `url.` are those
//! of OpenTelemetry's semantic conventions, and durations of ours are in seconds.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime};

use axum::http::{Method, StatusCode};
use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::context::{TraceContext, new_span_id};
use super::export::Traces;
use super::request::{RequestParameters, RequestTrace, TracedSequence};
use crate::sequence::{History, Interruption, InterruptionCause, PhaseSteps, StepShare};
use crate::telemetry::identity::RequestIdentity;
use crate::telemetry::outcome::Outcome;
use crate::telemetry::summary::RequestSummary;

const MAX_PATH_CHARS: usize = 128;
const MAX_REASON_CHARS: usize = 1024;

/// TGI's names of its routes' spans, which are the names of its handlers. Other routes have the names that OpenTelemetry's
/// conventions give to HTTP requests.
const TGI_NAMES: &[(&str, &str)] = &[
    ("/", "compat_generate"),
    ("/generate", "generate"),
    ("/generate_stream", "generate_stream"),
    ("/v1/chat/completions", "chat_completions"),
    ("/v1/completions", "completions"),
    ("/vertex", "vertex_compatibility"),
    ("/invocations", "sagemaker_compatibility"),
    ("/tokenize", "tokenize"),
    ("/chat_tokenize", "get_chat_tokenize"),
];

/// A request and its response, as HTTP sees them.
pub(crate) struct Exchange {
    pub(crate) method: Method,
    pub(crate) path: String,
    /// The path's pattern; `None`: there is no such route.
    pub(crate) route: Option<String>,
    /// `None`: no response was sent.
    pub(crate) status: Option<StatusCode>,
}

/// A request that ends now.
pub(crate) struct ClosedRequest<'a> {
    pub(crate) identity: &'a RequestIdentity,
    pub(crate) received: Instant,
    pub(crate) exchange: &'a Exchange,
    /// `None`: the client disconnected, or the request generates nothing.
    pub(crate) outcome: Option<&'a Outcome>,
    pub(crate) generates: bool,
}

impl ClosedRequest<'_> {
    /// Whether the client left before the answer to its generation was complete.
    pub(crate) fn is_disconnected(&self) -> bool {
        let is_refused = self.exchange.status.is_some_and(|status| status.as_u16() >= 400);
        self.outcome.is_none() && self.generates && !is_refused
    }
}

/// The spans of a request; none if it is not recorded.
pub(crate) fn spans(traces: &Traces, trace: &RequestTrace, request: &ClosedRequest<'_>) -> Vec<SpanData> {
    let Some(context) = &request.identity.trace().span else { return Vec::new() };
    let sequences: Vec<_> =
        trace.sequences().into_iter().map(|sequence| (sequence.timeline.history(), sequence)).collect();
    let mut builder = Builder { clock: Clock::now(), context, scope: traces.scope(), spans: Vec::new() };
    builder.root(traces, trace.parameters(), request, &sequences);
    if let Some((_, first)) = sequences.first() {
        builder.add("validate", context.span_id(), request.received, first.submitted);
    }
    for (index, (history, sequence)) in sequences.iter().enumerate() {
        builder.sequence(index, sequence, history);
    }
    builder.spans
}

/// Converts instants into the time of day.
struct Clock {
    now: Instant,
    time: SystemTime,
}

impl Clock {
    #[allow(clippy::disallowed_methods)] // the wall clock is what is wanted
    fn now() -> Self {
        Self { now: Instant::now(), time: SystemTime::now() }
    }

    fn time(&self, instant: Instant) -> SystemTime {
        self.time - self.now.saturating_duration_since(instant)
    }
}

struct Builder<'a> {
    clock: Clock,
    /// The root span.
    context: &'a SpanContext,
    scope: &'a InstrumentationScope,
    spans: Vec<SpanData>,
}

impl Builder<'_> {
    /// Adds a span below `parent`.
    fn add(&mut self, name: &'static str, parent: SpanId, start: Instant, end: Instant) -> &mut SpanData {
        let root = self.context;
        let state = root.trace_state().clone();
        let context = SpanContext::new(root.trace_id(), new_span_id(), root.trace_flags(), false, state);
        self.push(SpanData {
            span_context: context,
            parent_span_id: parent,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: Cow::Borrowed(name),
            start_time: self.clock.time(start),
            end_time: self.clock.time(end.max(start)),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        })
    }

    fn push(&mut self, span: SpanData) -> &mut SpanData {
        self.spans.push(span);
        self.spans.last_mut().expect("invariant: it was pushed just now")
    }

    fn root(
        &mut self,
        traces: &Traces,
        parameters: Option<&RequestParameters>,
        request: &ClosedRequest<'_>,
        sequences: &[(History, TracedSequence)],
    ) {
        let TraceContext { parent, .. } = request.identity.trace();
        let (context, now) = (self.context.clone(), self.clock.now);
        let root = self.add("", parent.span_id(), request.received, now);
        root.span_context = context;
        root.parent_span_is_remote = parent.is_remote();
        root.span_kind = SpanKind::Server;
        root.name = name(request.exchange);
        root.status = status(request);
        let attributes = &mut root.attributes;
        http(attributes, request);
        if let Some(parameters) = parameters {
            describe(attributes, parameters, traces.model_name());
        }
        if let Some(Outcome::Answered(summary)) = request.outcome {
            cost(attributes, summary);
            let seed = sequences.first().and_then(|(_, sequence)| sequence.seed);
            attributes.push(KeyValue::new("seed", format!("{seed:?}")));
            let reasons = sequences.iter().filter_map(|(history, _)| history.end?.finish_reason).map(openai_reason);
            let reasons: Vec<StringValue> = reasons.map(Into::into).collect();
            if !reasons.is_empty() {
                attributes.push(KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons))));
            }
        }
        let first_token = sequences.iter().filter_map(|(history, _)| history.first_token).min();
        if let Some(first_token) = first_token.filter(|_| parameters.is_some_and(|parameters| parameters.streams)) {
            let seconds = first_token.saturating_duration_since(request.received);
            attributes.push(KeyValue::new("gen_ai.response.time_to_first_chunk", seconds.as_secs_f64()));
        }
    }

    /// A span for the sequence, with a span for each phase that it reached and for each interruption.
    fn sequence(&mut self, index: usize, sequence: &TracedSequence, history: &History) {
        let end = history.end.map_or(self.clock.now, |end| end.at);
        let span = self.add("sequence", self.context.span_id(), sequence.submitted, end);
        let id = span.span_context.span_id();
        span.attributes.extend([
            KeyValue::new("penstock.sequence.index", count(index)),
            KeyValue::new("gen_ai.usage.input_tokens", count(sequence.num_prompt_tokens)),
        ]);
        if let Some(seed) = sequence.seed {
            span.attributes.push(KeyValue::new("penstock.sequence.seed", seed.to_string()));
        }
        if history.num_interruptions > 0 {
            span.attributes.push(KeyValue::new("penstock.sequence.interruptions", count(history.num_interruptions)));
        }
        if let Some(end) = &history.end {
            span.attributes.extend([
                KeyValue::new("gen_ai.usage.output_tokens", i64::from(end.num_generated_tokens)),
                KeyValue::new("gen_ai.usage.cache_read.input_tokens", count(end.num_cached_tokens)),
            ]);
            span.attributes
                .extend(end.finish_reason.map(|reason| KeyValue::new("penstock.sequence.finish_reason", reason)));
        }
        self.add("queue", id, sequence.submitted, history.started.unwrap_or(end));
        let Some(started) = history.started else { return };
        self.phase("prefill", id, (started, history.first_token.unwrap_or(end)), &history.prefill);
        if let Some(first_token) = history.first_token.filter(|_| history.decode.num_steps > 0) {
            self.phase("decode", id, (first_token, end), &history.decode);
        }
        for interruption in &history.interruptions {
            self.interruption(id, interruption, end);
        }
    }

    fn phase(&mut self, name: &'static str, parent: SpanId, (start, end): (Instant, Instant), steps: &PhaseSteps) {
        let mut slowest = steps.slowest.clone();
        slowest.sort_unstable_by_key(|share| share.step);
        let events = slowest.iter().map(|share| step(share, self.clock.time(share.reported))).collect();
        let num_dropped = steps.num_steps.saturating_sub(u32::try_from(slowest.len()).unwrap_or(u32::MAX));
        let span = self.add(name, parent, start, end);
        span.events.events = events;
        span.events.dropped_count = num_dropped;
        span.attributes.extend([
            KeyValue::new("penstock.steps", i64::from(steps.num_steps)),
            KeyValue::new("penstock.computed_tokens", i64::try_from(steps.num_tokens).unwrap_or(i64::MAX)),
            KeyValue::new("penstock.worker_forward", steps.worker_forward.as_secs_f64()),
        ]);
    }

    fn interruption(&mut self, parent: SpanId, interruption: &Interruption, end: Instant) {
        let Interruption { cause, began, ended } = interruption;
        let span = self.add("interruption", parent, *began, ended.unwrap_or(end));
        let (cause, reason) = match cause {
            InterruptionCause::Preemption => ("preemption", None),
            InterruptionCause::WorkerFailure(reason) => ("worker_failure", Some(reason)),
        };
        span.attributes.push(KeyValue::new("penstock.interruption.cause", cause));
        if let Some(reason) = reason {
            span.attributes.push(KeyValue::new("penstock.interruption.reason", cut(reason, MAX_REASON_CHARS)));
        }
    }
}

fn step(share: &StepShare, time: SystemTime) -> Event {
    let attributes = vec![
        KeyValue::new("penstock.step.number", i64::try_from(share.step).unwrap_or(i64::MAX)),
        KeyValue::new("penstock.step.duration", share.interval.as_secs_f64()),
        KeyValue::new("penstock.step.worker_forward", share.worker_forward.as_secs_f64()),
        KeyValue::new("penstock.step.sequences", count(share.num_sequences)),
        KeyValue::new("penstock.step.computed_tokens", i64::from(share.num_tokens)),
    ];
    Event::new("step", time, attributes, 0)
}

fn name(exchange: &Exchange) -> Cow<'static, str> {
    let Exchange { method, route, .. } = exchange;
    match route {
        Some(route) => match TGI_NAMES.iter().find(|(path, _)| path == route) {
            Some((_, name)) => Cow::Borrowed(name),
            None => Cow::Owned(format!("{method} {route}")),
        },
        None => Cow::Owned(method.to_string()),
    }
}

/// By OpenTelemetry's conventions a request that the server refuses is no error of the server.
fn status(request: &ClosedRequest<'_>) -> Status {
    match request.outcome {
        Some(Outcome::Failed { detail: Some(detail), .. }) => Status::error(cut(detail, MAX_REASON_CHARS)),
        Some(Outcome::Failed { error_type, .. })
            if request.exchange.status.is_some_and(|status| status.is_server_error()) =>
        {
            Status::error(*error_type)
        }
        _ => Status::Unset,
    }
}

fn http(attributes: &mut Vec<KeyValue>, request: &ClosedRequest<'_>) {
    let Exchange { method, path, route, status } = request.exchange;
    attributes.extend([
        KeyValue::new("http.request.method", method.to_string()),
        KeyValue::new("url.path", cut(path, MAX_PATH_CHARS)),
        KeyValue::new("url.scheme", "http"),
        KeyValue::new("penstock.request_id", request.identity.request_id_text().to_owned()),
    ]);
    attributes.extend(route.as_ref().map(|route| KeyValue::new("http.route", route.clone())));
    attributes.extend(status.map(|status| KeyValue::new("http.response.status_code", i64::from(status.as_u16()))));
    let error = match request.outcome {
        Some(Outcome::Failed { error_type, .. }) => Some(*error_type),
        None if request.is_disconnected() => Some("client_disconnected"),
        _ => None,
    };
    attributes.extend(error.map(|error| KeyValue::new("error.type", error)));
}

fn describe(attributes: &mut Vec<KeyValue>, parameters: &RequestParameters, model_name: &str) {
    let RequestParameters { operation, streams, num_choices, tgi, .. } = parameters;
    attributes.extend([
        KeyValue::new("parameters", tgi.clone()),
        KeyValue::new("gen_ai.operation.name", operation.name()),
        KeyValue::new("gen_ai.provider.name", "penstock"),
        KeyValue::new("gen_ai.request.model", model_name.to_owned()),
        KeyValue::new("gen_ai.response.model", model_name.to_owned()),
        KeyValue::new("gen_ai.request.stream", *streams),
    ]);
    if *num_choices > 1 {
        attributes.push(KeyValue::new("gen_ai.request.choice.count", count(*num_choices)));
    }
    let integers = [
        ("gen_ai.request.max_tokens", parameters.max_new_tokens.map(i64::from)),
        ("gen_ai.request.top_k", parameters.top_k.map(i64::from)),
        // The convention's type has no room for larger seeds; `parameters` has them.
        ("gen_ai.request.seed", parameters.seed.and_then(|seed| i64::try_from(seed).ok())),
    ];
    attributes.extend(integers.into_iter().filter_map(|(key, value)| Some(KeyValue::new(key, value?))));
    let fractions = [
        ("gen_ai.request.temperature", parameters.temperature),
        ("gen_ai.request.top_p", parameters.top_p),
        ("gen_ai.request.frequency_penalty", parameters.frequency_penalty),
        ("gen_ai.request.presence_penalty", parameters.presence_penalty),
    ];
    attributes.extend(fractions.into_iter().filter_map(|(key, value)| Some(KeyValue::new(key, decimal(value?)))));
}

/// COMPAT: TGI writes durations as Rust's `Debug` does.
fn cost(attributes: &mut Vec<KeyValue>, summary: &RequestSummary) {
    let durations = [
        ("total_time", summary.total()),
        ("validation_time", summary.validation),
        ("queue_time", summary.queue),
        ("inference_time", summary.inference),
        ("time_per_token", summary.per_token()),
    ];
    attributes.extend(durations.map(|(key, duration): (_, Duration)| KeyValue::new(key, format!("{duration:?}"))));
    attributes.extend([
        KeyValue::new("gen_ai.usage.input_tokens", count(summary.num_prompt_tokens)),
        KeyValue::new("gen_ai.usage.output_tokens", count(summary.num_generated_tokens)),
        KeyValue::new("gen_ai.usage.cache_read.input_tokens", count(summary.num_cached_tokens)),
    ]);
}

/// The reason as OpenAI's API and the conventions' examples call it.
fn openai_reason(reason: &'static str) -> &'static str {
    if reason == "length" { "length" } else { "stop" }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The double that is written like this float: 0.7, not 0.699999988079071.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

fn cut(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).collect()
}
