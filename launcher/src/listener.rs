//! The port: taken before anything is loaded, so that a busy one is found at once; opened when everything is ready.

use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

/// A port that is ours and that nobody can connect to yet.
pub struct ReservedPort {
    socket: Socket,
    pub address: SocketAddr,
}

#[derive(Debug, thiserror::Error)]
#[error("port {} on {} {}", .address.port(), .address.ip(), describe(.source))]
pub struct PortError {
    address: SocketAddr,
    source: std::io::Error,
}

fn describe(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => "is in use; stop what listens there or choose another --port".to_owned(),
        std::io::ErrorKind::PermissionDenied => "may not be used; ports below 1024 often need privileges".to_owned(),
        std::io::ErrorKind::AddrNotAvailable => {
            "is not an address of this machine; choose another --hostname".to_owned()
        }
        _ => format!("cannot be used: {error}"),
    }
}

impl ReservedPort {
    pub fn bind(address: SocketAddr) -> Result<Self, PortError> {
        let reserve = || {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            // As every server does: a predecessor's closed connections do not keep the port.
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&address.into())?;
            let address = socket.local_addr()?.as_socket().unwrap_or(address);
            Ok(Self { socket, address })
        };
        reserve().map_err(|source| PortError { address, source })
    }

    /// Lets clients connect.
    pub fn open(self) -> Result<TcpListener, PortError> {
        let Self { socket, address } = self;
        let open = || {
            socket.listen(1024)?;
            TcpListener::from_std(socket.into())
        };
        open().map_err(|source| PortError { address, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any_port() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    #[test]
    fn a_busy_port_is_refused_by_name() {
        let taken = std::net::TcpListener::bind(any_port()).unwrap();
        let address = taken.local_addr().unwrap();
        let error = ReservedPort::bind(address).err().unwrap().to_string();
        assert_eq!(
            error,
            format!("port {} on 127.0.0.1 is in use; stop what listens there or choose another --port", address.port())
        );
    }

    #[tokio::test]
    async fn nobody_can_connect_before_the_port_is_opened() {
        let port = ReservedPort::bind(any_port()).unwrap();
        let address = port.address;
        assert!(std::net::TcpStream::connect(address).is_err());
        let _listener = port.open().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
    }
}
