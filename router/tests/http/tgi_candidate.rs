//! Several generations of one request; alternatives, prompt logprobs and seeds.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::sequence::{FinishReason, SequenceEvent, SequenceFailure, Token, TopToken};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::model::{IM_END, bytes, word};
use crate::server::{Sequence, Server};

fn token(id: u32, logprob: f32) -> SequenceEvent {
    SequenceEvent::Token(Token { id, logprob, top: Vec::new() })
}

/// Answers the generations of a request with these words and logprobs, in order.
async fn saying(words: &'static [(&'static str, f32)]) -> Server {
    let next = AtomicUsize::new(0);
    let script = move |sequence: Sequence| {
        let (text, logprob) = words[next.fetch_add(1, Ordering::Relaxed) % words.len()];
        sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
        sequence.send(token(word(text), logprob));
        sequence.send(token(IM_END, logprob));
        sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
    };
    Server::start(script, |config: &mut Config| config.limits.max_best_of = 4).await
}

fn texts(answer: &Value) -> Vec<&str> {
    let others = answer["details"]["best_of_sequences"].as_array().unwrap();
    let all = std::iter::once(answer).chain(others);
    all.map(|sequence| sequence["generated_text"].as_str().unwrap()).collect()
}

const WORDS: &[(&str, f32)] = &[("END", -2.0), ("Hello", -1.0), (" world", -0.5), (" and more", -3.0)];

#[tokio::test]
async fn best_of_answers_with_the_best_and_lists_the_others_in_order() {
    let server = saying(&[("END", -2.0), ("Hello", -0.5)]).await;
    let parameters = json!({"best_of": 2, "do_sample": true, "details": true, "return_full_text": true});
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await;
    let requests = server.engine.requests.lock().unwrap().clone();
    let [loser, winner] = [0, 1].map(|index| requests[index].sampling.seed.to_string());
    assert_ne!(loser, winner);
    assert!(requests[0].group.is_some() && requests[0].group == requests[1].group);
    let body = answer.body.replace(&loser, "LOSER").replace(&winner, "WINNER");
    insta::assert_snapshot!(body, @r#"{"generated_text":"HiHello","details":{"finish_reason":"eos_token","generated_tokens":2,"seed":WINNER,"prefill":[],"tokens":[{"id":258,"text":"Hello","logprob":-0.5,"special":false},{"id":257,"text":"<|im_end|>","logprob":-0.5,"special":true}],"best_of_sequences":[{"generated_text":"HiEND","finish_reason":"eos_token","generated_tokens":2,"seed":LOSER,"prefill":[],"tokens":[{"id":262,"text":"END","logprob":-2.0,"special":false},{"id":257,"text":"<|im_end|>","logprob":-2.0,"special":true}]}]}}"#);
    // All generated tokens, and the prompt once.
    assert_eq!((answer.header("x-generated-tokens"), answer.header("x-prompt-tokens")), ("4", "2"));

    let server = saying(WORDS).await;
    let parameters = json!({"best_of": 4, "do_sample": true, "details": true});
    let answer = server.post("/", json!({"inputs": "Hi", "parameters": parameters})).await.json();
    assert_eq!(texts(&answer[0]), ["Hi world", "HiEND", "HiHello", "Hi and more"]);
}

#[tokio::test]
async fn n_answers_are_in_order_and_with_best_of_the_best_ones() {
    let ask = async |parameters: Value| {
        let server = saying(WORDS).await;
        server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json()
    };
    let all = ask(json!({"n": 3, "details": true, "do_sample": true})).await;
    assert_eq!(texts(&all), ["END", "Hello", " world"]);
    let best = ask(json!({"n": 3, "best_of": 4, "details": true, "do_sample": true})).await;
    assert_eq!(texts(&best), [" world", "END", "Hello"]);
    let one = ask(json!({"n": 1, "best_of": 4, "details": true, "do_sample": true})).await;
    assert_eq!(texts(&one), [" world"]);
}

#[tokio::test]
async fn a_seed_reproduces_all_of_n_and_differs_among_them() {
    let seeds = async || {
        let server = saying(WORDS).await;
        let parameters = json!({"n": 3, "details": true, "do_sample": true, "seed": 7});
        let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json();
        let others = answer["details"]["best_of_sequences"].as_array().unwrap();
        let told: Vec<u64> =
            std::iter::once(&answer["details"]).chain(others).map(|s| s["seed"].as_u64().unwrap()).collect();
        let used: Vec<u64> = server.engine.requests.lock().unwrap().iter().map(|r| r.sampling.seed).collect();
        assert_eq!(told, used);
        used
    };
    let first = seeds().await;
    assert_eq!(first, seeds().await);
    assert!(first[0] == 7 && first[1] != 7 && first[1] != first[2]);
}

#[tokio::test]
async fn best_of_zero_or_one_is_one() {
    for best_of in [0, 1] {
        let server = saying(WORDS).await;
        let parameters = json!({"best_of": best_of, "details": true});
        let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await.json();
        assert!(answer["details"].get("best_of_sequences").is_none());
        assert_eq!(server.engine.requests.lock().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn every_generation_takes_a_permit() {
    let (server, mut sequences) = Server::manual().await;
    let body = |n: usize| json!({"inputs": "Hi", "parameters": {"n": n}});
    let _stream = server.open("/generate_stream", body(1)).await;
    let (answer, _streaming) = tokio::join!(server.post("/generate", body(3)), async {
        let mut waiting = Vec::new();
        for _ in 0..4 {
            waiting.push(sequences.recv().await.unwrap());
        }
        let answer = server.post("/generate", body(1)).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        waiting.drain(1..).for_each(|sequence| sequence.answer(&[IM_END]));
        waiting
    });
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(server.post("/generate", body(4)).await.status, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_failed_generation_fails_the_request_and_aborts_the_others() {
    let (server, mut sequences) = Server::manual().await;
    let body = json!({"inputs": "Hi", "parameters": {"n": 3, "do_sample": true}});
    let (answer, (first, last)) = tokio::join!(server.post("/generate", body), async {
        let first = sequences.recv().await.unwrap();
        let broken = sequences.recv().await.unwrap();
        let last = sequences.recv().await.unwrap();
        first.send_token(word("Hello"));
        broken.send(SequenceEvent::Failed(SequenceFailure::Sequence("logits are NaN".to_owned())));
        (first, last)
    });
    assert_eq!(answer.status, StatusCode::FAILED_DEPENDENCY);
    assert_eq!(
        answer.body,
        r#"{"error":"Request failed during generation: logits are NaN","error_type":"generation"}"#
    );
    first.aborted.await.unwrap();
    last.aborted.await.unwrap();
}

#[tokio::test]
async fn a_disconnect_aborts_all_generations() {
    let (server, mut sequences) = Server::manual().await;
    let mut connection = TcpStream::connect(server.address).await.unwrap();
    let body = json!({"inputs": "Hi", "parameters": {"n": 3}}).to_string();
    let head = "POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: ";
    connection.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
    let all = [sequences.recv().await.unwrap(), sequences.recv().await.unwrap(), sequences.recv().await.unwrap()];
    drop(connection);
    for sequence in all {
        sequence.aborted.await.unwrap();
    }
}

fn with_everything(sequence: &Sequence) {
    let wanted = &sequence.request.sampling;
    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    if wanted.prompt_logprobs {
        let prompt = bytes("i").into_iter().map(|id| Token { id, logprob: -4.0, top: Vec::new() });
        sequence.send(SequenceEvent::PromptTokens(prompt.collect()));
    }
    let top = [TopToken { id: word("Hello"), logprob: -0.5 }, TopToken { id: word("END"), logprob: f32::NAN }];
    let top = top[..wanted.top_n as usize].to_vec();
    sequence.send(SequenceEvent::Token(Token { id: word("Hello"), logprob: -0.5, top: top.clone() }));
    sequence.send(SequenceEvent::Token(Token { id: word("END"), logprob: f32::NAN, top }));
    sequence.send(SequenceEvent::Finished(FinishReason::Length));
}

#[tokio::test]
async fn every_token_has_top_tokens_and_nan_is_null() {
    let server = Server::scripted(|sequence| with_everything(&sequence)).await;
    let parameters = json!({"top_n_tokens": 2, "details": true, "max_new_tokens": 2});
    let body = json!({"inputs": "Hi", "parameters": parameters});
    let answer = server.post("/generate", body.clone()).await;
    insta::assert_snapshot!(answer.body, @r#"{"generated_text":"HelloEND","details":{"finish_reason":"length","generated_tokens":2,"seed":null,"prefill":[],"tokens":[{"id":258,"text":"Hello","logprob":-0.5,"special":false},{"id":262,"text":"END","logprob":null,"special":false}],"top_tokens":[[{"id":258,"text":"Hello","logprob":-0.5,"special":false},{"id":262,"text":"END","logprob":null,"special":false}],[{"id":258,"text":"Hello","logprob":-0.5,"special":false},{"id":262,"text":"END","logprob":null,"special":false}]]}}"#);
    let stream = server.post("/generate_stream", body).await;
    insta::assert_snapshot!(stream.events()[0], @r#"{"index":1,"token":{"id":258,"text":"Hello","logprob":-0.5,"special":false},"top_tokens":[{"id":258,"text":"Hello","logprob":-0.5,"special":false},{"id":262,"text":"END","logprob":null,"special":false}],"generated_text":null,"details":null}"#);
}

#[tokio::test]
async fn the_prompt_s_logprobs_force_details_and_begin_with_null() {
    let server = Server::scripted(|sequence| with_everything(&sequence)).await;
    let body = json!({"inputs": "Hi", "parameters": {"decoder_input_details": true, "max_new_tokens": 2}});
    let answer = server.post("/generate", body.clone()).await.json();
    let prefill = json!([{"id": 72, "text": "H", "logprob": null}, {"id": 105, "text": "i", "logprob": -4.0}]);
    assert_eq!(answer["details"]["prefill"], prefill);

    let without = |config: &mut Config| config.prefill_logprobs = false;
    let server = Server::start(|sequence| with_everything(&sequence), without).await;
    let answer = server.post("/generate", body).await.json();
    assert_eq!(answer["details"]["prefill"], json!([]));
    assert!(!server.last_request().sampling.prompt_logprobs);
}

#[tokio::test]
async fn a_grammar_reaches_the_engine_under_either_name_and_in_either_shape() {
    let server = Server::answering(&[IM_END]).await;
    let tgi = json!({"type": "json", "value": {"type": "integer"}});
    let openai = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}});
    let mut grammars = Vec::new();
    for (field, grammar) in
        [("grammar", &tgi), ("response_format", &tgi), ("grammar", &openai), ("response_format", &openai)]
    {
        let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": {field: grammar}})).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        grammars.push(server.last_request().grammar.unwrap());
    }
    assert!(grammars.windows(2).all(|pair| pair[0] == pair[1]), "{grammars:?}");
    server.post("/generate", json!({"inputs": "Hi", "parameters": {"grammar": {"type": "text"}}})).await;
    assert_eq!(server.last_request().grammar, None);
}
