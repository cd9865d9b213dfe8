//! An answer that its client does not read is given up: what it holds is let go, and its stream is broken.
//!
//! Whoever writes a body asks for its next frame only when there is room for one, under HTTP/1.1 and HTTP/2 alike. So a body
//! of which a frame was taken, and no other was asked for since, has a client that takes nothing.

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

/// Patience is counted in so many parts, so that a process that was stopped does not find it gone when it goes on.
const NUM_TICKS: u32 = 8;

pub(super) async fn limit(State(patience): State<Duration>, request: Request, next: Next) -> Response {
    let identity = request.extensions().get::<RequestIdentity>().cloned();
    let response = next.run(request).await;
    // What is whole already holds nothing but its bytes.
    if http_body::Body::size_hint(response.body()).exact().is_some() {
        return response;
    }
    response.map(|body| {
        let state = Arc::new(Mutex::new(Reading { body: Some(body), is_due: false, num_ticks: 0 }));
        let watch = tokio::spawn(watch(Arc::downgrade(&state), patience, identity));
        Body::new(WatchedBody { state, _watch: AbortOnDropHandle::new(watch) })
    })
}

struct Reading {
    /// `None`: given up.
    body: Option<Body>,
    /// A frame was taken, and no other asked for since.
    is_due: bool,
    /// Since when, in parts of the patience.
    num_ticks: u32,
}

async fn watch(state: Weak<Mutex<Reading>>, patience: Duration, identity: Option<RequestIdentity>) {
    loop {
        tokio::time::sleep(patience / NUM_TICKS).await;
        let Some(state) = state.upgrade() else { return };
        let unread = {
            let mut reading = lock(&state);
            reading.num_ticks += u32::from(reading.is_due);
            // The first tick may come right after the frame.
            if reading.num_ticks > NUM_TICKS { reading.body.take() } else { None }
        };
        if let Some(body) = unread {
            metrics::client_given_up();
            let request_id = identity.as_ref().map(RequestIdentity::request_id_text);
            tracing::warn!(request_id, patience_s = patience.as_secs_f64(), "a client does not read its answer");
            return drop(body);
        }
    }
}

fn lock(state: &Mutex<Reading>) -> MutexGuard<'_, Reading> {
    // Between two statements it is whole; a body that panicked ends its stream itself.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

struct WatchedBody {
    state: Arc<Mutex<Reading>>,
    _watch: AbortOnDropHandle<()>,
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut reading = lock(&self.state);
        let Some(body) = &mut reading.body else {
            return Poll::Ready(Some(Err(axum::Error::new("the client did not read its answer"))));
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
