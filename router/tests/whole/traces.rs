//! A request's spans at the collector. A shutdown flushes them, so that no test waits for a time.

use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;
use penstock_router::engine::{Engine, EngineOptions};
use penstock_router::generator::Generator;
use penstock_scheduler::Limits;
use serde_json::{Value, json};
use tonic::Status;

use crate::collector::{Collector, attribute, children, names};
use crate::fake_worker::Script;
use crate::fake_worker::fleet::Fleet;
use crate::http_server::{Answer, Server, whole, within};
use crate::server::{LIMITS, TIMEOUT};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

type Headers<'a> = &'a [(&'a str, &'a str)];

async fn start(fleet: &Fleet, limits: Limits, adjust: impl FnOnce(&mut Config)) -> Server<Engine> {
    let options = EngineOptions { limits, step_deadline: TIMEOUT, max_failures: 5 };
    Server::serve(fleet.engine(options).await, adjust).await
}

/// A server with one healthy worker group.
async fn healthy(collector: &Collector) -> Server<Engine> {
    start(&Fleet::new([vec![Script::default()]]), LIMITS, |config| config.traces = Some(collector.config())).await
}

async fn post(server: &Server<Engine>, path: &str, headers: Headers<'_>, body: &Value) -> Answer {
    let request = server.request("POST", path).header("content-type", "application/json");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    whole(server.send(request, &body.to_string()).await).await
}

/// Shuts the server down: every span is at the collector afterwards.
async fn stop(server: Server<Engine>) {
    server.shutdown.cancel();
    within("the end", server.served).await.unwrap().unwrap();
}

fn generation(num_prompt_tokens: usize, max_new_tokens: u32) -> Value {
    // One token for each byte.
    json!({"inputs": "x".repeat(num_prompt_tokens), "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": true}})
}

/// The only span that continues the client's trace or begins one.
fn root(spans: &[Span]) -> &Span {
    let is_root = |span: &&Span| span.kind() == SpanKind::Server;
    let roots: Vec<_> = spans.iter().filter(is_root).collect();
    assert_eq!(roots.len(), 1, "{spans:#?}");
    roots[0]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn a_request_is_a_tree_of_spans_in_the_clients_trace() {
    let collector = Collector::start(None).await;
    let server = healthy(&collector).await;
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let headers = [("traceparent", parent.as_str()), ("tracestate", "vendor=1"), ("x-request-id", "mine")];
    let answer = post(&server, "/generate", &headers, &generation(40, 3)).await;
    stop(server).await;
    let spans = collector.spans();
    let root = root(&spans);
    assert_eq!(
        (root.name.as_str(), hex(&root.trace_id), hex(&root.parent_span_id)),
        ("generate", TRACE.into(), PARENT.into())
    );
    assert_eq!(answer.header("traceparent"), format!("00-{TRACE}-{}-01", hex(&root.span_id)));
    assert!(spans.iter().all(|span| span.trace_id == root.trace_id && span.trace_state == "vendor=1"));
    assert_eq!(names(&spans, root), ["validate", "sequence"]);
    let sequence = children(&spans, root)[1];
    assert_eq!(names(&spans, sequence), ["queue", "prefill", "decode"]);
    for span in &spans {
        let is_within = root.start_time_unix_nano <= span.start_time_unix_nano
            && span.start_time_unix_nano <= span.end_time_unix_nano
            && span.end_time_unix_nano <= root.end_time_unix_nano;
        assert!(is_within, "{span:#?}");
    }
    // 40 tokens in steps of 16, and a step for each token after the first.
    for (phase, num_steps) in children(&spans, sequence)[1..].iter().zip(["3", "2"]) {
        assert_eq!(attribute(&phase.attributes, "penstock.steps").as_deref(), Some(num_steps));
        assert_eq!(phase.events.len().to_string(), num_steps);
        assert_eq!(phase.dropped_events_count, 0);
        assert!(phase.events.is_sorted_by_key(|event| event.time_unix_nano));
    }
    let value = |name| attribute(&root.attributes, name).unwrap_or_else(|| panic!("no {name}: {root:#?}"));
    for (name, expected) in [
        ("http.request.method", "POST"),
        ("http.route", "/generate"),
        ("http.response.status_code", "200"),
        ("penstock.request_id", "mine"),
        ("seed", "None"),
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.request.model", "test/model"),
        ("gen_ai.request.max_tokens", "3"),
        ("gen_ai.usage.input_tokens", "40"),
        ("gen_ai.usage.output_tokens", "3"),
    ] {
        assert_eq!(value(name), expected, "{name}");
    }
    assert!(value("parameters").starts_with("GenerateParameters { best_of: None, temperature: None, "));
    for duration in ["total_time", "validation_time", "queue_time", "inference_time", "time_per_token"] {
        let value = value(duration);
        assert!(value.ends_with('s') && value.starts_with(|first: char| first.is_ascii_digit()), "{duration}: {value}");
    }
    let resource = collector.resource();
    assert_eq!(attribute(&resource, "service.name").as_deref(), Some("the-service"));
    assert!(attribute(&resource, "service.version").is_some());
}

#[tokio::test]
async fn neither_keys_nor_texts_nor_headers_are_in_spans() {
    let collector = Collector::start(None).await;
    let server = start(&Fleet::new([vec![Script::default()]]), LIMITS, |config| {
        config.traces = Some(collector.config());
        config.api_keys = ApiKeys::new(["SECRET-key".to_owned()]);
    })
    .await;
    let body = json!({"inputs": "SECRET", "parameters": {
        "max_new_tokens": 2, "stop": ["SECRET-stop"], "grammar": {"type": "regex", "value": "SECRET-grammar"},
        "bad_words": ["SECRET-word"], "cache_salt": "SECRET-salt", "ignore_eos": false,
    }});
    for key in ["Bearer SECRET-key", "Bearer SECRET-wrong"] {
        post(&server, "/generate?q=SECRET-query", &[("authorization", key), ("cookie", "SECRET-cookie")], &body).await;
    }
    post(
        &server,
        "/generate",
        &[("authorization", "Bearer SECRET-key")],
        &json!({"inputs": "SECRET", "parameters": {"best_of": 0}}),
    )
    .await;
    stop(server).await;
    let text = collector.text();
    assert!(text.contains("stop: [(hidden)]") && text.contains("grammar: Some(Regex)"), "{text}");
    assert!(!text.contains("SECRET"), "{text}");
}

#[tokio::test]
async fn only_sampled_requests_that_are_not_gets_are_exported() {
    let collector = Collector::start(None).await;
    let server = healthy(&collector).await;
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    let answer = post(&server, "/generate", &[("traceparent", &unsampled)], &generation(1, 1)).await;
    assert!(answer.headers.get("traceparent").is_none());
    for path in ["/health", "/info", "/metrics"] {
        assert!(server.get(path).await.headers.get("traceparent").is_none());
    }
    let answer = post(&server, "/generate", &[], &json!({"inputs": "x", "parameters": {"temperature": -1.0}})).await;
    assert_eq!(answer.status, 422);
    stop(server).await;
    let spans = collector.spans();
    let root = root(&spans);
    assert_eq!(spans.len(), 1, "a refused request has no sequence");
    assert!(answer.header("traceparent").contains(&hex(&root.trace_id)));
    assert!(root.parent_span_id.is_empty());
    assert_eq!(attribute(&root.attributes, "error.type").as_deref(), Some("validation"));
    assert_eq!(attribute(&root.attributes, "http.response.status_code").as_deref(), Some("422"));
    assert!(root.status.as_ref().is_none_or(|status| status.code() == StatusCode::Unset), "the client's fault");
}

#[tokio::test]
async fn each_choice_is_a_sequence() {
    let collector = Collector::start(None).await;
    let server = healthy(&collector).await;
    let body =
        json!({"prompt": ["xx", "yyy"], "n": 2, "max_tokens": 2, "temperature": 0.7, "seed": 5, "ignore_eos": true});
    assert_eq!(post(&server, "/v1/completions", &[], &body).await.status, 200);
    stop(server).await;
    let spans = collector.spans();
    let root = root(&spans);
    assert_eq!(root.name, "completions");
    assert_eq!(names(&spans, root), ["validate", "sequence", "sequence", "sequence", "sequence"]);
    let sequences = children(&spans, root);
    let of = |name| sequences[1..].iter().map(|span| attribute(&span.attributes, name).unwrap()).collect::<Vec<_>>();
    assert_eq!(of("penstock.sequence.index"), ["0", "1", "2", "3"]);
    assert_eq!(of("gen_ai.usage.input_tokens"), ["2", "2", "3", "3"]);
    assert_eq!(of("penstock.sequence.finish_reason"), ["length"; 4]);
    let seeds = of("penstock.sequence.seed");
    assert!(seeds[0] == "5" && seeds[0] != seeds[1] && seeds[..2] == seeds[2..], "{seeds:?}");
    assert_eq!(attribute(&root.attributes, "seed").as_deref(), Some("Some(5)"));
    assert_eq!(attribute(&root.attributes, "gen_ai.request.temperature").as_deref(), Some("0.7"));
    assert_eq!(attribute(&root.attributes, "gen_ai.request.choice.count").as_deref(), Some("2"));
}

#[tokio::test]
async fn a_lost_worker_is_an_interruption() {
    let collector = Collector::start(None).await;
    let dies = Script { die_at_step: Some(3), ..Script::default() };
    let fleet = Fleet::new([vec![dies], vec![Script::default()]]);
    let server = start(&fleet, LIMITS, |config| config.traces = Some(collector.config())).await;
    assert_eq!(post(&server, "/generate", &[], &generation(5, 8)).await.status, 200);
    stop(server).await;
    let spans = collector.spans();
    let sequence = children(&spans, root(&spans))[1];
    assert_eq!(attribute(&sequence.attributes, "penstock.sequence.interruptions").as_deref(), Some("1"));
    assert_eq!(names(&spans, sequence), ["queue", "prefill", "decode", "interruption"]);
    let interruption = children(&spans, sequence)[3];
    assert_eq!(attribute(&interruption.attributes, "penstock.interruption.cause").as_deref(), Some("worker_failure"));
    assert!(
        attribute(&interruption.attributes, "penstock.interruption.reason").is_some_and(|reason| !reason.is_empty())
    );
    assert!(interruption.end_time_unix_nano < sequence.end_time_unix_nano, "it was resumed");
}

#[tokio::test]
async fn a_preemption_is_an_interruption() {
    let collector = Collector::start(None).await;
    // Both sequences begin, and only one of them can end.
    let limits = Limits { num_blocks: 6, ..LIMITS };
    let (gate, script) = Script::gated(0);
    let fleet = Fleet::new([vec![script]]);
    let server = start(&fleet, limits, |config| {
        config.traces = Some(collector.config());
        config.limits.max_total_tokens = 96;
    })
    .await;
    let body = generation(20, 60);
    let both_are_here = async {
        while server.engine.stats().num_queued + server.engine.stats().num_running < 2 {
            tokio::task::yield_now().await;
        }
        gate.send_replace(u64::MAX);
    };
    let (one, other, ()) = tokio::join!(
        post(&server, "/generate", &[], &body),
        post(&server, "/generate", &[], &body),
        within("both requests", both_are_here)
    );
    assert_eq!((one.status, other.status), (200.try_into().unwrap(), 200.try_into().unwrap()));
    stop(server).await;
    let interruptions: Vec<_> = collector.spans().into_iter().filter(|span| span.name == "interruption").collect();
    assert_eq!(interruptions.len(), 1);
    assert_eq!(attribute(&interruptions[0].attributes, "penstock.interruption.cause").as_deref(), Some("preemption"));
}

#[tokio::test]
async fn a_failed_sequence_is_an_error_of_the_server() {
    let collector = Collector::start(None).await;
    let fleet = Fleet::new([vec![Script { broken_first_token: Some(u32::from(b'x')), ..Script::default() }]]);
    let server = start(&fleet, LIMITS, |config| config.traces = Some(collector.config())).await;
    assert_eq!(post(&server, "/generate", &[], &generation(3, 8)).await.status, 424);
    stop(server).await;
    let spans = collector.spans();
    let root = root(&spans);
    assert_eq!(root.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(attribute(&root.attributes, "error.type").as_deref(), Some("generation"));
    assert_eq!(names(&spans, root), ["validate", "sequence"], "what it did before is there");
    assert!(attribute(&root.attributes, "total_time").is_none());
}

#[tokio::test]
async fn a_collector_that_refuses_costs_spans_and_no_request() {
    let collector = Collector::start(Some(Status::permission_denied("no"))).await;
    let server = healthy(&collector).await;
    assert_eq!(post(&server, "/generate", &[], &generation(5, 2)).await.status, 200);
    let counted = async {
        while !server.get("/metrics").await.body.contains(r#"penstock_spans_lost{reason="export_failed"} 6"#) {
            tokio::task::yield_now().await;
        }
    };
    within("the loss", counted).await;
    assert_eq!(post(&server, "/generate", &[], &generation(5, 2)).await.status, 200);
    stop(server).await;
}

#[tokio::test]
async fn a_server_without_a_collector_serves_and_stops() {
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let config = penstock_router::config::TraceConfig::new(&format!("http://{closed}"), "service").unwrap();
    let server = start(&Fleet::new([vec![Script::default()]]), LIMITS, |adjusted| adjusted.traces = Some(config)).await;
    for _ in 0..3 {
        assert_eq!(post(&server, "/generate", &[], &generation(5, 2)).await.status, 200);
    }
    stop(server).await;
}
