//! Signals that stop the server: the first one, or the end of standard input, starts a drain; the second one stops it immediately.

use std::future::Future;
use std::mem::MaybeUninit;
use std::ptr::null;

use futures::FutureExt;
use futures::future::{BoxFuture, Fuse, OptionFuture};
use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SigHandler, SigSet, Signal};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Signals whose default action this program and its children rely on: a parent waits for a child's end, and processes that render
/// templates or compile grammars end when their time is over.
const RELIED_ON: [Signal; 4] = [Signal::SIGTERM, Signal::SIGCHLD, Signal::SIGALRM, Signal::SIGPROF];

/// Undoes what the program that started this one may have left ignored or blocked. Call it first, on the only thread.
/// SIGHUP stays ignored under `nohup`, and SIGINT in a background job of a script, until a server listens for it.
pub(crate) fn restore_defaults() -> nix::Result<()> {
    SigSet::empty().thread_set_mask()?;
    for signal in RELIED_ON {
        // SAFETY: no handler of this program is replaced, because none is set yet.
        #[allow(unsafe_code)]
        unsafe {
            nix::sys::signal::signal(signal, SigHandler::SigDfl)?
        };
    }
    Ok(())
}

/// Starts listening. The token is cancelled by the first SIGTERM, SIGINT or SIGHUP; the future resolves with the second.
/// A SIGHUP that is ignored, as under `nohup`, stays ignored. `with_stdin`: the end of standard input counts as a SIGTERM.
pub(crate) fn listen(with_stdin: bool) -> std::io::Result<(CancellationToken, impl Future<Output = Signal>)> {
    let mut signals = Signals {
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
        hang_up: if is_ignored(Signal::SIGHUP)? { None } else { Some(signal(SignalKind::hangup())?) },
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
    hang_up: Option<Stream>,
    stdin: Fuse<BoxFuture<'static, ()>>,
}

impl Signals {
    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::SIGTERM,
            _ = self.interrupt.recv() => Signal::SIGINT,
            Some(_) = OptionFuture::from(self.hang_up.as_mut().map(Stream::recv)) => Signal::SIGHUP,
            () = &mut self.stdin => Signal::SIGTERM,
        }
    }
}

fn is_ignored(signal: Signal) -> nix::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call changes nothing. It fills `action` when it succeeds.
    #[allow(unsafe_code)]
    unsafe {
        Errno::result(libc::sigaction(signal as libc::c_int, null(), action.as_mut_ptr()))?;
        Ok(action.assume_init().sa_sigaction == libc::SIG_IGN)
    }
}

/// Reads standard input to its end. An error ends it too.
async fn stdin_ended() {
    let mut stdin = tokio::io::stdin();
    let mut discarded = [0; 1024];
    while stdin.read(&mut discarded).await.is_ok_and(|count| count > 0) {}
}
