//! `/v1/responses`: the prompt of a conversation, and invalid requests.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::model::IM_END;
use crate::responses::{hello, tool};
use crate::tool::{call as call_tokens, prompt, server};

const PATH: &str = "/v1/responses";

fn message(role: &str, kind: &str, text: &str) -> Value {
    json!({"type": "message", "role": role, "content": [{"type": kind, "text": text}]})
}

fn call(id: &str) -> Value {
    json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{\"city\": \"x\"}"})
}

fn output(id: &str) -> Value {
    json!({"type": "function_call_output", "call_id": id, "output": "rain"})
}

#[tokio::test]
async fn the_template_sees_instructions_tools_calls_and_results() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let reasoning = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
                           "content": [{"type": "reasoning_text", "text": "hm"}]});
    let parts =
        json!({"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "sun"}]});
    let input = json!([
        message("developer", "input_text", "Sandboxed."), message("user", "input_text", "Hi"),
        {"role": "user", "content": "there"}, reasoning, message("assistant", "output_text", "Well."),
        call("call_1"), call("call_2"), parts, output("call_2"), message("developer", "input_text", "Be brief."),
    ]);
    let fields =
        json!({"instructions": "You help.", "input": input, "tools": [tool("f")], "reasoning": {"effort": "none"}});
    let answer = server.post(PATH, hello(fields)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    insta::assert_snapshot!(prompt(&server), @r#"
    [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
    offsystem:You help.

    Sandboxed.
    user:Hi

    there
    assistant:Well.<tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call><tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call>
    tool:suncall_1f
    tool:raincall_2f
    user:<system-reminder>
    Be brief.
    </system-reminder>
    "#);
}

/// As Codex CLI sends it to a provider that speaks Responses.
#[tokio::test]
async fn a_request_of_codex_is_answered() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let shell = json!({"type": "function", "name": "shell", "description": "Runs a command.", "strict": false, "parameters": {
        "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
        "required": ["command"], "additionalProperties": false}});
    let agents = json!({"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [tool("close")]});
    let body = json!({
        "model": "tgi", "instructions": "You are a coding agent.",
        "input": [
            message("developer", "input_text", "<permissions instructions>"),
            message("user", "input_text", "<environment_context>"), message("user", "input_text", "Fix it."),
        ],
        "tools": [shell, agents, {"type": "web_search", "external_web_access": false}], "tool_choice": "auto",
        "parallel_tool_calls": false, "reasoning": {"effort": "medium", "summary": "auto"}, "store": false, "stream": true,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0"}, "service_tier": null,
    });
    let answer = server.post(PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let last = answer.typed_events().pop().unwrap();
    assert_eq!(last["type"], "response.completed");
    let names: Vec<_> = last["response"]["tools"].as_array().unwrap().iter().map(|tool| tool["name"].clone()).collect();
    assert_eq!(names, ["shell", "agents__close"], "tools that OpenAI executes are left out");
}

#[tokio::test]
async fn a_function_in_a_namespace_is_shown_with_both_names_and_called_with_its_own() {
    let tokens = [call_tokens(r#"{"name": "agents__close", "arguments": {}}"#), vec![IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let tools = json!([{"type": "namespace", "name": "agents", "tools": [tool("close"), tool("open")]}, tool("close")]);
    let choice = json!({"type": "function", "namespace": "agents", "name": "close"});
    let answer = server.post(PATH, hello(json!({"tools": tools, "tool_choice": choice}))).await.json();
    let call = answer["output"][0].clone();
    assert_eq!((&call["namespace"], &call["name"]), (&json!("agents"), &json!("close")), "{answer}");
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "closed"});
    let again = hello(json!({"tools": tools, "input": [message("user", "input_text", "Hi"), call, output]}));
    assert_eq!(server.post(PATH, again).await.status, StatusCode::OK);
    let prompt = prompt(&server);
    assert!(prompt.contains(r#"<tool_call>{"name": "agents__close", "arguments": {}}"#), "{prompt}");
}

#[tokio::test]
async fn allowed_tools_limit_the_calls_and_not_the_prompt() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let choice = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]});
    let tools = json!([tool("f"), tool("g")]);
    server.post(PATH, hello(json!({"tools": tools, "tool_choice": "required"}))).await;
    let (shown, free) = (prompt(&server), format!("{:?}", server.last_request().grammar));
    server.post(PATH, hello(json!({"tools": tools, "tool_choice": choice}))).await;
    let limited = format!("{:?}", server.last_request().grammar);
    assert_eq!(prompt(&server), shown);
    assert!(free.contains("\"f\\") && !limited.contains("\"f\\") && limited.contains("\"g\\"), "{limited}");
}

#[tokio::test]
async fn invalid_requests_name_the_field() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let items = |items: Value| json!({"input": items});
    let user = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    for (fields, param, expected) in [
        (json!({"input": 5}), "input", "invalid type: integer"),
        (items(json!([])), "input", "it has no message"),
        (items(json!(["Hi"])), "input", "input[0]: invalid type: string"),
        (items(json!([{"role": "user"}])), "input[0]", "missing field `content`"),
        (items(json!([{"content": "Hi"}])), "input[0]", "missing field `role`"),
        (items(json!([{"role": "critic", "content": "Hi"}])), "input", "unknown variant `critic`"),
        (
            items(json!([{"type": "item_reference", "id": "msg_1"}])),
            "input[0].type",
            "`item_reference` is not supported",
        ),
        (items(json!([{"type": "custom_tool_call", "name": "p"}])), "input[0].type", "`custom_tool_call` is not"),
        (
            user(json!({"type": "input_image", "image_url": "data:,"})),
            "input[0].content[0].image_url",
            "images are not supported: this model reads only text",
        ),
        (user(json!({"type": "input_file"})), "input[0].content[0]", "`input_file` parts are not supported"),
        (user(json!({"type": "input_text"})), "input[0].content[0]", "the text is missing"),
        (items(json!([output("call_unknown")])), "input[0].call_id", "`call_unknown` is not the id of an earlier call"),
        (items(json!([call("a"), call("a")])), "input[1].call_id", "the id `a` occurs twice"),
        (items(json!([call("a")])), "input", "the call `a` has no result"),
        (items(json!([{"type": "function_call", "name": "f"}])), "input[0]", "missing field `call_id`"),
        (items(json!([{"type": "function_call_output", "call_id": "a"}])), "input[0]", "missing field `output`"),
        (json!({"tools": [{"type": "custom", "name": "p"}]}), "tools[0].type", "`custom` is not supported"),
        (json!({"tools": [tool("f"), {"type": "custom", "name": "p"}]}), "tools[1].type", "`custom` is not supported"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "`web_search` is not supported"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]", "missing field `name`"),
        (json!({"tools": [{"type": "web_search"}, {"type": "function"}]}), "tools[1]", "missing field `name`"),
        (json!({"tools": [{"type": "namespace"}]}), "tools[0]", "missing field `name`"),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [tool("f"), {"type": "custom"}]}]}),
            "tools[0].tools[1].type",
            "`custom` is not supported",
        ),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "h"}}), "tools", "\"h\""),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "web_search"}}), "tool_choice", "allowed tools"),
        (json!({"tool_choice": "required"}), "tools", "the request has no tools"),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "`max_output_tokens` must be strictly positive"),
        (json!({"max_output_tokens": 9000}), "input", "`input` tokens + `max_output_tokens` must be"),
        (json!({"temperature": -1}), "temperature", "`temperature` must be"),
        (json!({"text": {"format": {"type": "xml"}}}), "text", "unknown variant `xml`"),
        (
            json!({"text": {"format": {"type": "json_schema", "schema": {"x": "broken"}}}}),
            "text.format",
            "it is broken",
        ),
        (json!({"include": ["message.output_text.logprobs"]}), "include", "`message.output_text.logprobs` is not"),
        (json!({"truncation": "auto"}), "truncation", "only `disabled` is"),
        (json!({"background": true}), "background", "not supported"),
        (json!({"conversation": "conv_1"}), "conversation", "not supported"),
        (json!({"prompt": {"id": "p"}}), "prompt", "not supported"),
        (json!({"top_logprobs": 2}), "top_logprobs", "not supported"),
        (json!({"model": null}), "model", "invalid type: null"),
        (json!({"input": "x".repeat(8001)}), "input", "`input` must have at most"),
    ] {
        for stream in [false, true] {
            let mut body = hello(fields.clone());
            body["stream"] = stream.into();
            let answer = server.post(PATH, body).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{fields}: {}", answer.body);
            let error = &answer.json()["error"];
            assert_eq!(error["param"], param, "{error}");
            assert!(error["message"].as_str().unwrap().contains(expected), "{expected}: {error}");
        }
    }
}
