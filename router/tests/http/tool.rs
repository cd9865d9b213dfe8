//! Tools and reasoning on `/v1/chat/completions`.

use std::path::Path;

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::sequence::Grammar;
use serde_json::{Value, json};

use crate::fold::{chat_fold, chunks, with};
use crate::model::{self, IM_END, bytes, word};
use crate::server::{Sequence, Server};

const PATH: &str = "/v1/chat/completions";
/// Special tokens of this model; the marks of reasoning are ordinary tokens.
pub const TOOL_CALL: u32 = 264;
pub const TOOL_CALL_END: u32 = 265;
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if enable_thinking is false %}off{% endif %}\
    {% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", \
    \"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{{ m.tool_call_id }}{{ m.name }}\n{% endfor %}\
    {# removes </think> #}";

const MISTRAL: &str = "{{ tools }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [\
    {% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{% endif %}{% endfor %}";

pub async fn server(script: impl Fn(Sequence) + Send + Sync + 'static) -> Server {
    server_with(write_model, script).await
}

/// `adjust` changes the configuration.
pub async fn server_with_config(
    adjust: impl FnOnce(&mut Config),
    script: impl Fn(Sequence) + Send + Sync + 'static,
) -> Server {
    Server::start(script, |config| {
        write_model(&config.model_folder);
        (config.limits.max_input_tokens, config.limits.max_total_tokens) = (8000, 9000);
        adjust(config);
    })
    .await
}

/// `write` changes the model's folder.
async fn server_with(write: impl Fn(&Path), script: impl Fn(Sequence) + Send + Sync + 'static) -> Server {
    Server::start(script, |config| {
        write(&config.model_folder);
        (config.limits.max_input_tokens, config.limits.max_total_tokens) = (8000, 9000);
    })
    .await
}

async fn answering(tokens: &[u32]) -> Server {
    let tokens = tokens.to_vec();
    server(move |sequence| sequence.answer(&tokens)).await
}

fn write_model(folder: &Path) {
    model::write_with_template(folder, &json!(TEMPLATE));
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (id, text) in [(TOOL_CALL, "<tool_call>"), (TOOL_CALL_END, "</tool_call>")] {
        tokenizer["model"]["vocab"][text] = id.into();
        let mut token = tokenizer["added_tokens"][0].clone();
        (token["id"], token["content"]) = (id.into(), text.into());
        tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    }
    std::fs::write(path, tokenizer.to_string()).unwrap();
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}})
}

pub fn ask(fields: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [tool("f"), tool("g")]}), fields)
}

pub fn call(text: &str) -> Vec<u32> {
    [vec![TOOL_CALL], bytes(text), vec![TOOL_CALL_END]].concat()
}

pub fn prompt(server: &Server) -> String {
    let ids = server.last_request().prompt_token_ids;
    let text = |id| match id {
        TOOL_CALL => b"<tool_call>".to_vec(),
        TOOL_CALL_END => b"</tool_call>".to_vec(),
        byte => vec![u8::try_from(byte).unwrap()],
    };
    String::from_utf8(ids.into_iter().flat_map(text).collect()).unwrap()
}

fn grammar(server: &Server) -> Option<String> {
    server.last_request().grammar.map(|grammar| match grammar {
        Grammar::Lark(text) => text,
        other => panic!("{other:?}"),
    })
}

/// Replaces call ids, which differ in each answer.
pub fn without_ids(text: &str) -> String {
    regex::Regex::new("call_[0-9a-f]{24}").unwrap().replace_all(text, "call_ID").into_owned()
}

#[tokio::test]
async fn calls_are_not_part_of_the_content() {
    let first = call(r#"{"name": "f", "arguments": {"city": "né"}}"#);
    let second = call("\n{\"name\": \"g\", \"arguments\": {}}\n");
    let server = answering(&[first, bytes("\n"), second, vec![IM_END]].concat()).await;
    let answer = server.post(PATH, ask(json!({}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let choice = &answer.json()["choices"][0];
    insta::assert_snapshot!(without_ids(&choice.to_string()), @r#"{"index":0,"message":{"role":"assistant","content":null,"refusal":null,"annotations":[],"tool_calls":[{"id":"call_ID","type":"function","function":{"name":"f","arguments":"{\"city\": \"né\"}"}},{"id":"call_ID","type":"function","function":{"name":"g","arguments":"{}"}}]},"logprobs":null,"finish_reason":"tool_calls"}"#);
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_ne!(calls[0]["id"], calls[1]["id"]);
}

#[tokio::test]
async fn a_stream_names_a_call_once_before_its_arguments() {
    let text = bytes(r#"{"name": "f", "arguments": {"a": ""#);
    let end = [vec![word(": hi")], bytes("\"}}"), vec![TOOL_CALL_END, IM_END]].concat();
    let server = answering(&[vec![TOOL_CALL], text, end].concat()).await;
    let answer = server.post(PATH, ask(json!({"stream": true, "stream_options": {"include_usage": true}}))).await;
    let deltas: Vec<_> = chunks(&answer).iter().map(|chunk| chunk["choices"].to_string()).collect();
    insta::assert_snapshot!(without_ids(&deltas.join("\n")), @r#"
    [{"index":0,"delta":{"role":"assistant"},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_ID","type":"function","function":{"name":"f","arguments":""}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\""}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"a"}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\""}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":":"}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":" "}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\""}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":": hi"}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"\""}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]},"logprobs":null,"finish_reason":null}]
    [{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}]
    []
    "#);
}

#[tokio::test]
async fn reasoning_is_separate_from_content() {
    let server = answering(&[bytes("<think>hm</think>\n\n"), vec![word("Hello"), IM_END]].concat()).await;
    for fields in [json!({}), json!({"tools": null})] {
        let plain = server.post(PATH, ask(fields.clone())).await.json();
        let message = json!({"role": "assistant", "content": "Hello", "refusal": null, "annotations": [], "reasoning_content": "hm", "reasoning": "hm"});
        assert_eq!(plain["choices"][0]["message"], message);
        let streamed = server.post(PATH, ask(with(fields, json!({"stream": true})))).await;
        assert_eq!(chat_fold(&streamed), plain["choices"]);
    }
}

#[tokio::test]
async fn a_stream_sends_thoughts_before_content() {
    let server = answering(&[bytes("<think>hm</think>"), vec![word("Hello"), IM_END]].concat()).await;
    let answer = server.post(PATH, ask(json!({"stream": true, "stream_options": {"include_usage": true}}))).await;
    let lines: Vec<_> =
        chunks(&answer).iter().map(|chunk| format!("{} {}", chunk["choices"], chunk["usage"])).collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    [{"index":0,"delta":{"role":"assistant"},"logprobs":null,"finish_reason":null}] null
    [{"index":0,"delta":{"reasoning_content":"h","reasoning":"h"},"logprobs":null,"finish_reason":null}] null
    [{"index":0,"delta":{"reasoning_content":"m","reasoning":"m"},"logprobs":null,"finish_reason":null}] null
    [{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null}] null
    [{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}] null
    [] {"prompt_tokens":303,"completion_tokens":19,"total_tokens":322,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":9}}
    "#);
}

#[tokio::test]
async fn the_template_sees_tools_calls_and_results() {
    let server = answering(&[IM_END]).await;
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"city\": \"x\"}"}});
    let messages = json!([
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": [{"type": "text", "text": "rain"}]},
    ]);
    let body = json!({"messages": messages, "tools": [tool("f")], "reasoning_effort": "none"});
    let answer = server.post(PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    insta::assert_snapshot!(prompt(&server), @r#"
    [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
    offuser:Hi
    assistant:<tool_call>{"name": "f", "arguments": {"city": "x"}}</tool_call>
    tool:raincall_1f
    "#);
}

#[tokio::test]
async fn the_request_decides_how_the_prompt_ends() {
    let server = answering(&[IM_END]).await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]);
    let ends = [
        (json!({"continue_final_message": true, "add_generation_prompt": false}), "assistant:Well,"),
        (json!({"continue_final_message": true}), "assistant:Well,"),
        (json!({"add_generation_prompt": true}), "assistant:Well,\n"),
        // As in OpenAI, the assistant's message is not continued unless the request says so.
        (json!({}), "assistant:Well,\n"),
    ];
    for (fields, end) in ends {
        let answer = server.post(PATH, with(json!({"messages": messages}), fields)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert!(prompt(&server).ends_with(end), "{:?}", prompt(&server));
    }
    let fields = json!({"continue_final_message": true, "add_generation_prompt": true});
    let answer = server.post(PATH, with(json!({"messages": messages}), fields)).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("template_error")));
}

#[tokio::test]
async fn a_template_without_tools_gets_them_in_the_last_message() {
    let answer = bytes(r#"{"name": "f", "arguments": {"city": "x"}}"#);
    let tokens = [answer, vec![IM_END]].concat();
    let server = server_with(|_| (), move |sequence| sequence.answer(&tokens)).await;
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
    for fields in [json!({"tool_prompt": "Call!"}), json!({"tool_prompt": "Call!", "messages": parts})] {
        let plain = server.post(PATH, ask(fields)).await.json();
        assert_eq!(plain["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "f");
        let ids = server.last_request().prompt_token_ids;
        let prompt: Vec<u8> = ids.into_iter().filter_map(|id| u8::try_from(id).ok()).collect();
        let prompt = String::from_utf8(prompt).unwrap();
        assert!(
            prompt.starts_with("user\nHi\n---\n[{\"type\":\"function\"") && prompt.contains("]\nCall!\n"),
            "{prompt}"
        );
    }
}

#[tokio::test]
async fn a_template_that_shows_tools_gets_only_the_client_s_words() {
    let server = answering(&[IM_END]).await;
    for (fields, words) in
        [(json!({}), ""), (json!({"tool_prompt": ""}), ""), (json!({"tool_prompt": "Call!"}), "\n---\nCall!")]
    {
        let answer = server.post(PATH, ask(fields)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert!(prompt(&server).ends_with(&format!("user:Hi{words}\n")), "{}", prompt(&server));
    }
}

#[tokio::test]
async fn calls_in_an_unknown_format_are_text_unless_they_are_forced() {
    let write = |folder: &Path| {
        let template = "{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}";
        model::write_with_template(folder, &json!(template));
    };
    let text = r#"{"name": "f", "arguments": {}}"#;
    let tokens = [bytes(text), vec![IM_END]].concat();
    let server = server_with(write, move |sequence| sequence.answer(&tokens)).await;
    let plain = server.post(PATH, ask(json!({}))).await.json();
    assert_eq!((&plain["choices"][0]["message"]["content"], grammar(&server)), (&json!(text), None));
    let plain = server.post(PATH, ask(json!({"tool_choice": "required"}))).await.json();
    assert_eq!(plain["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "f");
}

#[tokio::test]
async fn only_allowed_tools_can_be_called_and_all_are_shown() {
    let server = answering(&[IM_END]).await;
    let named = |names: &[&str]| -> Value {
        names.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect()
    };
    let choice = |mode: &str, names: &[&str]| json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named(names)}});
    for (mode, is_forced) in [("auto", false), ("required", true)] {
        let answer = server.post(PATH, ask(json!({"tool_choice": choice(mode, &["g"])}))).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        let text = grammar(&server).unwrap();
        assert!(!text.contains("\\\"f\\\"") && text.contains("\\\"g\\\""), "{text}");
        assert_eq!(text.contains("PLAIN"), !is_forced);
        assert!(prompt(&server).contains("\"name\": \"f\""));
    }
    for (choice, message) in [
        (choice("auto", &["h"]), "the function \"h\", which is not one of the tools"),
        (choice("none", &["f"]), "tool_choice: "),
        (choice("auto", &[]), "allows no tool"),
    ] {
        let answer = server.post(PATH, ask(json!({"tool_choice": choice}))).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.body);
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains(message), "{}", answer.body);
    }
}

#[tokio::test]
async fn mistral_s_call_ids_are_accepted_by_its_templates() {
    let write = |folder: &Path| model::write_with_template(folder, &json!(MISTRAL));
    let tokens = [bytes(r#"[TOOL_CALLS][{"name": "f", "arguments": {}}]"#), vec![IM_END]].concat();
    let server = server_with(write, move |sequence| sequence.answer(&tokens)).await;
    let plain = server.post(PATH, ask(json!({}))).await.json();
    let id = plain["choices"][0]["message"]["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
}

#[tokio::test]
async fn the_choice_decides_the_grammar() {
    let server = answering(&[IM_END]).await;
    let mut grammars = Vec::new();
    for choice in [json!("auto"), json!("required"), json!("g"), json!({"type": "function", "function": {"name": "g"}})]
    {
        let answer = server.post(PATH, ask(json!({"tool_choice": choice}))).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        grammars.push(grammar(&server).unwrap());
    }
    assert!(grammars[0].contains("PLAIN") && !grammars[1].contains("PLAIN"));
    assert!(grammars[1].contains("\\\"f\\\"") && !grammars[2].contains("\\\"f\\\""), "{}", grammars[2]);
    assert_eq!(grammars[2], grammars[3]);
    server.post(PATH, ask(json!({"tool_choice": "required", "parallel_tool_calls": false}))).await;
    assert_ne!(grammar(&server).unwrap(), grammars[1]);

    for fields in [json!({"tool_choice": "none"}), json!({"tools": []}), json!({"tools": [], "tool_choice": "auto"})] {
        let answer = server.post(PATH, ask(fields)).await.json();
        assert_eq!(
            answer["choices"][0]["message"],
            json!({"role": "assistant", "content": "", "refusal": null, "annotations": []})
        );
        assert_eq!((grammar(&server), prompt(&server).contains("city")), (None, false));
    }
}

#[tokio::test]
async fn invalid_tools_are_refused() {
    let server = answering(&[IM_END]).await;
    let cases = [
        (json!({"tool_choice": "h"}), "tool_error", "the function \"h\", which is not one of the tools"),
        (json!({"tool_choice": "required", "tools": []}), "tool_error", "the request has no tools"),
        (json!({"tools": [tool("")]}), "tool_error", "name cannot be empty"),
        (
            json!({"tools": [tool("broken")]}),
            "tool_error",
            "the tools' parameters, or `response_format`, are not schemas",
        ),
        (json!({"tools": [tool("f"), tool("f")]}), "tool_error", "\"f\" is used twice"),
        (json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}), "malformed_request", "`retrieval`"),
        (json!({"tools": [{"type": "function"}]}), "malformed_request", "missing field `function`"),
        (json!({"tool_choice": 5}), "malformed_request", "tool_choice: "),
        (json!({"ignore_eos": true}), "validation", "`ignore_eos` cannot be combined"),
    ];
    for (fields, code, message) in cases {
        for stream in [false, true] {
            let answer = server.post(PATH, ask(with(fields.clone(), json!({"stream": stream})))).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{fields}: {}", answer.body);
            let error = &answer.json()["error"];
            assert_eq!(error["code"], code);
            assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        }
    }
}

#[tokio::test]
async fn content_follows_response_format_and_calls_follow_their_tools() {
    let server = answering(&[IM_END]).await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}});
    let answer = server.post(PATH, ask(json!({"response_format": format}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let both = grammar(&server).unwrap();
    assert!(both.contains("answer: content | run") && both.contains("content: %json {\"type\":\"integer\"}"), "{both}");
    server.post(PATH, ask(json!({"response_format": format, "tool_choice": "required"}))).await;
    assert!(!grammar(&server).unwrap().contains("content"));
}

#[tokio::test]
async fn a_forced_call_that_is_cut_leaves_no_text() {
    let server = answering(&call(r#"{"name": "f", "arguments": {"city": "x"}}"#)).await;
    for max_tokens in [1, 9, 20] {
        let fields = json!({"max_tokens": max_tokens, "tool_choice": "required"});
        let plain = server.post(PATH, ask(fields.clone())).await.json();
        let choice = &plain["choices"][0];
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
        let streamed = server.post(PATH, ask(with(fields, json!({"stream": true})))).await;
        assert_eq!(chat_fold(&streamed), plain["choices"]);
    }
}

#[tokio::test]
async fn an_incomplete_call_does_not_finish_with_tool_calls() {
    let server = answering(&call(r#"{"name": "f", "arguments": {"city": "x"}}"#)).await;
    let answer = server.post(PATH, ask(json!({"max_tokens": 32}))).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"ci");
}

#[tokio::test]
async fn a_client_s_grammar_applies_after_the_reasoning() {
    let server = answering(&[IM_END]).await;
    let format = json!({"type": "regex", "value": "[0-9]+"});
    server.post(PATH, ask(json!({"tools": null, "response_format": format}))).await;
    let grammar = grammar(&server).unwrap();
    assert!(grammar.contains("</think>") && grammar.contains("/[0-9]+/"), "{grammar}");
}

#[tokio::test]
async fn logprobs_of_the_content_are_apart_from_those_of_the_reasoning() {
    let tokens = [bytes("<think>hm</think>"), vec![word("Hello"), word(" world"), IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let joined = |tokens: &Value| -> String {
        tokens.as_array().unwrap().iter().map(|token| token["token"].as_str().unwrap()).collect()
    };
    let ask = json!({"logprobs": true, "messages": [{"role": "user", "content": "Hi"}]});
    let choice = server.post(PATH, ask.clone()).await.json()["choices"][0].clone();
    assert_eq!(choice["message"]["content"], "Hello world");
    assert_eq!(joined(&choice["logprobs"]["content"]), "Hello world<|im_end|>");
    assert_eq!(joined(&choice["logprobs"]["reasoning_content"]), "<think>hm</think>");
    assert_eq!(choice["logprobs"]["refusal"], Value::Null);
    let mut hidden = ask.clone();
    hidden["include_reasoning"] = false.into();
    let hidden = server.post(PATH, hidden).await.json()["choices"][0]["logprobs"].clone();
    assert_eq!(
        (joined(&hidden["content"]).as_str(), &hidden["reasoning_content"]),
        ("Hello world<|im_end|>", &Value::Null)
    );
    let mut streamed = ask;
    streamed["stream"] = true.into();
    let (mut content, mut reasoning) = (String::new(), String::new());
    for event in server.post(PATH, streamed).await.events() {
        let Ok(chunk) = serde_json::from_str::<Value>(&event) else { continue };
        let logprobs = &chunk["choices"][0]["logprobs"];
        if logprobs.is_object() {
            content += &joined(&logprobs["content"]);
            reasoning += &logprobs.get("reasoning_content").map(joined).unwrap_or_default();
        }
    }
    assert_eq!((content.as_str(), reasoning.as_str()), ("Hello world<|im_end|>", "<think>hm</think>"));
}
