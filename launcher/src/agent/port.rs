//! A free port that only one worker gets.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

/// Keeps a port bound, without listening on it. The worker binds it too (SO_REUSEPORT), and gets all its connections.
pub(crate) struct PortReservation {
    _socket: Socket,
    pub(crate) port: u16,
}

impl PortReservation {
    pub(crate) fn new(address: IpAddr) -> io::Result<Self> {
        let address = SocketAddr::new(address, 0);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_port(true)?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
        Ok(Self { _socket: socket, port })
    }
}
