use serde_json::{Value, json};

use super::*;

/// The warnings about a body.
fn warnings<T: RequestBody>(body: Value) -> Vec<String> {
    let (unknown, num_more) = T::known_fields().unknown_in(&body);
    let more = (num_more > 0).then(|| format!("{num_more} more"));
    unknown.iter().map(ToString::to_string).chain(more).collect()
}

#[test]
fn an_unknown_field_is_named_with_its_near_miss() {
    let chat = |body| warnings::<ChatRequest>(body);
    assert_eq!(chat(json!({"tempreature": 0.5})), ["unknown field `tempreature`; did you mean `temperature`?"]);
    assert_eq!(chat(json!({"maxTokens": 5})), ["unknown field `maxTokens`; did you mean `max_tokens`?"]);
    assert_eq!(chat(json!({"max_new_tokens": 5})), ["unknown field `max_new_tokens`; did you mean `max_tokens`?"]);
    assert_eq!(chat(json!({"topp": 0.5})), ["unknown field `topp`; did you mean `top_p`?"]);
    assert_eq!(chat(json!({"stop_sequences": []})), ["unknown field `stop_sequences`; did you mean `stop`?"]);
    assert_eq!(chat(json!({"zzz": 1})), ["unknown field `zzz`"]);
    assert_eq!(
        chat(json!({"stream_options": {"include_usages": true}})),
        ["unknown field `stream_options.include_usages`; did you mean `stream_options.include_usage`?"]
    );
}

#[test]
fn a_field_at_the_wrong_place_is_named_with_its_place() {
    let generate = |body| warnings::<GenerateRequest>(body);
    assert_eq!(
        generate(json!({"inputs": "a", "max_tokens": 5})),
        ["unknown field `max_tokens`; did you mean `parameters.max_new_tokens`?"]
    );
    assert_eq!(
        generate(json!({"inputs": "a", "max_new_tokens": 5})),
        ["unknown field `max_new_tokens`; did you mean `parameters.max_new_tokens`?"]
    );
    assert_eq!(
        generate(json!({"inputs": "a", "parameters": {"max_tokens": 5, "stream": true}})),
        [
            "unknown field `parameters.max_tokens`; did you mean `parameters.max_new_tokens`?",
            "unknown field `parameters.stream`; did you mean `stream`?"
        ]
    );
}

#[test]
fn every_instance_of_a_vertex_request_is_looked_through() {
    let body = json!({"instances": [{"inputs": "a", "parameters": {"topk": 1}}, {"messages": [], "tempreature": 1}]});
    assert_eq!(
        warnings::<VertexRequest>(body),
        [
            "unknown field `instances.parameters.topk`; did you mean `instances.parameters.top_k`?",
            "unknown field `instances.tempreature`; did you mean `instances.temperature`?"
        ]
    );
}

#[test]
fn known_fields_null_and_fields_for_the_template_are_no_warnings() {
    let body = json!({
        "messages": [{"role": "user", "content": "a", "name": "b", "thoughts": "c"}],
        "chat_template_kwargs": {"mode": "a"}, "logit_bias": {"5": 1}, "metadata": {"a": "b"}, "user": "a",
        "tools": [{"type": "function", "function": {"name": "f", "comment": "a"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": {"type": "object"}}},
        "stream_options": {"include_usage": true, "include_obfuscation": false}, "unknown": null,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    });
    assert_eq!(warnings::<ChatRequest>(body), [""; 0]);
    assert_eq!(
        warnings::<CompletionRequest>(json!({"prompt_token_ids": [1], "guided_json": {"type": "object"}})),
        [""; 0]
    );
    assert_eq!(
        warnings::<GenerateRequest>(
            json!({"inputs": "a", "parameters": {"grammar": {"type": "json", "value": {"a": 1}}}})
        ),
        [""; 0]
    );
    let messages = json!({
        "model": "a", "max_tokens": 1, "messages": [], "metadata": {"user_id": "a"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []}, "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    });
    assert_eq!(warnings::<MessagesRequest>(messages), [""; 0]);
    let responses = json!({
        "model": "a", "input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": true}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto", "generate_summary": null, "context": "auto"}, "metadata": {"a": "b"}, "include": [],
    });
    assert_eq!(warnings::<ResponsesRequest>(responses), [""; 0]);
}

#[test]
fn many_unknown_fields_are_counted() {
    let body: serde_json::Map<_, _> = (0..1000).map(|index| (format!("q{index}"), json!(1))).collect();
    let warnings = warnings::<ChatRequest>(body.into());
    assert_eq!((warnings.len(), warnings.last().map(String::as_str)), (17, Some("984 more")));
}
