//! What vLLM's clients bring: its fields and routes.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::PriorityOrder;
use penstock_router::sequence::{FinishReason, Grammar, SequenceEvent, Token, TopToken};
use serde_json::{Value, json};

use crate::fold::{chat_fold, chunks, with};
use crate::model::{IM_END, bytes, word};
use crate::server::{Sequence, Server};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(fields: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "Hi"}]}), fields)
}

fn completion(fields: Value) -> Value {
    with(json!({"prompt": "Hi"}), fields)
}

/// The error object of a refused request.
async fn refusal(server: &Server, path: &str, body: Value, status: StatusCode) -> Value {
    let answer = server.post(path, body.clone()).await;
    assert_eq!(answer.status, status, "{body}: {}", answer.body);
    answer.json()["error"].clone()
}

#[tokio::test]
async fn every_constraint_reaches_the_engine() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let expected = Some(Grammar::Regex("[a-z]+".to_owned()));
    for fields in [json!({"structured_outputs": {"regex": "[a-z]+"}}), json!({"guided_regex": "[a-z]+"})] {
        for (path, body) in [(CHAT, chat(fields.clone())), (COMPLETIONS, completion(fields))] {
            let answer = server.post(path, body.clone()).await;
            assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.body);
            assert_eq!(server.last_request().grammar, expected, "{body}");
        }
    }
}

#[tokio::test]
async fn a_constraint_that_cannot_be_enforced_is_refused_by_its_name() {
    let server = Server::answering(&[IM_END]).await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let cases = [
        (json!({"guided_regex": "broken"}), "guided_regex", "`guided_regex` is not a grammar: it is broken"),
        (json!({"structured_outputs": {"grammer": "x"}}), "structured_outputs", "unknown field `grammer`"),
        (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs", "not a JSON object"),
        (json!({"guided_grammar": "root ::= \n a"}), "guided_grammar", "line 2: rule `a` is not defined"),
        (json!({"response_format": {"type": "structural_tag"}}), "response_format", "missing field `structures`"),
        (json!({"guided_choice": "yes"}), "guided_choice", ""),
        (
            json!({"guided_json": {}, "response_format": {"type": "regex", "value": "a"}}),
            "guided_json",
            "`response_format` and `guided_json` exclude each other",
        ),
        (
            json!({"guided_json": {}, "tools": tools, "tool_choice": "required"}),
            "tool_choice",
            "`guided_json` and `tool_choice` exclude each other",
        ),
        (json!({"use_beam_search": true}), "use_beam_search", "`use_beam_search` is not supported"),
        (json!({"length_penalty": 0.5}), "length_penalty", "`length_penalty` is not supported"),
    ];
    for (fields, param, message) in cases {
        let error = refusal(&server, CHAT, chat(fields), StatusCode::BAD_REQUEST).await;
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
    let neutral = json!({"use_beam_search": false, "length_penalty": 1.0, "guided_decoding_backend": "xgrammar"});
    assert_eq!(server.post(CHAT, chat(neutral)).await.status, StatusCode::OK);
}

#[tokio::test]
async fn tokens_of_prompts_and_chats_in_the_shape_of_the_request() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/tokenize", json!({"prompt": "a b", "return_token_strs": true})).await;
    insta::assert_snapshot!(answer.body, @r#"{"count":3,"max_model_len":256,"tokens":[97,32,98],"token_strs":["a","Ġ","b"]}"#);
    let answer = server.post("/tokenize", chat(json!({"add_generation_prompt": false}))).await;
    let text = "user\nHi";
    assert_eq!(answer.json()["tokens"], json!([&[256][..], &bytes(text), &[257, 10]].concat()));
    assert_eq!(answer.json()["token_strs"], Value::Null);

    let answer = server.post("/detokenize", json!({"tokens": [97, 32, 257]})).await;
    assert_eq!(answer.body, r#"{"prompt":"a <|im_end|>"}"#);
    for (path, body, param) in [
        ("/tokenize", json!({"prompt": 5}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({"tokens": [5000]}), "tokens"),
        ("/detokenize", json!({"tokens": "a"}), "tokens"),
    ] {
        assert_eq!(refusal(&server, path, body, StatusCode::BAD_REQUEST).await["param"], param);
    }
}

#[tokio::test]
async fn the_served_names_replace_the_model_id() {
    let adjust = |config: &mut Config| config.served_model_names = vec!["first".to_owned(), "second".to_owned()];
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), adjust).await;
    let models = server.get("/v1/models").await.json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["first", "second"]);
    assert_eq!((&models["data"][1]["root"], &models["data"][1]["max_model_len"]), (&json!("test/model"), &json!(256)));
    assert!(models["data"][0]["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(server.get("/v1/models/second").await.json()["id"], "second");
    let named = async |path, body: Value| server.post(path, body).await.json()["model"].clone();
    assert_eq!(named(COMPLETIONS, completion(json!({"model": "second"}))).await, "first");
    assert_eq!(named(CHAT, chat(json!({"model": "tgi"}))).await, "first");
    assert_eq!(named(CHAT, chat(json!({"model": "any"}))).await, "any");
    assert_eq!(server.get("/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn another_model_is_404_on_every_route_if_names_are_checked() {
    let adjust = |config: &mut Config| config.check_model_names = true;
    let server = Server::start(|sequence| sequence.answer(&[word("Hello"), IM_END]), adjust).await;
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let requests = [
        (CHAT, chat(json!({}))),
        (COMPLETIONS, completion(json!({}))),
        ("/v1/responses", json!({"input": "Hi"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 5})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/invocations", chat(json!({}))),
        ("/tokenize", json!({"prompt": "Hi"})),
        ("/tokenize", chat(json!({}))),
        ("/detokenize", json!({"tokens": [97]})),
        ("/chat_tokenize", chat(json!({}))),
    ];
    for (path, body) in requests {
        let served = server.post(path, with(body.clone(), json!({"model": "test/model"}))).await;
        assert_eq!(served.status, StatusCode::OK, "{path}: {}", served.body);
        let other = server.post(path, with(body, json!({"model": "other"}))).await;
        assert_eq!(other.status, StatusCode::NOT_FOUND, "{path}: {}", other.body);
        assert!(other.body.contains("the model `other` is not served here, but: test/model"), "{}", other.body);
    }
    let instance = chat(json!({"model": "other"}));
    assert_eq!(server.post("/vertex", json!({"instances": [instance]})).await.status, StatusCode::NOT_FOUND);
    let error = refusal(&server, CHAT, chat(json!({"model": "other"})), StatusCode::NOT_FOUND).await;
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
}

#[tokio::test]
async fn a_lower_priority_can_be_the_earlier_one() {
    for (order, expected) in [(PriorityOrder::HighestFirst, 7), (PriorityOrder::LowestFirst, -7)] {
        let adjust = |config: &mut Config| config.priority_order = order;
        let server = Server::start(|sequence| sequence.answer(&[IM_END]), adjust).await;
        server.post(CHAT, chat(json!({"priority": 7}))).await;
        assert_eq!(server.last_request().priority, expected);
    }
}

/// A server that answers `Hello world` and reports alternatives to every token.
async fn with_alternatives() -> Server {
    Server::scripted(|sequence| {
        let token = |id| {
            let top = [word("END"), id].map(|id| TopToken { id, logprob: -0.25 });
            Token { id, logprob: -0.5, top: top.into_iter().take(sequence.request.sampling.top_n as usize).collect() }
        };
        sequence.send(SequenceEvent::Started { num_cached_tokens: 1 });
        if sequence.request.sampling.prompt_logprobs {
            let prompt = &sequence.request.prompt_token_ids[1..];
            sequence.send(SequenceEvent::PromptTokens(prompt.iter().map(|&id| token(id)).collect()));
        }
        for id in [word("Hello"), word(" world"), IM_END] {
            sequence.send(SequenceEvent::Token(token(id)));
        }
        sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
    })
    .await
}

#[tokio::test]
async fn token_ids_of_streams_add_up_to_those_of_plain_answers() {
    let server = with_alternatives().await;
    let generated = json!([word("Hello"), word(" world"), IM_END]);
    let prompt = json!(bytes("Hi"));
    for (path, body) in [(CHAT, chat(json!({}))), (COMPLETIONS, completion(json!({})))] {
        let body = with(body, json!({"return_token_ids": true}));
        let plain = server.post(path, body.clone()).await.json();
        let chunks = chunks(&server.post(path, with(body, json!({"stream": true}))).await);
        let choice = |answer: &Value| answer["choices"][0].clone();
        let ids: Vec<Value> =
            chunks.iter().flat_map(|chunk| choice(chunk)["token_ids"].as_array().unwrap().clone()).collect();
        assert_eq!((&choice(&plain)["token_ids"], &json!(ids)), (&generated, &generated), "{path}");
        if path == COMPLETIONS {
            assert_eq!(choice(&plain)["prompt_token_ids"], prompt);
            assert_eq!(choice(&chunks[0])["prompt_token_ids"], prompt);
            assert!(choice(&chunks[1]).get("prompt_token_ids").is_none());
        } else {
            assert_eq!(plain["prompt_token_ids"].as_array().unwrap().len(), 21);
            assert_eq!(chunks[0]["prompt_token_ids"], plain["prompt_token_ids"]);
            assert!(chunks[1].get("prompt_token_ids").is_none());
        }
    }
    let given = server.post(COMPLETIONS, json!({"prompt_token_ids": bytes("Hi")})).await;
    assert_eq!(given.status, StatusCode::OK, "{}", given.body);
    assert_eq!(server.last_request().prompt_token_ids, bytes("Hi"));
}

#[tokio::test]
async fn prompt_logprobs_have_their_own_number_of_alternatives() {
    let server = with_alternatives().await;
    let body = completion(json!({"prompt_logprobs": 1, "logprobs": 0}));
    let choice = server.post(COMPLETIONS, body).await.json()["choices"][0].clone();
    let end = json!({"logprob": -0.25, "rank": 1, "decoded_token": "END"});
    let own = json!({"logprob": -0.5, "rank": null, "decoded_token": "i"});
    assert_eq!(choice["prompt_logprobs"], json!([null, {word("END").to_string(): end, "105": own}]));
    assert_eq!(choice["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 1, "{choice}");
    let answer = server.post(CHAT, chat(json!({"prompt_logprobs": 2}))).await.json();
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), 21);
    assert_eq!(answer["prompt_logprobs"][1].as_object().unwrap().len(), 2);
    for fields in [json!({"prompt_logprobs": 21}), json!({"prompt_logprobs": 1, "stream": true})] {
        let error = refusal(&server, CHAT, chat(fields), StatusCode::BAD_REQUEST).await;
        assert_eq!(error["param"], "prompt_logprobs");
    }
}

#[tokio::test]
async fn every_chunk_can_have_the_usage_so_far() {
    let server = with_alternatives().await;
    for include_usage in [false, true] {
        let options = json!({"include_usage": include_usage, "continuous_usage_stats": true});
        let answer = server.post(COMPLETIONS, completion(json!({"stream": true, "stream_options": options}))).await;
        let usage: Vec<_> = chunks(&answer)
            .iter()
            .map(|chunk| (chunk["usage"]["completion_tokens"].clone(), chunk["usage"]["prompt_tokens_details"].clone()))
            .collect();
        let expected = if include_usage { vec![1, 2, 3, 3] } else { vec![1, 2, 3] };
        let cached = json!({"cached_tokens": 1});
        assert_eq!(usage, expected.into_iter().map(|n| (json!(n), cached.clone())).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn text_can_keep_stop_strings_and_special_tokens() {
    let server = Server::answering(&[word("Hello"), 256, word("END"), word(" and more"), IM_END]).await;
    let text = async |fields| {
        let choice = server.post(COMPLETIONS, completion(fields)).await.json()["choices"][0].clone();
        (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].as_str().unwrap().to_owned())
    };
    let stop = |text: &str| (text.to_owned(), "stop".to_owned());
    assert_eq!(text(json!({"stop": "END"})).await, stop("Hello"));
    assert_eq!(text(json!({"stop": "END", "include_stop_str_in_output": true})).await, stop("HelloEND"));
    assert_eq!(
        text(json!({"stop": "END", "include_stop_str_in_output": true, "max_tokens": 3})).await,
        stop("HelloEND")
    );
    assert_eq!(text(json!({"stop": "END", "skip_special_tokens": false})).await, stop("Hello<|im_start|>"));
    assert_eq!(text(json!({"skip_special_tokens": false})).await, stop("Hello<|im_start|>END and more"));
    let token = json!({"stop_token_ids": [word("END")], "include_stop_str_in_output": true});
    assert_eq!(text(token).await, stop("HelloEND"));
}

#[tokio::test]
async fn prompts_can_be_cut_and_salted() {
    let server = Server::answering(&[IM_END]).await;
    let prompt_of = async |fields| {
        let answer = server.post(COMPLETIONS, with(json!({"prompt": "abcdef"}), fields)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        server.last_request()
    };
    assert_eq!(prompt_of(json!({"truncate_prompt_tokens": 2})).await.prompt_token_ids, bytes("ef"));
    assert_eq!(prompt_of(json!({"truncate_prompt_tokens": -1})).await.prompt_token_ids, bytes("abcdef"));
    for given in [0, -2] {
        let body = completion(json!({"truncate_prompt_tokens": given}));
        let error = refusal(&server, COMPLETIONS, body, StatusCode::BAD_REQUEST).await;
        assert_eq!(error["param"], "truncate_prompt_tokens", "{error}");
    }
    let salt = async |fields| prompt_of(fields).await.cache_salt;
    let one = salt(json!({"cache_salt": "one"})).await;
    assert!(one.is_some() && salt(json!({})).await.is_none());
    assert_eq!(salt(json!({"cache_salt": "one"})).await, one);
    assert_ne!(salt(json!({"cache_salt": "other"})).await, one);
}

#[tokio::test]
async fn a_chat_can_begin_with_the_message_that_it_continues() {
    let server = Server::answering(&[word(" world"), IM_END]).await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]);
    let body = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": false});
    for (echo, expected) in [(false, " world"), (true, "Hello world")] {
        let body = with(body.clone(), json!({"echo": echo}));
        let message = server.post(CHAT, body.clone()).await.json()["choices"][0]["message"].clone();
        assert_eq!(message["content"], expected);
        let streamed = chat_fold(&server.post(CHAT, with(body, json!({"stream": true}))).await);
        assert_eq!(streamed[0]["message"]["content"], expected);
    }
}

#[tokio::test]
async fn only_allowed_tokens_and_no_bad_words_are_sampled() {
    let answer = |sequence: Sequence| sequence.answer(&[word("Hello"), IM_END]);
    let server = Server::start(answer, |config| config.payload_limit_bytes = 100_000).await;
    let fields = json!({"allowed_token_ids": [9, 3, 9, 260], "bad_words": [" ab", "c"]});
    for (path, body) in [(CHAT, chat(fields.clone())), (COMPLETIONS, completion(fields.clone()))] {
        let answer = server.post(path, body.clone()).await;
        assert_eq!(answer.status, StatusCode::OK, "{body}: {}", answer.body);
        let sampling = server.last_request().sampling;
        let mut allowed = vec![0; 33];
        (allowed[0], allowed[1], allowed[32]) = (1 << 3, 1 << 1, 1 << 4);
        assert_eq!(sampling.allowed_tokens, allowed);
        // With and without a space in front.
        let words: Vec<_> = sampling.bad_words.into_iter().map(|word| word.token_ids).collect();
        assert_eq!(words, [bytes(" ab"), bytes(" c"), bytes("ab"), bytes("c")]);
    }
    for fields in [
        json!({"bad_words": vec!["a"; 1024]}),
        json!({"bad_words": ["a".repeat(16_384)]}),
        json!({"allowed_token_ids": (0..264).collect::<Vec<u32>>()}),
    ] {
        let answer = server.post(COMPLETIONS, completion(fields)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    }
    server.post(CHAT, chat(json!({"allowed_token_ids": null, "bad_words": []}))).await;
    let sampling = server.last_request().sampling;
    assert!(sampling.allowed_tokens.is_empty() && sampling.bad_words.is_empty());

    for (fields, param, message) in [
        (json!({"allowed_token_ids": []}), "allowed_token_ids", "must name at least one token"),
        (json!({"allowed_token_ids": [5000]}), "allowed_token_ids", "token ids must be < 264. Given: 5000"),
        (json!({"allowed_token_ids": [-1]}), "allowed_token_ids", "expected u32"),
        (json!({"bad_words": ["a", " "]}), "bad_words", "`bad_words` must not contain an empty string"),
        (json!({"bad_words": vec!["a"; 1025]}), "bad_words", "`bad_words` supports up to 1024 words. Given: 1025"),
        (json!({"bad_words": ["a".repeat(16_385)]}), "bad_words", "up to 16384 bytes together. Given: 16385"),
        (json!({"allowed_token_ids": vec![1; 265]}), "allowed_token_ids", "supports up to 264 tokens"),
    ] {
        let error = refusal(&server, COMPLETIONS, completion(fields), StatusCode::BAD_REQUEST).await;
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
}

#[tokio::test]
async fn tokens_of_logprobs_may_be_named_by_their_ids() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let ids = json!({"return_tokens_as_token_ids": true});
    let answer = server.post(CHAT, chat(with(ids.clone(), json!({"logprobs": true})))).await.json();
    let first = &answer["choices"][0]["logprobs"]["content"][0];
    assert_eq!((&first["token"], &first["bytes"]), (&json!("token_id:258"), &json!(b"Hello")));
    let answer = server.post(COMPLETIONS, completion(with(ids, json!({"logprobs": 0})))).await.json();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["token_id:258", "token_id:257"]));
    assert_eq!(logprobs["top_logprobs"][0], json!({"token_id:258": -0.5}));
    assert_eq!(logprobs["text_offset"], json!([0, 5]));
}
