//! Routes that generate nothing.

use std::time::Duration;

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::generator::Health;
use serde_json::json;

use crate::model::IM_END;
use crate::server::{Server, whole};

#[tokio::test]
async fn health_follows_the_engine() {
    let server = Server::answering(&[IM_END]).await;
    for path in ["/health", "/ping", "/"] {
        let answer = server.get(path).await;
        assert_eq!((answer.status, answer.body.as_str()), (StatusCode::OK, ""));
    }
    *server.engine.health.lock().unwrap() = Health::Failed("rank 0 died".to_owned());
    let answer = server.get("/health").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.body, r#"{"error":"unhealthy","error_type":"healthcheck"}"#);
}

#[tokio::test]
async fn live_ready_and_progressing_are_independent() {
    let server = Server::answering(&[IM_END]).await;
    let lost = "rank 0 died".to_owned();
    let cases = [
        (Health::Healthy, [true, true, true]),
        (Health::Stalled { step: Duration::from_secs(99) }, [true, false, false]),
        (Health::Unresponsive { rank: 1 }, [true, false, false]),
        (Health::Restarting(lost.clone()), [true, false, true]),
        (Health::Failed(lost.clone()), [false, false, true]),
        (Health::ShutDown, [false, false, true]),
    ];
    let status = |ok| if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    for (health, [live, ready, progressing]) in cases {
        *server.engine.health.lock().unwrap() = health.clone();
        let mut statuses = Vec::new();
        for path in ["/health/live", "/health/ready"] {
            let answer = server.get(path).await;
            statuses.push(answer.status);
            for (name, ok) in [("live", live), ("ready", ready), ("progressing", progressing)] {
                let condition = &answer.json()[name];
                assert_eq!(condition["ok"], ok, "{health:?}: {}", answer.body);
                assert_eq!(condition.get("reason").is_some(), !ok, "{health:?}: {}", answer.body);
            }
            assert!(!answer.body.contains(&lost), "what workers say is for the log: {}", answer.body);
        }
        assert_eq!(statuses, [status(live), status(ready)], "{health:?}");
        assert_eq!(server.get("/health").await.status, status(ready), "{health:?}");
    }
    *server.engine.health.lock().unwrap() = Health::Stalled { step: Duration::from_secs(99) };
    insta::assert_snapshot!(server.get("/health/ready").await.body, @r#"{"live":{"ok":true},"ready":{"ok":false,"reason":"a step of the model has taken 99 s so far"},"progressing":{"ok":false,"reason":"a step of the model has taken 99 s so far"}}"#);
}

#[tokio::test]
async fn info_and_models_report_the_served_model() {
    let server = Server::answering(&[IM_END]).await;
    insta::assert_snapshot!(server.get("/info").await.body, @r#"{"model_id":"test/model","model_sha":null,"model_pipeline_tag":null,"max_concurrent_requests":4,"max_best_of":2,"max_stop_sequences":4,"max_input_tokens":200,"max_total_tokens":256,"validation_workers":1,"max_client_batch_size":4,"router":"text-generation-router","version":"0.1.0","sampling_defaults":{}}"#);
    let models = server.get("/v1/models").await.body;
    let model = server.get("/v1/models/test/model").await.body;
    assert_eq!(models, format!(r#"{{"object":"list","data":[{model}]}}"#));
    let created = model.split_once(r#""created":"#).unwrap().1.split(',').next().unwrap();
    insta::assert_snapshot!(model.replace(created, "SECONDS"), @r#"{"id":"test/model","object":"model","created":SECONDS,"owned_by":"test/model","root":"test/model","parent":null,"max_model_len":256}"#);
    let named = server.get("/v1/models/tgi").await.json();
    assert_eq!((&named["id"], &named["root"]), (&json!("tgi"), &json!("test/model")));
    let answer = server.get("/v1/models/other").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn tokens_have_their_offsets_in_the_text() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post("/tokenize", json!({"inputs": "a b<|im_end|>"})).await;
    insta::assert_snapshot!(answer.body, @r#"[{"id":97,"text":"a","start":0,"stop":1},{"id":32,"text":" ","start":1,"stop":2},{"id":98,"text":"b","start":2,"stop":3},{"id":257,"text":"<|im_end|>","start":3,"stop":13}]"#);
}

#[tokio::test]
async fn metrics_are_text() {
    let server = Server::answering(&[IM_END]).await;
    server.post("/generate", json!({"inputs": "Hi"})).await;
    let answer = server.get("/metrics").await;
    assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
    assert!(answer.body.contains("# TYPE tgi_request_count counter"), "{}", answer.body);
}

#[tokio::test]
async fn browsers_may_send_a_key() {
    let server = Server::answering(&[IM_END]).await;
    let ask = |server: &Server, origin: &str| {
        server
            .request("OPTIONS", "/v1/chat/completions")
            .header("origin", origin.to_owned())
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type,x-stainless-os")
    };
    let answer = whole(server.send(ask(&server, "https://a.example"), "").await).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.header("access-control-allow-origin"), "*");
    assert_eq!(answer.header("access-control-allow-headers"), "authorization,content-type,x-stainless-os");
    assert_eq!(answer.header("access-control-allow-methods"), "GET,POST,DELETE");

    let origins = |config: &mut Config| config.cors_allow_origins = vec!["https://a.example".to_owned()];
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), origins).await;
    let answer = whole(server.send(ask(&server, "https://a.example"), "").await).await;
    assert_eq!(answer.header("access-control-allow-origin"), "https://a.example");
    let answer = whole(server.send(ask(&server, "https://b.example"), "").await).await;
    assert!(!answer.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn browsers_may_read_tgi_s_headers() {
    let server = Server::answering(&[IM_END]).await;
    let request = server.request("POST", "/generate").header("origin", "https://a.example");
    let body = json!({"inputs": "Hi"}).to_string();
    let answer = whole(server.send(request.header("content-type", "application/json"), &body).await).await;
    let exposed: Vec<&str> = answer.header("access-control-expose-headers").split(',').collect();
    let own = answer.headers.keys().map(|name| name.as_str()).filter(|name| name.starts_with("x-"));
    for name in own.chain(["retry-after"]) {
        assert!(exposed.contains(&name), "{name} is not in {exposed:?}");
    }
}

#[tokio::test]
async fn an_invalid_origin_is_refused_at_startup() {
    let origins = |config: &mut Config| config.cors_allow_origins = vec!["everybody".to_owned()];
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), origins).await;
    let error = server.served.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "`everybody` is not an origin; give something like https://example.org");
}
