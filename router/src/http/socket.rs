//! Socket options with which the kernel detects clients that vanished or do not read.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use crate::config::ConnectionLimits;

/// Unsent bytes that the kernel buffers. With a larger buffer a slow reader would look for a long time like a client
/// that does not read.
#[cfg(target_os = "linux")]
const MAX_UNSENT_BYTES: u32 = 64 << 10;
/// The kernel's resolution of keep-alive times.
const MIN_KEEP_ALIVE: Duration = Duration::from_secs(1);

pub(super) fn configure(stream: &TcpStream, limits: ConnectionLimits) -> io::Result<()> {
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
    use tokio::net::TcpListener;

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
        configure(&stream, limits).unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(20));
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(5));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(40)));
        let soon = ConnectionLimits { keep_alive: Duration::from_millis(1), ..limits };
        configure(&stream, soon).unwrap();
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(1));
    }
}
