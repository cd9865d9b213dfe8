//! The addresses of connections, and the socket options with which the kernel detects clients that vanished or do not read.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::socket::{MsgFlags, recv};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;

use crate::limits::ConnectionLimits;

/// Unsent bytes that the kernel buffers. With a larger buffer a slow reader would look for a long time like a client
/// that does not read.
#[cfg(target_os = "linux")]
const MAX_UNSENT_BYTES: u32 = 64 << 10;
/// The kernel's resolution of keep-alive times.
const MIN_KEEP_ALIVE: Duration = Duration::from_secs(1);

/// What the server listens on.
pub enum Listener {
    /// A port.
    Tcp(TcpListener),
    /// A unix socket.
    Unix(UnixListener),
}

/// A connection.
pub(super) type Stream = Either<TcpStream, UnixStream>;

impl Listener {
    pub(super) async fn accept(&self) -> io::Result<Stream> {
        Ok(match self {
            Self::Tcp(listener) => Either::Left(listener.accept().await?.0),
            Self::Unix(listener) => Either::Right(listener.accept().await?.0),
        })
    }
}

/// Reads the first bytes that have arrived and leaves them in the socket. Returns their number, 0 at the end of the input.
pub(super) async fn peek(stream: &Stream, buffer: &mut [u8]) -> io::Result<usize> {
    let mut peek = |socket: i32| Ok(recv(socket, buffer, MsgFlags::MSG_PEEK)?);
    match stream {
        Either::Left(tcp) => tcp.async_io(Interest::READABLE, || peek(tcp.as_raw_fd())).await,
        Either::Right(unix) => unix.async_io(Interest::READABLE, || peek(unix.as_raw_fd())).await,
    }
}

/// Sets the options of a connection. The kernel itself sees the end of a client on this machine.
pub(super) fn configure(stream: &Stream, limits: ConnectionLimits) -> io::Result<()> {
    match stream {
        Either::Left(stream) => configure_tcp(stream, limits),
        Either::Right(_) => Ok(()),
    }
}

fn configure_tcp(stream: &TcpStream, limits: ConnectionLimits) -> io::Result<()> {
    // Events are small, and a client waits for each of them.
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keep_alive = TcpKeepalive::new()
        .with_time(limits.keep_alive.max(MIN_KEEP_ALIVE))
        .with_interval((limits.keep_alive / 4).max(MIN_KEEP_ALIVE));
    socket.set_tcp_keepalive(&keep_alive)?;
    #[cfg(target_os = "linux")]
    {
        // Covers unacknowledged data, data that the client's closed window holds back (since Linux 4.11), and keep-alive
        // probes.
        socket.set_tcp_user_timeout(Some(limits.client_timeout))?;
        socket.set_tcp_notsent_lowat(MAX_UNSENT_BYTES)?;
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_kernel_probes_quiet_clients_and_gives_up_on_unresponsive_ones() {
        let limits = ConnectionLimits {
            max_connections: 0,
            idle_timeout: Duration::ZERO,
            body_timeout: Duration::ZERO,
            max_head_bytes: 0,
            max_streams: 0,
            keep_alive: Duration::from_secs(20),
            client_timeout: Duration::from_secs(40),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        configure_tcp(&stream, limits).unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(20));
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(5));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(40)));
        let soon = ConnectionLimits { keep_alive: Duration::from_millis(1), ..limits };
        configure_tcp(&stream, soon).unwrap();
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(1));
    }
}
