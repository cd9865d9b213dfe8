//! Reads what a refused request leaves of its body. HTTP/1.1 has no other way to the next request, so hyper closes a
//! connection whose body is not read to its end, and a client that pools connections loses one at every 404.
//!
//! A body is discarded only within limits of size and time; a connection that exceeds them is closed.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::sync::oneshot;

const MAX_BYTES: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(2);

/// Discards the part of the request's body that nothing has read.
pub(super) async fn discard(request: Request, next: Next) -> Response {
    // A client that waits for `100 Continue` has sent nothing yet. Streams of HTTP/2 end one by one.
    let waits = request.headers().contains_key(header::EXPECT);
    let declared = http_body::Body::size_hint(request.body()).lower();
    if waits || request.version() == Version::HTTP_2 || declared > MAX_BYTES as u64 {
        return next.run(request).await;
    }
    let (returned, mut unread) = oneshot::channel();
    let response = next.run(request.map(|body| Body::new(ReturnedBody { body, returned: Some(returned) }))).await;
    if response.status() != StatusCode::REQUEST_TIMEOUT
        && let Ok(body) = unread.try_recv()
    {
        // Beyond the limits the connection is closed.
        let _ = tokio::time::timeout(TIMEOUT, discard_body(body)).await;
    }
    response
}

async fn discard_body(mut body: Body) {
    let mut num_bytes = 0;
    while num_bytes <= MAX_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        num_bytes += frame.data_ref().map_or(0, Bytes::len);
    }
}

/// A body that is sent back when it is dropped before its end.
struct ReturnedBody {
    body: Body,
    returned: Option<oneshot::Sender<Body>>,
}

impl http_body::Body for ReturnedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ReturnedBody {
    fn drop(&mut self) {
        let body = std::mem::take(&mut self.body);
        if !http_body::Body::is_end_stream(&body)
            && let Some(returned) = self.returned.take()
        {
            // The request has been answered meanwhile.
            let _ = returned.send(body);
        }
    }
}
