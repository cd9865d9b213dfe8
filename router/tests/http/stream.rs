//! `/generate_stream`: framing, order, and failures during the stream.

use axum::http::StatusCode;
use http_body_util::BodyExt;
use penstock_router::sequence::{SequenceEvent, SequenceFailure};
use serde_json::json;

use crate::model::{IM_END, word};
use crate::server::{Server, whole};

#[tokio::test]
async fn a_stream_is_one_event_for_each_token() {
    let server = Server::answering(&[word("Hello"), word(" world"), IM_END]).await;
    let parameters = json!({"details": true, "return_full_text": true, "max_new_tokens": 2});
    let answer = server.post("/generate_stream", json!({"inputs": "Hi", "parameters": parameters})).await;
    assert_eq!(answer.status, StatusCode::OK);
    insta::assert_snapshot!(answer.body, @r#"
    data: {"index":1,"token":{"id":258,"text":"Hello","logprob":-0.5,"special":false},"generated_text":null,"details":null}

    data: {"index":2,"token":{"id":259,"text":" world","logprob":-0.5,"special":false},"generated_text":"HiHello world","details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":2}}
    "#);
    assert_eq!(answer.header("content-type"), "text/event-stream");
    assert_eq!(answer.header("cache-control"), "no-cache");
    assert_eq!(answer.header("x-accel-buffering"), "no");
    assert_eq!(answer.header("x-compute-type"), "1-cpu");
    assert_eq!(answer.header("x-compute-characters"), "2");
    assert!(!answer.headers.contains_key("x-total-time"));
}

#[tokio::test]
async fn the_root_streams_on_request() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let answer = server.post("/", json!({"inputs": "Hi", "stream": true})).await;
    let events = answer.events();
    assert_eq!(events.len(), 2);
    assert!(events[1].contains(r#""generated_text":"HiHello","details":null"#), "{}", events[1]);
}

#[tokio::test]
async fn events_are_sent_as_tokens_arrive() {
    let (server, mut sequences) = Server::manual().await;
    let mut response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    for _ in 0..3 {
        sequence.send_token(word("Hello"));
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
        assert!(text.starts_with("data: {") && text.ends_with("}\n\n"), "{text:?}");
    }
}

#[tokio::test]
async fn a_failure_during_a_stream_is_its_last_event() {
    let (server, mut sequences) = Server::manual().await;
    let response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    assert_eq!(response.status(), StatusCode::OK);
    let sequence = sequences.recv().await.unwrap();
    sequence.send_token(word("Hello"));
    sequence.send(SequenceEvent::Failed(SequenceFailure::Sequence("logits are NaN".to_owned())));
    insta::assert_snapshot!(whole(response).await.body, @r#"
    data: {"index":1,"token":{"id":258,"text":"Hello","logprob":-0.5,"special":false},"generated_text":null,"details":null}

    data: {"error":"Request failed during generation: logits are NaN","error_type":"generation"}
    "#);

    let response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    drop(sequences.recv().await.unwrap());
    let expected = r#"{"error":"Incomplete generation","error_type":"incomplete_generation_stream"}"#;
    assert_eq!(whole(response).await.events(), [expected]);
}

#[tokio::test]
async fn refusals_are_statuses_and_not_events() {
    let server = Server::answering(&[IM_END]).await;
    for parameters in [
        json!({"temperature": 0}),
        json!({"best_of": 2}),
        json!({"best_of": 0}),
        json!({"n": 2}),
        json!({"decoder_input_details": true}),
    ] {
        let answer = server.post("/generate_stream", json!({"inputs": "Hi", "parameters": parameters})).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(answer.json()["error_type"], "validation");
    }
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let (server, mut sequences) = Server::manual().await;
    let mut response = server.open("/generate_stream", json!({"inputs": "Hi"})).await;
    let sequence = sequences.recv().await.unwrap();
    // From here on only: paused time leaps over every timeout while bytes are on their way.
    tokio::time::pause();
    let before = tokio::time::Instant::now();
    let frame = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), ":\n\n");
    assert!(before.elapsed() >= std::time::Duration::from_secs(14), "{:?}", before.elapsed());
    tokio::time::resume();
    sequence.answer(&[IM_END]);
    let rest = whole(response).await;
    assert_eq!(rest.events().len(), 1);
}

#[tokio::test]
async fn tgi_s_streams_do_not_end_with_done() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    for path in ["/generate_stream", "/", "/invocations"] {
        let answer = server.post(path, json!({"inputs": "Hi", "stream": true})).await;
        assert_eq!(answer.header("content-type"), "text/event-stream");
        assert_eq!(answer.events().len(), 2, "{path}");
        assert!(!answer.body.contains("[DONE]"));
    }
}

#[tokio::test]
async fn a_timeout_is_a_status_or_the_last_event() {
    let (server, mut sequences) = Server::manual().await;
    let body = json!({"inputs": "Hi", "parameters": {"timeout": 2}});
    let expected = r#"{"error":"the request's timeout expired","error_type":"timeout"}"#;
    let plain = server.post("/generate", body.clone()).await;
    assert_eq!((plain.status, plain.body.as_str()), (StatusCode::GATEWAY_TIMEOUT, expected));
    sequences.recv().await.unwrap().aborted.await.unwrap();

    let stream = server.post("/generate_stream", body).await;
    assert_eq!(stream.status, StatusCode::OK);
    assert_eq!(stream.events(), [expected]);
    sequences.recv().await.unwrap().aborted.await.unwrap();
}
