//! `/v1/completions`.

use axum::http::StatusCode;
use penstock_router::sequence::{FinishReason, SequenceEvent, Token, TopToken};
use serde_json::{Value, json};

use crate::chat::stable;
use crate::fold::{SEED, chunks, completion_fold, seed_index, with};
use crate::model::{IM_END, bytes, word};
use crate::server::{Sequence, Server};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_text_is_completed() {
    let server = Server::answering(&[word(" world"), word("END"), word(" and more"), IM_END]).await;
    let answer = server.post(PATH, json!({"prompt": "Hello", "stop": "END"})).await;
    let mut body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    body["id"] = "ID".into();
    body["created"] = 0.into();
    insta::assert_snapshot!(body.to_string(), @r#"{"object":"text_completion","id":"ID","created":0,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"text":" world","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}"#);
    assert_eq!(server.last_request().prompt_token_ids, bytes("Hello"));
}

#[tokio::test]
async fn a_stream_is_chunks_then_usage_then_done() {
    let server = Server::answering(&[word("Hello"), word(" world"), IM_END]).await;
    let fields = json!({"prompt": "Hi", "stream": true, "stream_options": {"include_usage": true}, "model": "mine"});
    insta::assert_snapshot!(stable(&server.post(PATH, fields).await.body), @r#"
    data: {"object":"text_completion","id":"cmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"text":"Hello","logprobs":null,"finish_reason":null}],"usage":null}

    data: {"object":"text_completion","id":"cmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"text":" world","logprobs":null,"finish_reason":null}],"usage":null}

    data: {"object":"text_completion","id":"cmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"usage":null}

    data: {"object":"text_completion","id":"cmpl-ID","created":SECONDS,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}}

    data: [DONE]
    "#);
}

#[tokio::test]
async fn a_stream_of_several_prompts_names_the_choice_of_each_chunk() {
    let server = Server::scripted(|sequence| {
        let prompt = sequence.request.prompt_token_ids.clone();
        sequence.answer(&[prompt, vec![IM_END]].concat());
    })
    .await;
    let answer = server.post(PATH, json!({"prompt": ["a", "b"], "stream": true, "logprobs": 0})).await;
    // The prompts are answered at the same time.
    let mut choices: Vec<_> = chunks(&answer).iter().map(|chunk| chunk["choices"].to_string()).collect();
    choices.sort_by_key(|choice| choice.contains("\"index\":1"));
    insta::assert_snapshot!(choices.join("\n"), @r#"
    [{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.5],"top_logprobs":[{"a":-0.5}],"text_offset":[0]},"finish_reason":null}]
    [{"index":0,"text":"","logprobs":{"tokens":["<|im_end|>"],"token_logprobs":[-0.5],"top_logprobs":[{"<|im_end|>":-0.5}],"text_offset":[1]},"finish_reason":"stop"}]
    [{"index":1,"text":"b","logprobs":{"tokens":["b"],"token_logprobs":[-0.5],"top_logprobs":[{"b":-0.5}],"text_offset":[0]},"finish_reason":null}]
    [{"index":1,"text":"","logprobs":{"tokens":["<|im_end|>"],"token_logprobs":[-0.5],"top_logprobs":[{"<|im_end|>":-0.5}],"text_offset":[1]},"finish_reason":"stop"}]
    "#);
}

#[tokio::test]
async fn several_prompts_are_answered_in_their_order() {
    let server = Server::scripted(|sequence| {
        let prompt = sequence.request.prompt_token_ids.clone();
        sequence.answer(&[prompt, vec![IM_END]].concat());
    })
    .await;
    for prompt in [json!(["ab", "c", "def"]), json!([[97, 98], [99], [100, 101, 102]])] {
        let answer = server.post(PATH, json!({"prompt": prompt})).await.json();
        let texts: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
        assert_eq!(texts, ["ab", "c", "def"]);
        assert_eq!(answer["usage"]["prompt_tokens"], 6);
        assert_eq!(answer["usage"]["completion_tokens"], 9);

        let fields = json!({"prompt": prompt, "stream": true, "stream_options": {"include_usage": true}});
        let events = server.post(PATH, fields).await.events();
        assert_eq!(events.last().unwrap(), "[DONE]");
        let chunks: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        let mut texts = vec![String::new(); 3];
        for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
            let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            texts[index].push_str(choice["text"].as_str().unwrap());
        }
        assert_eq!(texts, ["ab", "c", "def"]);
        assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 15);
    }
}

#[tokio::test]
async fn refusals_are_openai_s_error_objects() {
    let server = Server::answering(&[IM_END]).await;
    let cases = [
        (json!({"prompt": "a", "suffix": "b"}), "suffix not supported", "suffix is not supported"),
        (json!({"prompt": ["a", "b", "c", "d", "e"]}), "batch size exceeded", "5 prompts were given, at most 4"),
        (json!({"prompt": []}), "validation", "`prompt` cannot be empty"),
        (json!({"prompt": ["a", ""]}), "validation", "`prompt` cannot be empty"),
        (json!({"prompt": [5000]}), "validation", "token ids must be < 264. Given: 5000"),
        (json!({"prompt": "a", "logprobs": 6}), "validation", "`logprobs` must be >= 0 and <= 5. Given: 6"),
        (json!({"prompt": "a", "best_of": 3}), "validation", "`best_of` must be > 0 and <= 2. Given: 3"),
        (json!({"prompt": "a", "best_of": 1, "n": 2}), "validation", "`best_of` must be >= `n`. Given: 1 and 2"),
        (json!({"prompt": "a", "best_of": 2, "stream": true}), "validation", "`best_of` != 1 is not supported when"),
        (json!({"prompt": "a", "n": 5}), "validation", "`n` must be >= 1 and <= 4. Given: 5"),
        (json!({"prompt": ["a", "b"], "n": 3}), "validation", "`n` must be >= 1 and <= 2. Given: 3"),
        (json!({"prompt": "a", "max_tokens": 0}), "validation", "`max_tokens` must be strictly positive"),
        (json!({"prompt": "a", "logit_bias": {"999": 1}}), "validation", "token ids must be < 264. Given: 999"),
        (json!({"prompt": "a", "response_format": {"type": "xml"}}), "malformed_request", "`xml` is unknown"),
        (json!({"prompt": {"a": 1}}), "malformed_request", "a string, a list of strings"),
        (json!({}), "malformed_request", "missing field `prompt`"),
    ];
    for (body, code, message) in cases {
        let answer = server.post(PATH, body.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], code, "{body}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
}

/// Answers each sequence with its tokens, all with the given logprob.
async fn choosing(answers: Vec<(Vec<u32>, f32)>) -> Server {
    Server::scripted(move |sequence| {
        let index = seed_index(&sequence.request);
        let (tokens, logprob) = &answers[index];
        sequence.send(SequenceEvent::Started { num_cached_tokens: index });
        for &id in tokens {
            sequence.send(SequenceEvent::Token(Token { id, logprob: *logprob, top: Vec::new() }));
        }
        sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
    })
    .await
}

#[tokio::test]
async fn best_of_returns_the_highest_mean_logprob() {
    let answers =
        [("bad", -3.0), ("good", -0.1)].map(|(text, logprob)| ([bytes(text), vec![IM_END]].concat(), logprob));
    let server = choosing(answers.to_vec()).await;
    let answer = server.post(PATH, json!({"prompt": "Hi", "best_of": 2, "seed": SEED})).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!((choices.len(), &choices[0]["text"], &choices[0]["index"]), (1, &json!("good"), &json!(0)));
    // All generated tokens count, and the prompt counts once.
    let details = json!({"cached_tokens": 0});
    let usage = json!({"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11,
               "prompt_tokens_details": details, "completion_tokens_details": {"reasoning_tokens": 0}});
    assert_eq!(answer["usage"], usage);
    let group = |index: usize| server.engine.requests.lock().unwrap()[index].group;
    assert!(group(0).is_some() && group(0) == group(1));
}

#[tokio::test]
async fn every_prompt_has_its_choices_in_order() {
    let server = Server::scripted(|sequence| {
        let index = u32::try_from(seed_index(&sequence.request)).unwrap();
        let prompt = sequence.request.prompt_token_ids.clone();
        sequence.answer(&[prompt, bytes(&index.to_string()), vec![IM_END]].concat());
    })
    .await;
    let body = json!({"prompt": ["a", "b"], "n": 2, "seed": SEED, "echo": true});
    let plain = server.post(PATH, body.clone()).await.json();
    let texts: Vec<_> = plain["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["aa0", "aa1", "bb0", "bb1"]);
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    assert_eq!(completion_fold(&streamed), plain["choices"]);
}

/// Sends the prompt's logprobs as a worker does, then the answer.
fn score(sequence: Sequence, answer: &[u32]) {
    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    let token = |id: u32| Token { id, logprob: -0.25, top: vec![TopToken { id: word("END"), logprob: -0.125 }] };
    if sequence.request.sampling.prompt_logprobs {
        let rest = sequence.request.prompt_token_ids[1..].iter().map(|&id| token(id)).collect();
        sequence.send(SequenceEvent::PromptTokens(rest));
    }
    for (index, &id) in answer.iter().enumerate() {
        sequence.send(SequenceEvent::Token(token(id)));
        if index + 1 == sequence.request.max_new_tokens as usize {
            return sequence.send(SequenceEvent::Finished(FinishReason::Length));
        }
    }
    sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
}

#[tokio::test]
async fn logprobs_of_prompt_and_answer_have_openai_s_first_shape() {
    let server =
        Server::scripted(|sequence| score(sequence, &[bytes("é"), vec![word(" world"), IM_END]].concat())).await;
    let body = json!({"prompt": "né", "echo": true, "logprobs": 1});
    let plain = server.post(PATH, body.clone()).await.json();
    let sampling = server.last_request().sampling;
    assert!(sampling.prompt_logprobs && sampling.top_n == 1 && sampling.model_logprobs);
    insta::assert_snapshot!(plain["choices"], @r#"[{"index":0,"text":"néé world","logprobs":{"tokens":["n","","é","","é"," world","<|im_end|>"],"token_logprobs":[null,-0.25,-0.25,-0.25,-0.25,-0.25,-0.25],"top_logprobs":[null,{"END":-0.125,"bytes:\\xc3":-0.25},{"END":-0.125,"bytes:\\xa9":-0.25},{"END":-0.125,"bytes:\\xc3":-0.25},{"END":-0.125,"bytes:\\xa9":-0.25},{"END":-0.125," world":-0.25},{"END":-0.125,"<|im_end|>":-0.25}],"text_offset":[0,1,1,2,2,3,9]},"finish_reason":"stop"}]"#);
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    assert_eq!(completion_fold(&streamed), plain["choices"]);
    let choices: Vec<_> = chunks(&streamed).iter().map(|chunk| chunk["choices"].to_string()).collect();
    insta::assert_snapshot!(choices.join("\n"), @r#"
    [{"index":0,"text":"né","logprobs":{"tokens":["n","","é",""],"token_logprobs":[null,-0.25,-0.25,-0.25],"top_logprobs":[null,{"END":-0.125,"bytes:\\xc3":-0.25},{"END":-0.125,"bytes:\\xa9":-0.25},{"END":-0.125,"bytes:\\xc3":-0.25}],"text_offset":[0,1,1,2]},"finish_reason":null}]
    [{"index":0,"text":"é","logprobs":{"tokens":["é"],"token_logprobs":[-0.25],"top_logprobs":[{"END":-0.125,"bytes:\\xa9":-0.25}],"text_offset":[2]},"finish_reason":null}]
    [{"index":0,"text":" world","logprobs":{"tokens":[" world"],"token_logprobs":[-0.25],"top_logprobs":[{"END":-0.125," world":-0.25}],"text_offset":[3]},"finish_reason":null}]
    [{"index":0,"text":"","logprobs":{"tokens":["<|im_end|>"],"token_logprobs":[-0.25],"top_logprobs":[{"END":-0.125,"<|im_end|>":-0.25}],"text_offset":[9]},"finish_reason":"stop"}]
    "#);
    // Without the prompt.
    let plain = server.post(PATH, json!({"prompt": "né", "logprobs": true, "max_tokens": 3})).await.json();
    assert_eq!(plain["choices"][0]["logprobs"]["text_offset"], json!([0, 0, 1]));
    assert!(!server.last_request().sampling.prompt_logprobs);
}

#[tokio::test]
async fn a_prompt_is_scored_without_an_answer() {
    let server = Server::scripted(|sequence| score(sequence, &[word(" world"), IM_END])).await;
    let body = json!({"prompt": [[72, 105], [72]], "echo": true, "logprobs": 0, "max_tokens": 0});
    let plain = server.post(PATH, body.clone()).await.json();
    let choice = &plain["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("Hi"), &json!("length")));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.25]));
    assert_eq!(plain["usage"]["completion_tokens"], 0);
    assert_eq!(server.last_request().max_new_tokens, 1);
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    assert_eq!(completion_fold(&streamed), plain["choices"]);
}

#[tokio::test]
async fn disabled_features_are_refused() {
    let server = Server::start(
        |sequence| sequence.answer(&[IM_END]),
        |config| (config.grammar_support, config.prefill_logprobs) = (false, false),
    )
    .await;
    let cases = [
        (json!({"echo": true, "logprobs": 0}), "--enable-prefill-logprobs"),
        (json!({"response_format": {"type": "json_object"}}), "--disable-grammar-support"),
        (json!({"grammar": {"type": "regex", "value": "a"}}), "--disable-grammar-support"),
    ];
    for (fields, message) in cases {
        let answer = server.post(PATH, with(json!({"prompt": "a"}), fields)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.body.contains(message), "{}", answer.body);
    }
    let answer = server.post(PATH, json!({"prompt": "a", "echo": true, "logprobs": null})).await.json();
    assert_eq!(answer["choices"][0]["text"], "a");
}
