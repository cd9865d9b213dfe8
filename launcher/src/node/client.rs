//! This server's side of the connection to an agent.

use std::fmt::{self, Formatter};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, version};

use crate::flag::isa::CpuIsa;
use crate::flag::ranks_on::NodeAddress;
use crate::node::authority::{Authority, LAUNCHER_NAME, NODE_NAME};
use crate::node::secret::NodeSecret;
use crate::process::output::Lines;
use crate::protocol::{Open, Report};

/// Time that a node that is away, or hosts another server, has to come back. Streams wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Interval between attempts at a node that hosts another server, because that node logs each attempt.
const BUSY_RETRY_INTERVAL: Duration = Duration::from_secs(1);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// A machine that sends nothing for this long counts as lost.
const SILENCE: Duration = Duration::from_secs(20);

/// A node to host ranks on.
#[derive(Clone)]
pub(crate) struct NodeOptions {
    pub(crate) place: watch::Receiver<NodePlace>,
    pub(crate) secret: NodeSecret,
    /// Ray chose the place, and may choose another one.
    pub(crate) by_ray: bool,
    /// Ranks of this group on the node.
    pub(crate) num_ranks: usize,
    /// Each of them runs on a GPU.
    pub(crate) uses_gpus: bool,
}

/// The place of a node. Ray may move it.
#[derive(Clone, Debug)]
pub(crate) enum NodePlace {
    At(NodeAddress),
    /// Ray looks for a machine, or waits for one.
    Awaited,
    /// There is none, and why.
    Unavailable(String),
}

impl NodePlace {
    /// A place that does not change.
    pub(crate) fn fixed(address: NodeAddress) -> watch::Receiver<Self> {
        watch::channel(Self::At(address)).1
    }
}

impl fmt::Debug for NodeOptions {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} with {} ranks", *self.place.borrow(), self.num_ranks)
    }
}

/// An open connection: requests go in, reports come out, as with a fork server's own pipes.
pub(crate) struct NodeConnection {
    pub(crate) address: NodeAddress,
    pub(crate) requests: WriteHalf<TlsStream<TcpStream>>,
    pub(crate) reports: Lines<ReadHalf<TlsStream<TcpStream>>>,
}

/// Why a connection attempt failed.
enum Failure {
    /// The node may be starting.
    Absent(String),
    /// It does not know the secret.
    Stranger(String),
    /// It hosts another server, which may leave.
    Busy(String),
    /// It does not host this server.
    Refused(String),
}

impl NodeOptions {
    /// `None` while Ray looks for a machine.
    pub(crate) fn address(&self) -> Option<NodeAddress> {
        match &*self.place.borrow() {
            NodePlace::At(address) => Some(address.clone()),
            NodePlace::Awaited | NodePlace::Unavailable(_) => None,
        }
    }

    /// Waits until Ray has found a machine, without a limit, because the cluster may grow. The error says why it cannot.
    async fn placed(&self) -> Result<NodeAddress, String> {
        let mut place = self.place.clone();
        let found = place.wait_for(|place| !matches!(place, NodePlace::Awaited)).await;
        match found.as_deref() {
            Ok(NodePlace::At(address)) => Ok(address.clone()),
            Ok(NodePlace::Unavailable(reason)) => Err(reason.clone()),
            Ok(NodePlace::Awaited) | Err(_) => Err("the server is shutting down".to_owned()),
        }
    }

    /// Waits until the agent accepts this server. The error says why it did not.
    pub(crate) async fn connect(&self, cpu_isa: CpuIsa) -> Result<NodeConnection, String> {
        self.connect_with(Open::new(self.num_ranks, self.uses_gpus, cpu_isa)).await
    }

    /// Connects with `open` as the first line.
    pub(crate) async fn connect_with(&self, open: Open) -> Result<NodeConnection, String> {
        let config = self.tls().map_err(|error| format!("the secret of the nodes cannot be used: {error}"))?;
        let connector = TlsConnector::from(Arc::new(config));
        let (mut began, mut before, mut is_busy) = (Instant::now(), None, false);
        loop {
            let address = self.placed().await?;
            if before.replace(address.clone()).is_some_and(|before| before != address) {
                began = Instant::now();
            }
            let attempt = tokio::time::timeout(HANDSHAKE_TIMEOUT, attempt(&address, &connector, &open)).await;
            let was_busy = std::mem::take(&mut is_busy);
            let reason = match attempt {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(Failure::Refused(reason))) => return Err(format!("{address} has no fork server: {reason}")),
                Ok(Err(Failure::Busy(reason))) => {
                    if !was_busy {
                        tracing::info!("{address}: {reason}; waiting for it");
                    }
                    is_busy = true;
                    reason
                }
                Ok(Err(Failure::Stranger(reason))) if !self.by_ray => {
                    return Err(format!("{address} does not have the secret of --node-secret-file: {reason}"));
                }
                // Where Ray's node was, another server's node may listen by now.
                Ok(Err(Failure::Absent(reason) | Failure::Stranger(reason))) => reason,
                Err(_) => format!("no answer within {} s", HANDSHAKE_TIMEOUT.as_secs()),
            };
            if began.elapsed() > PATIENCE {
                let seconds = PATIENCE.as_secs();
                let (end, advice) =
                    if is_busy { ("free", "") } else { ("reached", "; is `penstock node` running there?") };
                return Err(format!("{address} was not {end} within {seconds} s: {reason}{advice}"));
            }
            tokio::time::sleep(if is_busy { BUSY_RETRY_INTERVAL } else { RETRY_INTERVAL }).await;
        }
    }

    fn tls(&self) -> Result<ClientConfig, String> {
        let authority = Authority::derive(&self.secret).map_err(|error| error.to_string())?;
        let (certificate, key) = authority.certify(LAUNCHER_NAME).map_err(|error| error.to_string())?.into_der();
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate().into()).map_err(|error| error.to_string())?;
        ClientConfig::builder_with_protocol_versions(&[&version::TLS13])
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)
            .map_err(|error| error.to_string())
    }
}

async fn attempt(address: &NodeAddress, connector: &TlsConnector, open: &Open) -> Result<NodeConnection, Failure> {
    let NodeAddress { host, port } = address;
    let absent = |error: io::Error| Failure::Absent(error.to_string());
    let plain = TcpStream::connect(format!("{host}:{port}")).await.map_err(absent)?;
    set_options(&plain).map_err(absent)?;
    let name = ServerName::try_from(NODE_NAME).map_err(|error| Failure::Stranger(error.to_string()))?;
    let stream = connector.connect(name, plain).await.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => Failure::Stranger(error.to_string()),
        _ => absent(error),
    })?;
    let (reports, mut requests) = tokio::io::split(stream);
    let line = serde_json::to_string(open).map_err(|error| Failure::Stranger(error.to_string()))?;
    requests.write_all((line + "\n").as_bytes()).await.map_err(absent)?;
    requests.flush().await.map_err(absent)?;
    let mut reports = Lines::new(reports);
    match reports.next().await.as_deref().map(serde_json::from_str) {
        Some(Ok(Report::Accepted {})) => Ok(NodeConnection { address: address.clone(), requests, reports }),
        Some(Ok(Report::Busy { reason })) => Err(Failure::Busy(reason)),
        Some(Ok(Report::Lost { reason })) => Err(Failure::Refused(reason)),
        _ => Err(Failure::Absent("it closed the connection".to_owned())),
    }
}

/// Lets the kernel detect a machine that is gone.
pub(crate) fn set_options(stream: &TcpStream) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(SILENCE / 4).with_interval(SILENCE / 4);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(SILENCE))?;
    socket.set_tcp_nodelay(true)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    fn on(place: watch::Receiver<NodePlace>) -> NodeOptions {
        NodeOptions { place, secret: NodeSecret::make(), by_ray: true, num_ranks: 1, uses_gpus: false }
    }

    #[tokio::test]
    async fn a_connection_follows_a_node_that_ray_moves() {
        for reply in ["", "no TLS, as of a node of another server"] {
            let (gone, next) =
                (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
            let [first, second] = [&gone, &next].map(|listener| {
                let address = listener.local_addr().unwrap();
                NodePlace::At(NodeAddress { host: address.ip().to_string(), port: address.port() })
            });
            let (sender, place) = watch::channel(NodePlace::Awaited);
            let mut connecting = tokio::spawn(async move { on(place).connect(CpuIsa::Auto).await.map(|_| ()) });
            sender.send_replace(first);
            let (mut tried, _) = gone.accept().await.unwrap(); // In vain.
            assert!(tried.read(&mut [0; 4096]).await.unwrap() > 0);
            tried.write_all(reply.as_bytes()).await.unwrap();
            drop(tried);
            sender.send_replace(second);
            tokio::select! {
                accepted = next.accept() => drop(accepted.unwrap()),
                ended = &mut connecting => panic!("{:?} instead of a connection", ended.unwrap()),
            }
            connecting.abort();
        }
    }

    #[tokio::test]
    async fn a_server_learns_why_ray_gives_it_no_node() {
        let (sender, place) = watch::channel(NodePlace::Awaited);
        let connecting = tokio::spawn(async move { on(place).connect(CpuIsa::Auto).await.map(|_| ()) });
        sender.send_replace(NodePlace::Unavailable("the cluster has no CPUs".to_owned()));
        assert_eq!(connecting.await.unwrap(), Err("the cluster has no CPUs".to_owned()));
    }
}
