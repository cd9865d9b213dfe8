//! `/v1/messages`: the prompt of a conversation, and invalid requests.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;
use serde_json::{Value, json};

use crate::messages::{hello, tool};
use crate::model::IM_END;
use crate::server::{Answer, Server, whole};
use crate::tool::{prompt, server};

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn call(id: &str) -> Value {
    json!({"type": "tool_use", "id": id, "name": "f", "input": {"city": "x"}})
}

fn result(id: &str) -> Value {
    json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "rain"}]})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}})
}

/// The prompt of this request.
async fn prompt_of(server: &Server, fields: Value) -> String {
    let answer = server.post(PATH, hello(fields)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    prompt(server)
}

#[tokio::test]
async fn the_template_sees_the_system_prompt_tools_calls_and_results() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let thinking = json!({"type": "thinking", "thinking": "hm", "signature": "unsigned"});
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [text("there")]},
        {"role": "assistant", "content": [thinking, text("Well."), call("toolu_1"), call("toolu_2")]},
        {"role": "user", "content": [text("Now?"), result("toolu_2")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true}]},
        {"role": "system", "content": "Be brief."},
    ]);
    let fields = json!({"system": [text("You help."), text("Always.")], "messages": messages, "tools": [tool("f")],
                        "thinking": {"type": "disabled"}});
    insta::assert_snapshot!(prompt_of(&server, fields).await, @r#"
    [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
    offsystem:You help.

    Always.
    user:Hi

    there
    assistant:Well.<tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call><tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call>
    tool:raintoolu_2f
    tool:toolu_1f
    user:Now?

    <system-reminder>
    Be brief.
    </system-reminder>
    "#);
}

#[tokio::test]
async fn what_differs_in_every_request_of_claude_code_is_not_part_of_the_prompt() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let header =
        |hash: &str| format!("x-anthropic-billing-header: cc_version=2.1.107.3d9; cc_entrypoint=cli; cch={hash};");
    let expected = prompt_of(&server, json!({"system": "You help."})).await;
    for system in [
        json!([text(&header("74943")), text("You help.")]),
        json!([text(&header("0aaa9")), {"type": "text", "text": "You help."}]),
        json!([text(&format!("{}\nYou help.", header("36ee5")))]),
        json!(format!("{}\nYou help.", header("eb6c6"))),
    ] {
        let fields = json!({"system": system, "cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "me"}});
        assert_eq!(prompt_of(&server, fields).await, expected);
    }
    assert_eq!(prompt_of(&server, json!({"system": header("1")})).await, prompt_of(&server, json!({})).await);
}

#[tokio::test]
async fn documents_and_search_results_are_read_as_text() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let plain = json!({"type": "document", "title": "T", "context": "C", "citations": {"enabled": true},
                       "source": {"type": "text", "media_type": "text/plain", "data": "one"}});
    let blocks = json!({"type": "document", "source": {"type": "content", "content": [text("two"), text("three")]}});
    let whole = json!({"type": "document", "source": {"type": "content", "content": "four"}});
    let found = json!({"type": "search_result", "source": "https://example.org", "title": "S",
                       "content": [text("five"), text("six")]});
    let tools = json!([{"type": "tool_reference", "tool_name": "g"}, found, plain]);
    let messages = json!([
        {"role": "user", "content": [plain, blocks, whole, text("Hi")]},
        {"role": "assistant", "content": [call("a")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": tools}]},
    ]);
    insta::assert_snapshot!(prompt_of(&server, json!({"messages": messages, "tools": [tool("f")]})).await, @r#"
    [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
    user:<document>
    title: T
    context: C

    one

    </document>

    <document>

    two

    three

    </document>

    <document>

    four

    </document>

    Hi
    assistant:<tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call>
    tool:<tool_reference>g</tool_reference>

    <search_result>
    title: S
    source: https://example.org

    five

    six
    </search_result>

    <document>
    title: T
    context: C

    one

    </document>af
    "#);
}

#[tokio::test]
async fn what_tools_of_other_servers_did_is_read_as_text_without_what_is_encrypted() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let page =
        json!({"type": "web_search_result", "url": "https://example.org", "title": "E", "encrypted_content": "x"});
    let pdf = json!({"type": "base64", "media_type": "application/pdf", "data": "JVBE"});
    let fetched = json!({"type": "web_fetch_result", "url": "https://example.org/a.pdf",
                         "content": {"type": "document", "source": pdf}});
    let ran = json!({"type": "code_execution_result", "stdout": "4", "stderr": "", "return_code": 0, "content": []});
    let answer = json!([
        text("Let me look."),
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "e"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [page]},
        {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_2", "content": fetched},
        {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_3", "content": ran},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "fallback"},
        text("It is E."),
    ]);
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer},
                          {"role": "user", "content": "Sure?"}]);
    insta::assert_snapshot!(prompt_of(&server, json!({"messages": messages})).await, @r#"
    user:Hi
    assistant:Let me look.

    <server_tool_use name="web_search">{"query":"e"}</server_tool_use>

    <web_search_tool_result>[{"type":"web_search_result","url":"https://example.org","title":"E"}]</web_search_tool_result>

    <web_fetch_tool_result>{"type":"web_fetch_result","url":"https://example.org/a.pdf","content":{"type":"document","source":{"type":"base64","media_type":"application/pdf"}}}</web_fetch_tool_result>

    <code_execution_tool_result>{"type":"code_execution_result","stdout":"4","stderr":"","return_code":0,"content":[]}</code_execution_tool_result>

    It is E.
    user:Sure?
    "#);
}

#[tokio::test]
async fn tools_that_the_client_executes_are_shown_with_their_documented_input() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let tools = json!([
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "text_editor_20241022", "name": "str_replace_editor"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1024, "display_height_px": 768},
    ]);
    let prompt = prompt_of(&server, json!({"tools": tools})).await;
    let shown: Value = serde_json::from_str(prompt.lines().next().unwrap()).unwrap();
    let property = |index: usize, name: &str| shown[index]["function"]["parameters"]["properties"][name].clone();
    let names: Vec<_> = (0..5).map(|index| shown[index]["function"]["name"].clone()).collect();
    assert_eq!(names, ["bash", "str_replace_based_edit_tool", "str_replace_editor", "memory", "computer"]);
    assert_eq!(property(0, "command")["type"], "string");
    assert_eq!(property(1, "command")["enum"], json!(["view", "create", "str_replace", "insert"]));
    assert_eq!(property(1, "insert_text")["type"], "string");
    assert_eq!(property(2, "command")["enum"][4], "undo_edit");
    assert_eq!(property(2, "insert_text"), Value::Null);
    assert_eq!(property(3, "command")["enum"][5], "rename");
    assert!(property(4, "action")["enum"].as_array().unwrap().contains(&json!("scroll")));
    assert!(prompt.contains("1024 x 768"));
}

#[tokio::test]
async fn tools_that_anthropic_executes_are_left_out_with_a_warning() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let hosted = [
        json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 2}),
        json!({"type": "code_execution_20250825", "name": "code_execution"}),
        json!({"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}),
        json!({"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"}),
        json!({"type": "mcp_toolset", "mcp_server_name": "m"}),
    ];
    let expected = prompt_of(&server, json!({"tools": [tool("f")]})).await;
    for hosted in hosted {
        for path in [PATH, COUNT] {
            let answer = server.post(path, hello(json!({"tools": [hosted, tool("f")]}))).await;
            assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
            let warning = format!("tools[0].type: `{}` is left out", hosted["type"].as_str().unwrap());
            assert!(answer.header("x-penstock-warning").contains(&warning));
        }
        assert_eq!(prompt_of(&server, json!({"tools": [hosted, tool("f")]})).await, expected);
    }
}

#[tokio::test]
async fn a_thread_is_not_kept_and_clients_learn_that_they_must_send_it_again() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    prompt_of(&server, json!({"thread": {"type": "create"}})).await;
    for path in [PATH, COUNT] {
        let thread = json!({"type": "continue", "previous_message_id": "msg_1"});
        let answer = server.post(path, hello(json!({"thread": thread}))).await;
        let message = refusal(&answer, StatusCode::NOT_FOUND, "not_found_error");
        assert!(message.contains("the conversation of `msg_1` is not stored"), "{message}");
        assert_eq!(answer.json()["error"]["details"], json!({"error_code": "thread_not_found"}));
    }
}

#[tokio::test]
async fn a_last_message_of_the_assistant_is_continued() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]);
    assert!(prompt_of(&server, json!({"messages": messages})).await.ends_with("assistant:Well,"));
}

#[tokio::test]
async fn the_tokens_that_are_counted_are_those_of_the_prompt() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let fields = json!({"system": "You help.", "tools": [tool("f")], "max_tokens": null});
    let count = server.post(COUNT, hello(fields)).await;
    let fields = json!({"system": "You help.", "tools": [tool("f")]});
    let usage = server.post(PATH, hello(fields)).await.json()["usage"]["input_tokens"].clone();
    assert_eq!(count.json(), json!({"input_tokens": usage}));
}

/// The message of a refusal in Anthropic's shape.
fn refusal(answer: &Answer, status: StatusCode, kind: &str) -> String {
    assert_eq!(answer.status, status, "{}", answer.body);
    let body = answer.json();
    assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)));
    body["error"]["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn invalid_requests_name_the_field() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [text("a"), block]}]});
    let answered = |calls: Value, results: Value| {
        json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": calls},
                            {"role": "user", "content": results}]})
    };
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}});
    for (fields, expected) in [
        (json!({"messages": []}), "`messages` cannot be empty"),
        (
            json!({"messages": [{"role": "user", "content": []}]}),
            "messages: they have no content that could be answered",
        ),
        (json!({"messages": "Hi"}), "messages: invalid type"),
        (json!({"messages": [{"role": "tool", "content": "Hi"}]}), "messages[0].role: unknown variant `tool`"),
        (json!({"messages": [{"role": "user"}]}), "messages[0]: missing field `content`"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content: invalid type: integer"),
        (user(json!({"type": "text"})), "messages[0].content[1]: missing field `text`"),
        (user(json!({"type": "video"})), "messages[0].content[1].type: unknown variant `video`"),
        (user(image.clone()), "messages[0].content[1].source: images are not supported: this model reads only text"),
        (user(json!({"type": "image"})), "messages[0].content[1]: `image` blocks need a `source`"),
        (user(json!({"type": "document", "source": {}})), "messages[0].content[1]: missing field `type`"),
        (user(json!({"type": "document"})), "messages[0].content[1].source: a document needs a `source`"),
        (
            user(
                json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}),
            ),
            "messages[0].content[1].source: documents of the type application/pdf are not supported; send the document's text",
        ),
        (
            user(json!({"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}})),
            "messages[0].content[1].source: documents are not fetched from URLs; send the document's text",
        ),
        (
            user(json!({"type": "document", "source": {"type": "file", "file_id": "f"}})),
            "messages[0].content[1].source: this server keeps no files; send the document's text",
        ),
        (
            user(json!({"type": "container_upload", "file_id": "f"})),
            "messages[0].content[1]: `container_upload` blocks are not supported: this server keeps no files",
        ),
        (
            json!({"system": [{"type": "document", "source": {"type": "text", "data": "a"}}]}),
            "system[0]: `document` blocks are not supported in a system prompt",
        ),
        (user(call("a")), "messages[0].content[1]: `tool_use` blocks do not belong"),
        (user(result("toolu_unknown")), "messages[0].content[1].tool_use_id: `toolu_unknown` is not the id"),
        (json!({"system": [image.clone()]}), "system[0]: `image` blocks are not supported"),
        (answered(json!([call("a")]), json!([result("b")])), "messages[2].content[0].tool_use_id: `b` is not the id"),
        (answered(json!([call("a")]), json!([result("a"), result("a")])), "messages[2].content[1].tool_use_id: `a`"),
        (answered(json!([call("a")]), json!("Go on")), "messages: the call `a` has no result"),
        (answered(json!([call("a"), call("a")]), json!([])), "messages[1].content[1].id: the id `a` occurs twice"),
        (answered(json!([result("a")]), json!([])), "messages[1].content[0]: `tool_result` blocks do not belong"),
        (
            answered(json!([call("a")]), json!([{"type": "tool_result", "tool_use_id": "a", "content": [image]}])),
            "messages[2].content[0].content[0].source: images are not supported",
        ),
        (json!({"messages": [{"role": "assistant", "content": [call("a")]}]}), "messages: the call `a` has no result"),
        (json!({"max_tokens": 0}), "`max_tokens` must be strictly positive"),
        (json!({"max_tokens": -1}), "max_tokens: invalid value"),
        (json!({"max_tokens": null}), "max_tokens: invalid type: null"),
        (json!({"temperature": -1}), "`temperature` must be"),
        (json!({"top_p": 2}), "`top_p` must be"),
        (json!({"stop_sequences": ["a", "b", "c", "d", "e"]}), "`stop_sequences` supports up to 4"),
        (json!({"stop_sequences": [""]}), "`stop_sequences` must not contain an empty string"),
        (json!({"tools": [{"name": "f"}]}), "tools[0]: missing field `input_schema`"),
        (
            json!({"tools": [{"type": "web_search_20250305", "name": "w"}]}),
            "tools[0].type: `web_search_20250305` is not supported: Anthropic executes it",
        ),
        (json!({"tools": [{"type": "bash_20250124"}]}), "tools[0]: missing field `name`"),
        (json!({"tools": [{"input_schema": {}}]}), "tools[0]: missing field `name`"),
        (
            json!({"tools": [tool("f"), {"type": "browser_toolset_20260801"}]}),
            "tools[1].type: `browser_toolset_20260801` is not a known tool; send it with the type `custom`",
        ),
        (json!({"tools": [{"type": "bash", "name": "b"}]}), "tools[0].type: `bash` is not a known tool"),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "tool", "name": "h"}}), "names the function \"h\""),
        (json!({"tool_choice": {"type": "any"}}), "the request has no tools"),
        (json!({"tool_choice": "auto"}), "tool_choice: invalid type: string"),
        (json!({"thinking": {"type": "loud"}}), "thinking.type: unknown variant `loud`"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type: unknown variant `xml`"),
        (json!({"output_config": {"format": {"type": "json_schema", "schema": 5}}}), "output_config.format: "),
        (json!({"output_format": {"type": "json_schema"}}), "`output_format` is not supported: send `output_config"),
        (json!({"mcp_servers": [{"url": "http://a"}]}), "`mcp_servers` is not supported"),
        (json!({"container": "c"}), "`container` is not supported"),
        (json!({"messages": [{"role": "user", "content": "x".repeat(8001)}]}), "prompt is too long: "),
    ] {
        for stream in [false, true] {
            let mut body = hello(fields.clone());
            body["stream"] = stream.into();
            let answer = server.post(PATH, body).await;
            let message = refusal(&answer, StatusCode::BAD_REQUEST, "invalid_request_error");
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }
}

#[tokio::test]
async fn what_is_not_a_request_gets_anthropic_s_errors_too() {
    let server = Server::answering(&[IM_END]).await;
    for path in [PATH, COUNT] {
        let message = refusal(&server.post(path, json!({})).await, StatusCode::BAD_REQUEST, "invalid_request_error");
        assert!(message.contains("missing field `m"), "{message}");
        let answer = server.post_text(path, "application/json", "{").await;
        refusal(&answer, StatusCode::BAD_REQUEST, "invalid_request_error");
        let deep = format!("{{\"messages\": {}", "[".repeat(5000));
        let message = refusal(
            &server.post_text(path, "application/json", &deep).await,
            StatusCode::BAD_REQUEST,
            "invalid_request_error",
        );
        assert!(message.contains("recursion limit"), "{message}");
        let answer = server.post_text(path, "text/plain", "{}").await;
        refusal(&answer, StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error");
        let large = hello(json!({"system": "x".repeat(20_000)}));
        refusal(&server.post(path, large).await, StatusCode::PAYLOAD_TOO_LARGE, "request_too_large");
    }
    let answer = server.post("/v1/messages/batches", json!({})).await;
    refusal(&answer, StatusCode::NOT_FOUND, "not_found_error");
}

#[tokio::test]
async fn a_key_may_be_sent_in_either_header() {
    let keys = |config: &mut Config| config.api_keys = ApiKeys::new(["one".to_owned()]);
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), keys).await;
    let ask = async |headers: &[(&str, &str)]| {
        let request = server.request("POST", PATH).header("content-type", "application/json");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        whole(server.send(request, &hello(json!({})).to_string()).await).await
    };
    for headers in [
        &[("x-api-key", "one")][..],
        &[("authorization", "Bearer one")],
        &[("authorization", "Bearer other"), ("x-api-key", "one")],
        &[("authorization", "Bearer one"), ("x-api-key", "other")],
    ] {
        assert_eq!(ask(headers).await.status, StatusCode::OK, "{headers:?}");
    }
    for headers in [&[][..], &[("x-api-key", "other")], &[("x-api-key", "")], &[("x-api-key", "Bearer one")]] {
        let message = refusal(&ask(headers).await, StatusCode::UNAUTHORIZED, "authentication_error");
        assert!(message.contains("API key"), "{message}");
    }
}
