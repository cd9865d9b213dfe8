//! Property: for any model output, a stream, added up as clients do, is the plain answer.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use penstock_router::sequence::{SequenceEvent, Token, TopToken};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::fold::{SEED, chat_fold, chunks, completion_fold, message_fold, response_fold, seed_index, with};
use crate::messages::{hello, stable, tool as anthropic_tool};
use crate::model::{IM_END, bytes, word};
use crate::responses;
use crate::server::Server;
use crate::tool::{TOOL_CALL, TOOL_CALL_END, ask, call, server, without_ids};

const PATH: &str = "/v1/chat/completions";

/// Pieces of model output, well-formed or not.
fn pieces() -> impl Strategy<Value = Vec<u32>> {
    let piece = prop_oneof![
        Just(vec![TOOL_CALL]),
        Just(vec![TOOL_CALL_END]),
        Just(bytes("<think>")),
        Just(bytes("</think>")),
        Just(bytes("<tool_call>")),
        Just(call(r#"{"name": "f", "arguments": {"city": ["}", 1]}}"#)),
        Just(bytes("{\"name\": \"g\", \"arguments\": {\"é")),
        Just(vec![word("Hello")]),
        Just(vec![word("!\n\nUser")]),
        Just(vec![IM_END]),
        "[ \n]{1,2}".prop_map(|text| bytes(&text)),
        "\\PC{1,3}".prop_map(|text| bytes(&text)),
        Just(vec![0xE2, 0x82]),
    ];
    proptest::collection::vec(piece, 0..8).prop_map(|pieces| [pieces.concat(), vec![IM_END]].concat())
}

/// Thoughts, text and a call: every kind of content.
fn every_kind() -> Vec<u32> {
    let call = call(r#"{"name": "f", "arguments": {"city": "Oslo"}}"#);
    [bytes("<think>why</think>"), vec![word("Hello")], call, vec![IM_END]].concat()
}

/// One case in five is `complete`, so that no run passes without a call: random pieces rarely form one.
fn or_complete<S: Strategy>(random: S, complete: S::Value) -> impl Strategy<Value = S::Value>
where
    S::Value: Clone,
{
    prop_oneof![1 => Just(complete), 4 => random]
}

type Answers = Arc<Mutex<Vec<Vec<u32>>>>;

/// Answers every choice of every prompt with its tokens.
fn answering(runtime: &Runtime, answers: &Answers) -> Server {
    let answers = Arc::clone(answers);
    runtime.block_on(server(move |sequence| {
        let tokens = answers.lock().unwrap()[seed_index(&sequence.request)].clone();
        let prompt =
            if sequence.request.sampling.prompt_logprobs { &sequence.request.prompt_token_ids[1..] } else { &[] };
        let token = |&id: &u32| Token { id, logprob: -0.25, top: vec![TopToken { id: 0xC3, logprob: -0.5 }] };
        sequence.send(SequenceEvent::PromptTokens(prompt.iter().map(token).collect()));
        sequence.answer(&tokens);
    }))
}

/// Answers every sequence with the first answer.
fn answering_first(runtime: &Runtime, answers: &Answers) -> Server {
    let answers = Arc::clone(answers);
    runtime.block_on(server(move |sequence| {
        let tokens = answers.lock().unwrap()[0].clone();
        sequence.answer(&tokens);
    }))
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn a_chat_s_stream_folds_to_the_plain_answer() {
    let runtime = Runtime::new().unwrap();
    let answers = Answers::default();
    let server = answering(&runtime, &answers);
    let num_calls = Cell::new(0);
    let fields = (any::<bool>(), any::<bool>(), any::<bool>(), proptest::option::of(1..40_u32));
    let case = (proptest::collection::vec(pieces(), 1..4), fields);
    let case = or_complete(case, (vec![every_kind()], (true, true, false, None)));
    proptest!(config(), |((tokens, (with_tools, logprobs, stops, max_tokens)) in case)| {
        let n = tokens.len();
        answers.lock().unwrap().clone_from(&tokens);
        let mut body = ask(json!({"n": n, "seed": SEED, "logprobs": logprobs, "max_tokens": max_tokens}));
        if !with_tools {
            body["tools"] = Value::Null;
        }
        if stops {
            body["stop"] = json!(["User", "}}"]);
        }
        let plain = runtime.block_on(server.post(PATH, body.clone()));
        prop_assert_eq!(plain.status, StatusCode::OK);
        let plain = plain.json();
        let streaming = json!({"stream": true, "stream_options": {"include_usage": true}});
        let streamed = runtime.block_on(server.post(PATH, with(body, streaming)));
        let usage = chunks(&streamed).last().unwrap()["usage"].clone();
        prop_assert_eq!(usage, plain["usage"].clone());
        let (folded, plain) = (chat_fold(&streamed).to_string(), plain["choices"].to_string());
        let ids = |text: &str| serde_json::from_str::<Value>(&without_ids(text)).unwrap();
        prop_assert_eq!(ids(&folded), ids(&plain));
        num_calls.set(num_calls.get() + plain.matches("call_").count());
    });
    assert!(num_calls.get() > 0, "no answer had a call in it");
}

#[test]
fn a_stream_of_messages_folds_to_the_plain_answer() {
    let runtime = Runtime::new().unwrap();
    let answers = Answers::default();
    let server = answering_first(&runtime, &answers);
    let kinds = Cell::new([0; 3]);
    let case = (pieces(), any::<[bool; 3]>(), proptest::option::of(1..40_u32));
    let case = or_complete(case, (every_kind(), [true, true, false], None));
    proptest!(config(), |((tokens, [with_tools, shows_thinking, stops], max_tokens) in case)| {
        *answers.lock().unwrap() = vec![tokens];
        let display = if shows_thinking { "summarized" } else { "omitted" };
        let mut body = hello(json!({"max_tokens": max_tokens.unwrap_or(1000),
                                    "thinking": {"type": "adaptive", "display": display}}));
        if with_tools {
            body["tools"] = json!([anthropic_tool("f"), anthropic_tool("g")]);
        }
        if stops {
            body["stop_sequences"] = json!(["User", "}}"]);
        }
        let plain = runtime.block_on(server.post("/v1/messages", body.clone()));
        prop_assert_eq!(plain.status, StatusCode::OK);
        let streamed = runtime.block_on(server.post("/v1/messages", with(body, json!({"stream": true}))));
        prop_assert_eq!(stable(&message_fold(&streamed).to_string()), stable(&plain.body));
        let seen = ["\"text\"", "\"thinking\"", "\"tool_use\""].map(|kind| plain.body.matches(kind).count());
        kinds.set(std::array::from_fn(|kind| kinds.get()[kind] + seen[kind]));
    });
    assert!(kinds.get().iter().all(|&num| num > 0), "{:?}", kinds.get());
}

#[test]
fn a_stream_of_a_response_folds_to_the_plain_answer() {
    let runtime = Runtime::new().unwrap();
    let answers = Answers::default();
    let server = answering_first(&runtime, &answers);
    let kinds = Cell::new([0; 3]);
    let case = (pieces(), any::<bool>(), proptest::option::of(1..40_u32));
    let case = or_complete(case, (every_kind(), true, None));
    proptest!(config(), |((tokens, with_tools, max_tokens) in case)| {
        *answers.lock().unwrap() = vec![tokens];
        let mut body = responses::hello(json!({"max_output_tokens": max_tokens}));
        if with_tools {
            body["tools"] = json!([responses::tool("f"), responses::tool("g")]);
        }
        let plain = runtime.block_on(server.post("/v1/responses", body.clone()));
        prop_assert_eq!(plain.status, StatusCode::OK);
        let streamed = runtime.block_on(server.post("/v1/responses", with(body, json!({"stream": true}))));
        let stable = responses::stable;
        prop_assert_eq!(stable(&response_fold(&streamed).to_string()), stable(&plain.json().to_string()));
        let seen = ["\"output_text\"", "\"reasoning_text\"", "\"function_call\""];
        let seen = seen.map(|kind| plain.body.matches(kind).count());
        kinds.set(std::array::from_fn(|kind| kinds.get()[kind] + seen[kind]));
    });
    assert!(kinds.get().iter().all(|&num| num > 0), "{:?}", kinds.get());
}

#[test]
fn a_completion_s_stream_folds_to_the_plain_answer() {
    let runtime = Runtime::new().unwrap();
    let answers = Answers::default();
    let server = answering(&runtime, &answers);
    let fields = (any::<bool>(), proptest::option::of(0..5_u32), any::<bool>(), proptest::option::of(0..40_u32));
    let prompts = proptest::collection::vec("\\PC{1,5}", 1..3);
    let case = (proptest::collection::vec(pieces(), 1..3), prompts, fields);
    proptest!(config(), |((tokens, prompts, (echo, logprobs, stops, max_tokens)) in case)| {
        answers.lock().unwrap().clone_from(&tokens);
        let max_tokens = max_tokens.filter(|&max_tokens| echo || max_tokens > 0);
        let mut body = json!({"prompt": prompts, "n": tokens.len(), "seed": SEED, "echo": echo});
        (body["logprobs"], body["max_tokens"]) = (json!(logprobs), json!(max_tokens));
        if stops {
            body["stop"] = json!(["User", "}}"]);
        }
        let plain = runtime.block_on(server.post("/v1/completions", body.clone()));
        prop_assert_eq!(plain.status, StatusCode::OK);
        let plain = plain.json();
        let streaming = json!({"stream": true, "stream_options": {"include_usage": true}});
        let streamed = runtime.block_on(server.post("/v1/completions", with(body, streaming)));
        let usage = chunks(&streamed).last().unwrap()["usage"].clone();
        prop_assert_eq!(usage, plain["usage"].clone());
        prop_assert_eq!(completion_fold(&streamed), plain["choices"].clone());
        for (index, choice) in plain["choices"].as_array().unwrap().iter().enumerate() {
            prop_assert!(!echo || choice["text"].as_str().unwrap().starts_with(&prompts[index / tokens.len()]));
            let lists = ["tokens", "token_logprobs", "top_logprobs", "text_offset"].map(|name| &choice["logprobs"][name]);
            let lengths = lists.map(|list| list.as_array().map(Vec::len));
            prop_assert!(lengths.iter().all(|length| *length == lengths[0] && length.is_some() == logprobs.is_some()));
        }
    });
}
