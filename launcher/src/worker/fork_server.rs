//! The fork server: one Python process that does all imports once and forks every worker.
//!
//! INVARIANT: when this process or the fork server ends, the kernel kills the workers.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_router::worker::LoadOptions;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::process::Child;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::flag::isa::CpuIsa;
use crate::node::client::{NodeConnection, NodeOptions};
use crate::process::output::{Lines, StderrTail};
use crate::process::python::{self, SpawnError};
use crate::process::share::MachineShare;
use crate::protocol::{Command, Report, WorkerEvents, WorkerFlags, WorkerTable};

/// Time limit for the process to exit after it has closed its output.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Polls of a waiting thread of libgomp before it sleeps.
const GOMP_SPINS: &str = "4000";

/// Starts its process again when a worker is requested after the process has ended.
pub(crate) struct ForkServer {
    options: ForkServerOptions,
    /// The model that each process loads before it forks workers, as in `Command::Load`.
    preload: Option<String>,
    process: Option<Process>,
}

/// Settings that all workers share.
#[derive(Clone, Debug)]
pub(crate) struct ForkServerOptions {
    pub(crate) python: PathBuf,
    /// CPU threads per rank.
    pub(crate) num_threads: usize,
    /// The part of the machine that the workers may use.
    pub(crate) share: MachineShare,
    pub(crate) cpu_isa: CpuIsa,
    pub(crate) hub_cache: Option<PathBuf>,
    /// Node of the process; `None`: this machine.
    pub(crate) node: Option<NodeOptions>,
}

/// Duration of the imports once they are done. Closed when the process has ended.
type ImportTime = watch::Receiver<Option<Duration>>;

struct Process {
    commands: mpsc::UnboundedSender<Command>,
    import_time: ImportTime,
    preload_time: watch::Receiver<Option<Duration>>,
    /// Reason for the end of the process, once it has ended.
    end: watch::Receiver<Option<String>>,
    task: JoinHandle<()>,
}

/// The sending sides of the channels of a `Process`.
struct ProcessEvents {
    import_time: watch::Sender<Option<Duration>>,
    preload_time: watch::Sender<Option<Duration>>,
    end: watch::Sender<Option<String>>,
}

/// A worker that was requested. It may still fail to start, which `events` tells.
pub(crate) struct Forked {
    pub(crate) handle: WorkerHandle,
    pub(crate) events: WorkerEvents,
}

/// Sends signals to a worker and the processes it started.
pub(crate) struct WorkerHandle {
    name: String,
    commands: mpsc::UnboundedSender<Command>,
    import_time: ImportTime,
}

impl WorkerHandle {
    /// Whether the worker's fork server is alive. The worker dies with it.
    pub(crate) fn has_fork_server(&self) -> bool {
        self.import_time.has_changed().is_ok()
    }

    /// Does nothing if the worker has exited.
    pub(crate) fn signal(&self, signal: Signal) {
        // An error means that the fork server has ended, and its workers with it.
        let _ = self.commands.send(Command::Signal { name: self.name.clone(), signal });
    }
}

impl ForkServer {
    pub(crate) fn new(options: ForkServerOptions) -> Self {
        Self { options, preload: None, process: None }
    }

    /// Node of its process; `None`: this machine.
    pub(crate) fn node(&self) -> Option<&NodeOptions> {
        self.options.node.as_ref()
    }

    /// Starts the process unless it runs. Call it on the main thread (see `python::module`).
    pub(crate) fn start(&mut self) -> Result<(), SpawnError> {
        if self.process.as_ref().is_none_or(|process| process.import_time.has_changed().is_err()) {
            let process = self.options.spawn().map_err(|source| SpawnError::new(&self.options.python, source))?;
            let load = self.preload.clone().map(|request| Command::Load { request });
            // If the process has just ended, the next worker is reported as lost.
            load.into_iter().for_each(|load| drop(process.commands.send(load)));
            self.process = Some(process);
        }
        Ok(())
    }

    /// Loads a model for all workers that are requested from now on, so that they share the pages of its weights.
    pub(crate) fn preload(&mut self, load: &LoadOptions) {
        let request: String = load.message().iter().map(|byte| format!("{byte:02x}")).collect();
        if let Some(process) = &self.process {
            let _ = process.commands.send(Command::Load { request: request.clone() });
        }
        self.preload = Some(request);
    }

    /// Duration of the load; `None` if each worker loads the model itself.
    pub(crate) fn preload_time(&self) -> Option<Duration> {
        self.process.as_ref().and_then(|process| *process.preload_time.borrow())
    }

    /// Requests a worker. Call it on the main thread (see `python::module`).
    pub(crate) fn start_worker(&mut self, flags: WorkerFlags) -> Result<Forked, SpawnError> {
        self.start()?;
        let Some(Process { commands, import_time, .. }) = &self.process else {
            unreachable!("invariant: it was started")
        };
        let (sender, events) = WorkerEvents::channel();
        let handle =
            WorkerHandle { name: flags.name.clone(), commands: commands.clone(), import_time: import_time.clone() };
        // If the process has just ended, `drive` still reads this and reports why.
        let _ = handle.commands.send(Command::Start { flags, events: sender });
        Ok(Forked { handle, events })
    }

    /// Resolves with the time from start to the end of the imports; never if the process ends before.
    pub(crate) fn import_time(&self) -> impl Future<Output = Duration> + use<> {
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

    /// Resolves when the process ends, with a sentence that says why.
    pub(crate) async fn end(&self) -> String {
        if let Some(process) = &self.process
            && let Ok(reason) = process.end.clone().wait_for(Option::is_some).await
        {
            return reason.clone().unwrap_or_default();
        }
        std::future::pending().await
    }

    /// Kills a process that does not respond, and its workers with it.
    pub(crate) async fn abandon(&mut self) {
        if let Some(Process { task, .. }) = self.process.take() {
            task.abort();
            let _ = task.await;
        }
    }

    /// Ends the process once no `WorkerHandle` is left.
    pub(crate) async fn stop(self) {
        if let Some(Process { commands, task, .. }) = self.process {
            drop(commands);
            if self.options.node.is_some() {
                // The end of the connection ends the process.
                task.abort();
            }
            // An error means that the task has ended.
            let _ = task.await;
        }
    }
}

impl ForkServerOptions {
    fn spawn(&self) -> std::io::Result<Process> {
        let (commands, received) = mpsc::unbounded_channel();
        let (import_sender, import_time) = watch::channel(None);
        let (preload_sender, preload_time) = watch::channel(None);
        let (end_sender, end) = watch::channel(None);
        let events = ProcessEvents { import_time: import_sender, preload_time: preload_sender, end: end_sender };
        let task = match &self.node {
            None => tokio::spawn(drive(self.command().spawn()?, received, events)),
            Some(node) => tokio::spawn(drive_node(node.clone(), self.cpu_isa, received, events)),
        };
        Ok(Process { commands, import_time, preload_time, end, task })
    }

    /// The process on this machine.
    pub(crate) fn command(&self) -> tokio::process::Command {
        let mut command = python::module(&self.python, "penstock_server.process.fork_server");
        command.stdin(Stdio::piped());
        if let Some(devices) = &self.share.devices {
            command.env("CUDA_VISIBLE_DEVICES", devices);
        }
        if let Some(cores) = &self.share.cores {
            command.args(["--cores", cores]);
        }
        if let Some(capability) = self.cpu_isa.torch_capability() {
            command.env("ATEN_CPU_CAPABILITY", capability);
        }
        // NumPy's own threads would exist before the fork.
        command.env("OPENBLAS_NUM_THREADS", "1");
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", self.num_threads.to_string());
        }
        // Threads of a parallel section that wait for another one keep their cores busy: by default for milliseconds, which they
        // then lack when another process wants the core too.
        if ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"].iter().all(|name| std::env::var_os(name).is_none()) {
            command.env("GOMP_SPINCOUNT", GOMP_SPINS);
        }
        // Gloo and NCCL listen on TCP ports for the other ranks. All ranks are on this machine, so no other host needs them.
        for variable in ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] {
            if std::env::var_os(variable).is_none() {
                command.env(variable, "lo");
            }
        }
        if let Some(cache) = &self.hub_cache {
            command.env("HF_HUB_CACHE", cache);
        }
        command
    }
}

/// Exchanges commands and reports until the process ends or every command sender is dropped. Then it ends the process and
/// reports its workers, and any that are requested later, as lost.
async fn drive(mut child: Child, mut commands: mpsc::UnboundedReceiver<Command>, events: ProcessEvents) {
    let (Some(stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        unreachable!("invariant: all three are piped")
    };
    let tail = StderrTail::default();
    let mut following = tokio::spawn(tail.clone().follow(None, stderr));
    let mut workers = WorkerTable::default();
    if let Ended::Released = exchange(stdin, Lines::new(stdout), &mut commands, &mut workers, &events).await {
        let _ = child.start_kill();
    }
    drop(events.import_time);
    if tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.is_err() {
        let _ = child.start_kill();
    }
    let status = child.wait().await;
    if tokio::time::timeout(EXIT_TIMEOUT, &mut following).await.is_err() {
        following.abort();
    }
    let reason = match status {
        Ok(status) => tail.exit_reason("the fork server", status),
        Err(error) => format!("the fork server cannot be watched: {error}"),
    };
    report_lost(reason, workers, commands, events.end).await;
}

/// Like `drive`, with a process on a node, which ends with the connection.
async fn drive_node(
    node: NodeOptions,
    cpu_isa: CpuIsa,
    mut commands: mpsc::UnboundedReceiver<Command>,
    events: ProcessEvents,
) {
    let (reason, workers) = match node.connect(cpu_isa).await {
        Err(reason) => (reason, WorkerTable::default()),
        Ok(NodeConnection { address, requests, reports }) => {
            let mut workers = WorkerTable::on_node(address.host.clone());
            let reason = match exchange(requests, reports, &mut commands, &mut workers, &events).await {
                Ended::Lost(Some(reason)) => format!("{address} has no fork server: {reason}"),
                Ended::Lost(None) | Ended::Released => format!("the connection to {address} was lost"),
            };
            (reason, workers)
        }
    };
    drop(events.import_time);
    report_lost(reason, workers, commands, events.end).await;
}

/// Reports all workers, and any that are requested later, as lost.
async fn report_lost(
    reason: String,
    mut workers: WorkerTable,
    mut commands: mpsc::UnboundedReceiver<Command>,
    end: watch::Sender<Option<String>>,
) {
    end.send_replace(Some(reason.clone()));
    workers.remove_all(&reason);
    while let Some(command) = commands.recv().await {
        workers.request(command);
        workers.remove_all(&reason);
    }
}

/// The end of an exchange.
enum Ended {
    /// Every command sender is dropped.
    Released,
    /// The process, or the connection to it, has ended. A node says why.
    Lost(Option<String>),
}

/// Exchanges commands and reports.
async fn exchange(
    mut requests: impl AsyncWrite + Unpin,
    mut reports: Lines<impl AsyncRead + Unpin>,
    commands: &mut mpsc::UnboundedReceiver<Command>,
    workers: &mut WorkerTable,
    events: &ProcessEvents,
) -> Ended {
    let began = Instant::now();
    loop {
        tokio::select! {
            command = commands.recv() => match command.map(|command| workers.request(command)) {
                None => return Ended::Released,
                Some(request) => {
                    if requests.write_all(request.as_bytes()).await.is_err() || requests.flush().await.is_err() {
                        return Ended::Lost(None);
                    }
                }
            },
            line = reports.next() => match line.as_deref().map(serde_json::from_str) {
                Some(Ok(Report::Ready {})) => {
                    events.import_time.send_replace(Some(began.elapsed()));
                }
                Some(Ok(Report::Loaded { seconds })) => {
                    events.preload_time.send_replace(Duration::try_from_secs_f64(seconds).ok());
                }
                Some(Ok(Report::Lost { reason })) => return Ended::Lost(Some(reason)),
                Some(Ok(report)) => workers.dispatch(report),
                // Printed by code that Python runs at startup.
                Some(Err(_)) => tracing::info!(target: "worker", "{}", line.unwrap_or_default()),
                None => return Ended::Lost(None),
            },
        }
    }
}
