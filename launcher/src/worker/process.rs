//! The processes of one worker group: one per rank, started, watched and stopped together.
//!
//! INVARIANT: dropping a `Workers` kills its processes and removes its files.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use penstock_router::worker::{Endpoint, WORKER_NAME, WorkerTls};
use tempfile::TempDir;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use crate::node::authority::{Authority, LAUNCHER_NAME};
use crate::node::client::NodeOptions;
use crate::process::output::{Lines, StderrTail};
use crate::process::python::SpawnError;
use crate::protocol::{Listening, NodeFlags, WorkerEvents, WorkerFlags};
use crate::worker::fork_server::{Forked, WorkerHandle};
use crate::worker::host::{Hosts, LocalRank};

/// Time limit for the kernel to end a killed process. Freeing the memory of a large one takes time.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that the pipes of an exited process may stay open, because a process that it started holds them.
const PIPE_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest path of a group's private folder: with a socket's name it fits into the 107 bytes of an address.
const MAX_FOLDER_BYTES: usize = 80;

/// Settings that every group of a replica shares.
#[derive(Clone, Debug)]
pub(crate) struct WorkerOptions {
    pub(crate) replica: usize,
    pub(crate) num_replicas: usize,
    pub(crate) num_ranks: usize,
    /// Prefix of the socket paths; `None` for paths in the group's private folder.
    pub(crate) socket_prefix: Option<PathBuf>,
}

/// The running processes of a group.
pub(crate) struct Workers {
    ranks: Vec<Rank>,
    /// The reason of each worker's exit.
    exits: mpsc::UnboundedReceiver<String>,
    sockets: Vec<PathBuf>,
    token: String,
    /// Removed on drop.
    folder: TempDir,
}

struct Rank {
    worker: WorkerHandle,
    /// Its address, once it has started.
    place: watch::Receiver<Option<Place>>,
    has_exited: watch::Receiver<bool>,
}

/// Address of a worker.
#[derive(Clone, Debug)]
struct Place {
    endpoint: Endpoint,
    /// Address for the other ranks, as HOST:PORT. Only on a node.
    peers: Option<String>,
}

/// Addresses of a group whose workers have started.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    /// Endpoints in the order of ranks.
    pub(crate) endpoints: Vec<Endpoint>,
    /// `LoadRequest.rendezvous`, at which the ranks meet.
    pub(crate) rendezvous: String,
    /// `LoadRequest.token`.
    pub(crate) token: String,
}

/// The certificates of a group on nodes, made for it.
struct GroupTls {
    authority: Authority,
    router: Arc<WorkerTls>,
}

impl GroupTls {
    fn make() -> Result<Self, rcgen::Error> {
        let authority = Authority::make()?;
        let identity = authority.certify(LAUNCHER_NAME)?.identity();
        let router = Arc::new(WorkerTls { identity, authority: authority.pem() });
        Ok(Self { authority, router })
    }

    /// Flags of a worker on a node, which fills in `listen` and `uses_gpu`.
    fn worker(&self, LocalRank { rank, size }: LocalRank) -> Result<NodeFlags, rcgen::Error> {
        let identity = self.authority.certify(WORKER_NAME)?.identity();
        Ok(NodeFlags {
            local_rank: rank,
            local_size: size,
            uses_gpu: false,
            listen: String::new(),
            certificate: identity.certificates,
            key: identity.key,
            authority: self.authority.pem(),
        })
    }
}

/// Why the processes could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkersError {
    #[error(
        "cannot create a folder for the workers' sockets: {0}; make /tmp writable (for a container: --tmpfs /tmp), or set TMPDIR"
    )]
    Folder(std::io::Error),
    #[error("cannot create the pipes of a worker: {0}")]
    Pipe(std::io::Error),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error("cannot make the workers' certificates: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// A new folder that only this user can enter: in `parent`, or in /tmp if the path there is too long for sockets.
fn private_folder(parent: &Path) -> std::io::Result<TempDir> {
    let mut new = tempfile::Builder::new();
    new.prefix("penstock-").permissions(Permissions::from_mode(0o700));
    let folder = new.tempdir_in(parent)?;
    if folder.path().as_os_str().len() <= MAX_FOLDER_BYTES { Ok(folder) } else { new.tempdir_in("/tmp") }
}

impl Workers {
    /// Starts one process per rank. Call it on the main thread (see `python::module`).
    ///
    /// `number` is unique among the groups of this replica.
    pub(crate) fn spawn(options: &WorkerOptions, hosts: &mut Hosts, number: usize) -> Result<Self, WorkersError> {
        hosts.start()?;
        let number = options.replica + options.num_replicas * number;
        let folder = private_folder(&std::env::temp_dir()).map_err(WorkersError::Folder)?;
        let mut prefix = options.socket_prefix.clone().unwrap_or_else(|| folder.path().join("worker")).into_os_string();
        // COMPAT: the first group's sockets have TGI's names.
        if number > 0 {
            prefix.push(format!("-{number}"));
        }
        let (exit_sender, exits) = mpsc::unbounded_channel();
        let token: [u8; 32] = rand::random();
        let token: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut workers = Self { ranks: Vec::new(), exits, sockets: Vec::new(), token, folder };
        let mut tls = None;
        for rank in 0..options.num_ranks {
            let mut socket = prefix.clone();
            socket.push(format!("-{rank}"));
            let socket = PathBuf::from(socket);
            let [stdout, stderr] =
                ["stdout", "stderr"].map(|name| workers.folder.path().join(format!("{name}-{rank}")));
            let (host, local_rank) = hosts.of_rank(rank, options.num_ranks);
            let (node, place_of): (_, PlaceOf) = match host.node() {
                None => {
                    let endpoint = Endpoint::Unix(socket.clone());
                    (None, Box::new(|_| Some(Place { endpoint, peers: None })))
                }
                Some(_) => {
                    let tls = match &mut tls {
                        Some(tls) => tls,
                        none => none.insert(GroupTls::make()?),
                    };
                    let router = tls.router.clone();
                    let place_of = move |listening: Option<_>| Some(Place::on_node(listening?, router));
                    (Some(tls.worker(local_rank)?), Box::new(place_of))
                }
            };
            let on_node =
                host.node().and_then(NodeOptions::address).map_or_else(String::new, |address| format!(" on {address}"));
            // A node logs what its workers print.
            let pipes = if node.is_none() { Some((make_pipe(&stdout)?, make_pipe(&stderr)?)) } else { None };
            let flags = WorkerFlags {
                name: format!("worker-{number}.{rank}"),
                endpoint: Endpoint::Unix(socket.clone()).to_string(),
                rank,
                world_size: options.num_ranks,
                token: workers.token.clone(),
                node,
                stdout,
                stderr,
            };
            let Forked { handle, events } = host.start_worker(flags)?;
            let (place_sender, place) = watch::channel(None);
            let (exited_sender, has_exited) = watch::channel(false);
            let worker =
                Watched { rank, name: format!("the worker of rank {rank}{on_node}"), place_of, place: place_sender };
            let watching = worker.watch(events, pipes, exited_sender, exit_sender.clone());
            let socket_file = socket.clone();
            tokio::spawn(async move {
                watching.await;
                // The worker may have created it after `drop` removed the files.
                let _ = std::fs::remove_file(socket_file);
            });
            workers.ranks.push(Rank { worker: handle, place, has_exited });
            workers.sockets.push(socket);
        }
        Ok(workers)
    }

    /// Resolves when all workers have been forked, which happens after the fork server has loaded the model; never if one
    /// cannot be.
    pub(crate) fn started(&self) -> impl Future<Output = Meeting> + use<> {
        let mut places: Vec<_> = self.ranks.iter().map(|rank| rank.place.clone()).collect();
        let file = format!("file://{}", self.folder.path().join("rendezvous").display());
        let token = self.token.clone();
        async move {
            let (mut endpoints, mut peers) = (Vec::new(), Vec::new());
            for place in &mut places {
                let place = place.wait_for(Option::is_some).await.ok().and_then(|place| place.clone());
                let Some(place) = place else { return std::future::pending().await };
                endpoints.push(place.endpoint);
                peers.extend(place.peers);
            }
            let rendezvous = if peers.is_empty() { file } else { format!("tls://{}", peers.join(",")) };
            Meeting { endpoints, rendezvous, token }
        }
    }

    /// Resolves when a worker exits, with a sentence that says which one and why. Cancel safe.
    pub(crate) async fn exit(&mut self) -> String {
        match self.exits.recv().await {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }

    /// Whether every worker is running.
    pub(crate) fn are_alive(&self) -> bool {
        self.ranks.iter().all(|rank| !*rank.has_exited.borrow() && rank.worker.has_fork_server())
    }

    /// Asks the workers to exit, and kills those that have not after `grace`.
    pub(crate) async fn stop(self, grace: Duration) {
        if !self.ranks.iter().all(|rank| rank.place.borrow().is_some()) {
            return; // The fork server is still loading. Dropping the workers kills those that it forks.
        }
        self.signal(Signal::SIGTERM);
        if !self.have_exited(grace).await {
            tracing::warn!("a worker did not exit within {} s and is killed", grace.as_secs());
        }
    }

    /// Kills the workers and waits until their memory and devices are free. Returns whether they are.
    pub(crate) async fn kill(self) -> bool {
        self.signal(Signal::SIGKILL);
        let have_exited = self.have_exited(KILL_TIMEOUT).await;
        if !have_exited {
            tracing::warn!("a killed worker is still running after {} s", KILL_TIMEOUT.as_secs());
        }
        have_exited
    }

    /// Kills the workers without waiting. A group that has lost a rank cannot compute.
    pub(crate) fn kill_now(&self) {
        self.signal(Signal::SIGKILL);
    }

    /// Whether all workers exit within `limit`.
    async fn have_exited(&self, limit: Duration) -> bool {
        let all_exited = async {
            for rank in &self.ranks {
                let mut has_exited = rank.has_exited.clone();
                // An error means that `watch_worker` has returned, so the process has exited.
                let _ = has_exited.wait_for(|exited| *exited).await;
            }
        };
        tokio::time::timeout(limit, all_exited).await.is_ok()
    }

    fn signal(&self, signal: Signal) {
        for rank in &self.ranks {
            if !*rank.has_exited.borrow() {
                rank.worker.signal(signal);
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        for socket in &self.sockets {
            // Missing if it is in the private folder, or if the worker removed it.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// Creates a FIFO that only this user may open.
pub(crate) fn make_pipe(path: &Path) -> Result<pipe::Receiver, WorkersError> {
    mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|error| WorkersError::Pipe(error.into()))?;
    pipe::OpenOptions::new().open_receiver(path).map_err(WorkersError::Pipe)
}

/// Address of a worker, from the report of its start. `None`: the report lacks something.
type PlaceOf = Box<dyn FnOnce(Option<Listening>) -> Option<Place> + Send>;

impl Place {
    fn on_node(Listening { host, ports }: Listening, tls: Arc<WorkerTls>) -> Self {
        let peers = Some(format!("{host}:{}", ports.peers));
        Self { endpoint: Endpoint::Tcp { host, port: ports.worker, tls }, peers }
    }
}

/// A worker that was requested.
struct Watched {
    rank: usize,
    /// Name for the log.
    name: String,
    place_of: PlaceOf,
    place: watch::Sender<Option<Place>>,
}

impl Watched {
    /// Logs the worker's output and reports its exit.
    async fn watch(
        self,
        events: WorkerEvents,
        pipes: Option<(pipe::Receiver, pipe::Receiver)>,
        has_exited: watch::Sender<bool>,
        exits: mpsc::UnboundedSender<String>,
    ) {
        let Self { rank, name, place_of, place } = self;
        let WorkerEvents { started, exited } = events;
        let tail = StderrTail::default();
        // A FIFO without a writer looks closed, so reading starts when the worker has opened it.
        let started = started.await.ok();
        let open = pipes.filter(|_| started.is_some());
        place.send_replace(started.and_then(place_of));
        let (stdout, stderr) = open.unzip();
        let mut stdout = tokio::spawn(async move {
            let Some(stdout) = stdout else { return };
            let mut lines = Lines::new(stdout);
            while let Some(line) = lines.next().await {
                tracing::info!(target: "worker", rank, "{line}");
            }
        });
        let follow = stderr.map(|stderr| tail.clone().follow(Some(rank), stderr));
        let mut stderr = tokio::spawn(async move {
            if let Some(follow) = follow {
                follow.await;
            }
        });
        let status = exited.await.unwrap_or_else(|_| Err("the fork server was abandoned".to_owned()));
        let limit = if status.is_ok() {
            has_exited.send_replace(true);
            PIPE_TIMEOUT
        } else {
            // The kernel kills the worker without a report. Its stdout closes when its memory is free.
            KILL_TIMEOUT
        };
        if tokio::time::timeout(limit, &mut stdout).await.is_err() {
            stdout.abort();
        }
        has_exited.send_replace(true);
        if tokio::time::timeout(PIPE_TIMEOUT, &mut stderr).await.is_err() {
            stderr.abort();
        }
        let reason = match status {
            Ok(status) => tail.exit_reason(&name, status),
            Err(reason) => format!("{name} is lost: {reason}"),
        };
        // The receiver is gone while the server stops.
        let _ = exits.send(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_fit_into_their_addresses_wherever_temporary_files_are() {
        let parent = tempfile::tempdir_in("/tmp").unwrap();
        let long = parent.path().join("x".repeat(100));
        std::fs::create_dir(&long).unwrap();
        for (given, expected) in [(parent.path(), parent.path()), (&long, Path::new("/tmp"))] {
            let folder = private_folder(given).unwrap();
            assert_eq!(folder.path().parent(), Some(expected));
            assert_eq!(folder.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
            std::os::unix::net::UnixListener::bind(folder.path().join("worker-10000-63.steps")).unwrap();
        }
        assert_eq!(std::fs::read_dir(long).unwrap().count(), 0, "a folder was left behind");
    }
}
