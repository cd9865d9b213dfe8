//! The workers' processes: one a rank, started together, followed, and stopped together.
//!
//! INVARIANT: when a `Workers` is dropped, none of its processes and none of its files is left.

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

use crate::fork_protocol::{Life, WorkerFlags};
use crate::fork_server::{ForkServer, Forked, SpawnError, WorkerHandle};
use crate::last_words::LastWords;
use crate::process;

/// How long the kernel may take to end what was killed: the memory of a large process is not free at once.
const KILL_PATIENCE: Duration = Duration::from_secs(30);
/// How long the pipes of a process that ended may stay open: something that it started may hold them.
const PIPE_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct WorkerOptions {
    pub num_ranks: usize,
    /// Beginning of the socket paths; `None`: in the private folder.
    pub socket_prefix: Option<PathBuf>,
}

pub struct Workers {
    ranks: Vec<Rank>,
    deaths: mpsc::UnboundedReceiver<String>,
    sockets: Vec<PathBuf>,
    /// Removed on drop.
    folder: TempDir,
}

struct Rank {
    worker: WorkerHandle,
    has_ended: watch::Receiver<bool>,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkersError {
    #[error("cannot make a folder for the workers' sockets: {0}")]
    Folder(std::io::Error),
    #[error("cannot make the pipes of a worker: {0}")]
    Pipe(std::io::Error),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

impl Workers {
    /// Starts one process a rank. Call it on the main thread (see `process::python_module`).
    ///
    /// `number` counts the groups of this server; two that live at the same time need different ones.
    pub fn spawn(options: &WorkerOptions, fork_server: &mut ForkServer, number: usize) -> Result<Self, WorkersError> {
        let folder = tempfile::Builder::new().prefix("penstock-").permissions(Permissions::from_mode(0o700)).tempdir();
        let folder = folder.map_err(WorkersError::Folder)?;
        let mut prefix = options.socket_prefix.clone().unwrap_or_else(|| folder.path().join("worker")).into_os_string();
        // COMPAT: the sockets of the first group have TGI's names.
        if number > 0 {
            prefix.push(format!("-{number}"));
        }
        let (death_sender, deaths) = mpsc::unbounded_channel();
        let mut workers = Self { ranks: Vec::new(), deaths, sockets: Vec::new(), folder };
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
            let Forked { handle, life } = fork_server.start_worker(flags)?;
            let (end_sender, has_ended) = watch::channel(false);
            let life = follow(rank, life, pipes, end_sender, death_sender.clone());
            let its_socket = socket.clone();
            tokio::spawn(async move {
                life.await;
                // It may have made it after `drop` looked.
                let _ = std::fs::remove_file(its_socket);
            });
            workers.ranks.push(Rank { worker: handle, has_ended });
            workers.sockets.push(socket);
        }
        Ok(workers)
    }

    /// Where the ranks listen, in their order.
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    /// Where the ranks meet, as a torch.distributed init method.
    pub fn rendezvous(&self) -> String {
        format!("file://{}", self.folder.path().join("rendezvous").display())
    }

    /// Resolves when a worker ends, with a sentence that says which one and why.
    pub async fn death(&mut self) -> String {
        match self.deaths.recv().await {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }

    /// Whether none has ended.
    pub fn are_alive(&self) -> bool {
        self.ranks.iter().all(|rank| !*rank.has_ended.borrow() && rank.worker.has_fork_server())
    }

    /// Asks all to end, and kills what has not after `grace`.
    pub async fn stop(self, grace: Duration) {
        self.signal(Signal::SIGTERM);
        if !self.have_ended(grace).await {
            tracing::warn!("a worker did not stop within {} s and is killed", grace.as_secs());
        }
    }

    /// Kills what is left, and waits until its memory and its devices are free. Whether they are.
    pub async fn kill(self) -> bool {
        self.signal(Signal::SIGKILL);
        let have_ended = self.have_ended(KILL_PATIENCE).await;
        if !have_ended {
            tracing::warn!("a worker that was killed is still there after {} s", KILL_PATIENCE.as_secs());
        }
        have_ended
    }

    /// Kills what is left without waiting: of ranks that depend on each other, one is not worth anything alone.
    pub fn disband(&self) {
        self.signal(Signal::SIGKILL);
    }

    async fn have_ended(&self, patience: Duration) -> bool {
        let all_ended = async {
            for rank in &self.ranks {
                let mut has_ended = rank.has_ended.clone();
                // An error means that its follower is gone, and so is the process.
                let _ = has_ended.wait_for(|ended| *ended).await;
            }
        };
        tokio::time::timeout(patience, all_ended).await.is_ok()
    }

    fn signal(&self, signal: Signal) {
        for rank in &self.ranks {
            if !*rank.has_ended.borrow() {
                rank.worker.signal(signal);
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        for socket in &self.sockets {
            // Those in the private folder go with it; a worker that ended by itself has removed its own.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// A FIFO, which only this user may open.
fn make_pipe(path: &Path) -> Result<pipe::Receiver, WorkersError> {
    mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|error| WorkersError::Pipe(error.into()))?;
    pipe::OpenOptions::new().open_receiver(path).map_err(WorkersError::Pipe)
}

/// Re-emits what a worker says, and reports its end.
async fn follow(
    rank: usize,
    life: Life,
    (stdout, stderr): (pipe::Receiver, pipe::Receiver),
    end: watch::Sender<bool>,
    deaths: mpsc::UnboundedSender<String>,
) {
    let Life { started, ended } = life;
    let last_words = LastWords::default();
    // Before, a pipe would look as if it had been closed.
    let has_started = started.await.is_ok();
    let log = move |line: &str| tracing::info!(target: "worker", rank, "{line}");
    let mut stdout = tokio::spawn(async move {
        if has_started {
            process::for_each_line(stdout, log).await;
        }
    });
    let follow = last_words.clone().follow(Some(rank), stderr);
    let mut stderr = tokio::spawn(async move {
        if has_started {
            follow.await;
        }
    });
    let status = ended.await.unwrap_or_else(|_| Err("the fork server was given up".to_owned()));
    let patience = if status.is_ok() {
        end.send_replace(true);
        PIPE_PATIENCE
    } else {
        // The kernel ends it, and nobody tells: its output, which it has for itself, closes when its memory is free.
        KILL_PATIENCE
    };
    if tokio::time::timeout(patience, &mut stdout).await.is_err() {
        stdout.abort();
    }
    end.send_replace(true);
    if tokio::time::timeout(PIPE_PATIENCE, &mut stderr).await.is_err() {
        stderr.abort();
    }
    let who = format!("the worker of rank {rank}");
    let reason = match status {
        Ok(status) => last_words.exit_reason(&who, status),
        Err(reason) => format!("{who} is lost: {reason}"),
    };
    // Nobody listens any more when the server is stopping.
    let _ = deaths.send(reason);
}
