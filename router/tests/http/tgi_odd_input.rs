//! Unusual bodies: each is refused with a 4xx status or served, and none causes an internal error.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::sequence::{Sampling, greedy};
use serde_json::{Value, json};

use crate::model::IM_END;
use crate::server::Server;

const ROUTES: [&str; 7] =
    ["/generate", "/generate_stream", "/", "/tokenize", "/invocations", "/vertex", "/chat_tokenize"];

#[tokio::test]
async fn invalid_json_is_400_in_plain_text_on_every_route() {
    let server = Server::answering(&[IM_END]).await;
    let broken: [&[u8]; 4] = [b"", b"{", br#"{"inputs":"Hi",}"#, b"{'inputs':'Hi'}"];
    let unreadable: [&[u8]; 5] = [
        br#"{"inputs":"Hi","parameters":{"temperature":NaN}}"#,
        br#"{"inputs":"Hi","parameters":{"temperature":Infinity}}"#,
        br#"{"inputs":"Hi","parameters":{"temperature":1e400}}"#,
        b"{\"inputs\":\"\xff\xfe\"}",
        b"{\"inputs\":\"\\ud800\"}",
    ];
    // The value of an unknown field is skipped.
    let asked = unreadable.iter().map(|body| (body, &ROUTES[..5])).chain(broken.iter().map(|body| (body, &ROUTES[..])));
    for (body, routes) in asked {
        for path in routes {
            let answer = server.post_bytes(path, body).await;
            let told = String::from_utf8_lossy(body);
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path} {told}: {}", answer.body);
            assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
        }
    }
    assert!(server.engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn json_of_the_wrong_shape_is_422_in_plain_text() {
    let server = Server::answering(&[IM_END]).await;
    let bodies = [
        r#"[]"#.to_owned(),
        r#"null"#.to_owned(),
        r#"{"inputs":null}"#.to_owned(),
        r#"{"inputs":"Hi","parameters":null}"#.to_owned(),
        r#"{"inputs":"Hi","parameters":{"seed":18446744073709551616}}"#.to_owned(),
        r#"{"inputs":"Hi","parameters":{"max_new_tokens":1.5}}"#.to_owned(),
        r#"{"inputs":"Hi","parameters":{"max_new_tokens":4294967296}}"#.to_owned(),
        r#"{"inputs":"Hi","parameters":{"grammar":{"type":"xml","value":""}}}"#.to_owned(),
        r#"{"inputs":"Hi","parameters":{"grammar":{"type":"json"}}}"#.to_owned(),
    ];
    for body in &bodies {
        for path in ["/generate", "/generate_stream", "/", "/invocations"] {
            let answer = server.post_bytes(path, body.as_bytes()).await;
            assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{path} {body}: {}", answer.body);
            assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8", "{body}");
        }
    }
    let twice = br#"{"inputs":"Hi","parameters":{"seed":1,"seed":2}}"#;
    let answer = server.post_bytes("/generate", twice).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(answer.body.contains("duplicate field `seed`"), "{}", answer.body);
    assert!(server.engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn every_optional_field_may_be_null() {
    let server = Server::answering(&[IM_END]).await;
    let document = server.get("/api-doc/openapi.json").await.json();
    let schemas = ["GenerateParameters", "ExtensionFields"].map(|name| &document["components"]["schemas"][name]);
    let parts = schemas.into_iter().flat_map(|schema| schema["allOf"].as_array().into_iter().flatten().chain([schema]));
    let names = parts.filter_map(|part| part["properties"].as_object()).flat_map(|properties| properties.keys());
    let nulls: serde_json::Map<String, Value> = names.map(|name| (name.clone(), Value::Null)).collect();
    assert!(nulls.len() >= 29, "{nulls:?}");
    for path in ["/generate", "/generate_stream", "/", "/invocations", "/tokenize"] {
        let answer = server.post(path, json!({"inputs": "Hi", "stream": null, "parameters": nulls})).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
    }
    let sampling = server.last_request().sampling;
    let expected = Sampling { stop_token_ids: vec![IM_END], ..greedy() };
    assert_eq!(sampling, expected);
}

#[tokio::test]
async fn deep_nesting_is_refused_in_fields_that_are_read() {
    let server =
        Server::start(|s| s.answer(&[IM_END]), |config: &mut Config| config.payload_limit_bytes = 1 << 20).await;
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let grammar = format!(r#"{{"grammar":{{"type":"json","value":{deep}}}}}"#);
    let messages = format!(r#"[{{"role":"user","content":{deep}}}]"#);
    let body = format!(
        r#"{{"inputs":"Hi","parameters":{grammar},"messages":{messages},"instances":[{{"inputs":"Hi","x":{deep}}}]}}"#
    );
    for path in ROUTES {
        let answer = server.post_bytes(path, body.as_bytes()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path}: {}", answer.body);
    }
}

#[tokio::test]
async fn long_lists_are_counted_before_they_are_used() {
    let server =
        Server::start(|s| s.answer(&[IM_END]), |config: &mut Config| config.payload_limit_bytes = 1 << 20).await;
    let stops: Vec<_> = (0..10_000).map(|index| index.to_string()).collect();
    let ids: Vec<_> = (0..10_000).collect();
    let biases: serde_json::Map<_, _> = (0..10_000).map(|id| (id.to_string(), json!(1))).collect();
    let cases = [
        (json!({"stop": stops}), "`stop` supports up to 4 stop sequences. Given: 10000"),
        (json!({"stop_token_ids": ids}), "`stop_token_ids` supports up to 128 tokens. Given: 10000"),
        (json!({"logit_bias": biases}), "`logit_bias` supports up to 1024 tokens. Given: 10000"),
        (json!({"n": usize::MAX}), "`n` must be >= 1 and <= 4. Given: 18446744073709551615"),
        (json!({"best_of": usize::MAX}), "`best_of` must be > 0 and <= 2. Given: 18446744073709551615"),
        (
            json!({"max_new_tokens": u32::MAX}),
            "`inputs` tokens + `max_new_tokens` must be <= 256. Given: 2 `inputs` tokens and 4294967295 `max_new_tokens`",
        ),
        (json!({"temperature": 1e39}), "`temperature` must be at most 3.4028235e38, the largest number of 32 bits"),
    ];
    for (parameters, message) in cases {
        for path in ["/generate", "/"] {
            let answer = server.post(path, json!({"inputs": "Hi", "parameters": parameters})).await;
            assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{}", answer.body);
            assert_eq!(answer.json()["error"], format!("Input validation error: {message}"));
        }
    }
    assert!(server.engine.requests.lock().unwrap().is_empty());
}
