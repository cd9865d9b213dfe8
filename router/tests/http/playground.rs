//! The playground's files, and which clients get the page at `/`.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;

use crate::model::IM_END;
use crate::server::{Answer, Server, whole};

const BROWSER: &str = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
const MAX_SIZE_BYTES: usize = 500_000;

async fn start(adjust: impl FnOnce(&mut Config)) -> Server {
    Server::start(|sequence| sequence.answer(&[IM_END]), adjust).await
}

/// What a client with this `Accept` gets at the root.
async fn root(server: &Server, accept: &str) -> Answer {
    whole(server.send(server.request("GET", "/").header("accept", accept), "").await).await
}

#[tokio::test]
async fn the_page_and_its_files_need_no_key_and_forbid_what_they_do_not_use() {
    let keys = |config: &mut Config| config.api_keys = ApiKeys::new(["key".to_owned()]);
    let server = start(keys).await;
    let page = server.get("/playground").await;
    assert_eq!((page.status, page.header("cache-control")), (StatusCode::OK, "no-cache"));
    let mut size = page.body.len();
    let paths: Vec<_> = page.body.split('"').filter(|part| part.starts_with("playground/")).collect();
    assert_eq!(paths.len(), 2, "{}", page.body);
    for (path, content_type) in paths.into_iter().zip(["text/css; charset=utf-8", "text/javascript; charset=utf-8"]) {
        let file = server.get(&format!("/{path}")).await;
        assert_eq!((file.status, file.header("content-type")), (StatusCode::OK, content_type), "{path}");
        assert!(file.header("cache-control").ends_with("immutable"), "{path}");
        assert_eq!(file.header("x-content-type-options"), "nosniff", "{path}");
        size += file.body.len();
    }
    assert!(size <= MAX_SIZE_BYTES, "{size}");
    let policy = page.header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; "), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains("http") && !policy.contains('*'), "{policy}");
    assert_eq!(server.get("/playground/nothing").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn browsers_get_the_page_at_the_root_and_other_clients_their_health() {
    let server = start(|_| ()).await;
    let page = server.get("/playground").await.body;
    let at_root = root(&server, BROWSER).await;
    assert_eq!((at_root.status, &at_root.body), (StatusCode::OK, &page));
    assert!(at_root.headers.get_all("vary").iter().any(|value| value == "accept"));
    for accept in ["*/*", "application/json", "text/plain, */*;q=0.5"] {
        let health = root(&server, accept).await;
        assert_eq!((health.status, health.body.as_str()), (StatusCode::OK, ""), "{accept}");
    }
    assert_eq!(server.get("/").await.body, "");
}

#[tokio::test]
async fn a_server_without_the_playground_has_none_of_its_routes() {
    let server = start(|config| config.playground = false).await;
    assert_eq!(server.get("/playground").await.status, StatusCode::NOT_FOUND);
    assert_eq!(server.get("/playground/page.js").await.status, StatusCode::NOT_FOUND);
    assert_eq!(root(&server, BROWSER).await.body, "");
}
