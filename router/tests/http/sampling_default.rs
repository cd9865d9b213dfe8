//! What requests leave out is the model's default on the routes of OpenAI and Anthropic, and TGI's on TGI's.

use penstock_router::SamplingDefaults;
use penstock_router::sequence::Sampling;
use serde_json::{Value, json};

use crate::fold::with;
use crate::model::{IM_END, word};
use crate::server::{Engine, Server};

async fn server(defaults: Value) -> Server<Engine> {
    let (sampling_defaults, bad) = SamplingDefaults::of(defaults.as_object().unwrap());
    assert_eq!(bad, []);
    let script = |sequence: crate::server::Sequence| sequence.answer(&[word("Hello"), IM_END]);
    Server::start(script, |config| config.sampling_defaults = sampling_defaults).await
}

/// A small request to each route that takes the model's defaults.
fn bodies() -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "Hi"})),
        ("/v1/responses", json!({"model": "tgi", "input": "Hi"})),
        ("/v1/messages", json!({"model": "tgi", "messages": messages, "max_tokens": 100})),
    ]
}

/// What the engine was asked for, after a request that the server accepted.
async fn asked(server: &Server<Engine>, path: &str, body: Value) -> (Sampling, u32) {
    let answer = server.post(path, body).await;
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    let request = server.last_request();
    (request.sampling, request.max_new_tokens)
}

#[tokio::test]
async fn what_a_request_leaves_out_is_the_models_default() {
    let server = server(json!({
        "temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "typical_p": 0.875, "repetition_penalty": 1.5,
        "max_new_tokens": 7,
    }))
    .await;
    for (path, body) in bodies() {
        for body in [body.clone(), with(body, json!({"temperature": null, "top_p": null}))] {
            let (sampling, max_new_tokens) = asked(&server, path, body).await;
            assert!(sampling.do_sample, "{path}");
            let Sampling { temperature, top_p, top_k, min_p, typical_p, repetition_penalty, .. } = sampling;
            assert_eq!((temperature, top_p, top_k, min_p), (0.5, 0.75, 20, 0.25), "{path}");
            assert_eq!((typical_p, repetition_penalty), (0.875, 1.5), "{path}");
            assert_eq!(max_new_tokens, if path == "/v1/messages" { 100 } else { 7 }, "{path}");
        }
    }
}

#[tokio::test]
async fn a_value_of_the_request_wins_also_if_it_is_neutral() {
    let server = server(json!({
        "temperature": 0, "top_p": 0.5, "top_k": 9, "min_p": 0.5, "typical_p": 0.5, "repetition_penalty": 1.5,
        "max_new_tokens": 7,
    }))
    .await;
    for off in [-1, 0] {
        let neutral = json!({
            "temperature": 1, "top_p": 1, "top_k": off, "min_p": 0, "typical_p": 1, "repetition_penalty": 1, "max_tokens": 50,
        });
        for (path, body) in &bodies()[..2] {
            let (sampling, max_new_tokens) = asked(&server, path, with(body.clone(), neutral.clone())).await;
            assert!(sampling.do_sample, "{path}");
            let Sampling { temperature, top_p, top_k, min_p, typical_p, repetition_penalty, .. } = sampling;
            assert_eq!((temperature, top_p, top_k, min_p), (1.0, 1.0, 0, 0.0), "{path}");
            assert_eq!((typical_p, repetition_penalty, max_new_tokens), (1.0, 1.0, 50), "{path}");
        }
    }
    let (_, responses) = &bodies()[2];
    let fields = json!({"temperature": 0.5, "top_p": 1, "max_output_tokens": 50});
    let (sampling, max_new_tokens) = asked(&server, "/v1/responses", with(responses.clone(), fields)).await;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.typical_p, max_new_tokens), (0.5, 1.0, 0.5, 50));
}

#[tokio::test]
async fn a_greedy_request_stays_greedy_with_the_models_repetition_penalty() {
    let server =
        server(json!({"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.5})).await;
    for (path, body) in bodies() {
        let (sampling, _) = asked(&server, path, with(body, json!({"temperature": 0}))).await;
        let Sampling { temperature, top_p, top_k, min_p, repetition_penalty, .. } = sampling;
        assert!(!sampling.do_sample, "{path}");
        assert_eq!((temperature, top_p, top_k, min_p, repetition_penalty), (1.0, 1.0, 0, 0.0, 1.5), "{path}");
    }
}

#[tokio::test]
async fn a_model_may_be_greedy_by_default() {
    for greedy in [
        json!({"temperature": 0, "top_k": 50}),
        json!({"top_p": 0, "temperature": 0.7}),
        json!({"top_k": 1, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1}),
    ] {
        let server = server(greedy).await;
        for (path, body) in bodies() {
            assert!(!asked(&server, path, body).await.0.do_sample, "{path}");
        }
    }
}

#[tokio::test]
async fn a_completion_has_sixteen_tokens_unless_the_model_has_less() {
    for (defaults, expected) in
        [(json!({}), 16), (json!({"max_new_tokens": 7}), 7), (json!({"max_new_tokens": 40}), 16)]
    {
        let server = server(defaults).await;
        assert_eq!(asked(&server, "/v1/completions", json!({"prompt": "Hi"})).await.1, expected);
        assert_eq!(asked(&server, "/v1/completions", json!({"prompt": "Hi", "max_tokens": 30})).await.1, 30);
    }
}

#[tokio::test]
async fn a_default_length_beyond_the_context_is_what_fits() {
    let server = server(json!({"max_new_tokens": 100_000})).await;
    let (_, max_new_tokens) = asked(&server, "/v1/responses", json!({"model": "tgi", "input": "Hi"})).await;
    assert!((200..256).contains(&max_new_tokens), "{max_new_tokens}");
}

#[tokio::test]
async fn tgis_routes_keep_tgis_defaults() {
    let server = server(json!({"temperature": 0.5, "top_k": 1, "repetition_penalty": 1.5, "max_new_tokens": 7})).await;
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (path, body) in [
        ("/", json!({"inputs": "Hi"})),
        ("/generate", json!({"inputs": "Hi"})),
        ("/generate_stream", json!({"inputs": "Hi"})),
        ("/invocations", json!({"inputs": "Hi"})),
        ("/invocations", chat.clone()),
        ("/invocations", json!({"prompt": "Hi", "max_tokens": 20})),
        ("/vertex", json!({"instances": [{"inputs": "Hi"}]})),
        ("/vertex", json!({"instances": [chat]})),
    ] {
        let (sampling, max_new_tokens) = asked(&server, path, body).await;
        assert!(sampling.do_sample, "{path}");
        assert_eq!((sampling.temperature, sampling.top_k, sampling.repetition_penalty), (1.0, 0, 1.0), "{path}");
        assert!(max_new_tokens > 7, "{path}");
    }
}

#[tokio::test]
async fn info_the_document_and_responses_show_the_defaults() {
    let server = server(json!({"temperature": 0.7, "top_p": 0.75, "min_p": 0.25, "max_new_tokens": 7})).await;
    let info = server.get("/info").await.json();
    let shown = json!({"temperature": 0.7, "top_p": 0.75, "min_p": 0.25, "max_new_tokens": 7});
    assert_eq!(info["sampling_defaults"], shown);
    let response = server.post("/v1/responses", json!({"model": "tgi", "input": "Hi", "top_p": 1})).await.json();
    assert_eq!((&response["temperature"], &response["top_p"]), (&json!(0.7), &json!(1.0)));
    let document = server.get("/api-doc/openapi.json").await.json();
    // A request's own fields are in the last part of its schema.
    let default = |request: &str, field: &str| {
        let schema = &document["components"]["schemas"][request];
        let own = schema["allOf"].as_array().and_then(|parts| parts.last()).unwrap_or(schema);
        own["properties"][field]["default"].clone()
    };
    for (request, field, expected) in [
        ("SamplingFields", "temperature", json!(0.7)),
        ("SamplingFields", "min_p", json!(0.25)),
        ("SamplingFields", "repetition_penalty", json!(1)),
        ("ChatRequest", "max_tokens", json!(7)),
        ("CompletionRequest", "max_tokens", json!(7)),
        ("ResponsesRequest", "top_p", json!(0.75)),
        ("ResponsesRequest", "max_output_tokens", json!(7)),
        ("AnthropicMessagesRequest", "temperature", json!(0.7)),
        ("GenerateParameters", "temperature", json!(1)),
        ("ExtensionFields", "min_p", json!(0)),
    ] {
        assert_eq!(default(request, field), expected, "{request} {field}");
    }
}
