//! Chat templates are programs: a runaway one costs its own request an error, and other requests nothing.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::model;
use crate::server::{Answer, Server};

/// Grows without end where the message says how, and repeats all other messages. `ns` keeps minijinja from folding
/// the expressions when it compiles the template.
const TEMPLATE: &str = "{% set kind = messages[0].content %}{% set ns = namespace(s='ab', list=[1], one=1) %}\
    {% if kind == 'doubled string' %}{% for _ in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}\
    {% elif kind == 'added string' %}{% for _ in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}\
    {% elif kind == 'nested joins' %}{% for _ in range(100) %}{% set ns.s = [ns.s, ns.s, ns.s] | join(ns.s) %}{% endfor %}\
    {% elif kind == 'replaced string' %}{% for _ in range(100) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}\
    {% elif kind == 'multiplied string' %}{% for _ in range(100) %}{% set ns.s = ns.s * 1000 %}{% endfor %}\
    {% elif kind == 'kept strings' %}{% for _ in range(100) %}{% set ns.list = ns.list + [ns.s * 4000000] %}{% endfor %}\
    {% elif kind == 'multiplied list' %}{{ ([0] * (ns.one * 10 ** 12)) | list | length }}\
    {% elif kind == 'captured output' %}{% set out %}{% for _ in range(100) %}{{ ns.s * 4000000 }}{% endfor %}{% endset %}\
    {% elif kind == 'long output' %}{% for _ in range(5) %}{{ ns.s * 4000000 }}{% endfor %}\
    {% elif kind == 'long range' %}{{ range(10 ** 9) | list }}\
    {% elif kind == 'deep list' %}{% for _ in range(100000) %}{% set ns.list = [ns.list] %}{% endfor %}{{ ns.list }}\
    {% elif kind == 'deep macro' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}\
    {% elif kind == 'slow search' %}{% set text = ns.s * 4000000 %}{% for _ in range(99999) %}{{ 'bb' in text }}{% endfor %}\
    {% else %}{{ kind }}{% endif %}";

async fn server() -> Server {
    Server::start(
        |sequence| sequence.answer(&[model::word("Hello"), model::IM_END]),
        |config| model::write_with_template(&config.model_folder, &json!(TEMPLATE)),
    )
    .await
}

async fn chat(server: &Server, text: &str) -> Answer {
    server.post("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]})).await
}

fn assert_refused(kind: &str, answer: &Answer, reason: &str) {
    let error = &answer.json()["error"];
    assert_eq!((answer.status, &error["code"]), (StatusCode::BAD_REQUEST, &json!("template_error")), "{kind}");
    assert!(error["message"].as_str().is_some_and(|message| message.contains(reason)), "{kind}: {error}");
}

#[tokio::test]
async fn a_template_that_grows_without_end_is_refused_and_the_next_chat_is_served() {
    let server = server().await;
    // Where memory is slow, the deadline comes first.
    let too_much = "Template error: template too ";
    for kind in [
        "doubled string",
        "added string",
        "nested joins",
        "replaced string",
        "kept strings",
        "captured output",
        "deep list",
    ] {
        assert_refused(kind, &chat(&server, kind).await, too_much);
    }
    for kind in ["multiplied string", "multiplied list"] {
        assert_refused(kind, &chat(&server, kind).await, "*: the result is longer than 10000000");
    }
    assert_refused("", &chat(&server, "long output").await, "it writes a prompt of more than 32 MiB");
    assert_refused("", &chat(&server, "long range").await, "range too big");
    assert_refused("", &chat(&server, "deep macro").await, "recursion");
    let answer = chat(&server, "Hi").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
}

#[tokio::test]
async fn a_template_that_runs_for_too_long_is_ended_and_other_chats_are_served_meanwhile() {
    let server = server().await;
    let slow = chat(&server, "slow search");
    let others = async {
        for _ in 0..3 {
            let answer = chat(&server, "Hi").await;
            assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        }
    };
    tokio::pin!(slow);
    tokio::select! {
        answer = &mut slow => panic!("other chats waited for the slow one: {}", answer.body),
        () = others => {}
    }
    assert_refused("slow search", &slow.await, "template too slow: rendering takes more than 5 seconds");
}

#[tokio::test]
async fn a_template_that_cannot_even_be_tried_out_fails_the_chats_and_not_the_server() {
    let template = "{% set ns = namespace(s='ab') %}{% for _ in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let adjust = |config: &mut penstock_router::Config| {
        model::write_with_template(&config.model_folder, &json!(template));
    };
    let server = Server::start(|sequence| sequence.answer(&[model::IM_END]), adjust).await;
    // Where memory is slow, the deadline comes first.
    assert_refused("trial", &chat(&server, "Hi").await, "template too ");
    assert_eq!(server.post("/generate", json!({"inputs": "Hi"})).await.status, StatusCode::OK);
}

#[tokio::test]
async fn tools_choose_their_template_and_a_broken_one_fails_only_them() {
    let with_templates = async |tool_use: &str| {
        let templates = json!([{"name": "default", "template": "default {{ tools }}"},
                               {"name": "tool_use", "template": tool_use}]);
        let adjust = |config: &mut penstock_router::Config| {
            model::write_with_template(&config.model_folder, &templates);
        };
        Server::start(|sequence| sequence.answer(&[model::IM_END]), adjust).await
    };
    let tokenize = async |server: &Server, tools: Value| {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": tools});
        server.post("/chat_tokenize", body).await
    };
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let server = with_templates("tool_use {{ tools | length }}").await;
    assert_eq!(tokenize(&server, json!(null)).await.json()["templated_text"], "default None");
    assert_eq!(tokenize(&server, tools.clone()).await.json()["templated_text"], "tool_use 1");
    let broken = with_templates("{{").await;
    assert_eq!(tokenize(&broken, json!(null)).await.json()["templated_text"], "default None");
    assert_eq!(tokenize(&broken, tools).await.json()["error_type"], "template_error");
}

async fn chat_with(server: &Server, path: &str, template: &str, fields: Value) -> Answer {
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "chat_template": template});
    server.post(path, crate::fold::with(body, fields)).await
}

#[tokio::test]
async fn a_request_may_bring_a_template_if_the_server_trusts_it() {
    let path = "/v1/chat/completions";
    let refusing = server().await;
    for path in [path, "/tokenize"] {
        let answer = chat_with(&refusing, path, "x", json!({})).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("chat_template")), "{path}");
        assert!(error["message"].as_str().unwrap().contains("--trust-request-chat-template"), "{error}");
    }

    let trusting = Server::start(
        |sequence| {
            sequence.answer(
                &[&model::bytes("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>")[..], &[model::IM_END]]
                    .concat(),
            )
        },
        |config| config.trusts_request_chat_templates = true,
    )
    .await;
    let prompt = |server: &Server| server.last_request().prompt_token_ids;
    // More than are kept; the first one is compiled twice.
    for number in (0..12).chain([0]) {
        let template = format!("{number}: {{{{ messages[0].content }}}}");
        let answer = chat_with(&trusting, path, &template, json!({})).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert_eq!(prompt(&trusting), model::bytes(&format!("{number}: Hi")));
    }
    let tokens = chat_with(&trusting, "/tokenize", "{{ messages[0].role }}", json!({})).await.json();
    assert_eq!(tokens["tokens"], json!(model::bytes("user")));
    // The answer is read as the request's template writes calls.
    let calls = "{% if tools %}Answer with <tool_call>{\"name\": …, \"arguments\": …}</tool_call>: {{ tools | tojson }}{% endif %}\
        {% for m in messages %}{% for call in m.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", \
        \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{{ m.content }}{% endfor %}";
    let tools = json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]});
    let answer = chat_with(&trusting, path, calls, tools.clone()).await.json();
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "f", "{answer}");

    for (template, message) in [
        ("{% if %}", "syntax"),
        ("{{ messages | nothing }}", "nothing"),
        ("{{ [0] * (messages | length * 10 ** 15) }}", "longer than"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "template too"),
    ] {
        let answer = chat_with(&trusting, path, template, json!({})).await;
        assert_refused(template, &answer, message);
    }
    assert_eq!(chat_with(&trusting, path, "x", json!({})).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_request_s_template_has_at_most_256_kib() {
    let adjust = |config: &mut penstock_router::Config| {
        config.trusts_request_chat_templates = true;
        config.payload_limit_bytes = 1 << 20;
    };
    let server = Server::start(|sequence| sequence.answer(&[model::IM_END]), adjust).await;
    let path = "/v1/chat/completions";
    // A comment of this length, and a word.
    let template = |num_bytes: usize| format!("{{#{}#}}word", "-".repeat(num_bytes - 8));
    let longest = chat_with(&server, path, &template(256 << 10), json!({})).await;
    assert_eq!(longest.status, StatusCode::OK, "{}", longest.body);
    assert_eq!(server.last_request().prompt_token_ids, model::bytes("word"));
    let refused = chat_with(&server, path, &template((256 << 10) + 1), json!({})).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("chat_template")));
    assert!(error["message"].as_str().unwrap().contains("it has 262145 bytes, at most 262144 are allowed"), "{error}");
}
