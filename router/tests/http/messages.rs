//! `/v1/messages`: answers, streams and their ends.

use axum::http::StatusCode;
use penstock_router::sequence::{FinishReason, Grammar, SequenceEvent, SequenceFailure};
use serde_json::{Value, json};

use crate::fold::{message_fold, with};
use crate::model::{IM_END, bytes, word};
use crate::server::{Answer, Server, whole};
use crate::tool::{call, server};

const PATH: &str = "/v1/messages";

pub fn hello(fields: Value) -> Value {
    with(json!({"model": "tgi", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}), fields)
}

pub fn tool(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"name": name, "description": "d", "input_schema": schema})
}

/// Replaces ids, which differ in each answer.
pub fn stable(text: &str) -> String {
    let ids = regex::Regex::new("(msg_|toolu_)[0-9a-f]{24,32}").unwrap();
    ids.replace_all(text, "${1}ID").into_owned()
}

/// The events of a stream, one in each line.
fn lines(answer: &Answer) -> String {
    let events: Vec<_> = answer.typed_events().iter().map(Value::to_string).collect();
    stable(&events.join("\n"))
}

#[tokio::test]
async fn an_answer_has_anthropic_s_shape() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let answer = server.post(PATH, hello(json!({}))).await;
    insta::assert_snapshot!(stable(&answer.body), @r#"{"id":"msg_ID","type":"message","role":"assistant","model":"test/model","content":[{"type":"text","text":"Hello"}],"stop_reason":"end_turn","stop_sequence":null,"stop_details":null,"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":2,"output_tokens_details":{"thinking_tokens":0},"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"service_tier":"standard"}}"#);
    assert_eq!(answer.header("x-prompt-tokens"), "21");
}

#[tokio::test]
async fn a_stream_has_the_published_events_in_order() {
    let server = Server::answering(&[word("Hello"), word(" world"), IM_END]).await;
    let answer = server.post(PATH, hello(json!({"stream": true, "model": "mine"}))).await;
    insta::assert_snapshot!(stable(&answer.body), @r#"
    event: message_start
    data: {"type":"message_start","message":{"id":"msg_ID","type":"message","role":"assistant","model":"mine","content":[],"stop_reason":null,"stop_sequence":null,"stop_details":null,"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0,"output_tokens_details":{"thinking_tokens":0},"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"service_tier":"standard"}}}

    event: content_block_start
    data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

    event: content_block_delta
    data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}

    event: content_block_delta
    data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" world"}}

    event: content_block_stop
    data: {"type":"content_block_stop","index":0}

    event: message_delta
    data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":3,"output_tokens_details":{"thinking_tokens":0},"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"service_tier":"standard"}}

    event: message_stop
    data: {"type":"message_stop"}
    "#);
    assert_eq!(answer.header("content-type"), "text/event-stream");
}

#[tokio::test]
async fn thoughts_text_and_calls_are_blocks_one_after_the_other() {
    let calls = [call(r#"{"name": "f", "arguments": {"city": "né"}}"#), call(r#"{"name": "g", "arguments": {}}"#)];
    let tokens = [bytes("<think>hm</think>"), vec![word("Hello")], calls.concat(), vec![IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let body = hello(json!({"tools": [tool("f"), tool("g")]}));
    let plain = server.post(PATH, body.clone()).await;
    insta::assert_snapshot!(stable(&plain.json()["content"].to_string()), @r#"[{"type":"thinking","thinking":"hm","signature":"unsigned"},{"type":"text","text":"Hello"},{"type":"tool_use","id":"toolu_ID","name":"f","caller":{"type":"direct"},"input":{"city":"né"}},{"type":"tool_use","id":"toolu_ID","name":"g","caller":{"type":"direct"},"input":{}}]"#);
    assert_eq!(plain.json()["stop_reason"], "tool_use");
    let streamed = server.post(PATH, with(body.clone(), json!({"stream": true}))).await;
    insta::assert_snapshot!(lines(&streamed), @r#"
    {"type":"message_start","message":{"id":"msg_ID","type":"message","role":"assistant","model":"test/model","content":[],"stop_reason":null,"stop_sequence":null,"stop_details":null,"usage":{"input_tokens":303,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0,"output_tokens_details":{"thinking_tokens":0},"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"service_tier":"standard"}}}
    {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}
    {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"h"}}
    {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"m"}}
    {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"unsigned"}}
    {"type":"content_block_stop","index":0}
    {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}
    {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Hello"}}
    {"type":"content_block_stop","index":1}
    {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"toolu_ID","name":"f","caller":{"type":"direct"},"input":{}}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"\""}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"c"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"i"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"t"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"y"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"\""}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":":"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":" "}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"\""}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"n"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"é"}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"\""}}
    {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"}"}}
    {"type":"content_block_stop","index":2}
    {"type":"content_block_start","index":3,"content_block":{"type":"tool_use","id":"toolu_ID","name":"g","caller":{"type":"direct"},"input":{}}}
    {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"{"}}
    {"type":"content_block_delta","index":3,"delta":{"type":"input_json_delta","partial_json":"}"}}
    {"type":"content_block_stop","index":3}
    {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":303,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":96,"output_tokens_details":{"thinking_tokens":9},"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":0},"service_tier":"standard"}}
    {"type":"message_stop"}
    "#);
    assert_eq!(stable(&message_fold(&streamed).to_string()), stable(&plain.json().to_string()));

    let thinking = json!({"type": "adaptive", "display": "omitted"});
    let omitted = server.post(PATH, with(body, json!({"thinking": thinking}))).await.json();
    assert_eq!(omitted["content"][0], json!({"type": "thinking", "thinking": "", "signature": "unsigned"}));
}

#[tokio::test]
async fn the_stop_reason_says_why_the_answer_ended() {
    let tokens = [word("Hello"), word("!\n\nUser"), word(": hi"), word("END"), IM_END];
    let server = Server::answering(&tokens).await;
    for (fields, text, reason, sequence) in [
        (json!({}), "Hello!\n\nUser: hiEND", "end_turn", json!(null)),
        (json!({"stop_sequences": ["nope", "END"]}), "Hello!\n\nUser: hi", "stop_sequence", json!("END")),
        (json!({"stop_sequences": ["User:", "hi"]}), "Hello!\n\n", "stop_sequence", json!("User:")),
        (json!({"max_tokens": 2}), "Hello!\n\nUser", "max_tokens", json!(null)),
    ] {
        let answer = server.post(PATH, hello(fields.clone())).await.json();
        let end = (&answer["content"][0]["text"], &answer["stop_reason"], &answer["stop_sequence"]);
        assert_eq!(end, (&json!(text), &json!(reason), &sequence), "{fields}");
        let streamed = server.post(PATH, hello(with(fields, json!({"stream": true})))).await;
        assert_eq!(stable(&message_fold(&streamed).to_string()), stable(&answer.to_string()));
    }
}

#[tokio::test]
async fn more_tokens_than_the_context_has_room_for_are_allowed() {
    let server = Server::answering(&[word("Hello"); 300]).await;
    let answer = server.post(PATH, hello(json!({"max_tokens": 64_000}))).await.json();
    assert_eq!(answer["stop_reason"], "model_context_window_exceeded");
    assert_eq!(answer["usage"]["output_tokens"], 256 - 21);
}

#[tokio::test]
async fn usage_counts_what_the_prefix_cache_had() {
    let (server, mut sequences) = Server::manual().await;
    for stream in [false, true] {
        let ask = async { whole(server.open(PATH, hello(json!({"stream": stream}))).await).await };
        let reply = async {
            let sequence = sequences.recv().await.unwrap();
            sequence.send(SequenceEvent::Started { num_cached_tokens: 16 });
            sequence.send_token(IM_END);
            sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
        };
        let (answer, ()) = tokio::join!(ask, reply);
        let counts = |usage: &Value| {
            ["input_tokens", "cache_read_input_tokens", "output_tokens"].map(|name| usage[name].as_u64().unwrap())
        };
        if stream {
            let events = answer.typed_events();
            assert_eq!(counts(&events[0]["message"]["usage"]), [5, 16, 0]);
            assert_eq!(counts(&events[1]["usage"]), [5, 16, 1]);
        } else {
            assert_eq!(counts(&answer.json()["usage"]), [5, 16, 1]);
        }
    }
}

#[tokio::test]
async fn a_cut_call_is_not_a_reason_to_execute_it() {
    let tokens = call(r#"{"name": "f", "arguments": {"city": "x"}}"#);
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let body = hello(json!({"tools": [tool("f")], "max_tokens": 32}));
    let answer = server.post(PATH, body.clone()).await.json();
    assert_eq!((&answer["stop_reason"], &answer["content"][0]["input"]), (&json!("max_tokens"), &json!({})));
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    let fragments: String =
        streamed.typed_events().iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(fragments, "{\"ci");
}

#[tokio::test]
async fn the_text_follows_the_output_format() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let format = json!({"type": "json_schema", "schema": {"type": "integer"}});
    let answer = server.post(PATH, hello(json!({"output_config": {"format": format, "effort": "low"}}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let Some(Grammar::Lark(grammar)) = server.last_request().grammar else { panic!("no grammar") };
    assert!(grammar.contains(r#"{"type":"integer"}"#), "{grammar}");
}

#[tokio::test]
async fn temperature_zero_is_greedy_and_sampling_is_the_default() {
    let server = Server::answering(&[IM_END]).await;
    for (fields, expected) in [
        (json!({}), (true, 1.0, 1.0, 0)),
        (json!({"temperature": 0, "top_k": 5, "top_p": 0.5}), (false, 1.0, 1.0, 0)),
        (json!({"temperature": 0.5, "top_k": 5, "top_p": 0.5}), (true, 0.5, 0.5, 5)),
        (json!({"temperature": 1, "top_k": 0, "top_p": 1}), (true, 1.0, 1.0, 0)),
    ] {
        let answer = server.post(PATH, hello(fields)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        let sampling = server.last_request().sampling;
        assert_eq!((sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k), expected);
    }
}

#[tokio::test]
async fn a_failure_during_a_stream_is_its_last_event() {
    let (server, mut sequences) = Server::manual().await;
    let response = server.open(PATH, hello(json!({"stream": true}))).await;
    assert_eq!(response.status(), StatusCode::OK);
    let sequence = sequences.recv().await.unwrap();
    sequence.send_token(word("Hello"));
    sequence.send(SequenceEvent::Failed(SequenceFailure::Sequence("logits are NaN".to_owned())));
    let events = whole(response).await.typed_events();
    let error = json!({"type": "api_error", "message": "Request failed during generation: logits are NaN"});
    assert_eq!(events.last().unwrap(), &json!({"type": "error", "error": error}));
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["message_start", "content_block_start", "content_block_delta", "error"]);
}

#[tokio::test]
async fn silence_is_filled_with_pings() {
    let (server, mut sequences) = Server::manual().await;
    let response = server.open(PATH, hello(json!({"stream": true}))).await;
    let sequence = sequences.recv().await.unwrap();
    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    // From here on only: paused time leaps over every timeout while bytes are on their way.
    tokio::time::pause();
    tokio::time::sleep(std::time::Duration::from_secs(20)).await;
    tokio::time::resume();
    sequence.answer(&[IM_END]);
    let events = whole(response).await.typed_events();
    assert_eq!(events[1], json!({"type": "ping"}));
}
