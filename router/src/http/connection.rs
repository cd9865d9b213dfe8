//! Connections: HTTP/1.1 and HTTP/2 on one port, within what one client may take. TLS is a proxy's business.
//!
//! INVARIANT: when [`serve`] has ended, or was dropped, no connection is left.

use std::error::Error;
use std::io;
use std::pin::{Pin, pin};
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::{socket, vertex_route};
use crate::config::{ConnectionLimits, VertexRoutes};
use crate::telemetry::metrics;

/// How HTTP/2 begins, and no request of HTTP/1 does (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Between looks at a connection that has sent a part of those bytes.
const PEEK_INTERVAL: Duration = Duration::from_millis(10);
/// After an accept that failed for want of something, such as file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// For how long what a client goes on to send is read, after it was refused.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_PIECE_BYTES: usize = 16 << 10;
/// Large enough that a body of ordinary size needs no window update.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

#[derive(Clone)]
pub(crate) struct App {
    pub(crate) router: axum::Router,
    pub(crate) vertex_routes: VertexRoutes,
    pub(crate) limits: ConnectionLimits,
}

/// Accepts until `closing` is cancelled; then lets every connection finish its requests.
pub(crate) async fn serve(listener: TcpListener, app: App, closing: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = closing.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve_connection(stream, app.clone(), closing.clone()));
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

/// The client gave up before it was accepted.
fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn serve_connection(stream: TcpStream, app: App, closing: CancellationToken) {
    let limits = app.limits;
    if let Err(error) = socket::configure(&stream, limits) {
        // As when the client is gone already; a socket that refuses something is not broken by that.
        tracing::debug!("a connection's socket is as it was: {error}");
    }
    let begins = tokio::time::timeout(limits.head_timeout, begins_as_http2(&stream));
    let Some(Ok(Ok(is_http2))) = closing.run_until_cancelled(begins).await else { return };
    let stream = TokioIo::new(stream);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let App { router, vertex_routes, .. } = app.clone();
        let request = vertex_route::resolve(&vertex_routes, request.map(Body::new));
        router.oneshot(request)
    });
    if is_http2 {
        finish(pin!(http2(limits).serve_connection(stream, service)), &closing).await;
    } else {
        let mut connection = http1(limits).serve_connection(stream, service);
        finish(Pin::new(&mut connection), &closing).await;
        closing.run_until_cancelled(linger(connection.into_parts().io.into_inner())).await;
    }
}

/// Looks without taking: the first bytes are still there for whoever reads the protocol. All of the preface, as the
/// HTTP/2 side waits for it without a limit.
async fn begins_as_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0; HTTP2_PREFACE.len()];
    loop {
        let count = stream.peek(&mut first).await?;
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
    builder.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout).max_header_size(limits.max_head_bytes);
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

/// The kernel or a ping found that the client takes nothing, or is not there any more.
fn is_given_up(error: &hyper::Error) -> bool {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    // What the network last said of it goes before the plain reason.
    let is_kernels = |error: &io::Error| matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable);
    let mut causes = std::iter::successors(error.source(), |&error| error.source());
    // A head that did not come in time has no further cause; an answer to a ping has.
    causes.any(|cause| error.is_timeout() || cause.downcast_ref().is_some_and(is_kernels))
}

/// Runs a connection to its end; when closing, to the end of the requests that are open.
async fn finish<C>(mut connection: Pin<&mut C>, closing: &CancellationToken)
where
    C: GracefulConnection<Error = hyper::Error>,
{
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        if is_given_up(&error) {
            metrics::client_given_up();
        }
        // Clients leave in many ways, and none of them is our error.
        tracing::debug!("a connection ended: {error}");
    }
}

/// A connection that is closed over bytes which nobody has read is reset, and the answer may be lost with it: who is still
/// sending has to be able to read why it is in vain (RFC 9112, section 9.6).
async fn linger(mut stream: TcpStream) {
    let until_closed = async {
        stream.shutdown().await?;
        let mut piece = vec![0; LINGER_PIECE_BYTES];
        while stream.read(&mut piece).await? > 0 {}
        io::Result::Ok(())
    };
    // Whoever is not there any more reads nothing.
    let _ = tokio::time::timeout(LINGER, until_closed).await;
}
