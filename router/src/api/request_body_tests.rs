use serde_json::{Value, json};

use super::*;
use crate::api::unknown_field::{UnknownFields, unknown_fields};

/// The warnings about a body.
fn warnings<T: RequestBody>(body: Value) -> Vec<String> {
    let UnknownFields { unknown, num_more, .. } = unknown_fields(T::known_fields(), &body);
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
            "unknown field `instances[0].parameters.topk`; did you mean `instances[0].parameters.top_k`?",
            "unknown field `instances[1].tempreature`; did you mean `instances[1].temperature`?"
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
fn unknown_fields_of_messages_tools_and_formats_are_named_with_their_places() {
    let chat = json!({
        "messages": [
            {"role": "user", "contnt": "a", "content": [{"text": "a", "txt": "b", "type": "text", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "a", "tool_cals": [], "toolCallId": "a", "mood": "good"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "paramters": {}, "return": {}, "strict": true}}],
        "tool_choice": {"type": "function", "function": {"name": "f", "nam": "g"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"foo": 1}, "strct": true, "description": "b"}},
        "grammar": {"schemaa": {}, "type": "json_object"},
    });
    assert_eq!(
        warnings::<ChatRequest>(chat),
        [
            "unknown field `messages[0].contnt`; did you mean `messages[0].content`?",
            "unknown field `messages[0].content[0].txt`; did you mean `messages[0].content[0].text`?",
            "unknown field `messages[1].tool_cals`; did you mean `messages[1].tool_calls`?",
            "unknown field `messages[1].toolCallId`; did you mean `messages[1].tool_call_id`?",
            "unknown field `tools[0].function.paramters`; did you mean `tools[0].function.parameters`?",
            "unknown field `tool_choice.function.nam`; did you mean `tool_choice.function.name`?",
            "unknown field `response_format.json_schema.strct`; did you mean `response_format.json_schema.strict`?",
            "unknown field `grammar.schemaa`; did you mean `grammar.schema`?",
        ]
    );
    let messages = json!({
        "model": "a", "max_tokens": 1,
        "system": [{"type": "text", "text": "a", "cache_control": {}, "txt": "b"}],
        "messages": [{"role": "user", "id": "m", "content": [
            {"type": "text", "text": "a", "citations": [], "title": "b"},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}, "titel": "b"},
            {"type": "web_search_tool_result", "tool_use_id": "a", "content": [{"type": "web_search_result", "page_age": "1"}]},
            {"type": "tool_result", "tool_use_id": "a", "is_error": false, "content": [{"type": "text", "text": "a", "txt": "b"}]},
        ]}],
        "tools": [{"name": "f", "input_schema": {"a": 1}, "descripton": "b", "strict": true},
                  {"type": "bash_20250124", "name": "bash", "other": 1}],
        "tool_choice": {"type": "auto", "disable_parallel": true}, "thinking": {"budget_tokens": 5, "type": "adaptive"},
        "output_config": {"format": {"type": "json_schema", "schema": {"a": 1}, "name": "a"}},
    });
    assert_eq!(
        warnings::<MessagesRequest>(messages),
        [
            "unknown field `system[0].txt`; did you mean `system[0].text`?",
            "unknown field `messages[0].id`",
            "`messages[0].content[0].title` has no effect with the type `text`",
            "unknown field `messages[0].content[1].titel`; did you mean `messages[0].content[1].title`?",
            "unknown field `messages[0].content[3].content[0].txt`; did you mean `messages[0].content[3].content[0].text`?",
            "unknown field `tools[0].descripton`; did you mean `tools[0].description`?",
            "unknown field `tool_choice.disable_parallel`; did you mean `tool_choice.disable_parallel_tool_use`?",
            "`thinking.budget_tokens` has no effect with the type `adaptive`",
            "unknown field `output_config.format.name`",
        ]
    );
    let responses = json!({
        "model": "a", "max_tokens": 5, "max_completion_tokens": 5,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a", "txt": "b"}], "contnt": "c"},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed", "phase": "final_answer",
             "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
            {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "a"}},
        ],
        "tools": [{"type": "function", "name": "f", "paramters": {}, "strict": true}, {"type": "web_search", "search_context_size": "low"}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"a": 1}, "strct": true}},
        "stream_options": {"include_usage": true, "include_obfuscation": false},
    });
    assert_eq!(
        warnings::<ResponsesRequest>(responses),
        [
            "unknown field `max_tokens`; did you mean `max_output_tokens`?",
            "unknown field `max_completion_tokens`; did you mean `max_output_tokens`?",
            "unknown field `input[0].content[0].txt`; did you mean `input[0].content[0].text`?",
            "unknown field `input[0].contnt`; did you mean `input[0].content`?",
            "unknown field `tools[0].paramters`; did you mean `tools[0].parameters`?",
            "unknown field `text.format.strct`; did you mean `text.format.strict`?",
            "unknown field `stream_options.include_usage`",
        ]
    );
}

#[test]
fn a_list_in_the_place_of_an_object_is_found() {
    let list = |known: &KnownFields, body: Value| unknown_fields(known, &body).misplaced_list;
    assert_eq!(list(GenerateRequest::known_fields(), json!(["a", {}])), Some(String::new()));
    assert_eq!(
        list(GenerateRequest::known_fields(), json!({"inputs": "a", "parameters": [1]})),
        Some("parameters".to_owned())
    );
    let chat = ChatRequest::known_fields();
    assert_eq!(list(chat, json!({"stream_options": [true]})), Some("stream_options".to_owned()));
    assert_eq!(list(chat, json!({"messages": [["user", "a"]]})), Some("messages[0]".to_owned()));
    assert_eq!(list(chat, json!({"messages": [{"content": [{"type": "text"}]}], "stop": ["a"], "tools": []})), None);
}

#[test]
fn many_unknown_fields_are_counted() {
    let body: serde_json::Map<_, _> = (0..1000).map(|index| (format!("q{index}"), json!(1))).collect();
    let warnings = warnings::<ChatRequest>(body.into());
    assert_eq!((warnings.len(), warnings.last().map(String::as_str)), (17, Some("984 more")));
}
