//! `penstock node`: hosts the ranks of servers on other machines, a fork server for each connection.
//!
//! INVARIANT: a connection that has not shown a certificate of the secret's authority starts nothing.

mod port;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, version};

use crate::flag::node::NodeArgs;
use crate::node::authority::{Authority, NODE_NAME};
use crate::node::client;
use crate::node::secret::NodeSecret;
use port::PortReservation;

use crate::process::output::{Lines, StderrTail};
use crate::process::share::MachineShare;
use crate::protocol::{NodeFlags, Open, Ports, Report, Request, WorkerFlags};
use crate::worker::fork_server::ForkServerOptions;
use crate::worker::process::make_pipe;

/// Time limit for a connection to show its certificate and its first line.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the fork server to exit after its standard input has ended, and for its output to be read to its end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two looks at workers that are being killed.
const EXIT_INTERVAL: Duration = Duration::from_millis(50);
/// Killed workers that run for longer than this are reported.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// Connections at a time that have not shown both. The limit is separate, so that strangers take no place of a server.
const MAX_OPENINGS: usize = 64;
/// Servers at a time.
const MAX_SERVERS: usize = 64;
/// Workers of one connection.
const MAX_WORKERS: usize = 1024;
const NCCL_INTERFACE: &str = "NCCL_SOCKET_IFNAME";

/// The node refuses a server for now.
#[derive(Debug, thiserror::Error)]
#[error("the GPUs of this node are used by another server")]
struct GpusInUse;

/// State that all connections share.
struct Node {
    python: PathBuf,
    address: IpAddr,
    acceptor: TlsAcceptor,
    /// A permit for each server that has workers here.
    servers: Semaphore,
    /// A permit for the server whose ranks use them. `None`: they are not offered.
    gpus: Option<Semaphore>,
}

/// Serves until the future is dropped. Run it on the main thread (see `python::module`), with a runtime that has no other.
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
            let text = format!("{reason:#}");
            let report =
                if reason.is::<GpusInUse>() { Report::Busy { reason: text } } else { Report::Lost { reason: text } };
            let farewell = async {
                send(&mut reports, &report).await?;
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
            // The server tries again. If it waited here, two servers could each wait for what the other one has on another node.
            Some(gpus) => Some(gpus.try_acquire().map_err(|_| GpusInUse)?),
        };
        send(reports, &Report::Accepted {}).await?;
        tracing::info!(server = peer.to_string(), ranks = open.num_ranks, "a server uses this node");
        self.host(requests, reports, &open).await
    }

    /// Returns when the fork server and its workers have exited.
    async fn host<R, W>(&self, requests: &mut Lines<R>, reports: &mut W, open: &Open) -> anyhow::Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut command = self.fork_server(open).command();
        if open.uses_gpus && std::env::var_os(NCCL_INTERFACE).is_none() {
            command.env_remove(NCCL_INTERFACE); // Not the loopback interface: NCCL finds one.
        }
        let mut workers = Hosted::new(self.address, open.uses_gpus)?;
        let mut child = command.spawn().context("cannot start the fork server")?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            unreachable!("invariant: all three are piped")
        };
        let tail = StderrTail::default();
        let mut following = tokio::spawn(tail.clone().follow(None, stderr));
        let mut lines = Lines::new(stdout);
        let relayed = workers.relay(requests, reports, &mut stdin, &mut lines).await;
        drop(stdin);
        let status = workers.end(child, lines).await;
        if let End::OfForkServer = relayed? {
            let _ = tokio::time::timeout(OPENING_TIMEOUT, &mut following).await;
            anyhow::bail!(tail.exit_reason("the fork server", status?));
        }
        Ok(())
    }

    fn fork_server(&self, open: &Open) -> ForkServerOptions {
        let num_ranks = open.num_ranks.clamp(1, MAX_WORKERS);
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        ForkServerOptions {
            python: self.python.clone(),
            num_threads: (num_cores / num_ranks).max(1),
            share: MachineShare::default(),
            cpu_isa: open.cpu_isa,
            hub_cache: None,
            node: None,
        }
    }
}

async fn send(to: &mut (impl AsyncWrite + Unpin), message: &impl serde::Serialize) -> io::Result<()> {
    to.write_all((serde_json::to_string(message)? + "\n").as_bytes()).await?;
    to.flush().await
}

/// Whether a process runs. A zombie, whose parent has not asked for its status, does not: it uses nothing any more.
fn is_running(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses, which may have some itself.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The side that ended first.
enum End {
    OfConnection,
    OfForkServer,
}

/// The workers of a connection.
struct Hosted {
    /// Ports of each worker, by its name: one for the server and one for the other ranks, reserved until the worker has ended.
    ports: HashMap<String, [PortReservation; 2]>,
    /// Workers that have started and not ended, by name.
    pids: HashMap<String, Pid>,
    address: IpAddr,
    uses_gpus: bool,
    /// Holds the workers' pipes. Removed on drop.
    folder: TempDir,
    num_started: usize,
}

impl Hosted {
    fn new(address: IpAddr, uses_gpus: bool) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("penstock-").tempdir().context("cannot create a folder")?;
        Ok(Self { ports: HashMap::new(), pids: HashMap::new(), address, uses_gpus, folder, num_started: 0 })
    }

    /// Passes requests and reports on.
    async fn relay<R, W>(
        &mut self,
        requests: &mut Lines<R>,
        reports: &mut W,
        stdin: &mut ChildStdin,
        lines: &mut Lines<ChildStdout>,
    ) -> anyhow::Result<End>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            tokio::select! {
                request = requests.next() => {
                    let Some(request) = request else { return Ok(End::OfConnection) };
                    let request = serde_json::from_str(&request).context("a request is not understood")?;
                    let request = match request {
                        Request::Start(flags) if self.ports.len() >= MAX_WORKERS => {
                            let reason = format!("this node has {MAX_WORKERS} workers of this server already");
                            send(reports, &Report::Refused { name: flags.name, reason }).await?;
                            continue;
                        }
                        Request::Start(flags) => Request::Start(self.place(flags)?),
                        Request::Load { .. } => continue, // Only for one rank on one machine.
                        signal @ Request::Signal { .. } => signal,
                    };
                    send(stdin, &request).await?;
                }
                line = lines.next() => match line.as_deref().map(serde_json::from_str) {
                    Some(Ok(report)) => send(reports, &self.amended(report)).await?,
                    // Printed by code that Python runs at startup.
                    Some(Err(_)) => tracing::info!(target: "worker", "{}", line.unwrap_or_default()),
                    None => return Ok(End::OfForkServer),
                },
            }
        }
    }

    /// Waits until the fork server, whose standard input has ended, has exited, and kills it if it does not. Its workers die with it. Returns
    /// when their memory and devices are free.
    async fn end(&mut self, mut child: Child, mut lines: Lines<ChildStdout>) -> io::Result<ExitStatus> {
        if tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.is_err() {
            let _ = child.start_kill();
        }
        let status = child.wait().await;
        let unread = async {
            while let Some(line) = lines.next().await {
                let _ = serde_json::from_str(&line).map(|report| self.amended(report));
            }
        };
        let _ = tokio::time::timeout(EXIT_TIMEOUT, unread).await;
        let mut all_gone = Box::pin(async {
            while self.pids.values().any(|pid| is_running(*pid)) {
                tokio::time::sleep(EXIT_INTERVAL).await;
            }
        });
        if tokio::time::timeout(KILL_TIMEOUT, &mut all_gone).await.is_err() {
            tracing::warn!("a killed worker is still running after {} s", KILL_TIMEOUT.as_secs());
            all_gone.await;
        }
        status
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
                self.pids.insert(name.clone(), Pid::from_raw(pid));
                let ports =
                    self.ports.get(&name).map(|[worker, peers]| Ports { worker: worker.port, peers: peers.port });
                Report::Started { name, pid, ports }
            }
            report => {
                if let Report::Ended { name, .. } | Report::Refused { name, .. } = &report {
                    self.ports.remove(name);
                    self.pids.remove(name);
                }
                report
            }
        }
    }
}
