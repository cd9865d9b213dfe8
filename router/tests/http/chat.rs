//! `/v1/chat/completions`.

use axum::http::StatusCode;
use penstock_router::sequence::{FinishReason, Grammar, LogitBias, SequenceEvent, SequenceFailure, Token, TopToken};
use serde_json::{Value, json};

use crate::fold::{SEED, seed_index, with};
use crate::model::{IM_END, IM_START, bytes, word};
use crate::server::{Answer, Server, whole};
use crate::tool;

const PATH: &str = "/v1/chat/completions";

fn hello(fields: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "Hi"}]}), fields)
}

/// Replaces what differs from run to run.
pub fn stable(text: &str) -> String {
    let id = regex::Regex::new("(chatcmpl|cmpl)-[0-9a-f]{32}").unwrap();
    let created = regex::Regex::new("\"created\":[1-9][0-9]+").unwrap();
    created.replace_all(&id.replace_all(text, "$1-ID"), "\"created\":SECONDS").into_owned()
}

fn content(answer: &Answer) -> String {
    let events = answer.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    chunks.map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test]
async fn an_answer_has_openai_s_shape() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let answer = server.post(PATH, hello(json!({"logprobs": true}))).await;
    insta::assert_snapshot!(stable(&answer.body), @r#"{"object":"chat.completion","id":"chatcmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"message":{"role":"assistant","content":"Hello","refusal":null,"annotations":[]},"logprobs":{"content":[{"token":"Hello","logprob":-0.5,"bytes":[72,101,108,108,111],"top_logprobs":[]},{"token":"<|im_end|>","logprob":-0.5,"bytes":[60,124,105,109,95,101,110,100,124,62],"top_logprobs":[]}],"refusal":null},"finish_reason":"stop"}],"usage":{"prompt_tokens":21,"completion_tokens":2,"total_tokens":23,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}"#);
    assert_eq!(answer.header("x-prompt-tokens"), "21");
}

#[tokio::test]
async fn a_refusal_of_the_assistant_is_what_it_said() {
    let server = tool::server(|sequence| sequence.answer(&[IM_END])).await;
    let refused = json!({"role": "assistant", "content": null, "refusal": "I cannot do that."});
    for message in
        [refused, json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot do that."}]})]
    {
        let messages = json!([{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "Why?"}]);
        assert_eq!(server.post(PATH, json!({"messages": messages})).await.status, StatusCode::OK);
        assert!(tool::prompt(&server).contains("assistant:I cannot do that.\n"), "{}", tool::prompt(&server));
    }
}

#[tokio::test]
async fn a_stream_is_chunks_then_usage_then_done() {
    let server = Server::answering(&[word("Hello"), word(" world"), IM_END]).await;
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}, "model": "mine"});
    let answer = server.post(PATH, hello(fields)).await;
    insta::assert_snapshot!(stable(&answer.body), @r#"
    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"mine","system_fingerprint":"0.1.0-native","choices":[{"index":0,"delta":{"role":"assistant","content":"Hello"},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"mine","system_fingerprint":"0.1.0-native","choices":[{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"mine","system_fingerprint":"0.1.0-native","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop"}],"usage":null}

    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"mine","system_fingerprint":"0.1.0-native","choices":[],"usage":{"prompt_tokens":21,"completion_tokens":3,"total_tokens":24,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}

    data: [DONE]
    "#);
}

#[tokio::test]
async fn the_template_renders_the_prompt() {
    let server = Server::answering(&[IM_END]).await;
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    server.post(PATH, json!({"messages": [{"role": "user", "content": parts, "name": null}]})).await;
    let expected = [vec![IM_START], bytes("user\nab"), vec![IM_END], bytes("\n"), vec![IM_START], bytes("assistant\n")];
    assert_eq!(server.last_request().prompt_token_ids, expected.concat());
}

#[tokio::test]
async fn sampling_is_the_default_and_temperature_zero_is_greedy() {
    let server = Server::answering(&[IM_END]).await;
    let neutral = json!({
        "n": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "stop": null, "tools": null,
        "stream": null, "stream_options": null, "logprobs": null, "top_logprobs": null, "max_tokens": null, "seed": -1,
        "temperature": null, "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me", "model": "tgi",
    });
    let answer = server.post(PATH, hello(neutral)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.json()["model"], "test/model");
    let sampling = server.last_request().sampling;
    assert!(sampling.do_sample);
    assert_eq!((sampling.seed, sampling.top_p, sampling.temperature), (u64::MAX, 1.0, 1.0));

    server.post(PATH, hello(json!({"temperature": 0, "top_p": 0.5, "min_p": 0.1}))).await;
    let sampling = server.last_request().sampling;
    assert!(!sampling.do_sample);
    assert_eq!((sampling.top_p, sampling.min_p, sampling.temperature), (1.0, 0.0, 1.0));
}

#[tokio::test]
async fn the_text_ends_before_a_stop_string_and_no_delta_shows_it() {
    let tokens = [word("Hello"), word("!\n\nUser"), word(": hi"), word("END"), IM_END];
    let server = Server::answering(&tokens).await;
    for stop in [json!("\n\nUser:"), json!(["nope", "\n\nUser:"])] {
        let answer = server.post(PATH, hello(json!({"stop": stop}))).await.json();
        assert_eq!(answer["choices"][0]["message"]["content"], "Hello!");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(answer["usage"]["completion_tokens"], 3);
        let streamed = server.post(PATH, hello(json!({"stop": stop, "stream": true}))).await;
        assert_eq!(content(&streamed), "Hello!");
    }
    // Text held back for a stop string that did not come is released at the end.
    for max_tokens in 2..=5 {
        let fields = json!({"stop": "\n\nUser: hiENDx", "max_tokens": max_tokens, "stream": true});
        let streamed = server.post(PATH, hello(fields)).await;
        let whole = ["Hello", "!\n\nUser", ": hi", "END"][..max_tokens.min(4)].concat();
        assert_eq!(content(&streamed), whole);
    }
}

#[tokio::test]
async fn max_tokens_has_two_names() {
    let server = Server::answering(&[word("Hello"); 9]).await;
    for fields in [
        json!({"max_tokens": 2}),
        json!({"max_completion_tokens": 2}),
        json!({"max_tokens": 2, "max_completion_tokens": 2}),
    ] {
        let answer = server.post(PATH, hello(fields)).await.json();
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 2);
    }
    let answer = server.post(PATH, hello(json!({"max_tokens": 2, "max_completion_tokens": 3}))).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn unsupported_features_are_refused_by_name() {
    let server = Server::answering(&[IM_END]).await;
    let asked = [
        ("functions", json!([{"name": "f"}]), "`functions` is not supported: send `tools`"),
        ("function_call", json!({"name": "f"}), "`function_call` is not supported: send `tool_choice`"),
        ("modalities", json!(["text", "audio"]), "`modalities` is not supported: this model answers in text only"),
        ("audio", json!({"voice": "x"}), "`audio` is not supported: this model answers in text only"),
        ("n", json!(5), "`n` must be >= 1 and <= 4. Given: 5"),
        ("n", json!(0), "`n` must be >= 1"),
        ("top_logprobs", json!(21), "`top_logprobs` must be >= 0 and <= 20. Given: 21"),
        ("logit_bias", json!({"5": 101}), "`logit_bias` must be >= -100 and <= 100"),
        ("presence_penalty", json!(2.5), "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ("messages", json!([]), "`messages` cannot be empty"),
        ("grammar", json!({"type": "regex", "value": "broken"}), "`grammar` is not a grammar: it is broken"),
    ];
    for (name, value, message) in asked {
        for stream in [false, true] {
            let mut body = hello(json!({"stream": stream}));
            body[name] = value.clone();
            let answer = server.post(PATH, body).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{name}");
            let error = answer.json()["error"].clone();
            assert!(error["message"].as_str().unwrap().contains(message), "{error}");
            assert_eq!(error["param"], name);
        }
    }
    let image = json!([{"type": "image_url", "image_url": {"url": "http://x/"}}]);
    let answer = server.post(PATH, json!({"messages": [{"role": "user", "content": image}]})).await;
    assert!(answer.body.contains("`image_url` parts are not supported"), "{}", answer.body);
}

#[tokio::test]
async fn fields_without_effect_are_accepted() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let fields = json!({
        "user": "me", "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "reasoning_effort": "low",
        "functions": [], "function_call": "auto", "modalities": ["text"], "audio": null, "top_logprobs": 3, "top_k": -1,
        "typical_p": 1, "parallel_tool_calls": true, "prediction": null, "prompt_cache_key": "k",
    });
    let answer = server.post(PATH, hello(fields)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.json()["choices"][0]["logprobs"], Value::Null);
    assert_eq!(server.last_request().sampling.top_n, 0);
}

#[tokio::test]
async fn parameters_reach_the_engine() {
    let server = Server::answering(&[IM_END]).await;
    let fields = json!({
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 1.5}, "logprobs": true,
        "top_logprobs": 20, "seed": 9, "temperature": 0.5, "top_p": 0.25, "stop_token_ids": [7],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
    });
    let answer = server.post(PATH, hello(fields)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let sampling = server.last_request().sampling;
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty, sampling.seed), (0.5, -0.5, 9));
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_n), (0.5, 0.25, 20));
    assert_eq!(sampling.logit_bias, [LogitBias { token_id: 5, bias: 1.5 }]);
    assert_eq!(sampling.stop_token_ids, [IM_END, 7]);
    assert!(sampling.model_logprobs);
    assert_eq!(server.last_request().grammar, Some(Grammar::JsonSchema(r#"{"type":"integer"}"#.to_owned())));
}

#[tokio::test]
async fn logprobs_have_each_token_s_own_bytes() {
    let top = vec![TopToken { id: 0xC3, logprob: -0.25 }, TopToken { id: word("Hello"), logprob: f32::NEG_INFINITY }];
    let server = Server::scripted(move |sequence| {
        let tokens = [0xC3, 0xA9, IM_END];
        for id in tokens {
            sequence.send(SequenceEvent::Token(Token { id, logprob: -0.5, top: top.clone() }));
        }
        sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
    })
    .await;
    let answer = server.post(PATH, hello(json!({"logprobs": true, "top_logprobs": 2}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "é");
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let bytes: Vec<_> = tokens.iter().map(|token| (&token["token"], &token["bytes"])).collect();
    assert_eq!(bytes[..2], [(&json!(""), &json!([0xC3])), (&json!("é"), &json!([0xA9]))]);
    insta::assert_snapshot!(tokens[0]["top_logprobs"], @r#"[{"token":"","logprob":-0.25,"bytes":[195]},{"token":"Hello","logprob":-9999.0,"bytes":[72,101,108,108,111]}]"#);
    let streamed = server.post(PATH, hello(json!({"logprobs": true, "top_logprobs": 1, "stream": true}))).await;
    insta::assert_snapshot!(stable(&streamed.body), @r#"
    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"delta":{"content":"é"},"logprobs":{"content":[{"token":"","logprob":-0.5,"bytes":[195],"top_logprobs":[{"token":"","logprob":-0.25,"bytes":[195]}]},{"token":"é","logprob":-0.5,"bytes":[169],"top_logprobs":[{"token":"�","logprob":-0.25,"bytes":[195]}]}],"refusal":null},"finish_reason":null}],"usage":null}

    data: {"object":"chat.completion.chunk","id":"chatcmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"delta":{"content":""},"logprobs":{"content":[{"token":"<|im_end|>","logprob":-0.5,"bytes":[60,124,105,109,95,101,110,100,124,62],"top_logprobs":[{"token":"�","logprob":-0.25,"bytes":[195]}]}],"refusal":null},"finish_reason":"stop"}],"usage":null}

    data: [DONE]
    "#);
}

#[tokio::test]
async fn choices_share_the_prompt_and_have_seeds_of_their_own() {
    let server = Server::scripted(|sequence| {
        let index = u32::try_from(seed_index(&sequence.request)).unwrap();
        sequence.answer(&[bytes(&index.to_string()), vec![IM_END]].concat());
    })
    .await;
    let answer = server.post(PATH, hello(json!({"n": 3, "seed": SEED}))).await.json();
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| (&choice["index"], &choice["message"]["content"])).collect();
    assert_eq!(texts, [(&json!(0), &json!("0")), (&json!(1), &json!("1")), (&json!(2), &json!("2"))]);
    assert_eq!((&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]), (&json!(21), &json!(6)));
    let requests = server.engine.requests.lock().unwrap().clone();
    assert!(requests[0].group.is_some() && requests.iter().all(|request| request.group == requests[0].group));
}

#[tokio::test]
async fn a_request_takes_a_permit_for_each_choice() {
    let (server, mut sequences) = Server::manual().await;
    let first = server.open(PATH, hello(json!({"n": 3, "stream": true}))).await;
    let answer = server.post(PATH, hello(json!({"n": 2}))).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    for _ in 0..3 {
        sequences.recv().await.unwrap().answer(&[IM_END]);
    }
    assert_eq!(whole(first).await.events().len(), 4);
}

#[tokio::test]
async fn a_failure_in_a_stream_has_the_plain_answer_s_error() {
    let (server, mut sequences) = Server::manual().await;
    let fail = SequenceEvent::Failed(SequenceFailure::Sequence("logits are NaN".to_owned()));
    let (answer, ()) = tokio::join!(server.post(PATH, hello(json!({}))), async {
        sequences.recv().await.unwrap().send(fail.clone());
    });
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    insta::assert_snapshot!(answer.body, @r#"{"error":{"message":"Request failed during generation: logits are NaN","type":"server_error","param":null,"code":"generation"}}"#);
    let response = server.open(PATH, hello(json!({"stream": true}))).await;
    sequences.recv().await.unwrap().send(fail);
    insta::assert_snapshot!(whole(response).await.body, @r#"
    data: {"error":{"message":"Request failed during generation: logits are NaN","type":"server_error","param":null,"code":"generation","http_status_code":500}}

    data: [DONE]
    "#);
}

#[tokio::test]
async fn a_template_s_refusal_is_the_client_s_error() {
    let folder = tempfile::tempdir().unwrap();
    let check = |template: Value| {
        crate::model::write_with_template(folder.path(), &template);
        folder.path().to_owned()
    };
    let cases = [
        (json!("{{ raise_exception('roles must alternate') }}"), "roles must alternate"),
        (json!("{% for %}"), "Template error: "),
        (Value::Null, "the model has no chat template"),
    ];
    for (template, message) in cases {
        let path = check(template);
        let server = Server::start(|sequence| sequence.answer(&[IM_END]), |config| config.model_folder = path).await;
        let answer = server.post(PATH, hello(json!({"stream": true}))).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"]["code"], "template_error");
        assert!(answer.body.contains(message), "{}", answer.body);
    }
}
