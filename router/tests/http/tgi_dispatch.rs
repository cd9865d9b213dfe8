//! `/invocations`, `/vertex` and `/chat_tokenize`.

use axum::http::StatusCode;
use penstock_router::sequence::{SequenceEvent, SequenceFailure};
use serde_json::{Value, json};

use crate::model::{IM_END, bytes, word};
use crate::server::Server;

fn chat() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

#[tokio::test]
async fn invocations_are_dispatched_by_shape_in_tgi_s_order() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let answer = server.post("/invocations", json!({"inputs": "Hi", "messages": chat(), "prompt": "x"})).await;
    assert_eq!(answer.body, r#"[{"generated_text":"HiHello"}]"#);
    assert_eq!(answer.header("x-prompt-tokens"), "2");
    let answer = server.post("/invocations", json!({"messages": chat(), "prompt": "x"})).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello");
    let answer = server.post("/invocations", json!({"prompt": "x"})).await.json();
    assert_eq!(answer["choices"][0]["text"], "Hello");
    // A body that is not a prompt may still be a chat.
    let answer = server.post("/invocations", json!({"inputs": 5, "messages": chat()})).await.json();
    assert_eq!(answer["object"], "chat.completion");
}

#[tokio::test]
async fn invocations_stream_and_fail_like_the_route_they_select() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let stream = server.post("/invocations", json!({"inputs": "Hi", "stream": true})).await;
    assert!(stream.body.starts_with("data: {\"index\":1,"), "{}", stream.body);
    let stream = server.post("/invocations", json!({"messages": chat(), "stream": true})).await;
    assert!(stream.body.ends_with("data: [DONE]\n\n"));
    let refused = server.post("/invocations", json!({"inputs": ""})).await;
    assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(refused.json()["error_type"], "validation");
    let refused = server.post("/invocations", json!({"prompt": "x", "suffix": "y"})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn an_invocation_of_unknown_shape_is_422_with_the_reason() {
    let server = Server::answering(&[IM_END]).await;
    for (body, told) in [
        (json!({}), "send `inputs`"),
        (json!([1]), "send `inputs`"),
        (json!({"inputs": "Hi", "parameters": {"seed": -1}}), "`inputs` cannot be read"),
        (json!({"messages": 5}), "`messages` cannot be read"),
        (json!({"prompt": {}}), "`prompt` cannot be read"),
    ] {
        let answer = server.post("/invocations", body.clone()).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
        assert!(answer.body.contains(told), "{body}: {}", answer.body);
        assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
    }
}

#[tokio::test]
async fn vertex_predicts_a_text_for_each_instance_in_their_order() {
    let (server, mut sequences) = Server::manual().await;
    let body = json!({"instances": [
        {"inputs": "first", "parameters": {"max_new_tokens": 2, "top_k": 3, "return_full_text": true}},
        {"messages": chat(), "stream": true},
        {"inputs": "third", "parameters": null},
    ]});
    let (answer, ()) = tokio::join!(server.post("/vertex", body), async {
        let mut all = Vec::new();
        for _ in 0..3 {
            all.push(sequences.recv().await.unwrap());
        }
        // The chat's prompt is rendered first, so its sequence may be submitted last.
        all.sort_by_key(|sequence| match &sequence.request.prompt_token_ids {
            ids if *ids == bytes("first") => 0,
            ids if *ids == bytes("third") => 2,
            _ => 1,
        });
        assert_eq!(all[0].request.sampling.top_k, 3);
        assert!(all.iter().all(|sequence| sequence.request.sampling.do_sample));
        assert_eq!(all[2].request.prompt_token_ids, bytes("third"));
        // Sequences end in the opposite order.
        for text in [" and more", "END", "Hello"] {
            all.pop().unwrap().answer(&[word(text), IM_END]);
        }
    });
    assert_eq!(
        (answer.status, answer.body.as_str()),
        (StatusCode::OK, r#"{"predictions":["firstHello","END"," and more"]}"#)
    );
    assert!(!answer.headers.contains_key("x-compute-type"));
}

#[tokio::test]
async fn vertex_hides_the_reason_of_a_failure() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/vertex", json!({"instances": []})).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(answer.body, r#"{"error":"Input validation error","error_type":"Input validation error"}"#);
    let incomplete = r#"{"error":"Incomplete generation","error_type":"Incomplete generation"}"#;
    for instance in [json!({"inputs": ""}), json!({"messages": []}), json!({"messages": chat(), "n": 2})] {
        let answer = server.post("/vertex", json!({"instances": [{"inputs": "Hi"}, instance]})).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{instance}");
        assert_eq!(answer.body, incomplete);
    }
    let answer = server.post("/vertex", json!({"instances": [{"prompt": "Hi"}]})).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
}

#[tokio::test]
async fn an_instance_that_fails_aborts_the_others() {
    let (server, mut sequences) = Server::manual().await;
    let body = json!({"instances": [{"inputs": "a"}, {"inputs": "b"}]});
    let (answer, other) = tokio::join!(server.post("/vertex", body), async {
        let first = sequences.recv().await.unwrap();
        let other = sequences.recv().await.unwrap();
        first.send(SequenceEvent::Failed(SequenceFailure::Sequence("logits are NaN".to_owned())));
        other
    });
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    other.aborted.await.unwrap();
}

#[tokio::test]
async fn chat_tokenize_answers_the_rendered_prompt_and_its_tokens() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/chat_tokenize", json!({"messages": [{"role": "u", "content": "x"}]})).await;
    insta::assert_snapshot!(answer.body, @r#"{"tokenize_response":[{"id":256,"text":"<|im_start|>","start":0,"stop":12},{"id":117,"text":"u","start":12,"stop":13},{"id":10,"text":"\n","start":13,"stop":14},{"id":120,"text":"x","start":14,"stop":15},{"id":257,"text":"<|im_end|>","start":15,"stop":25},{"id":10,"text":"\n","start":25,"stop":26},{"id":256,"text":"<|im_start|>","start":26,"stop":38},{"id":97,"text":"a","start":38,"stop":39},{"id":115,"text":"s","start":39,"stop":40},{"id":115,"text":"s","start":40,"stop":41},{"id":105,"text":"i","start":41,"stop":42},{"id":115,"text":"s","start":42,"stop":43},{"id":116,"text":"t","start":43,"stop":44},{"id":97,"text":"a","start":44,"stop":45},{"id":110,"text":"n","start":45,"stop":46},{"id":116,"text":"t","start":46,"stop":47},{"id":10,"text":"\n","start":47,"stop":48}],"templated_text":"<|im_start|>u\nx<|im_end|>\n<|im_start|>assistant\n"}"#);
    let refused = server.post("/chat_tokenize", json!({"messages": []})).await;
    assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(refused.json()["error_type"], "validation");
}
