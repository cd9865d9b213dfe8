//! Names and connections, so that tests can give names any address.

use std::io;
use std::net::SocketAddr;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::net::{TcpStream, lookup_host};

/// Resolves names and opens connections.
pub(super) trait Network: Send + Sync {
    /// The addresses of a host, which is a name or an address.
    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;

    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<TcpStream>>;
}

/// The network of this machine. It has no proxies.
pub(super) struct SystemNetwork;

impl Network for SystemNetwork {
    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let host = host.to_owned();
        async move { Ok(lookup_host((host, port)).await?.collect()) }.boxed()
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'static, io::Result<TcpStream>> {
        TcpStream::connect(address).boxed()
    }
}
