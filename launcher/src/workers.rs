//! The processes of one worker group: one per rank, started, watched and stopped together.
//!
//! INVARIANT: dropping a `Workers` kills its processes and removes its files.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use crate::fork_protocol::{WorkerEvents, WorkerFlags};
use crate::fork_server::{ForkServer, Forked, SpawnError, WorkerHandle};
use crate::output::{Lines, StderrTail};

/// How long the kernel may take to end a killed process. Freeing the memory of a large one takes time.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the pipes of an exited process may stay open, because a process that it started holds them.
const PIPE_TIMEOUT: Duration = Duration::from_secs(1);

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
    /// Removed on drop.
    folder: TempDir,
}

struct Rank {
    worker: WorkerHandle,
    has_started: watch::Receiver<bool>,
    has_exited: watch::Receiver<bool>,
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
}

impl Workers {
    /// Starts one process per rank. Call it on the main thread (see `process::python_module`).
    ///
    /// `number` is unique among the groups of this replica.
    pub(crate) fn spawn(
        options: &WorkerOptions,
        fork_server: &mut ForkServer,
        number: usize,
    ) -> Result<Self, WorkersError> {
        let number = options.replica + options.num_replicas * number;
        let folder = tempfile::Builder::new().prefix("penstock-").permissions(Permissions::from_mode(0o700)).tempdir();
        let folder = folder.map_err(WorkersError::Folder)?;
        let mut prefix = options.socket_prefix.clone().unwrap_or_else(|| folder.path().join("worker")).into_os_string();
        // COMPAT: the first group's sockets have TGI's names.
        if number > 0 {
            prefix.push(format!("-{number}"));
        }
        let (exit_sender, exits) = mpsc::unbounded_channel();
        let mut workers = Self { ranks: Vec::new(), exits, sockets: Vec::new(), folder };
        for rank in 0..options.num_ranks {
            let mut socket = prefix.clone();
            socket.push(format!("-{rank}"));
            let socket = PathBuf::from(socket);
            let [stdout, stderr] =
                ["stdout", "stderr"].map(|name| workers.folder.path().join(format!("{name}-{rank}")));
            let pipes = (make_pipe(&stdout)?, make_pipe(&stderr)?);
            let name = format!("worker-{number}.{rank}");
            let flags =
                WorkerFlags { name, socket: socket.clone(), rank, world_size: options.num_ranks, stdout, stderr };
            let Forked { handle, events } = fork_server.start_worker(flags)?;
            let (started_sender, has_started) = watch::channel(false);
            let (exited_sender, has_exited) = watch::channel(false);
            let watching = watch_worker(rank, events, pipes, started_sender, exited_sender, exit_sender.clone());
            let socket_file = socket.clone();
            tokio::spawn(async move {
                watching.await;
                // The worker may have created it after `drop` removed the files.
                let _ = std::fs::remove_file(socket_file);
            });
            workers.ranks.push(Rank { worker: handle, has_started, has_exited });
            workers.sockets.push(socket);
        }
        Ok(workers)
    }

    /// Where the workers listen, in the order of ranks.
    pub(crate) fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    /// Where the ranks meet: an init method of torch.distributed.
    pub(crate) fn rendezvous(&self) -> String {
        format!("file://{}", self.folder.path().join("rendezvous").display())
    }

    /// Resolves when all workers have been forked, which happens after the fork server has loaded the model; never if one
    /// cannot be.
    pub(crate) fn started(&self) -> impl Future<Output = ()> + use<> {
        let ranks: Vec<_> = self.ranks.iter().map(|rank| rank.has_started.clone()).collect();
        async move {
            for mut has_started in ranks {
                if has_started.wait_for(|started| *started).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
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
        if !self.ranks.iter().all(|rank| *rank.has_started.borrow()) {
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
fn make_pipe(path: &Path) -> Result<pipe::Receiver, WorkersError> {
    mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|error| WorkersError::Pipe(error.into()))?;
    pipe::OpenOptions::new().open_receiver(path).map_err(WorkersError::Pipe)
}

/// Logs a worker's output and reports its exit.
async fn watch_worker(
    rank: usize,
    events: WorkerEvents,
    (stdout, stderr): (pipe::Receiver, pipe::Receiver),
    started_sender: watch::Sender<bool>,
    has_exited: watch::Sender<bool>,
    exits: mpsc::UnboundedSender<String>,
) {
    let WorkerEvents { started, exited } = events;
    let tail = StderrTail::default();
    // A FIFO without a writer looks closed, so reading starts when the worker has opened it.
    let has_started = started.await.is_ok();
    started_sender.send_replace(has_started);
    let mut stdout = tokio::spawn(async move {
        let mut lines = Lines::new(stdout);
        while has_started && let Some(line) = lines.next().await {
            tracing::info!(target: "worker", rank, "{line}");
        }
    });
    let follow = tail.clone().follow(Some(rank), stderr);
    let mut stderr = tokio::spawn(async move {
        if has_started {
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
    let worker = format!("the worker of rank {rank}");
    let reason = match status {
        Ok(status) => tail.exit_reason(&worker, status),
        Err(reason) => format!("{worker} is lost: {reason}"),
    };
    // The receiver is gone while the server stops.
    let _ = exits.send(reason);
}
