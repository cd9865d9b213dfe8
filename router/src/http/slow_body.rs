//! A deadline for the request's body: a body that is not complete in time is answered 408.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use tokio::time::Sleep;

use super::dialect;
use crate::api::error::ApiError;

pub(super) async fn limit(State(timeout): State<Duration>, request: Request, next: Next) -> Response {
    if http_body::Body::is_end_stream(request.body()) {
        return next.run(request).await;
    }
    let path = request.uri().path().to_owned();
    let is_late = Arc::new(AtomicBool::new(false));
    let timed = |body| {
        let deadline = Box::pin(tokio::time::sleep(timeout));
        Body::new(TimedBody { body, deadline, is_late: Arc::clone(&is_late) })
    };
    let response = next.run(request.map(timed)).await;
    // The extractor saw a generic read error and answered that.
    if is_late.load(Ordering::Relaxed) { too_late(timeout, &path) } else { response }
}

fn too_late(timeout: Duration, path: &str) -> Response {
    let seconds = timeout.as_secs_f64();
    let message = format!("the request's body was not complete after {seconds} s");
    let error = ApiError::Malformed { status: StatusCode::REQUEST_TIMEOUT, message, param: None };
    dialect::error_response(path, error)
}

struct TimedBody {
    body: Body,
    deadline: Pin<Box<Sleep>>,
    is_late: Arc<AtomicBool>,
}

impl http_body::Body for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        ready!(self.deadline.as_mut().poll(context));
        self.is_late.store(true, Ordering::Relaxed);
        Poll::Ready(Some(Err(axum::Error::new("the body is late"))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
