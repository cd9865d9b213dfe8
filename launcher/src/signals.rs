//! What stops the server: the first signal, or the end of standard input, starts a drain; the second one stops it immediately.

use std::future::Future;

use futures::FutureExt;
use futures::future::{BoxFuture, Fuse};
use nix::sys::signal::Signal;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Starts listening. The token is cancelled by the first SIGTERM, SIGINT or SIGHUP; the future resolves with the second.
/// `with_stdin`: the end of standard input counts as a SIGTERM.
pub(crate) fn listen(with_stdin: bool) -> std::io::Result<(CancellationToken, impl Future<Output = Signal>)> {
    let mut signals = Signals {
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
        hang_up: signal(SignalKind::hangup())?,
        stdin: if with_stdin { stdin_ended().boxed().fuse() } else { Fuse::terminated() },
    };
    let drain = CancellationToken::new();
    let second = {
        let drain = drain.clone();
        async move {
            let first = signals.next().await;
            tracing::info!("{first}: finishing running requests; a second signal stops the server immediately");
            drain.cancel();
            signals.next().await
        }
    };
    Ok((drain, second))
}

struct Signals {
    terminate: Stream,
    interrupt: Stream,
    hang_up: Stream,
    stdin: Fuse<BoxFuture<'static, ()>>,
}

impl Signals {
    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::SIGTERM,
            _ = self.interrupt.recv() => Signal::SIGINT,
            _ = self.hang_up.recv() => Signal::SIGHUP,
            () = &mut self.stdin => Signal::SIGTERM,
        }
    }
}

/// Reads standard input to its end. An error ends it too.
async fn stdin_ended() {
    let mut stdin = tokio::io::stdin();
    let mut discarded = [0; 1024];
    while stdin.read(&mut discarded).await.is_ok_and(|count| count > 0) {}
}
