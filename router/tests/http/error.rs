//! Refusals on TGI's routes: statuses, types and messages.

use std::io::Write;

use axum::http::StatusCode;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use penstock_router::Config;
use serde_json::{Value, json};

use crate::fold::with;
use crate::model::IM_END;
use crate::server::{Answer, Server, whole};

async fn validation_error(server: &Server, inputs: &str, parameters: Value) -> String {
    let answer = server.post("/generate", json!({"inputs": inputs, "parameters": parameters})).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{parameters}: {}", answer.body);
    assert!(!answer.headers.contains_key("x-compute-type"));
    let body = answer.json();
    assert_eq!(body["error_type"], "validation");
    body["error"].as_str().unwrap().strip_prefix("Input validation error: ").unwrap().to_owned()
}

#[tokio::test]
async fn parameters_out_of_range_are_refused() {
    let server = Server::answering(&[IM_END]).await;
    let cases = [
        (json!({"temperature": 0.0}), "`temperature` must be strictly positive"),
        (json!({"temperature": -1}), "`temperature` must be strictly positive"),
        (json!({"temperature": 1e300}), "`temperature` must be at most 3.4028235e38, the largest number of 32 bits"),
        (json!({"repetition_penalty": 0}), "`repetition_penalty` must be strictly positive"),
        (json!({"frequency_penalty": 2.5}), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (json!({"top_p": 1.0}), "`top_p` must be > 0.0 and < 1.0"),
        (json!({"typical_p": 0}), "`typical_p` must be > 0.0 and < 1.0"),
        (json!({"top_k": 0}), "`top_k` must be strictly positive"),
        (json!({"max_new_tokens": 0}), "`max_new_tokens` must be strictly positive"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "`stop` supports up to 4 stop sequences. Given: 5"),
        (json!({"stop": [""]}), "`stop` must not contain an empty string"),
        (json!({"best_of": 3}), "`best_of` must be > 0 and <= 2. Given: 3"),
        (json!({"best_of": 2}), "you must use sampling when `best_of` is > 1"),
        (json!({"best_of": 2, "do_sample": true, "seed": 1}), "`seed` must not be set when `best_of` > 1"),
        (json!({"top_n_tokens": 6}), "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        (json!({"truncate": 0}), "`truncate` must be strictly positive and less than or equal to 200. Given: 0"),
        (json!({"truncate": 201}), "`truncate` must be strictly positive and less than or equal to 200. Given: 201"),
        (
            json!({"max_new_tokens": 255}),
            "`inputs` tokens + `max_new_tokens` must be <= 256. Given: 2 `inputs` tokens and 255 `max_new_tokens`",
        ),
    ];
    for (parameters, message) in cases {
        assert_eq!(validation_error(&server, "Hi", parameters).await, message);
    }
    assert_eq!(validation_error(&server, "", json!({})).await, "`inputs` cannot be empty");
    let long = "x".repeat(201);
    let message = "`inputs` must have at most 200 tokens. Given: 201";
    assert_eq!(validation_error(&server, &long, json!({})).await, message);
    assert!(server.engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn unsupported_features_are_refused_by_name() {
    let server = Server::answering(&[IM_END]).await;
    let grammar = json!({"type": "regex", "value": "a"});
    let cases = [
        (json!({"adapter_id": "mine"}), "`adapter_id` mine is unknown: no adapters are served"),
        (json!({"grammar": {"type": "regex", "value": "broken"}}), "`grammar` is not a grammar: it is broken"),
        (
            json!({"grammar": grammar, "response_format": grammar}),
            "`grammar` and `response_format` are the same thing; send one of them",
        ),
        (json!({"n": 0}), "`n` must be >= 1 and <= 4. Given: 0"),
        (json!({"n": 5}), "`n` must be >= 1 and <= 4. Given: 5"),
        (json!({"n": 3, "best_of": 2, "do_sample": true}), "`best_of` must be >= `n`. Given: 2 and 3"),
    ];
    for (parameters, message) in cases {
        assert_eq!(validation_error(&server, "Hi", parameters).await, message);
    }
    let without = |config: &mut Config| config.grammar_support = false;
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), without).await;
    for field in ["grammar", "response_format"] {
        let message = "`grammar` is not supported: the server runs with --disable-grammar-support";
        assert_eq!(validation_error(&server, "Hi", json!({field: grammar})).await, message);
    }
    assert!(server.engine.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn malformed_bodies_are_refused_in_plain_text() {
    let server = Server::answering(&[IM_END]).await;
    let json = "application/json";
    let cases = [
        (json, "{\"inputs\":".to_owned(), StatusCode::BAD_REQUEST),
        (json, "{}".to_owned(), StatusCode::UNPROCESSABLE_ENTITY),
        (json, json!({"inputs": 5}).to_string(), StatusCode::UNPROCESSABLE_ENTITY),
        (json, json!({"inputs": "Hi", "parameters": null}).to_string(), StatusCode::UNPROCESSABLE_ENTITY),
        (json, json!({"inputs": "Hi", "parameters": {"seed": -1}}).to_string(), StatusCode::UNPROCESSABLE_ENTITY),
        (json, json!({"inputs": "x".repeat(20_000)}).to_string(), StatusCode::PAYLOAD_TOO_LARGE),
        (json, format!("{{\"x\":{}", "[".repeat(5000)), StatusCode::BAD_REQUEST),
        ("text/plain", json!({"inputs": "Hi"}).to_string(), StatusCode::UNSUPPORTED_MEDIA_TYPE),
    ];
    for (content_type, body, status) in cases {
        for path in ["/generate", "/generate_stream", "/", "/tokenize"] {
            let answer = server.post_text(path, content_type, &body).await;
            assert_eq!(answer.status, status, "{path} {}", answer.body);
            assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
        }
        let answer = server.post_text("/v1/chat/completions", content_type, &body).await;
        let expected = if status == StatusCode::UNPROCESSABLE_ENTITY { StatusCode::BAD_REQUEST } else { status };
        assert_eq!(answer.status, expected);
        assert_eq!(answer.json()["error"]["code"], "malformed_request");
    }
}

#[tokio::test]
async fn a_value_of_a_wrong_type_is_refused_with_its_field() {
    let server = Server::answering(&[IM_END]).await;
    let cases = [
        (json!({"temperature": "hot"}), "temperature: invalid type: string \"hot\", expected f32"),
        (json!({"min_p": "a"}), "min_p: invalid type: string \"a\", expected f32"),
        (json!({"stop_token_ids": [1, -1]}), "stop_token_ids[1]: invalid value: integer `-1`, expected u32"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias: `x` is not a token id"),
        (json!({"n": 1.5}), "n: invalid type: floating point `1.5`, expected usize"),
        (json!({"stop": [5]}), "stop"),
    ];
    for (fields, told) in cases {
        let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": fields})).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert!(answer.body.contains(told), "{}", answer.body);
        let chat = with(json!({"messages": [{"role": "user", "content": "Hi"}]}), fields);
        let answer = server.post("/v1/chat/completions", chat).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(told), "{message}");
    }
}

#[tokio::test]
async fn a_wrong_part_of_a_chat_is_named_with_its_place() {
    let server = Server::answering(&[IM_END]).await;
    let chat =
        |content: Value, tools: Value| json!({"messages": [{"role": "user", "content": content}], "tools": tools});
    let content = |content: Value| chat(content, json!(null));
    let tool = |tool: Value| chat(json!("Hi"), json!([tool]));
    for (body, told) in [
        (content(json!(5)), "messages[0].content: invalid type: integer `5`, expected a string or a list"),
        (
            content(json!([{"type": "text", "text": "a"}, 5])),
            "messages[0].content[1]: invalid type: integer `5`, expected an object",
        ),
        (content(json!([{"text": "a"}])), "messages[0].content[0]: missing field `type`"),
        (content(json!([{"type": "text", "text": 5}])), "messages[0].content[0].text: invalid type: integer `5`"),
        (tool(json!(5)), "tools[0]: invalid type: integer `5`, expected an object"),
        (tool(json!({"function": {"name": 5}})), "tools[0]: function.name: invalid type: integer `5`"),
        (json!({"messages": [["user", "Hi"]]}), "messages[0]: invalid type: sequence, expected an object"),
        (
            json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true, "stream_options": [true, false, null]}),
            "stream_options: is a list",
        ),
    ] {
        let answer = server.post("/v1/chat/completions", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(told), "{message}");
    }
}

#[tokio::test]
async fn a_list_is_no_request() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/generate", json!(["Hi", {}, false])).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{}", answer.body);
    assert!(answer.body.contains("body: is a list, must be an object"), "{}", answer.body);
}

#[tokio::test]
async fn a_byte_order_mark_is_ignored() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post_text("/generate", "application/json", "\u{feff}{\"inputs\": \"Hi\"}").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
}

#[tokio::test]
async fn the_message_about_a_deep_body_is_short() {
    let server = Server::answering(&[IM_END]).await;
    let body = format!("{{\"a\": {}{}}}", "[".repeat(500), "]".repeat(500));
    let answer = server.post_text("/v1/chat/completions", "application/json", &body).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.chars().count() <= 401 && message.contains("recursion limit exceeded"), "{message}");
}

#[tokio::test]
async fn unknown_fields_are_ignored() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/generate", json!({"inputs": "Hi", "x": 1, "parameters": {"y": {}}})).await;
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn unknown_routes_and_methods_are_refused() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.get("/nowhere").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json(), json!({"error": "there is no route /nowhere", "error_type": "not_found"}));
    let refused = "does not accept GET; the header `allow` says what it accepts";
    for (path, at) in
        [("/generate", "/error"), ("/v1/chat/completions", "/error/message"), ("/v1/messages", "/error/message")]
    {
        let answer = server.get(path).await;
        assert_eq!((answer.status, answer.header("allow")), (StatusCode::METHOD_NOT_ALLOWED, "POST"));
        assert_eq!(*answer.json().pointer(at).unwrap(), json!(format!("the route {path} {refused}")));
    }
    let answer = server.get("/v1/nowhere").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json()["error"]["message"], "there is no route /v1/nowhere");
}

#[tokio::test]
async fn a_panic_fails_one_request_only() {
    let server = Server::scripted(|sequence| {
        assert_ne!(sequence.request.max_new_tokens, 13, "unlucky");
        sequence.answer(&[IM_END]);
    })
    .await;
    for path in ["/generate", "/generate_stream"] {
        let answer = server.post(path, json!({"inputs": "Hi", "parameters": {"max_new_tokens": 13}})).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer.json()["error_type"], "internal");
    }
    let answer = server.post("/v1/completions", json!({"prompt": "Hi", "max_tokens": 13})).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer.json()["error"]["type"], "server_error");
    assert_eq!(server.post("/generate", json!({"inputs": "Hi"})).await.status, StatusCode::OK);
}

/// A request to generate, compressed. `encoding`: its name in the header.
async fn post_encoded(server: &Server, encoding: &str, body: Vec<u8>) -> Answer {
    let request = server.request("POST", "/v1/completions").header("content-type", "application/json");
    whole(server.send_bytes(request.header("content-encoding", encoding), body).await).await
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn compressed_bodies_are_decoded_within_the_limit_of_bodies() {
    let server = Server::answering(&[IM_END]).await;
    let text = json!({"model": "tgi", "prompt": "Hi"}).to_string();
    let mut deflate = ZlibEncoder::new(Vec::new(), Compression::default());
    deflate.write_all(text.as_bytes()).unwrap();
    for (encoding, body) in [
        ("gzip", gzip(&text)),
        ("GZIP", gzip(&text)),
        ("deflate", deflate.finish().unwrap()),
        ("identity", text.clone().into()),
    ] {
        let answer = post_encoded(&server, encoding, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{encoding}: {}", answer.body);
    }
    // A thousand times as large when it is decoded.
    let bomb = gzip(&format!("{{\"prompt\": \"{}\"}}", "x".repeat(10_000_000)));
    assert!(bomb.len() < 20_000);
    assert_eq!(post_encoded(&server, "gzip", bomb).await.status, StatusCode::PAYLOAD_TOO_LARGE);
    let cut = gzip(&text)[..20].to_vec();
    for body in [cut, text.clone().into()] {
        let answer = post_encoded(&server, "gzip", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.body.contains("the body cannot be decoded"), "{}", answer.body);
    }
}

#[tokio::test]
async fn other_encodings_are_refused_by_name() {
    let server = Server::answering(&[IM_END]).await;
    for encoding in ["br", "zstd", "gzip, br"] {
        let answer = post_encoded(&server, encoding, b"{}".to_vec()).await;
        assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(message, format!("the content-encoding `{encoding}` is not supported, only gzip and deflate are"));
    }
}

#[tokio::test]
async fn a_number_too_large_for_the_server_is_refused_with_the_limit() {
    let server = Server::answering(&[IM_END]).await;
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Hi", "temperature": 1e308})),
        ("/v1/responses", json!({"model": "tgi", "input": "Hi", "temperature": 1e308})),
        (
            "/v1/messages",
            json!({"model": "tgi", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}],
                                "temperature": 1e308}),
        ),
        ("/generate", json!({"inputs": "Hi", "parameters": {"temperature": 1e308}})),
    ] {
        let answer = server.post(path, body).await;
        assert!(answer.body.contains("`temperature` must be at most 3.4028235e38"), "{path}: {}", answer.body);
    }
}
