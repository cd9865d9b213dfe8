//! The process from which the workers are forked: Python's imports are done in it, once for all of them.
//!
//! INVARIANT: when this process or that one ends, the kernel ends the workers.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::fork_protocol::{Command, Life, Lives, Report, WorkerFlags};
use crate::last_words::LastWords;
use crate::process;

/// How long it may take to exit when it has closed its output.
const EXIT_PATIENCE: Duration = Duration::from_secs(1);

/// Started when the first worker is asked for, and again when one is asked for after its end.
pub struct ForkServer {
    options: ForkServerOptions,
    process: Option<Process>,
}

/// What is the same for all workers.
#[derive(Clone, Debug)]
pub struct ForkServerOptions {
    pub python: PathBuf,
    /// CPU threads of each rank.
    pub num_threads: usize,
    pub hub_cache: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot start {}: {source}; set PENSTOCK_PYTHON to the interpreter that has penstock_server", .python.display())]
pub struct SpawnError {
    python: PathBuf,
    source: std::io::Error,
}

/// How long the imports took, when they are done. Closed when the process has ended.
type ImportTime = watch::Receiver<Option<Duration>>;

struct Process {
    commands: mpsc::UnboundedSender<Command>,
    import_time: ImportTime,
    task: JoinHandle<()>,
}

/// A worker that was asked for.
pub struct Forked {
    pub handle: WorkerHandle,
    pub life: Life,
}

/// Signals a worker, and whatever it started, as long as it is there.
pub struct WorkerHandle {
    name: String,
    commands: mpsc::UnboundedSender<Command>,
    import_time: ImportTime,
}

impl WorkerHandle {
    /// Whether its fork server is there, without which it cannot live.
    pub fn has_fork_server(&self) -> bool {
        self.import_time.has_changed().is_ok()
    }

    pub fn signal(&self, signal: Signal) {
        // A fork server that has ended took its workers with it.
        let _ = self.commands.send(Command::Signal { name: self.name.clone(), signal });
    }
}

impl ForkServer {
    pub fn new(options: ForkServerOptions) -> Self {
        Self { options, process: None }
    }

    /// Asks for a worker. Call it on the main thread (see `process::python_module`).
    pub fn start_worker(&mut self, flags: WorkerFlags) -> Result<Forked, SpawnError> {
        let process = match self.process.take().filter(|process| process.import_time.has_changed().is_ok()) {
            Some(process) => process,
            None => {
                self.options.spawn().map_err(|source| SpawnError { python: self.options.python.clone(), source })?
            }
        };
        let Process { commands, import_time, .. } = self.process.insert(process);
        let (sender, life) = Life::new();
        let handle =
            WorkerHandle { name: flags.name.clone(), commands: commands.clone(), import_time: import_time.clone() };
        // Heard also after the end of the process, if only to be told of it.
        let _ = handle.commands.send(Command::Start { flags, life: sender });
        Ok(Forked { handle, life })
    }

    /// Resolves when its imports are done, with the time from its start; never if it ends before.
    pub fn import_time(&self) -> impl Future<Output = Duration> + use<> {
        let import_time = self.process.as_ref().map(|process| process.import_time.clone());
        async move {
            if let Some(mut import_time) = import_time
                && let Ok(found) = import_time.wait_for(Option::is_some).await
                && let Some(duration) = *found
            {
                return duration;
            }
            std::future::pending().await
        }
    }

    /// Kills it and, with it, its workers, when it does not do what it is told.
    pub async fn abandon(&mut self) {
        if let Some(Process { task, .. }) = self.process.take() {
            task.abort();
            let _ = task.await;
        }
    }

    /// Ends it when nobody holds a worker any more.
    pub async fn stop(self) {
        if let Some(Process { commands, task, .. }) = self.process {
            drop(commands);
            // An error means that it is gone.
            let _ = task.await;
        }
    }
}

impl ForkServerOptions {
    fn spawn(&self) -> std::io::Result<Process> {
        let mut command = process::python_module(&self.python, "penstock_server.fork_server");
        command.stdin(Stdio::piped());
        // Numpy's own threads would be there when it forks.
        command.env("OPENBLAS_NUM_THREADS", "1");
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", self.num_threads.to_string());
        }
        if let Some(cache) = &self.hub_cache {
            command.env("HF_HUB_CACHE", cache);
        }
        let (commands, received) = mpsc::unbounded_channel();
        let (import_sender, import_time) = watch::channel(None);
        let task = tokio::spawn(drive(command.spawn()?, received, import_sender));
        Ok(Process { commands, import_time, task })
    }
}

/// Speaks with the process until it ends, or nobody wants anything of it; then ends it, and tells all who ask why.
async fn drive(
    mut child: Child,
    mut commands: mpsc::UnboundedReceiver<Command>,
    import_time: watch::Sender<Option<Duration>>,
) {
    let began = Instant::now();
    let (Some(mut stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        unreachable!("invariant: its pipes are ours")
    };
    let last_words = LastWords::default();
    let mut following = tokio::spawn(last_words.clone().follow(None, stderr));
    let mut reports = BufReader::new(stdout).lines();
    let mut workers = Lives::default();
    loop {
        tokio::select! {
            command = commands.recv() => match command.map(|command| workers.request(command)) {
                None => {
                    let _ = child.start_kill();
                    break;
                }
                Some(request) => if stdin.write_all(request.as_bytes()).await.is_err() {
                    break;
                },
            },
            line = reports.next_line() => match line {
                Ok(Some(line)) => match serde_json::from_str(&line) {
                    Ok(Report::Ready {}) => {
                        import_time.send_replace(Some(began.elapsed()));
                    }
                    Ok(report) => workers.hear(report),
                    // Something that Python was made to run at its start.
                    Err(_) => tracing::info!(target: "worker", "{line}"),
                },
                _ => break,
            },
        }
    }
    drop(import_time);
    if tokio::time::timeout(EXIT_PATIENCE, child.wait()).await.is_err() {
        let _ = child.start_kill();
    }
    let status = child.wait().await;
    if tokio::time::timeout(EXIT_PATIENCE, &mut following).await.is_err() {
        following.abort();
    }
    let reason = match status {
        Ok(status) => last_words.exit_reason("the fork server", status),
        Err(error) => format!("the fork server cannot be watched: {error}"),
    };
    workers.end(&reason);
    while let Some(command) = commands.recv().await {
        workers.request(command);
        workers.end(&reason);
    }
}
