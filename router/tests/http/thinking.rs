//! Budgets of thoughts, in each dialect.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::sequence::{Grammar, LimitedThoughts};
use serde_json::{Value, json};

use crate::fold::with;
use crate::model::{IM_END, bytes, word};
use crate::server::Server;
use crate::tool;

/// Requests for a budget of 7 tokens.
fn requests() -> [(&'static str, Value); 3] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let thinking = json!({"type": "enabled", "budget_tokens": 7});
    [
        ("/v1/chat/completions", json!({"messages": messages, "thinking_token_budget": 7})),
        ("/v1/messages", json!({"model": "tgi", "max_tokens": 9, "messages": messages, "thinking": thinking})),
        ("/v1/responses", json!({"model": "tgi", "input": "Hi", "reasoning": {"max_tokens": 7}})),
    ]
}

async fn thinking(adjust: impl FnOnce(&mut Config)) -> Server {
    let tokens = [bytes("<think>hm</think>"), vec![word("Hello"), IM_END]].concat();
    tool::server_with_config(adjust, move |sequence| sequence.answer(&tokens)).await
}

fn limited(server: &Server) -> Option<LimitedThoughts> {
    match server.last_request().grammar {
        Some(Grammar::Thoughts(limited)) => Some(*limited),
        _ => None,
    }
}

#[tokio::test]
async fn a_budget_of_thoughts_limits_the_sequence() {
    let server = thinking(|_| ()).await;
    for (path, body) in requests() {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        let LimitedThoughts { limit, grammar } = limited(&server).unwrap();
        assert_eq!((limit.max_tokens, &*limit.open, &*limit.close), (7, "<think>", "</think>"), "{path}");
        assert_eq!((limit.end_ids, limit.reopens, grammar), (bytes("</think>"), false, None), "{path}");
        assert!(!answer.headers.contains_key("x-penstock-warning"));
    }
}

#[tokio::test]
async fn the_server_s_budget_is_the_default() {
    let server = thinking(|config| config.reasoning_budget = Some(3)).await;
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    server.post("/v1/chat/completions", chat.clone()).await;
    assert_eq!(limited(&server).unwrap().limit.max_tokens, 3);
    server.post("/v1/chat/completions", with(chat.clone(), json!({"thinking_token_budget": 0}))).await;
    assert_eq!(limited(&server).unwrap().limit.max_tokens, 0);
    server.post("/v1/chat/completions", with(chat, json!({"response_format": {"type": "json_object"}}))).await;
    assert!(matches!(limited(&server).unwrap().grammar, Some(Grammar::Lark(_))));
    server.post("/generate", json!({"inputs": "Hi", "parameters": {"max_new_tokens": 2}})).await;
    assert_eq!(limited(&server), None);
}

#[tokio::test]
async fn a_budget_of_a_model_without_thoughts_is_a_warning() {
    let server = Server::answering(&[IM_END]).await;
    for (path, body) in requests() {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        assert_eq!(limited(&server), None);
        assert!(answer.header("x-penstock-warning").contains("` has no effect"), "{path}");
    }
}

#[tokio::test]
async fn a_completion_has_no_thoughts_to_limit() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/v1/completions", json!({"prompt": "Hi", "thinking_token_budget": 5})).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert!(answer.body.contains("`thinking_token_budget` is not supported"), "{}", answer.body);
}

#[tokio::test]
async fn allowed_tokens_do_not_exclude_the_end_of_thoughts() {
    let server = thinking(|_| ()).await;
    let body =
        json!({"messages": [{"role": "user", "content": "Hi"}], "thinking_token_budget": 2, "allowed_token_ids": [65]});
    assert_eq!(server.post("/v1/chat/completions", body).await.status, StatusCode::OK);
    let allowed = server.last_request().sampling.allowed_tokens;
    assert!(bytes("A</think>").iter().all(|&id| allowed[id as usize / 8] & (1 << (id % 8)) != 0));
}
