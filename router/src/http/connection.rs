//! Connections: HTTP/1.1 and HTTP/2 on one port or unix socket, within the limits of one client. TLS is a proxy's job.
//!
//! INVARIANT: no connection outlives [`serve`], whether it returns or is dropped.

use std::error::Error;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::joined_writes::JoinedWrites;
use super::socket::{Listener, Stream};
use super::{guarded_body, socket, vertex_route};
use crate::config::VertexRoutes;
use crate::limits::ConnectionLimits;
use crate::telemetry::metrics;

/// The first bytes of HTTP/2, which no HTTP/1 request begins with (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Pause before looking again at a connection that has sent only a part of the preface.
const PEEK_INTERVAL: Duration = Duration::from_millis(10);
/// Pause after an accept that failed for lack of a resource, such as file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// How long a refused client's remaining input is read and discarded.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BUFFER_BYTES: usize = 16 << 10;
/// Large enough that a body of ordinary size needs no window update.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

#[derive(Clone)]
pub(crate) struct App {
    pub(crate) router: axum::Router,
    pub(crate) vertex_routes: VertexRoutes,
    pub(crate) limits: ConnectionLimits,
}

/// Accepts connections until `closing` is cancelled; then returns when every connection has finished its requests.
pub(crate) async fn serve(listener: Listener, app: App, closing: CancellationToken) {
    let mut connections = JoinSet::new();
    let mut was_full = false;
    loop {
        tokio::select! {
            () = closing.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok(stream) => {
                    while connections.try_join_next().is_some() {}
                    let max_connections = app.limits.max_connections;
                    let is_full = connections.len() >= max_connections;
                    if is_full {
                        metrics::connection_refused();
                        if !was_full {
                            tracing::warn!(max_connections, "too many connections: new ones are closed at once");
                        }
                    } else {
                        connections.spawn(serve_connection(stream, app.clone(), closing.clone()));
                    }
                    was_full = is_full;
                }
                Err(error) if is_of_connection(&error) => {}
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Whether the client gave up before its connection was accepted.
fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn serve_connection(stream: Stream, app: App, closing: CancellationToken) {
    let limits = app.limits;
    if let Err(error) = socket::configure(&stream, limits) {
        // The client may be gone already. A socket without these options still works.
        tracing::debug!("cannot set the options of a connection's socket: {error}");
    }
    let sniffed = tokio::time::timeout(limits.idle_timeout, begins_as_http2(&stream));
    let Some(Ok(Ok(is_http2))) = closing.run_until_cancelled(sniffed).await else { return };
    let stream = TokioIo::new(JoinedWrites(stream));
    let open_requests = OpenRequests::default();
    let service = {
        let open_requests = open_requests.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            let App { router, vertex_routes, .. } = app.clone();
            let request = vertex_route::resolve(&vertex_routes, request.map(Body::new));
            let open = open_requests.open();
            async move { router.oneshot(request).await.map(|response| guarded_body::guard(response, open)) }
        })
    };
    if is_http2 {
        let idle = || open_requests.idle(limits.idle_timeout);
        run(pin!(http2(limits).serve_connection(stream, service)), &closing, idle).await;
    } else {
        let mut connection = http1(limits).serve_connection(stream, service);
        // hyper itself limits the time to the next request's head.
        run(Pin::new(&mut connection), &closing, std::future::pending).await;
        closing.run_until_cancelled(linger(connection.into_parts().io.into_inner().0)).await;
    }
}

/// Peeks at the first bytes and leaves them for the protocol's own reader. Waits for the whole preface, because hyper's
/// HTTP/2 side would wait for the rest of it without a limit.
async fn begins_as_http2(stream: &Stream) -> io::Result<bool> {
    let mut first = [0; HTTP2_PREFACE.len()];
    loop {
        let count = socket::peek(stream, &mut first).await?;
        if count == 0 || first[..count] != HTTP2_PREFACE[..count] {
            return Ok(false);
        }
        if count == first.len() {
            return Ok(true);
        }
        tokio::time::sleep(PEEK_INTERVAL).await;
    }
}

fn http1(limits: ConnectionLimits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.idle_timeout).max_header_size(limits.max_head_bytes);
    builder
}

fn http2(limits: ConnectionLimits) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.max_streams)
        .max_header_list_size(u32::try_from(limits.max_head_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .keep_alive_interval(limits.keep_alive)
        .keep_alive_timeout(limits.keep_alive);
    builder
}

/// The number of requests that are open on one connection: received, and their responses not sent completely.
#[derive(Clone, Default)]
struct OpenRequests(Arc<watch::Sender<usize>>);

/// Counts as an open request until it is dropped.
struct OpenRequest(OpenRequests);

impl OpenRequests {
    fn open(&self) -> OpenRequest {
        self.0.send_modify(|count| *count += 1);
        OpenRequest(self.clone())
    }

    /// Returns when no request has been open for `timeout`.
    async fn idle(&self, timeout: Duration) {
        let mut count = self.0.subscribe();
        loop {
            // Cannot fail: `self` holds the sender.
            let _ = count.wait_for(|&count| count == 0).await;
            if tokio::time::timeout(timeout, count.changed()).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// Runs a connection to its end. When `closing` is cancelled or the connection is idle, it is shut down gracefully: open
/// requests are finished, new ones are not accepted. One that stays open and idle after that is dropped.
async fn run<C, Idle>(mut connection: Pin<&mut C>, closing: &CancellationToken, idle: impl Fn() -> Idle)
where
    C: GracefulConnection<Error = hyper::Error>,
    Idle: Future<Output = ()>,
{
    let ended = tokio::select! {
        result = connection.as_mut() => Some(result),
        () = closing.cancelled() => None,
        () = idle() => None,
    };
    let result = match ended {
        Some(result) => result,
        None => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                result = connection => result,
                () = idle() => return,
            }
        }
    };
    if let Err(error) = result {
        if is_given_up(&error) {
            metrics::client_given_up();
        }
        // Clients disconnect in many ways; none of them is an error of ours.
        tracing::debug!("a connection ended: {error}");
    }
}

/// Whether the kernel or a ping found that the client does not read, or has vanished.
fn is_given_up(error: &hyper::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    // The kernel reports the last network error instead of the plain timeout.
    let is_kernels = |error: &io::Error| matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable);
    let mut causes = std::iter::successors(error.source(), |&error| error.source());
    // A ping timeout has a cause; a late request head has none.
    causes.any(|cause| error.is_timeout() || cause.downcast_ref().is_some_and(is_kernels))
}

/// Closes the write side, then reads and discards what the client still sends, so that it can read the response to a
/// refused request: closing a socket with unread input resets it, and the response may be lost (RFC 9112, section 9.6).
async fn linger(mut stream: Stream) {
    let until_closed = async {
        stream.shutdown().await?;
        let mut buffer = vec![0; LINGER_BUFFER_BYTES];
        while stream.read(&mut buffer).await? > 0 {}
        io::Result::Ok(())
    };
    // A timeout or an error means that the client is gone or does not stop sending.
    let _ = tokio::time::timeout(LINGER, until_closed).await;
}
