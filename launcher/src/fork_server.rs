//! The process from which the workers are forked: Python's imports are done in it, once for all of them.
//!
//! The protocol is in `server/penstock_server/fork_server.py`. When this process or that one ends, the kernel ends the
//! workers.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

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

struct Process {
    commands: mpsc::UnboundedSender<Command>,
    import_time: watch::Receiver<Option<Duration>>,
    task: JoinHandle<()>,
}

/// What a worker is started with.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerFlags {
    /// Its own among all of this fork server.
    pub name: String,
    pub socket: PathBuf,
    pub rank: usize,
    pub world_size: usize,
    /// FIFOs, open for reading.
    pub stdout: PathBuf,
    pub stderr: PathBuf,
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
}

impl WorkerHandle {
    /// Whether its fork server is there, without which it cannot live.
    pub fn has_fork_server(&self) -> bool {
        !self.commands.is_closed()
    }

    pub fn signal(&self, signal: Signal) {
        // A fork server that has ended took its workers with it.
        let _ = self.commands.send(Command::Signal { name: self.name.clone(), signal });
    }
}

/// What becomes of a worker.
pub struct Life {
    /// When it has its FIFOs open; an error if it never will.
    pub started: oneshot::Receiver<()>,
    pub ended: oneshot::Receiver<End>,
}

/// A worker's exit status; or why there is none: it never began, or its fork server has ended.
pub type End = Result<ExitStatus, String>;

enum Command {
    Start { flags: WorkerFlags, life: LifeSender },
    Signal { name: String, signal: Signal },
}

struct LifeSender {
    /// Until it has started.
    started: Option<oneshot::Sender<()>>,
    ended: oneshot::Sender<End>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Request<'a> {
    Start(&'a WorkerFlags),
    Signal { name: &'a str, number: i32 },
}

#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Report {
    Ready {},
    Started { name: String, pid: i32 },
    Refused { name: String, reason: String },
    Ended { name: String, status: i32 },
}

impl ForkServer {
    pub fn new(options: ForkServerOptions) -> Self {
        Self { options, process: None }
    }

    /// Asks for a worker. Call it on the main thread (see `process::python_module`).
    pub fn start_worker(&mut self, flags: WorkerFlags) -> Result<Forked, SpawnError> {
        let process = match self.process.take().filter(|process| !process.commands.is_closed()) {
            Some(process) => process,
            None => {
                self.options.spawn().map_err(|source| SpawnError { python: self.options.python.clone(), source })?
            }
        };
        let commands = self.process.insert(process).commands.clone();
        let (started_sender, started) = oneshot::channel();
        let (end_sender, ended) = oneshot::channel();
        let handle = WorkerHandle { name: flags.name.clone(), commands };
        let life = LifeSender { started: Some(started_sender), ended: end_sender };
        // Where nobody listens any more, its end is told by the channels of its life.
        let _ = handle.commands.send(Command::Start { flags, life });
        Ok(Forked { handle, life: Life { started, ended } })
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
    pub fn abandon(&mut self) {
        if let Some(process) = self.process.take() {
            process.task.abort();
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

/// Speaks with the process until it ends, or nobody wants anything of it; then ends it.
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
    commands.close();
    while let Ok(command) = commands.try_recv() {
        workers.request(command);
    }
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
}

/// The workers that have not ended, by name.
#[derive(Default)]
struct Lives(HashMap<String, LifeSender>);

impl Lives {
    /// The line that asks for it.
    fn request(&mut self, command: Command) -> String {
        let request = match &command {
            Command::Start { flags, .. } => serde_json::to_string(&Request::Start(flags)),
            Command::Signal { name, signal } => {
                serde_json::to_string(&Request::Signal { name, number: *signal as i32 })
            }
        };
        match (command, request) {
            (Command::Start { flags, life }, Ok(request)) => {
                self.0.insert(flags.name, life);
                request + "\n"
            }
            (Command::Signal { .. }, Ok(request)) => request + "\n",
            (Command::Start { life, .. }, Err(error)) => {
                let _ = life.ended.send(Err(format!("it cannot be told its socket: {error}")));
                String::new()
            }
            (Command::Signal { .. }, Err(_)) => String::new(),
        }
    }

    fn hear(&mut self, report: Report) {
        match report {
            Report::Ready {} => {}
            Report::Started { name, pid } => {
                tracing::debug!(target: "worker", pid, "{name} has started");
                if let Some(started) = self.0.get_mut(&name).and_then(|life| life.started.take()) {
                    // Nobody listens any more when the server is stopping.
                    let _ = started.send(());
                }
            }
            Report::Refused { name, reason } => self.end_one(&name, Err(reason)),
            Report::Ended { name, status } => self.end_one(&name, Ok(ExitStatus::from_raw(status))),
        }
    }

    fn end_one(&mut self, name: &str, end: End) {
        if let Some(life) = self.0.remove(name) {
            let _ = life.ended.send(end);
        }
    }

    fn end(self, reason: &str) {
        for life in self.0.into_values() {
            let _ = life.ended.send(Err(reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(lives: &mut Lives, name: &str) -> (String, Life) {
        let (started_sender, started) = oneshot::channel();
        let (end_sender, ended) = oneshot::channel();
        let flags = WorkerFlags {
            name: name.to_owned(),
            socket: "/a/worker-1".into(),
            rank: 1,
            world_size: 2,
            stdout: "/a/out".into(),
            stderr: "/a/err".into(),
        };
        let life = LifeSender { started: Some(started_sender), ended: end_sender };
        (lives.request(Command::Start { flags, life }), Life { started, ended })
    }

    fn hear(lives: &mut Lives, line: &str) {
        lives.hear(serde_json::from_str(line).unwrap());
    }

    #[test]
    fn requests_are_lines_of_json() {
        let mut lives = Lives::default();
        assert_eq!(
            start(&mut lives, "a").0,
            "{\"start\":{\"name\":\"a\",\"socket\":\"/a/worker-1\",\"rank\":1,\"world_size\":2,\
             \"stdout\":\"/a/out\",\"stderr\":\"/a/err\"}}\n"
        );
        let signal = Command::Signal { name: "a".to_owned(), signal: Signal::SIGTERM };
        assert_eq!(lives.request(signal), "{\"signal\":{\"name\":\"a\",\"number\":15}}\n");
    }

    #[test]
    fn reports_reach_the_worker_that_they_are_about() {
        let mut lives = Lives::default();
        let (mut first, mut second) = (start(&mut lives, "a").1, start(&mut lives, "b").1);
        hear(&mut lives, r#"{"started": {"name": "a", "pid": 7}}"#);
        assert_eq!((first.started.try_recv(), second.started.try_recv().is_ok()), (Ok(()), false));
        hear(&mut lives, r#"{"ended": {"name": "a", "status": 9}}"#);
        hear(&mut lives, r#"{"refused": {"name": "b", "reason": "no more processes"}}"#);
        assert_eq!(first.ended.try_recv().unwrap().unwrap().signal(), Some(9));
        assert_eq!(second.ended.try_recv(), Ok(Err("no more processes".to_owned())));
        assert!(second.started.try_recv().is_err());
    }

    #[test]
    fn an_end_takes_all_workers_along() {
        let mut lives = Lives::default();
        let mut life = start(&mut lives, "a").1;
        hear(&mut lives, r#"{"started": {"name": "a", "pid": 7}}"#);
        lives.end("it ended");
        assert_eq!(life.ended.try_recv(), Ok(Err("it ended".to_owned())));
    }

    #[test]
    fn what_is_no_report_is_told_from_one() {
        assert_eq!(serde_json::from_str::<Report>(r#"{"ready": {}}"#).unwrap(), Report::Ready {});
        for line in ["", "site: hello", "{}", r#"{"ended": {"name": "a"}}"#, r#"{"other": {}}"#] {
            assert!(serde_json::from_str::<Report>(line).is_err(), "{line}");
        }
    }
}
