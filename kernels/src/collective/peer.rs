//! Another rank's process.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A process, and a file descriptor that becomes readable when it ends.
pub(super) struct Peer {
    pid: i32,
    file: OwnedFd,
}

impl Peer {
    /// The process of this pid, which must be running.
    pub(super) fn open(pid: i32) -> io::Result<Peer> {
        // SAFETY: the call reads no memory of this process.
        let file = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was opened above, and has no other owner.
        Ok(Peer { pid, file: unsafe { OwnedFd::from_raw_fd(file as i32) } })
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether the process has ended. It may still be a zombie.
    pub(super) fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one valid entry.
        unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
    }
}
