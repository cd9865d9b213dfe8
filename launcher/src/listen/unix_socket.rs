//! The server's unix socket. Like a port it is bound before anything is loaded, and accepts connections only when everything
//! is ready.
//!
//! A socket's file outlives a process that is killed, and a bound socket refuses connections until it is opened, so neither
//! the file nor a refused connection tells whether a server uses it. A locked file next to it does: PATH.lock.

use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

/// A bound socket that does not accept connections yet.
pub(crate) struct ReservedSocket {
    socket: Socket,
    file: SocketFile,
}

/// The files of a socket of this process. Dropping it removes them.
pub(crate) struct SocketFile {
    socket: PathBuf,
    lock: PathBuf,
    /// Locked for as long as the socket is used.
    _locked: File,
}

/// Why a unix socket cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("unix socket {} {}", .path.display(), .why)]
pub(crate) struct SocketError {
    path: PathBuf,
    why: String,
}

impl ReservedSocket {
    /// Binds without listening. Removes the file of a socket that no process uses any more. The umask decides which
    /// users may connect, as for every new file.
    pub(crate) fn bind(path: &Path) -> Result<Self, SocketError> {
        let refuse = |why: String| SocketError { path: path.to_owned(), why };
        let cannot = |error: io::Error| refuse(format!("cannot be used: {error}"));
        let in_use = || refuse("is in use; stop the process that uses it or choose another --uds".to_owned());
        let address = SockAddr::unix(path).map_err(cannot)?;
        match path.symlink_metadata() {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(refuse("is the path of something else; remove that or choose another --uds".to_owned()));
            }
            // Of a server, or of another program, which knows nothing of the lock.
            Ok(_) if UnixStream::connect(path).is_ok() => return Err(in_use()),
            _ => {}
        }
        let file = SocketFile::lock(path).map_err(cannot)?.ok_or_else(in_use)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(cannot(error)),
            _ => {}
        }
        let bind = || {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            socket.bind(&address)?;
            Ok(socket)
        };
        Ok(Self { socket: bind().map_err(cannot)?, file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.file.socket
    }

    /// Starts to listen. The socket can be reached until the file is dropped.
    pub(crate) fn open(self) -> Result<(UnixListener, SocketFile), SocketError> {
        let Self { socket, file } = self;
        let open = || {
            socket.listen(1024)?;
            UnixListener::from_std(std::os::unix::net::UnixListener::from(std::os::fd::OwnedFd::from(socket)))
        };
        match open() {
            Ok(listener) => Ok((listener, file)),
            Err(error) => Err(SocketError { path: file.socket.clone(), why: format!("cannot be opened: {error}") }),
        }
    }
}

impl SocketFile {
    /// `None` if another process has the lock.
    fn lock(path: &Path) -> io::Result<Option<Self>> {
        let mut lock = path.as_os_str().to_owned();
        lock.push(".lock");
        let lock = PathBuf::from(lock);
        loop {
            let file = File::options().create(true).append(true).open(&lock)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // The previous owner may have removed the file between the two calls above.
            if lock.metadata().is_ok_and(|found| file.metadata().is_ok_and(|locked| locked.ino() == found.ino())) {
                return Ok(Some(Self { socket: path.to_owned(), lock, _locked: file }));
            }
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // INVARIANT: the lock goes last, so the socket is not yet another server's.
        for path in [&self.socket, &self.lock] {
            if let Err(error) = std::fs::remove_file(path)
                && error.kind() != ErrorKind::NotFound
            {
                tracing::warn!("cannot remove {}: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Not in TMPDIR, whose path may be too long for a socket.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/tmp").unwrap()
    }

    fn error(path: &Path) -> String {
        ReservedSocket::bind(path).err().unwrap().to_string()
    }

    #[tokio::test]
    async fn connections_are_refused_until_the_socket_is_opened_and_its_files_go_with_it() {
        let folder = folder();
        let path = folder.path().join("socket");
        let reserved = ReservedSocket::bind(&path).unwrap();
        assert!(UnixStream::connect(&path).is_err());
        let (_listener, file) = reserved.open().unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o666;
        let plain = folder.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        assert_eq!(mode(&path), mode(&plain), "not what the umask allows");
        std::fs::remove_file(plain).unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_socket_that_a_server_has_reserved_or_that_accepts_connections_is_in_use() {
        let folder = folder();
        let path = folder.path().join("socket");
        let in_use =
            format!("unix socket {} is in use; stop the process that uses it or choose another --uds", path.display());
        let reserved = ReservedSocket::bind(&path).unwrap();
        assert_eq!(error(&path), in_use);
        drop(reserved);
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(error(&path), in_use);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn the_socket_of_a_killed_server_is_replaced() {
        let folder = folder();
        let path = folder.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        std::fs::write(folder.path().join("socket.lock"), "").unwrap();
        assert!(path.exists());
        ReservedSocket::bind(&path).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_not_a_socket_is_kept() {
        let folder = folder();
        let path = folder.path().join("socket");
        std::fs::write(&path, "precious").unwrap();
        assert!(error(&path).ends_with("is the path of something else; remove that or choose another --uds"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_reported() {
        let folder = folder();
        assert!(error(&folder.path().join("missing").join("socket")).contains("cannot be used: No such file"));
        assert!(error(&folder.path().join("x".repeat(120))).contains("cannot be used: "));
    }
}
