//! A watchdog for response bodies: one whose client does not read is dropped, which aborts its generations.
//!
//! Under HTTP/1.1 and HTTP/2 alike, hyper polls a body for its next frame only when it can send one. So if a frame was
//! taken and no other has been polled for since, the client does not read.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use tokio_util::task::AbortOnDropHandle;

use crate::telemetry::{RequestIdentity, metrics};

/// The timeout is counted in this many ticks, so that a process that was stopped and continued does not find it expired.
const NUM_TICKS: u32 = 8;

pub(super) async fn limit(State(timeout): State<Duration>, request: Request, next: Next) -> Response {
    let identity = request.extensions().get::<RequestIdentity>().cloned();
    let response = next.run(request).await;
    // A complete body holds no resources but its bytes.
    if http_body::Body::size_hint(response.body()).exact().is_some() {
        return response;
    }
    response.map(|body| watched(Reading::of(body), timeout, identity))
}

struct Reading {
    /// `None` after it was dropped.
    body: Option<Body>,
    /// A frame was taken, and no other polled for since.
    is_due: bool,
    /// How long it has been due, in ticks.
    num_ticks: u32,
}

impl Reading {
    fn of(body: Body) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { body: Some(body), is_due: false, num_ticks: 0 }))
    }
}

async fn watch(state: Weak<Mutex<Reading>>, timeout: Duration, identity: Option<RequestIdentity>) {
    loop {
        tokio::time::sleep(timeout / NUM_TICKS).await;
        let Some(state) = state.upgrade() else { return };
        let unread = {
            let mut reading = lock(&state);
            reading.num_ticks += u32::from(reading.is_due);
            // `>`, because the first tick may come right after the frame.
            if reading.num_ticks > NUM_TICKS { reading.body.take() } else { None }
        };
        if let Some(body) = unread {
            metrics::client_given_up();
            let request_id = identity.as_ref().map(RequestIdentity::request_id_text);
            tracing::warn!(request_id, timeout_s = timeout.as_secs_f64(), "a client does not read its response");
            return drop(body);
        }
    }
}

fn lock(state: &Mutex<Reading>) -> MutexGuard<'_, Reading> {
    // Consistent between any two statements; a body that panics ends its own stream.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

struct WatchedBody {
    state: Arc<Mutex<Reading>>,
    _watch: AbortOnDropHandle<()>,
}

fn watched(state: Arc<Mutex<Reading>>, timeout: Duration, identity: Option<RequestIdentity>) -> Body {
    let watch = tokio::spawn(watch(Arc::downgrade(&state), timeout, identity));
    Body::new(WatchedBody { state, _watch: AbortOnDropHandle::new(watch) })
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut reading = lock(&self.state);
        let Some(body) = &mut reading.body else {
            return Poll::Ready(Some(Err(axum::Error::new("the client did not read its response"))));
        };
        let frame = Pin::new(body).poll_frame(context);
        (reading.is_due, reading.num_ticks) = (matches!(frame, Poll::Ready(Some(_))), 0);
        frame
    }

    fn is_end_stream(&self) -> bool {
        lock(&self.state).body.as_ref().is_some_and(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        lock(&self.state).body.as_ref().map(http_body::Body::size_hint).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;
    use http_body_util::BodyExt;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(40);

    /// A watched body and its state.
    fn under_watch(body: Body) -> (Body, Arc<Mutex<Reading>>) {
        let state = Reading::of(body);
        (watched(Arc::clone(&state), TIMEOUT, None), state)
    }

    fn is_given_up(state: &Mutex<Reading>) -> bool {
        lock(state).body.is_none()
    }

    fn endless() -> Body {
        Body::from_stream(stream::repeat_with(|| Ok::<_, Infallible>("x")))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_not_polled_again_is_dropped() {
        let (mut body, state) = under_watch(endless());
        body.frame().await.unwrap().unwrap();
        tokio::time::sleep(TIMEOUT).await;
        assert!(!is_given_up(&state));
        tokio::time::sleep(TIMEOUT / NUM_TICKS * 2).await;
        assert!(is_given_up(&state));
        assert!(body.frame().await.unwrap().is_err(), "it fails instead of ending");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_not_given_up() {
        let (mut body, state) = under_watch(endless());
        for _ in 0..20 {
            body.frame().await.unwrap().unwrap();
            tokio::time::sleep(TIMEOUT - Duration::from_secs(1)).await;
        }
        assert!(!is_given_up(&state));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_waits_for_the_next_frame_is_not_given_up() {
        let (mut body, state) = under_watch(Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()));
        assert!(futures::poll!(body.frame()).is_pending());
        tokio::time::sleep(TIMEOUT * 10).await;
        assert!(!is_given_up(&state));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_was_never_polled_is_not_given_up() {
        let (_body, state) = under_watch(endless());
        tokio::time::sleep(TIMEOUT * 10).await;
        assert!(!is_given_up(&state));
    }
}
