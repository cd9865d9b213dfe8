//! Signals: the first one starts a drain, the second one stops the server immediately.

use std::future::Future;

use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Starts listening. The token is cancelled by the first SIGTERM, SIGINT or SIGHUP; the future resolves with the second.
pub(crate) fn listen() -> std::io::Result<(CancellationToken, impl Future<Output = Signal>)> {
    let mut signals = Signals {
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
        hang_up: signal(SignalKind::hangup())?,
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
}

impl Signals {
    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::SIGTERM,
            _ = self.interrupt.recv() => Signal::SIGINT,
            _ = self.hang_up.recv() => Signal::SIGHUP,
        }
    }
}
