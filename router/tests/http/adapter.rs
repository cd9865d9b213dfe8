//! LoRA adapters: how requests name them, when they are loaded, and which one gives way.

use std::path::PathBuf;

use axum::http::StatusCode;
use penstock_router::config::{AdapterConfig, AdapterSource};
use penstock_router::{AdapterDownload, Config};
use serde_json::{Value, json};

use crate::model::{IM_END, word};
use crate::server::{Server, within};

const CHAT: &str = "/v1/chat/completions";

/// Serves these adapters, of which two are loaded at a time.
fn adapters(names: &[&str]) -> impl FnOnce(&mut Config) {
    let source = |name: &&str| AdapterSource { name: (*name).to_owned(), path: PathBuf::from(format!("/of/{name}")) };
    let sources = names.iter().map(source).collect();
    move |config| config.adapters = AdapterConfig { sources, max_loaded: 2, can_change: false }
}

/// Like `adapters`, on a server that adds and removes them.
fn changing(names: &[&str]) -> impl FnOnce(&mut Config) {
    let adjust = adapters(names);
    move |config| {
        adjust(config);
        config.adapters.can_change = true;
    }
}

async fn server(names: &[&str]) -> Server {
    Server::start(|sequence| sequence.answer(&[word("Hello"), IM_END]), adapters(names)).await
}

fn chat(model: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "Hi"}]})
}

#[tokio::test]
async fn every_dialect_names_adapters_in_its_own_field() {
    let server = server(&["sql", "poet"]).await;
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let requests = [
        ("/generate", json!({"inputs": "Hi", "parameters": {"adapter_id": "sql"}}), None),
        (CHAT, chat("sql"), Some("sql")),
        ("/v1/completions", json!({"model": "sql", "prompt": "Hi"}), Some("sql")),
        ("/v1/responses", json!({"model": "sql", "input": "Hi"}), Some("sql")),
        ("/v1/messages", json!({"model": "sql", "messages": messages, "max_tokens": 5}), Some("sql")),
    ];
    for (path, body, named) in requests {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        assert_eq!(answer.json()["model"].as_str(), named, "{path}");
        let adapter = server.last_request().adapter.unwrap();
        assert_eq!((adapter.id, adapter.path.to_str()), (1, Some("/of/sql")), "{path}");
    }
    for model in ["tgi", "any"] {
        server.post(CHAT, chat(model)).await;
        assert_eq!(server.last_request().adapter, None);
    }
    assert_eq!(*server.engine.loads.lock().unwrap(), [(1, vec![])]);
}

#[tokio::test]
async fn an_unknown_adapter_is_refused_with_those_that_are_served() {
    let request = json!({"inputs": "Hi", "parameters": {"adapter_id": "law"}});
    for (names, reason) in [
        (&[][..], "`adapter_id` law is unknown: no adapters are served"),
        (&["sql", "poet"], "`adapter_id` law is unknown: the server has `poet`, `sql`"),
    ] {
        let answer = server(names).await.post("/generate", request.clone()).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(answer.json()["error"], format!("Input validation error: {reason}"));
    }
}

#[tokio::test]
async fn models_lists_adapters_with_their_parent() {
    let server = server(&["sql"]).await;
    let models = server.get("/v1/models").await.json();
    let listed: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|model| (&model["id"], &model["parent"])).collect();
    assert_eq!(listed, [(&json!("test/model"), &Value::Null), (&json!("sql"), &json!("test/model"))]);
    assert_eq!(server.get("/v1/models/sql").await.json()["parent"], "test/model");
}

#[tokio::test]
async fn adapters_are_models_where_names_are_checked() {
    let adjust = |config: &mut Config| {
        adapters(&["sql"])(config);
        config.check_model_names = true;
    };
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), adjust).await;
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::OK);
    assert_eq!(server.post(CHAT, chat("law")).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn the_least_recently_used_adapter_gives_way() {
    let server = server(&["a", "b", "c"]).await;
    for model in ["a", "b", "a", "c", "a", "b"] {
        assert_eq!(server.post(CHAT, chat(model)).await.status, StatusCode::OK);
    }
    // By their ids: c takes b's place, and then b takes c's.
    assert_eq!(*server.engine.loads.lock().unwrap(), [(1, vec![]), (2, vec![]), (3, vec![2]), (2, vec![3])]);
}

#[tokio::test]
async fn a_request_without_a_place_runs_when_another_has_ended() {
    let (server, mut sequences) = Server::manual_with(adapters(&["a", "b", "c"])).await;
    let [first, second] = ["a", "b"].map(|model| server.post(CHAT, chat(model)));
    let script = async {
        let running = [sequences.recv().await.unwrap(), sequences.recv().await.unwrap()];
        let end = async {
            let line =
                r#"vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="c"} "#;
            let told = async { while !server.get("/metrics").await.body.contains(line) {} };
            within("metrics that tell an endpoint picker", told).await;
            for sequence in running {
                sequence.answer(&[IM_END]);
            }
            let last = sequences.recv().await.unwrap();
            assert_eq!(last.request.adapter.as_ref().unwrap().id, 3);
            last.answer(&[IM_END]);
        };
        tokio::join!(server.post(CHAT, chat("c")), end).0
    };
    let (first, second, third) = tokio::join!(first, second, script);
    assert!([first, second, third].iter().all(|answer| answer.status == StatusCode::OK));
}

#[tokio::test]
async fn an_adapter_that_cannot_be_loaded_fails_its_requests_only() {
    let server = server(&["broken", "sql"]).await;
    for _ in 0..3 {
        let answer = server.post(CHAT, chat("broken")).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.ends_with("the adapter `broken` cannot be loaded: it is broken"), "{message}");
    }
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::OK);
    assert_eq!(server.post(CHAT, chat("tgi")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn an_adapter_that_cannot_be_used_takes_the_place_of_another_one_only_once() {
    let server = server(&["a", "b", "broken", "large"]).await;
    for model in ["a", "b", "broken", "broken", "broken", "a", "b", "large", "large"] {
        let status = server.post(CHAT, chat(model)).await.status;
        assert_eq!(status == StatusCode::OK, ["a", "b"].contains(&model), "{model}: {status}");
    }
    // Memory may be free again, so a large one is asked for each time.
    let expected = [(1, vec![]), (2, vec![]), (3, vec![1]), (1, vec![]), (4, vec![1]), (4, vec![])];
    assert_eq!(*server.engine.loads.lock().unwrap(), expected);
}

#[tokio::test]
async fn an_adapter_that_replaces_an_unusable_one_is_used() {
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), changing(&["broken"])).await;
    assert_eq!(server.post(CHAT, chat("broken")).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let mut request = added("broken", "/of/another");
    request["load_inplace"] = json!(true);
    assert_eq!(server.post(LOAD, request).await.status, StatusCode::OK);
    assert_eq!(server.post(CHAT, chat("broken")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn prefixes_are_shared_with_requests_of_the_same_adapter_only() {
    let server = server(&["a", "b"]).await;
    let mut salts = Vec::new();
    for body in [chat("tgi"), chat("a"), chat("a"), chat("b")] {
        server.post(CHAT, body).await;
        salts.push(server.last_request().cache_salt);
    }
    assert_eq!((salts[0], salts[1] == salts[2]), (None, true));
    assert!(salts[1].is_some() && salts[1] != salts[3]);
}

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

fn added(name: &str, path: &str) -> Value {
    json!({"lora_name": name, "lora_path": path})
}

#[tokio::test]
async fn adapters_are_added_and_removed_while_serving() {
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), changing(&[])).await;
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::NOT_FOUND);
    let answer = server.post(LOAD, added("sql", "/of/sql")).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, "Success: LoRA adapter 'sql' added successfully."));
    assert_eq!(*server.engine.loads.lock().unwrap(), [(1, vec![])]);
    assert_eq!(server.get("/v1/models/sql").await.json()["parent"], "test/model");
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::OK);
    assert_eq!(server.last_request().adapter.unwrap().path.to_str(), Some("/of/sql"));
    let answer = server.post(UNLOAD, json!({"lora_name": "sql"})).await;
    assert_eq!(
        (answer.status, &answer.body[..]),
        (StatusCode::OK, "Success: LoRA adapter 'sql' removed successfully.")
    );
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::NOT_FOUND);
    assert_eq!(server.get("/v1/models/sql").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn an_adapter_that_is_removed_finishes_its_requests() {
    let (server, mut sequences) = Server::manual_with(changing(&["sql"])).await;
    let script = async {
        let running = sequences.recv().await.unwrap();
        assert_eq!(server.post(UNLOAD, json!({"lora_name": "sql"})).await.status, StatusCode::OK);
        assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::NOT_FOUND);
        // Its place is in use, and so is that of the second adapter: both are not unloaded.
        assert_eq!(server.post(LOAD, added("poet", "/of/poet")).await.status, StatusCode::OK);
        assert_eq!(*server.engine.loads.lock().unwrap(), [(1, vec![]), (2, vec![])]);
        running.answer(&[IM_END]);
    };
    let (answer, ()) = tokio::join!(server.post(CHAT, chat("sql")), script);
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(server.post(LOAD, added("law", "/of/law")).await.status, StatusCode::OK);
    // The removed adapter gives way, though it was used last.
    assert_eq!(server.engine.loads.lock().unwrap().last(), Some(&(3, vec![1])));
}

#[tokio::test]
async fn an_adapter_is_replaced_in_place_only_on_request() {
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), changing(&["sql"])).await;
    server.post(CHAT, chat("sql")).await;
    let salt = server.last_request().cache_salt;
    let replacing = json!({"lora_name": "sql", "lora_path": "/of/new", "load_inplace": true});
    assert_eq!(server.post(LOAD, replacing).await.status, StatusCode::OK);
    server.post(CHAT, chat("sql")).await;
    assert_eq!(server.last_request().adapter.unwrap().path.to_str(), Some("/of/new"));
    assert_ne!(server.last_request().cache_salt, salt, "no prefix of the adapter before");
    for (name, path, param, reason) in [
        ("sql", "/of/sql", "lora_name", "the name \"sql\" is taken"),
        ("test/model", "/of/sql", "lora_name", "must be a name that the model does not have"),
        ("", "/of/sql", "lora_name", "must be a name"),
        ("poet", "of/poet/x", "lora_path", "must be an absolute path of a folder, or an id on the hub"),
        ("poet", "../poet", "lora_path", "must be an absolute path"),
        ("poet", "/of/broken", "lora_path", "the adapter cannot be loaded: it is broken"),
    ] {
        let answer = server.post(LOAD, added(name, path)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.body);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains(reason), "{error}");
    }
    assert_eq!(server.post(CHAT, chat("poet")).await.status, StatusCode::NOT_FOUND);
    let unknown = server.post(UNLOAD, json!({"lora_name": "poet"})).await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert_eq!(unknown.json()["error"]["message"], "there is no adapter \"poet\"");
}

#[tokio::test]
async fn an_adapter_on_the_hub_is_downloaded_before_it_is_loaded() {
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), changing(&[])).await;
    let launcher = async {
        let mut downloads = server.downloads.lock().await;
        let AdapterDownload { id, answer } = downloads.recv().await.unwrap();
        assert_eq!(id, "owner/sql@main");
        // Other requests go on, and nothing is loaded before.
        assert_eq!(server.post(CHAT, chat("test/model")).await.status, StatusCode::OK);
        assert_eq!(*server.engine.loads.lock().unwrap(), []);
        answer.send(Ok(PathBuf::from("/cache/sql"))).unwrap();
    };
    let (answer, ()) = tokio::join!(server.post(LOAD, added("sql", "owner/sql@main")), launcher);
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::OK);
    assert_eq!(server.last_request().adapter.unwrap().path.to_str(), Some("/cache/sql"));
    // A name that is taken is refused before any download.
    let answer = server.post(LOAD, added("sql", "owner/other")).await;
    assert_eq!(answer.json()["error"]["param"], "lora_name");
}

#[tokio::test]
async fn a_download_that_fails_fails_its_request_only() {
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), changing(&["sql"])).await;
    let launcher = async {
        let download = server.downloads.lock().await.recv().await.unwrap();
        download.answer.send(Err("owner/law is not on the hub".to_owned())).unwrap();
    };
    let (answer, ()) = tokio::join!(server.post(LOAD, added("law", "owner/law")), launcher);
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    let error = &answer.json()["error"];
    assert_eq!(error["message"], "the adapter cannot be loaded: owner/law is not on the hub");
    assert_eq!(error["param"], "lora_path");
    assert_eq!(server.post(CHAT, chat("law")).await.status, StatusCode::NOT_FOUND);
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn adapters_change_only_where_the_operator_allows_it() {
    let server = server(&["sql"]).await;
    for (path, body) in [(LOAD, added("poet", "/of/poet")), (UNLOAD, json!({"lora_name": "sql"}))] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.ends_with("start the server with --enable-lora-updates"), "{message}");
    }
    assert_eq!(server.post(CHAT, chat("sql")).await.status, StatusCode::OK);
}
