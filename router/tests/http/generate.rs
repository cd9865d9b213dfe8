//! `/generate` and `/`: answers, headers, sampling defaults, stop strings, lengths.

use axum::http::StatusCode;
use penstock_router::sequence::{Sampling, greedy};
use serde_json::json;

use crate::model::{IM_END, bytes, word};
use crate::server::Server;

#[tokio::test]
async fn an_answer_has_tgi_s_shape() {
    let server = Server::answering(&[word("Hello"), word(" world"), IM_END]).await;
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": {"details": true}})).await;
    assert_eq!(answer.status, StatusCode::OK);
    insta::assert_snapshot!(answer.body, @r#"{"generated_text":"Hello world","details":{"finish_reason":"eos_token","generated_tokens":3,"seed":null,"prefill":[],"tokens":[{"id":258,"text":"Hello","logprob":-0.5,"special":false},{"id":259,"text":" world","logprob":-0.5,"special":false},{"id":257,"text":"<|im_end|>","logprob":-0.5,"special":true}]}}"#);

    let plain = server.post("/generate", json!({"inputs": "Hi", "parameters": {}})).await;
    insta::assert_snapshot!(plain.body, @r#"{"generated_text":"Hello world"}"#);
}

#[tokio::test]
async fn headers_report_the_cost() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let answer = server.post("/generate", json!({"inputs": "Hié"})).await;
    assert_eq!(answer.header("content-type"), "application/json");
    assert_eq!(answer.header("x-compute-type"), "1-cpu");
    assert_eq!(answer.header("x-compute-characters"), "3");
    assert_eq!(answer.header("x-prompt-tokens"), "4");
    assert_eq!(answer.header("x-generated-tokens"), "2");
    assert!(answer.header("x-compute-time").parse::<f64>().unwrap() > 0.0);
    for name in ["x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"] {
        answer.header(name).parse::<u64>().unwrap();
    }
}

#[tokio::test]
async fn the_root_answers_a_list_and_repeats_the_prompt_of_text_generation_models() {
    let tokens = [word(" world"), IM_END];
    let server = Server::answering(&tokens).await;
    let answer = server.post("/", json!({"inputs": "Hello"})).await;
    insta::assert_snapshot!(answer.body, @r#"[{"generated_text":"Hello world"}]"#);
    let asked = server.post("/", json!({"inputs": "Hello", "parameters": {"return_full_text": false}})).await;
    insta::assert_snapshot!(asked.body, @r#"[{"generated_text":" world"}]"#);

    let is_summary = |config: &mut penstock_router::Config| config.pipeline_tag = Some("summarization".to_owned());
    let server = Server::start(move |sequence| sequence.answer(&tokens), is_summary).await;
    let answer = server.post("/", json!({"inputs": "Hello"})).await;
    insta::assert_snapshot!(answer.body, @r#"[{"generated_text":" world"}]"#);
}

#[tokio::test]
async fn parameters_reach_the_engine() {
    let server = Server::answering(&[IM_END]).await;
    let parameters = json!({
        "temperature": 0.5, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.5, "seed": 42, "max_new_tokens": 3,
        "best_of": 1, "frequency_penalty": 0.0, "top_n_tokens": 0, "watermark": false, "grammar": null, "stop": null,
    });
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let request = server.last_request();
    assert_eq!(request.prompt_token_ids, bytes("Hi"));
    assert_eq!(request.max_new_tokens, 3);
    assert_eq!(request.sampling.stop_token_ids, [IM_END]);
    let sampling = Sampling {
        do_sample: true,
        seed: 42,
        temperature: 0.5,
        top_k: 7,
        top_p: 0.75,
        repetition_penalty: 1.5,
        stop_token_ids: [IM_END].into(),
        ..greedy()
    };
    assert_eq!(request.sampling, sampling);
}

#[tokio::test]
async fn penalties_are_clamped() {
    let server = Server::answering(&[IM_END]).await;
    for (given, meant) in [(1.4e-45, 1e-6), (3e38, 1e6), (0.5, 0.5)] {
        for (path, body) in [
            ("/generate", json!({"inputs": "Hi", "parameters": {"repetition_penalty": given}})),
            ("/v1/completions", json!({"prompt": "Hi", "repetition_penalty": given})),
        ] {
            assert_eq!(server.post(path, body).await.status, StatusCode::OK, "{path}: {given}");
            assert_eq!(server.last_request().sampling.repetition_penalty, meant, "{path}: {given}");
        }
    }
}

#[tokio::test]
async fn sampling_is_the_default_only_without_parameters() {
    let server = Server::answering(&[IM_END]).await;
    let cases = [
        (json!({"inputs": "Hi"}), true),
        (json!({"inputs": "Hi", "parameters": {}}), false),
        (json!({"inputs": "Hi", "parameters": {"do_sample": true}}), true),
        (json!({"inputs": "Hi", "parameters": {"temperature": 1.0}}), false),
        (json!({"inputs": "Hi", "parameters": {"temperature": 0.7}}), true),
        (json!({"inputs": "Hi", "parameters": {"top_k": 5}}), true),
        (json!({"inputs": "Hi", "parameters": {"top_p": 0.9}}), true),
        (json!({"inputs": "Hi", "parameters": {"min_p": 0.1}}), true),
        (json!({"inputs": "Hi", "parameters": {"min_p": 0.0}}), false),
        (json!({"inputs": "Hi", "parameters": {"seed": 1}}), false),
    ];
    for (body, samples) in cases {
        server.post("/generate", body.clone()).await;
        assert_eq!(server.last_request().sampling.do_sample, samples, "{body}");
    }
}

#[tokio::test]
async fn the_seed_is_reported_if_sampling_is_on() {
    let server = Server::answering(&[IM_END]).await;
    let seed = async |parameters| {
        let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await;
        answer.json()["details"]["seed"].clone()
    };
    assert_eq!(seed(json!({"details": true, "seed": 7})).await, json!(null));
    assert_eq!(seed(json!({"details": true, "seed": 7, "do_sample": true})).await, json!(7));
    let drawn = seed(json!({"details": true, "do_sample": true})).await;
    assert_eq!(drawn.as_u64().unwrap(), server.last_request().sampling.seed);
}

#[tokio::test]
async fn stop_strings_are_found_across_tokens_and_stay_in_the_text() {
    let server = Server::answering(&[word("Hello"), word("!\n\nUser"), word(": hi"), word("END"), IM_END]).await;
    let parameters = json!({"stop": ["\n\nUser:"], "details": true});
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json();
    assert_eq!(answer["generated_text"], "Hello!\n\nUser:");
    assert_eq!(answer["details"]["finish_reason"], "stop_sequence");
    assert_eq!(answer["details"]["generated_tokens"], 3);
    assert_eq!(answer["details"]["tokens"][2]["text"], ":");
}

#[tokio::test]
async fn a_stop_string_may_be_a_special_token() {
    let server = Server::answering(&[word("Hello"), 256, word("END")]).await;
    let parameters = json!({"stop": ["<|im_start|>"], "details": true});
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json();
    assert_eq!(answer["generated_text"], "Hello");
    assert_eq!(answer["details"]["finish_reason"], "stop_sequence");
}

#[tokio::test]
async fn incomplete_characters_are_never_sent() {
    let server = Server::answering(&[bytes("é€"), vec![IM_END]].concat()).await;
    let parameters = json!({"details": true});
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json();
    let tokens = answer["details"]["tokens"].as_array().unwrap();
    let texts: Vec<_> = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["", "é", "", "", "€", "<|im_end|>"]);
    assert_eq!(answer["generated_text"], "é€");

    let parameters = json!({"details": true, "max_new_tokens": 3});
    let cut = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json();
    assert_eq!(cut["generated_text"], "é\u{FFFD}");
    assert_eq!(cut["details"]["finish_reason"], "length");
}

#[tokio::test]
async fn without_max_new_tokens_the_context_may_be_filled() {
    let server = Server::answering(&[IM_END]).await;
    server.post("/generate", json!({"inputs": "Hello"})).await;
    assert_eq!(server.last_request().max_new_tokens, 256 - 5);
    server.post("/generate", json!({"inputs": "x".repeat(300), "parameters": {"truncate": 10}})).await;
    assert_eq!(server.last_request().prompt_token_ids.len(), 10);
    server.post("/generate", json!({"inputs": "abc", "parameters": {"truncate": 2}})).await;
    assert_eq!(server.last_request().prompt_token_ids, bytes("bc"));
}

#[tokio::test]
async fn long_inputs_are_tokenized_too() {
    let long = "many words ".repeat(400);
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/tokenize", json!({"inputs": long})).await.json();
    assert_eq!(answer.as_array().unwrap().len(), long.len());
}
