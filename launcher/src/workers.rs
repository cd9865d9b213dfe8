//! The workers' processes: one a rank, started together, followed, and stopped together.
//!
//! INVARIANT: when a `Workers` is dropped, none of its processes and none of its files is left.

use std::collections::VecDeque;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde::Deserialize;
use tempfile::TempDir;
use tokio::process::Child;
use tokio::sync::{mpsc, watch};

use crate::process;

/// How much of what a worker last said may explain its end.
const MAX_LAST_LINES: usize = 20;
/// How long the kernel may take to end what was killed: the memory of a large process is not free at once.
const KILL_PATIENCE: Duration = Duration::from_secs(30);
/// How long the pipes of a process that ended may stay open: something that it started may hold them.
const PIPE_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct WorkerOptions {
    pub python: PathBuf,
    pub num_ranks: usize,
    /// CPU threads of each rank.
    pub num_threads: usize,
    /// Beginning of the socket paths; `None`: in the private folder.
    pub socket_prefix: Option<PathBuf>,
    pub hub_cache: Option<PathBuf>,
}

/// What processes are started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Serving,
    /// To take the place of others one day, so without hurry.
    Reserve,
}

pub struct Workers {
    ranks: Vec<Rank>,
    deaths: mpsc::UnboundedReceiver<String>,
    sockets: Vec<PathBuf>,
    /// Removed on drop.
    folder: TempDir,
}

struct Rank {
    leader: Pid,
    has_ended: watch::Receiver<bool>,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkersError {
    #[error("cannot make a folder for the workers' sockets: {0}")]
    Folder(std::io::Error),
    #[error("cannot start {}: {source}; set PENSTOCK_PYTHON to the interpreter that has penstock_server", .python.display())]
    Spawn { python: PathBuf, source: std::io::Error },
}

impl Workers {
    /// Starts one process a rank. Call it on the main thread (see `process::python_module`).
    ///
    /// `number` counts the groups of this server; two that live at the same time need different ones.
    pub fn spawn(options: &WorkerOptions, number: usize, role: Role) -> Result<Self, WorkersError> {
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
            let spawn_error = |source| WorkersError::Spawn { python: options.python.clone(), source };
            let child = spawn_rank(options, rank, &socket, role).map_err(spawn_error)?;
            let leader = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
            let leader = leader.expect("invariant: a child that was not waited for has an id");
            let (end_sender, has_ended) = watch::channel(false);
            tokio::spawn(follow(rank, child, end_sender, death_sender.clone()));
            workers.ranks.push(Rank { leader, has_ended });
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
        self.ranks.iter().all(|rank| !*rank.has_ended.borrow())
    }

    /// Asks all to end, and kills what has not after `grace`.
    pub async fn stop(self, grace: Duration) {
        self.signal(Signal::SIGTERM);
        if !self.have_ended(grace).await {
            tracing::warn!("a worker did not stop within {} s and is killed", grace.as_secs());
        }
    }

    /// Kills what is left, and waits until its memory and its devices are free.
    pub async fn kill(self) {
        self.signal(Signal::SIGKILL);
        if !self.have_ended(KILL_PATIENCE).await {
            tracing::warn!("a worker that was killed is still there after {} s", KILL_PATIENCE.as_secs());
        }
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
                process::signal_group(rank.leader, signal);
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

fn spawn_rank(options: &WorkerOptions, rank: usize, socket: &Path, role: Role) -> std::io::Result<Child> {
    let mut command = process::python_module(&options.python, "penstock_server");
    command.arg("--socket").arg(socket).args(["--rank", &rank.to_string()]);
    command.args(["--world-size", &options.num_ranks.to_string()]);
    if role == Role::Reserve {
        command.arg("--in-reserve");
    }
    if std::env::var_os("OMP_NUM_THREADS").is_none() {
        command.env("OMP_NUM_THREADS", options.num_threads.to_string());
    }
    if let Some(cache) = &options.hub_cache {
        command.env("HF_HUB_CACHE", cache);
    }
    command.spawn()
}

/// Re-emits what a worker says, and reports its end.
async fn follow(rank: usize, mut child: Child, end: watch::Sender<bool>, deaths: mpsc::UnboundedSender<String>) {
    let last_lines = Arc::new(Mutex::new(VecDeque::new()));
    let pipes = {
        let (stdout, stderr, last_lines) = (child.stdout.take(), child.stderr.take(), last_lines.clone());
        async move {
            let stdout = async {
                if let Some(stdout) = stdout {
                    process::for_each_line(stdout, |line| tracing::info!(target: "worker", rank, "{line}")).await;
                }
            };
            let stderr = async {
                if let Some(stderr) = stderr {
                    process::for_each_line(stderr, |line| remember(&last_lines, re_emit(rank, line))).await;
                }
            };
            tokio::join!(stdout, stderr);
        }
    };
    let mut pipes = tokio::spawn(pipes);
    let status = child.wait().await;
    end.send_replace(true);
    if tokio::time::timeout(PIPE_PATIENCE, &mut pipes).await.is_err() {
        pipes.abort();
    }
    let last_lines = last_lines.lock().unwrap_or_else(PoisonError::into_inner);
    let reason = match status {
        Ok(status) => exit_reason(rank, status, last_lines.iter()),
        Err(error) => format!("the worker of rank {rank} cannot be watched: {error}"),
    };
    // Nobody listens any more when the server is stopping.
    let _ = deaths.send(reason);
}

fn remember(last_lines: &Mutex<VecDeque<String>>, line: Option<String>) {
    if let Some(line) = line {
        let mut last_lines = last_lines.lock().unwrap_or_else(PoisonError::into_inner);
        if last_lines.len() == MAX_LAST_LINES {
            last_lines.pop_front();
        }
        last_lines.push_back(line);
    }
}

#[derive(Deserialize)]
struct LogLine {
    level: String,
    message: String,
    #[serde(default)]
    target: String,
}

/// Logs a line of a worker's standard error under its rank. What may explain the worker's end comes back.
fn re_emit(rank: usize, line: &str) -> Option<String> {
    let Ok(LogLine { level, message, target: module }) = serde_json::from_str(line) else {
        // Not from its logger: the interpreter's or a library's own words.
        tracing::warn!(target: "worker", rank, "{line}");
        return Some(line.to_owned());
    };
    match level.as_str() {
        "TRACE" | "DEBUG" => tracing::debug!(target: "worker", rank, module, "{message}"),
        "INFO" => tracing::info!(target: "worker", rank, module, "{message}"),
        "WARN" | "WARNING" => tracing::warn!(target: "worker", rank, module, "{message}"),
        _ => {
            tracing::error!(target: "worker", rank, module, "{message}");
            return Some(message);
        }
    }
    None
}

/// One sentence on how and, as far as its last words tell, why a worker ended.
fn exit_reason<'a>(rank: usize, status: ExitStatus, last_lines: impl Iterator<Item = &'a String>) -> String {
    let lines: Vec<&str> = last_lines.flat_map(|lines| lines.lines()).map(str::trim).collect();
    let stated = lines.iter().rev().find_map(|line| line.strip_prefix("error: "));
    let last = lines.iter().rev().find(|line| !line.is_empty()).copied();
    let how = match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = Signal::try_from(signal).map_or_else(|_| signal.to_string(), |signal| signal.to_string());
            let hint = if signal == Signal::SIGKILL as i32 { ", as happens when memory runs out" } else { "" };
            format!("was ended by {name}{hint}")
        }
        (None, Some(0)) => "ended".to_owned(),
        (None, code) => format!("ended with exit status {}", code.unwrap_or_default()),
    };
    match stated.or(last) {
        Some(why) => format!("the worker of rank {rank} {how}: {why}"),
        None => format!("the worker of rank {rank} {how}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(raw_status: i32, lines: &[&str]) -> String {
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        exit_reason(2, ExitStatus::from_raw(raw_status), lines.iter())
    }

    #[test]
    fn an_exit_is_explained_by_the_workers_stated_error() {
        let lines = ["error: no model here", "some library's farewell"];
        assert_eq!(reason(1 << 8, &lines), "the worker of rank 2 ended with exit status 1: no model here");
    }

    #[test]
    fn an_exit_without_a_stated_error_is_explained_by_the_last_line() {
        let lines = ["Traceback (most recent call last):\n  File x\nValueError: no", "  "];
        assert_eq!(reason(3 << 8, &lines), "the worker of rank 2 ended with exit status 3: ValueError: no");
    }

    #[test]
    fn a_kill_hints_at_memory() {
        let expected = "the worker of rank 2 was ended by SIGKILL, as happens when memory runs out";
        assert_eq!(reason(Signal::SIGKILL as i32, &[]), expected);
    }

    #[test]
    fn log_lines_explain_an_end_only_when_they_are_errors() {
        assert_eq!(re_emit(0, r#"{"level":"INFO","message":"loaded","target":"a"}"#), None);
        let error = r#"{"level":"ERROR","message":"boom\nValueError: x","target":"a"}"#;
        assert_eq!(re_emit(0, error), Some("boom\nValueError: x".to_owned()));
        assert_eq!(re_emit(0, "Segmentation fault"), Some("Segmentation fault".to_owned()));
    }
}
