//! `penstock node`: hosts the ranks of servers on other machines, a fork server for each connection.
//!
//! INVARIANT: a connection that has not shown a certificate of the secret's authority starts nothing.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, version};

use super::authority::{Authority, NODE_NAME};
use super::reservation::PortReservation;
use super::{NodeSecret, client};
use crate::fork_protocol::{NodeFlags, Open, Ports, Report, Request, WorkerFlags};
use crate::fork_server::ForkServerOptions;
use crate::machine_share::MachineShare;
use crate::output::{Lines, StderrTail};
use crate::workers::make_pipe;

/// How long a connection may take to show its certificate and its first line.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections at a time that have not shown both. Their own limit, so that strangers take no place of a server.
const MAX_OPENINGS: usize = 64;
/// Servers at a time.
const MAX_SERVERS: usize = 64;
/// Of one connection.
const MAX_WORKERS: usize = 1024;
const NCCL_INTERFACE: &str = "NCCL_SOCKET_IFNAME";

/// Hosts ranks of a model for servers on other machines (--ranks-on). Every connection is encrypted, and both sides prove that they
/// know the secret
#[derive(Clone, Debug, Args)]
pub(crate) struct NodeArgs {
    /// IP address and port to listen on, as other machines reach them. Workers listen on the same address, on ports that the system
    /// chooses, with certificates made for each group
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: SocketAddr,

    /// File with the secret that this node and the servers that use it share, at least 32 characters
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: PathBuf,

    /// Offer this machine's GPUs, one for each rank, to one server at a time. GPUs of several machines exchange tensors by NCCL, which
    /// neither encrypts nor checks who connects: only for a private network, whose interface NCCL_SOCKET_IFNAME names.
    /// CUDA_VISIBLE_DEVICES chooses the GPUs. Has not been run on GPUs yet
    #[arg(long)]
    pub(crate) unencrypted_gpus: bool,

    /// Log one JSON object per line
    #[arg(long)]
    pub(crate) json_output: bool,

    /// Stop when standard input ends, as it does when the program that started this node is killed
    #[arg(long)]
    pub(crate) stop_with_stdin: bool,
}

/// What every connection needs.
struct Node {
    python: PathBuf,
    address: IpAddr,
    acceptor: TlsAcceptor,
    /// A permit for each server that has workers here.
    servers: Semaphore,
    /// A permit for the server whose ranks use them. `None`: they are not offered.
    gpus: Option<Semaphore>,
}

/// Serves until the future is dropped. Run it on the main thread (see `process::python_module`), with a runtime that has no other.
pub(crate) async fn run(args: &NodeArgs, python: &Path) -> anyhow::Result<()> {
    let secret = NodeSecret::read(&args.secret_file)?;
    let acceptor = TlsAcceptor::from(Arc::new(tls(&secret).context("cannot make this node's certificate")?));
    let listener = TcpListener::bind(args.listen).await.with_context(|| format!("cannot listen on {}", args.listen))?;
    let address = listener.local_addr().context("cannot listen")?;
    if address.ip().is_unspecified() {
        anyhow::bail!("--listen is {address}, must be an address of this machine that the other machines reach");
    }
    tracing::info!(url = format!("node://{address}"), "this node waits for servers");
    let node = Arc::new(Node {
        python: python.to_owned(),
        address: address.ip(),
        acceptor,
        servers: Semaphore::new(MAX_SERVERS),
        gpus: args.unencrypted_gpus.then(|| Semaphore::new(1)),
    });
    let openings = Arc::new(Semaphore::new(MAX_OPENINGS));
    loop {
        let opening = openings.clone().acquire_owned().await?;
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await; // Out of files: they may become free.
                continue;
            }
        };
        let node = node.clone();
        tokio::spawn(async move {
            match node.serve(stream, peer, opening).await {
                Ok(()) => tracing::info!(server = peer.to_string(), "the server has left"),
                Err(reason) => tracing::warn!(server = peer.to_string(), "the connection ends: {reason:#}"),
            }
        });
    }
}

fn tls(secret: &NodeSecret) -> anyhow::Result<ServerConfig> {
    let authority = Authority::derive(secret)?;
    let (certificate, key) = authority.certify(NODE_NAME)?.into_der();
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate().into())?;
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build()?;
    Ok(ServerConfig::builder_with_protocol_versions(&[&version::TLS13])
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate], key)?)
}

impl Node {
    /// Runs a fork server until the connection or the fork server ends. `permit` is for the opening only.
    async fn serve(&self, stream: TcpStream, peer: SocketAddr, permit: OwnedSemaphorePermit) -> anyhow::Result<()> {
        client::set_options(&stream)?;
        let opening = async {
            let stream = self.acceptor.accept(stream).await.map_err(|error| {
                anyhow::anyhow!("the TLS handshake failed: {error}; a server with another secret fails like this")
            })?;
            let (requests, reports) = tokio::io::split(stream);
            let mut requests = Lines::new(requests);
            let line = requests.next().await.context("it closed the connection")?;
            let open: Open = serde_json::from_str(&line).context("its first line is not understood")?;
            Ok::<_, anyhow::Error>((requests, reports, open))
        };
        let (mut requests, mut reports, open) =
            tokio::time::timeout(OPENING_TIMEOUT, opening).await.context("it was silent for too long")??;
        drop(permit);
        let result = self.accept(&mut requests, &mut reports, open, peer).await;
        if let Err(reason) = &result {
            // The connection may be what failed. Requests are read to their end, because a socket that is closed with unread
            // bytes takes back what it has sent.
            let farewell = async {
                send(&mut reports, &Report::Lost { reason: format!("{reason:#}") }).await?;
                reports.shutdown().await?;
                while requests.next().await.is_some() {}
                Ok::<_, io::Error>(())
            };
            let _ = tokio::time::timeout(OPENING_TIMEOUT, farewell).await;
        }
        result
    }

    /// Hosts the ranks of a server that has shown the secret. The error is for both sides.
    async fn accept<R, W>(
        &self,
        requests: &mut Lines<R>,
        reports: &mut W,
        open: Open,
        peer: SocketAddr,
    ) -> anyhow::Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        open.check()?;
        let Ok(_permit) = self.servers.try_acquire() else {
            anyhow::bail!("this node hosts {MAX_SERVERS} servers already");
        };
        let _gpus = match &self.gpus {
            _ if !open.uses_gpus => None,
            None => {
                anyhow::bail!("this node offers no GPUs; start it with --unencrypted-gpus, on a private network only")
            }
            Some(gpus) => {
                if gpus.available_permits() == 0 {
                    tracing::info!(server = peer.to_string(), "a server waits for the GPUs, which another one uses");
                }
                Some(gpus.acquire().await?)
            }
        };
        tracing::info!(server = peer.to_string(), ranks = open.num_ranks, "a server uses this node");
        self.host(requests, reports, &open).await
    }

    async fn host<R, W>(&self, requests: &mut Lines<R>, reports: &mut W, open: &Open) -> anyhow::Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut command = self.fork_server(open.num_ranks.clamp(1, MAX_WORKERS)).command();
        if open.uses_gpus && std::env::var_os(NCCL_INTERFACE).is_none() {
            command.env_remove(NCCL_INTERFACE); // Not the loopback interface: NCCL finds one.
        }
        let mut child = command.spawn().context("cannot start the fork server")?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            unreachable!("invariant: all three are piped")
        };
        let tail = StderrTail::default();
        let mut following = tokio::spawn(tail.clone().follow(None, stderr));
        let mut lines = Lines::new(stdout);
        let mut workers = Hosted::new(self.address, open.uses_gpus)?;
        let ended = loop {
            tokio::select! {
                request = requests.next() => {
                    let Some(request) = request else { break false };
                    let request = serde_json::from_str(&request).context("a request is not understood")?;
                    let request = match request {
                        Request::Start(flags) if workers.ports.len() >= MAX_WORKERS => {
                            let reason = format!("this node has {MAX_WORKERS} workers of this server already");
                            send(reports, &Report::Refused { name: flags.name, reason }).await?;
                            continue;
                        }
                        Request::Start(flags) => Request::Start(workers.place(flags)?),
                        Request::Load { .. } => continue, // Only for one rank on one machine.
                        signal @ Request::Signal { .. } => signal,
                    };
                    send(&mut stdin, &request).await?;
                }
                line = lines.next() => match line.as_deref().map(serde_json::from_str) {
                    Some(Ok(report)) => send(reports, &workers.amended(report)).await?,
                    // Printed by code that Python runs at startup.
                    Some(Err(_)) => tracing::info!(target: "worker", "{}", line.unwrap_or_default()),
                    None => break true,
                },
            }
        };
        if !ended {
            child.start_kill()?;
        }
        let status = child.wait().await?;
        if ended {
            let _ = tokio::time::timeout(OPENING_TIMEOUT, &mut following).await;
            anyhow::bail!(tail.exit_reason("the fork server", status));
        }
        Ok(())
    }

    fn fork_server(&self, num_ranks: usize) -> ForkServerOptions {
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        ForkServerOptions {
            python: self.python.clone(),
            num_threads: (num_cores / num_ranks).max(1),
            share: MachineShare::default(),
            hub_cache: None,
            node: None,
        }
    }
}

async fn send(to: &mut (impl AsyncWrite + Unpin), message: &impl serde::Serialize) -> io::Result<()> {
    to.write_all((serde_json::to_string(message)? + "\n").as_bytes()).await?;
    to.flush().await
}

/// The workers of a connection.
struct Hosted {
    /// By name: the ports for the server and for the other ranks, which stay reserved until the worker has ended.
    ports: HashMap<String, [PortReservation; 2]>,
    address: IpAddr,
    uses_gpus: bool,
    /// Of their pipes. Removed on drop.
    folder: TempDir,
    num_started: usize,
}

impl Hosted {
    fn new(address: IpAddr, uses_gpus: bool) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("penstock-").tempdir().context("cannot create a folder")?;
        Ok(Self { ports: HashMap::new(), address, uses_gpus, folder, num_started: 0 })
    }

    /// Gives a worker its ports and pipes here, and logs what it prints.
    fn place(&mut self, flags: WorkerFlags) -> anyhow::Result<WorkerFlags> {
        let ports = [PortReservation::new(self.address)?, PortReservation::new(self.address)?];
        let [endpoint, listen] =
            [&ports[0], &ports[1]].map(|port| SocketAddr::new(self.address, port.port).to_string());
        self.num_started += 1;
        let pipe = |name| self.folder.path().join(format!("{name}-{}", self.num_started));
        let [stdout, stderr] = ["stdout", "stderr"].map(pipe);
        let (out, err) = (make_pipe(&stdout)?, make_pipe(&stderr)?);
        let rank = flags.rank;
        tokio::spawn(async move {
            let mut lines = Lines::new(out);
            while let Some(line) = lines.next().await {
                tracing::info!(target: "worker", rank, "{line}");
            }
        });
        tokio::spawn(StderrTail::default().follow(Some(rank), err));
        self.ports.insert(flags.name.clone(), ports);
        let node = flags.node.map(|node| NodeFlags { listen, uses_gpu: self.uses_gpus, ..node });
        Ok(WorkerFlags { endpoint: format!("https://{endpoint}"), node, stdout, stderr, ..flags })
    }

    /// Adds to a report what only this node knows.
    fn amended(&mut self, report: Report) -> Report {
        match report {
            Report::Started { name, pid, .. } => {
                let ports =
                    self.ports.get(&name).map(|[worker, peers]| Ports { worker: worker.port, peers: peers.port });
                Report::Started { name, pid, ports }
            }
            report => {
                if let Report::Ended { name, .. } | Report::Refused { name, .. } = &report {
                    self.ports.remove(name);
                }
                report
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{NodeAddress, NodeOptions, NodePlace};

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    /// What a server with `secret` gets from a node with `SECRET`, and whether the node has accepted it.
    async fn meeting(secret: &str) -> (Result<(), String>, bool) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let acceptor = TlsAcceptor::from(Arc::new(tls(&NodeSecret::new(SECRET).unwrap()).unwrap()));
        let node = tokio::spawn(async move {
            let stream = acceptor.accept(listener.accept().await.unwrap().0).await.ok()?;
            Lines::new(stream).next().await
        });
        let address = NodeAddress { host: "127.0.0.1".to_owned(), port };
        let server = NodeOptions {
            place: NodePlace::fixed(address),
            secret: NodeSecret::new(secret).unwrap(),
            by_ray: false,
            num_ranks: 3,
            uses_gpus: true,
        };
        let connection = server.connect().await;
        let first_line = node.await.unwrap();
        let open = first_line.and_then(|line| serde_json::from_str::<Open>(&line).ok());
        (connection.map(|_| ()), open.is_some_and(|open| open.check().is_ok() && open.num_ranks == 3 && open.uses_gpus))
    }

    #[tokio::test]
    async fn a_server_and_a_node_prove_to_each_other_that_they_know_the_secret() {
        assert_eq!(meeting(SECRET).await, (Ok(()), true));
        let (refusal, was_accepted) = meeting(&SECRET.replace('f', "g")).await;
        assert!(refusal.unwrap_err().contains("does not have the secret of --node-secret-file") && !was_accepted);
    }

    /// The reason that a node gives for what `open` asks of it, if Python is `/nowhere`.
    async fn refusal(num_servers: usize, open: Open) -> String {
        let secret = NodeSecret::new(SECRET).unwrap();
        let node = Node {
            python: "/nowhere".into(),
            address: IpAddr::from([127, 0, 0, 1]),
            acceptor: TlsAcceptor::from(Arc::new(tls(&secret).unwrap())),
            servers: Semaphore::new(MAX_SERVERS - num_servers),
            gpus: None,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = NodeAddress { host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
        let openings = Arc::new(Semaphore::new(1));
        let permit = openings.clone().acquire_owned().await.unwrap();
        let server = async {
            let place = NodePlace::fixed(address);
            let options = NodeOptions { place, secret, by_ray: false, num_ranks: 1, uses_gpus: open.uses_gpus };
            let mut connection = options.connect_with(open).await.unwrap();
            // What a server sends before it reads the refusal does not cost it the refusal.
            connection.requests.write_all(b"\n\n").await.unwrap();
            connection.reports.next().await.unwrap()
        };
        let accepted = async {
            let (stream, peer) = listener.accept().await.unwrap();
            node.serve(stream, peer, permit).await.unwrap_err()
        };
        let (report, error) = tokio::join!(server, accepted);
        assert_eq!(openings.available_permits(), 1);
        let Report::Lost { reason } = serde_json::from_str(&report).unwrap() else { panic!("{report}") };
        assert_eq!(reason, format!("{error:#}"));
        reason
    }

    #[tokio::test]
    async fn a_server_learns_why_a_node_does_not_host_it() {
        let open = |uses_gpus| Open::new(1, uses_gpus);
        let no_python = refusal(0, open(false)).await;
        assert!(no_python.starts_with("cannot start the fork server: "), "{no_python}");
        assert_eq!(refusal(MAX_SERVERS, open(false)).await, "this node hosts 64 servers already");
        let other_release = refusal(0, Open { release: "0.0.1".to_owned(), ..open(false) }).await;
        assert!(other_release.starts_with("the server is release 0.0.1, this node is release "), "{other_release}");
        let no_gpus = refusal(0, open(true)).await;
        assert!(no_gpus.starts_with("this node offers no GPUs; start it with --unencrypted-gpus"), "{no_gpus}");
    }
}
