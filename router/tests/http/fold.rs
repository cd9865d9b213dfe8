//! Adds up streams as the openai and anthropic packages do.

use std::collections::BTreeMap;

use penstock_router::sequence::SequenceRequest;
use serde_json::{Value, json};

use crate::server::Answer;

/// The seed of requests whose choices are told apart by their seeds.
pub const SEED: u64 = 7;

/// The index of a sequence's choice, in a request with [`SEED`].
pub fn seed_index(request: &SequenceRequest) -> usize {
    let steps = |index: u64| SEED.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    (0..128).position(|index| steps(index) == request.sampling.seed).unwrap()
}

pub fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// The chunks of a stream that ended without an error.
pub fn chunks(answer: &Answer) -> Vec<Value> {
    let events = answer.events();
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

/// The summed choices of a completion's stream.
pub fn completion_fold(answer: &Answer) -> Value {
    let mut choices: BTreeMap<u64, Value> = BTreeMap::new();
    for chunk in chunks(answer) {
        for choice in chunk["choices"].as_array().unwrap() {
            let empty = json!({"index": choice["index"], "text": "", "logprobs": null, "finish_reason": null});
            let sum = choices.entry(choice["index"].as_u64().unwrap()).or_insert(empty);
            accumulate(sum, choice);
        }
    }
    choices.into_values().collect()
}

/// The summed choices of a chat's stream, as a plain answer has them.
pub fn chat_fold(answer: &Answer) -> Value {
    let mut choices: BTreeMap<u64, Value> = BTreeMap::new();
    for chunk in chunks(answer) {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for choice in chunk["choices"].as_array().unwrap() {
            let calls = choice["delta"]["tool_calls"].as_array();
            assert!(calls.is_none_or(|calls| calls.len() == 1), "{choice}");
            let sum = choices.entry(choice["index"].as_u64().unwrap()).or_insert(json!({}));
            accumulate(sum, choice);
        }
    }
    choices.into_values().map(message).collect()
}

/// The message of a stream of `/v1/messages`. Checks that its blocks come one after the other.
pub fn message_fold(answer: &Answer) -> Value {
    let mut events = answer.typed_events().into_iter().filter(|event| event["type"] != "ping");
    let mut message = events.next().unwrap()["message"].take();
    let (mut open, mut arguments) = (None, String::new());
    for mut event in events.by_ref() {
        let blocks = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!((open, &event["index"]), (None, &json!(blocks.len())));
                open = event["index"].as_u64();
                blocks.push(event["content_block"].take());
            }
            "content_block_delta" => {
                assert_eq!(event["index"].as_u64(), open);
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                let (field, kind) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", "text"),
                    "thinking_delta" => ("thinking", "thinking"),
                    "signature_delta" => ("signature", "thinking"),
                    "input_json_delta" => {
                        assert_eq!(block["type"], "tool_use");
                        arguments.push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("{other}"),
                };
                assert_eq!(block["type"], kind);
                block[field] = (block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap()).into();
            }
            "content_block_stop" => {
                assert_eq!(event["index"].as_u64(), open.take());
                if blocks.last().unwrap()["type"] == "tool_use" {
                    blocks.last_mut().unwrap()["input"] = serde_json::from_str(&arguments).unwrap_or(json!({}));
                    arguments.clear();
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                accumulate(&mut message, &event["delta"]);
                message["usage"] = event["usage"].take();
                break;
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(events.collect::<Vec<_>>(), [json!({"type": "message_stop"})]);
    message
}

/// The response of a stream of `/v1/responses`, from its deltas. Checks the order of the events, and that what they repeat
/// is the sum of the deltas.
pub fn response_fold(answer: &Answer) -> Value {
    let events = answer.typed_events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    let (last, events) = events.split_last().unwrap();
    assert_eq!([&events[0]["type"], &events[1]["type"]], ["response.created", "response.in_progress"]);
    let mut output: Vec<Value> = Vec::new();
    let mut open = None;
    for event in &events[2..] {
        let kind = event["type"].as_str().unwrap();
        if kind == "response.output_item.added" {
            assert_eq!((open, &event["output_index"]), (None, &json!(output.len())));
            open = event["output_index"].as_u64();
            output.push(event["item"].clone());
            continue;
        }
        assert_eq!(event["output_index"].as_u64(), open, "{event}");
        let item = output.last_mut().unwrap();
        assert!(event.get("item_id").is_none_or(|id| *id == item["id"]), "{event}");
        match kind {
            "response.content_part.added" => item["content"] = json!([event["part"]]),
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                append(&mut item["content"][0]["text"], &event["delta"]);
                if let (Some(logprobs), Some(more)) =
                    (item["content"][0].get_mut("logprobs").and_then(Value::as_array_mut), event["logprobs"].as_array())
                {
                    logprobs.extend(more.iter().cloned());
                }
            }
            "response.function_call_arguments.delta" => append(&mut item["arguments"], &event["delta"]),
            "response.custom_tool_call_input.delta" => append(&mut item["input"], &event["delta"]),
            "response.custom_tool_call_input.done" => assert_eq!(event["input"], item["input"]),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], item["content"][0]["text"]);
            }
            "response.function_call_arguments.done" => assert_eq!(event["arguments"], item["arguments"]),
            "response.content_part.done" => assert_eq!(event["part"], item["content"][0]),
            "response.output_item.done" => {
                item["status"] = event["item"]["status"].clone();
                assert_eq!(event["item"], *item);
                open = None;
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(open, None);
    let response = &last["response"];
    assert_eq!(last["type"], format!("response.{}", response["status"].as_str().unwrap()));
    assert_eq!(response["output"], json!(output));
    response.clone()
}

fn append(text: &mut Value, more: &Value) {
    *text = (text.as_str().unwrap().to_owned() + more.as_str().unwrap()).into();
}

/// Turns a summed delta into a message, whose calls have no index.
fn message(mut choice: Value) -> Value {
    let mut message = choice["delta"].take();
    if let Some(calls) = message.get_mut("tool_calls") {
        for call in calls.as_array_mut().unwrap() {
            call.as_object_mut().unwrap().remove("index");
        }
    }
    for field in ["content", "refusal"] {
        message.as_object_mut().unwrap().entry(field).or_insert(Value::Null);
    }
    message["annotations"] = json!([]);
    json!({"index": choice["index"], "message": message, "logprobs": choice["logprobs"],
           "finish_reason": choice["finish_reason"]})
}

fn accumulate(sum: &mut Value, delta: &Value) {
    for (key, more) in delta.as_object().unwrap() {
        let is_new = sum.get(key).is_none_or(Value::is_null);
        match (&mut sum[key], more) {
            (sum, more) if is_new || key == "index" || key == "type" => *sum = more.clone(),
            (_, Value::Null) => {}
            (Value::String(text), Value::String(more)) => text.push_str(more),
            (sum @ Value::Object(_), Value::Object(_)) => accumulate(sum, more),
            (Value::Array(items), Value::Array(more)) => more.iter().for_each(|entry| add_entry(items, entry)),
            (sum, more) => panic!("{key}: {more} after {sum}"),
        }
    }
}

/// Entries with an index are added up; others are appended.
fn add_entry(items: &mut Vec<Value>, entry: &Value) {
    let index = entry.get("index").and_then(Value::as_u64).map(|index| usize::try_from(index).unwrap());
    match index.and_then(|index| items.get_mut(index)) {
        Some(item) => accumulate(item, entry),
        None => items.push(entry.clone()),
    }
}
