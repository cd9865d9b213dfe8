//! The address of the server: a port, or a unix socket. It is bound before anything is loaded, so that a busy port is reported
//! at once, and accepts connections only when everything is ready.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use penstock_router::Listener;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

use crate::listen::unix_socket::{ReservedSocket, SocketError, SocketFile};

/// The address of the server. Displays as a URL for a client on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Port(SocketAddr),
    Socket(PathBuf),
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(address) if address.ip().is_unspecified() => {
                write!(formatter, "http://{}", SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port()))
            }
            Self::Port(address) => write!(formatter, "http://{address}"),
            Self::Socket(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// Bound, but not accepting connections yet.
pub(crate) enum Reserved {
    Port(ReservedPort),
    Socket(ReservedSocket),
}

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Socket(#[from] SocketError),
}

impl Reserved {
    /// Binds without listening.
    pub(crate) fn bind(place: &Place) -> Result<Self, ListenError> {
        Ok(match place {
            Place::Port(address) => Self::Port(ReservedPort::bind(*address)?),
            Place::Socket(path) => Self::Socket(ReservedSocket::bind(path)?),
        })
    }

    /// The address for clients, with the number of the port that was chosen for port 0.
    pub(crate) fn place(&self) -> Place {
        match self {
            Self::Port(port) => Place::Port(port.address),
            Self::Socket(socket) => Place::Socket(socket.path().to_owned()),
        }
    }

    /// Starts to listen, on a socket until its file is dropped.
    pub(crate) fn open(self) -> Result<(Listener, Option<SocketFile>), ListenError> {
        Ok(match self {
            Self::Port(port) => (Listener::Tcp(port.open()?), None),
            Self::Socket(socket) => {
                let (listener, file) = socket.open()?;
                (Listener::Unix(listener), Some(file))
            }
        })
    }
}

/// A bound port that does not accept connections yet.
pub(crate) struct ReservedPort {
    socket: Socket,
    pub(crate) address: SocketAddr,
}

/// Why a port cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("port {} on {} {}", .address.port(), .address.ip(), describe(.source))]
pub(crate) struct PortError {
    address: SocketAddr,
    source: std::io::Error,
}

fn describe(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => "is in use; stop the process that uses it or choose another --port".to_owned(),
        std::io::ErrorKind::PermissionDenied => {
            "may not be used by this user; ports below 1024 usually need privileges".to_owned()
        }
        std::io::ErrorKind::AddrNotAvailable => {
            "is not an address of this machine; choose another --hostname".to_owned()
        }
        _ => format!("cannot be used: {error}"),
    }
}

impl ReservedPort {
    /// Binds without listening. Port 0 picks a free port; `address` then has its number.
    pub(crate) fn bind(address: SocketAddr) -> Result<Self, PortError> {
        let reserve = || {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            // Closed connections of a previous server do not block the port.
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&address.into())?;
            let address = socket.local_addr()?.as_socket().unwrap_or(address);
            Ok(Self { socket, address })
        };
        reserve().map_err(|source| PortError { address, source })
    }

    /// Starts to listen.
    pub(crate) fn open(self) -> Result<TcpListener, PortError> {
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
    fn a_busy_port_is_reported_with_its_number() {
        let taken = std::net::TcpListener::bind(any_port()).unwrap();
        let address = taken.local_addr().unwrap();
        let error = ReservedPort::bind(address).err().unwrap().to_string();
        assert_eq!(
            error,
            format!(
                "port {} on 127.0.0.1 is in use; stop the process that uses it or choose another --port",
                address.port()
            )
        );
    }

    #[tokio::test]
    async fn connections_are_refused_until_the_port_is_opened() {
        let port = ReservedPort::bind(any_port()).unwrap();
        let address = port.address;
        assert!(std::net::TcpStream::connect(address).is_err());
        let _listener = port.open().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
    }
}
