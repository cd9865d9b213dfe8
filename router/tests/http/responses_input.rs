//! `/v1/responses`: the prompt of a conversation, and invalid requests.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::model::{IM_END, bytes};
use crate::responses::{hello, tool};
use crate::tool::{call as call_tokens, prompt, server, server_with_config};

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
async fn custom_tools_are_shown_with_their_grammar_and_their_calls_read() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let format =
        |syntax: &str, definition: &str| json!({"type": "grammar", "syntax": syntax, "definition": definition});
    let custom =
        |name: &str, format: Value| json!({"type": "custom", "name": name, "description": "d", "format": format});
    let tools = json!([
        custom("sql", format("regex", "^SELECT [a-z]+$")),
        custom("patch", format("lark", "start: \"+\" /[a-z]+/ LF\n%import common.LF")),
        custom("nested", format("lark", "start: \"(\" start? \")\"")),
        custom("ahead", format("regex", "(?=a)[a-z]+")),
        {"type": "custom", "name": "free"},
    ]);
    let input = json!([
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_1", "name": "sql", "input": "SELECT \"a\""},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "rain"},
    ]);
    let answer = server.post(PATH, hello(json!({"tools": tools, "input": input, "tool_choice": "required"}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(
        answer.json()["tools"],
        json!([tools[0], tools[1], tools[2], tools[3],
        {"type": "custom", "name": "free", "description": null, "format": {"type": "text"}}])
    );
    let warning = answer.header("x-penstock-warning");
    assert!(warning.contains("tools[2].format: the model is shown the grammar, which is not enforced"), "{warning}");
    assert!(warning.contains("tools[3].format") && !warning.contains("tools[1]"), "{warning}");
    let prompt = prompt(&server);
    let shown: Value = serde_json::from_str(prompt.lines().next().unwrap()).unwrap();
    let pattern = |index: usize| shown[index]["function"]["parameters"]["properties"]["input"]["pattern"].clone();
    assert_eq!(pattern(0), "^(?:SELECT [a-z]+)$");
    assert!(pattern(1).as_str().is_some_and(|pattern| regex::Regex::new(pattern).unwrap().is_match("+ab\n")));
    assert_eq!([pattern(2), pattern(3), pattern(4)], [Value::Null, Value::Null, Value::Null]);
    let description = shown[0]["function"]["description"].as_str().unwrap();
    assert_eq!(description, "d\n\nThe input matches this regular expression:\n^SELECT [a-z]+$");
    assert!(
        prompt.contains(r#"<tool_call>{"name": "sql", "arguments": {"input": "SELECT \"a\""}}</tool_call>"#),
        "{prompt}"
    );
    assert!(prompt.contains("tool:raincall_1sql"), "{prompt}");
}

#[tokio::test]
async fn what_tools_of_other_servers_did_is_read_as_text() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let action = json!({"type": "search", "query": "e"});
    let input = json!([
        {"role": "user", "content": "Hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": action},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBOR"},
        {"type": "shell_call", "id": "sh_1", "call_id": "c", "status": "completed", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,iVBOR"}},
        message("assistant", "output_text", "It is E."),
        {"role": "user", "content": "Sure?"},
    ]);
    assert_eq!(server.post(PATH, hello(json!({"input": input}))).await.status, StatusCode::OK);
    insta::assert_snapshot!(prompt(&server), @r#"
    user:Hi
    assistant:<web_search_call>{"action":{"type":"search","query":"e"}}</web_search_call>

    <image_generation_call>{}</image_generation_call>

    <shell_call>{"action":{"commands":["ls"]}}</shell_call>
    user:<shell_call_output>{"output":[{"stdout":"a","stderr":""}]}</shell_call_output>

    <computer_call_output>{"output":{"type":"computer_screenshot"}}</computer_call_output>
    assistant:It is E.
    user:Sure?
    "#);
}

#[tokio::test]
async fn the_oldest_turns_of_a_conversation_that_is_too_long_are_dropped() {
    let limits = |config: &mut penstock_router::Config| {
        (config.limits.max_input_tokens, config.limits.max_total_tokens) = (250, 300);
    };
    let server = server_with_config(limits, |sequence| sequence.answer(&[IM_END])).await;
    let turn = |letter: &str| {
        [message("user", "input_text", &letter.repeat(60)), message("assistant", "output_text", &letter.repeat(20))]
    };
    let mut input: Vec<_> = [turn("a"), turn("b"), turn("c"), turn("d")].concat();
    input.push(json!({"role": "user", "content": "And now?"}));
    let fields = |truncation: &str| json!({"instructions": "Help.", "input": input, "truncation": truncation});
    let refused = server.post(PATH, hello(fields("disabled"))).await;
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded");
    let answer = server.post(PATH, hello(fields("auto"))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.json()["truncation"], "auto");
    let prompt = prompt(&server);
    assert!(prompt.contains("system:Help.") && prompt.contains("And now?"), "{prompt}");
    assert!(!prompt.contains("aaaa") && prompt.contains("dddd"), "{prompt}");
    let short = server.post(PATH, hello(json!({"truncation": "auto"}))).await;
    assert_eq!(short.status, StatusCode::OK);
}

#[tokio::test]
async fn the_tokens_that_are_counted_are_those_of_the_prompt() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let fields = json!({"instructions": "Help.", "tools": [tool("f")]});
    let count = server.post("/v1/responses/input_tokens", hello(fields.clone())).await.json();
    let used = server.post(PATH, hello(fields)).await.json()["usage"]["input_tokens"].clone();
    assert_eq!(count, json!({"object": "response.input_tokens", "input_tokens": used}));
}

#[tokio::test]
async fn a_compaction_stands_for_its_conversation() {
    let tokens = [bytes("They met."), vec![IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let input = json!([{"role": "user", "content": "Hi"}, message("assistant", "output_text", "Well."),
                       message("user", "input_text", "Go on.")]);
    let answer = server.post("/v1/responses/compact", hello(json!({"instructions": "Help.", "input": input}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert!(prompt(&server).contains("Summarize our conversation so far"));
    let compacted = answer.json();
    assert_eq!(compacted["object"], "response.compaction");
    assert_eq!(compacted["usage"]["output_tokens"], 10);
    let output = compacted["output"].as_array().unwrap();
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["message", "message", "compaction"]);
    let next: Vec<_> = output.iter().cloned().chain([json!({"role": "user", "content": "Now?"})]).collect();
    let continued = server.post(PATH, hello(json!({"input": next}))).await;
    assert_eq!(continued.status, StatusCode::OK, "{}", continued.body);
    let prompt = prompt(&server);
    assert!(
        prompt.contains("user:Hi\n\nGo on.\n\n<conversation-summary>\nThey met.\n</conversation-summary>\n\nNow?"),
        "{prompt}"
    );
}

#[tokio::test]
async fn invalid_requests_name_the_field() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let items = |items: Value| json!({"input": items});
    let user = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    for (fields, param, expected) in [
        (json!({"input": 5}), "input", "invalid type: integer"),
        (json!({"input": null}), "input", "it has no message"),
        (json!({"metadata": {"a": 5}}), "metadata", "invalid type: integer `5`, expected a string"),
        (items(json!([])), "input", "it has no message"),
        (items(json!(["Hi"])), "input", "input[0]: invalid type: string"),
        (items(json!([{"role": "user"}])), "input[0]", "missing field `content`"),
        (items(json!([{"content": "Hi"}])), "input[0]", "missing field `role`"),
        (items(json!([{"role": "critic", "content": "Hi"}])), "input", "unknown variant `critic`"),
        (
            items(json!([{"type": "item_reference", "id": "msg_1"}])),
            "input[0].id",
            "`msg_1` is not the id of an item of a stored response",
        ),
        (items(json!([{"type": "custom_tool_call", "name": "p"}])), "input[0]", "missing field `call_id`"),
        (items(json!([{"type": "dream"}])), "input[0].type", "`dream` is not supported"),
        (
            items(json!([{"type": "compaction", "encrypted_content": "x"}])),
            "input[0].encrypted_content",
            "only its author can read it",
        ),
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
        (json!({"tools": [{"type": "custom"}]}), "tools[0]", "missing field `name`"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "`web_search` is not supported"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]", "missing field `name`"),
        (json!({"tools": [{"type": "web_search"}, {"type": "function"}]}), "tools[1]", "missing field `name`"),
        (json!({"tools": [{"type": "namespace"}]}), "tools[0]", "missing field `name`"),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [tool("f"), {"type": "mcp"}]}]}),
            "tools[0].tools[1].type",
            "`mcp` is not supported",
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
        (json!({"include": ["logprobs"]}), "include", "`logprobs` is not supported"),
        (json!({"truncation": "some"}), "truncation", "only `disabled` and `auto` are"),
        (json!({"background": true}), "background", "not supported"),
        (json!({"conversation": "conv_1"}), "conversation", "not supported"),
        (json!({"prompt": {"id": "p"}}), "prompt", "not supported"),
        (json!({"top_logprobs": 21}), "top_logprobs", "`top_logprobs` must be >= 0 and <= 20"),
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
