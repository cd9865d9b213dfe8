//! The two paths that Vertex AI chooses for a container. They are rewritten before routing, because a chosen path may
//! already be a route with another meaning.

use axum::extract::Request;
use axum::http::uri::PathAndQuery;
use axum::http::{Method, Uri};

use crate::config::VertexRoutes;

const PREDICT: PathAndQuery = PathAndQuery::from_static("/vertex");
const HEALTH: PathAndQuery = PathAndQuery::from_static("/health");

/// Rewrites a request on a chosen path to the route that serves it.
pub(super) fn resolve<B>(routes: &VertexRoutes, mut request: Request<B>) -> Request<B> {
    let is_for = |route: &Option<String>| route.as_deref() == Some(request.uri().path());
    let target = if request.method() == Method::POST && is_for(&routes.predict) {
        PREDICT
    } else if request.method() == Method::GET && is_for(&routes.health) {
        HEALTH
    } else {
        return request;
    };
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    parts.path_and_query = Some(target);
    *request.uri_mut() = Uri::from_parts(parts).expect("invariant: a URI with another path is a URI");
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(method: Method, uri: &str) -> String {
        let routes = VertexRoutes { predict: Some("/predict".to_owned()), health: Some("/".to_owned()) };
        let request = Request::builder().method(method).uri(uri).body(()).unwrap();
        resolve(&routes, request).uri().to_string()
    }

    #[test]
    fn the_chosen_paths_are_predictions_and_health() {
        assert_eq!(resolved(Method::POST, "/predict"), "/vertex");
        assert_eq!(resolved(Method::GET, "/"), "/health");
        assert_eq!(resolved(Method::GET, "http://a/?b"), "http://a/health");
    }

    #[test]
    fn other_requests_are_not_rewritten() {
        assert_eq!(resolved(Method::GET, "/predict"), "/predict");
        assert_eq!(resolved(Method::POST, "/"), "/");
        assert_eq!(resolved(Method::POST, "/predict/x?y"), "/predict/x?y");
    }
}
