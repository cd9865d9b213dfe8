//! Process 1, as in a container: the kernel gives it every process whose parent has died, and keeps them as zombies until it
//! waits for them. So process 1 only runs the server as its child, forwards signals to it, and waits for all processes.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid};

const FORWARDED: [Signal; 6] =
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];

/// In process 1, runs this program with the same arguments in a child, and returns the child's exit status, or 128 + n after
/// signal n. `None` in every other process.
pub(crate) fn run_as_first_process() -> Option<ExitCode> {
    if getpid() != Pid::from_raw(1) {
        return None;
    }
    let status = supervise().unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: process 1 cannot run the server: {error}");
        1
    });
    Some(ExitCode::from(status))
}

fn supervise() -> std::io::Result<u8> {
    // The health check looks for the server by its name.
    prctl::set_name(c"penstock-init")?;
    // Blocked, so that none is lost before the first wait. The server unblocks them (`signal::restore_defaults`).
    let signals: SigSet = FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect();
    signals.thread_block()?;
    let mut arguments = std::env::args_os();
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0(arguments.next().unwrap_or_default()).args(arguments);
    // Its own process group, so that Ctrl-C in a terminal arrives once.
    command.process_group(0);
    let server = Pid::from_raw(command.spawn()?.id().cast_signed());
    loop {
        match signals.wait()? {
            Signal::SIGCHLD => {
                if let Some(status) = reap(server)? {
                    return Ok(status);
                }
            }
            // An error means that the server has just exited, which SIGCHLD tells.
            signal => drop(kill(server, signal)),
        }
    }
}

/// Waits for every process that has exited. Returns the exit status of `server` if it is among them.
fn reap(server: Pid) -> nix::Result<Option<u8>> {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::Exited(pid, status) if pid == server => return Ok(Some(status.to_le_bytes()[0])),
            WaitStatus::Signaled(pid, signal, _) if pid == server => {
                return Ok(Some(128_u8.saturating_add(signal as u8)));
            }
            WaitStatus::StillAlive => return Ok(None),
            _ => {}
        }
    }
}
