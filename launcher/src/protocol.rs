//! Messages between this process and the fork server, and the table of workers that the replies are about.
//!
//! `server/penstock_server/process/fork_server.py` documents the protocol.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::flag::isa::CpuIsa;

/// Version of what a server and a node say to each other.
const NODE_PROTOCOL_VERSION: u32 = 3;
/// Ranks of different releases could compute different tokens, or not understand each other.
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The first line that a server sends to a node.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Open {
    pub(crate) version: u32,
    /// Release of the server.
    #[serde(default)]
    pub(crate) release: String,
    /// Ranks of one group on the node, which share its cores.
    pub(crate) num_ranks: usize,
    /// Each rank runs on a GPU.
    #[serde(default)]
    pub(crate) uses_gpus: bool,
    #[serde(default)]
    pub(crate) cpu_isa: CpuIsa,
}

/// Why a node refuses a server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(
        "the server speaks version {0} of the node protocol, this node speaks version {NODE_PROTOCOL_VERSION}; \
         install the same release on both"
    )]
    Version(u32),
    #[error("the server is release {0}, this node is release {RELEASE}; install the same release on both")]
    Release(String),
}

impl Open {
    pub(crate) fn new(num_ranks: usize, uses_gpus: bool, cpu_isa: CpuIsa) -> Self {
        Self { version: NODE_PROTOCOL_VERSION, release: RELEASE.to_owned(), num_ranks, uses_gpus, cpu_isa }
    }

    /// Whether this node can host the server.
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        if self.version != NODE_PROTOCOL_VERSION {
            return Err(OpenError::Version(self.version));
        }
        if self.release != RELEASE {
            return Err(OpenError::Release(self.release.clone()));
        }
        Ok(())
    }
}

/// Settings of a worker's start. They have secrets, so there is no `Debug`.
#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct WorkerFlags {
    /// Unique among all workers of this fork server.
    pub(crate) name: String,
    /// A URI. A node chooses it for its workers.
    pub(crate) endpoint: String,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Token that `Load` must have.
    pub(crate) token: String,
    /// `None`: all ranks are on this machine.
    pub(crate) node: Option<NodeFlags>,
    /// FIFOs, open for reading.
    pub(crate) stdout: PathBuf,
    pub(crate) stderr: PathBuf,
}

/// A worker's place on one of several machines, and its TLS.
#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct NodeFlags {
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
    /// Whether it runs on a GPU. The node sets it, as `Open` asks.
    pub(crate) uses_gpu: bool,
    /// Address for the other ranks, as HOST:PORT. The node chooses it.
    pub(crate) listen: String,
    /// PEM, like the two below.
    pub(crate) certificate: String,
    pub(crate) key: String,
    pub(crate) authority: String,
}

/// Ports of a worker on a node.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Ports {
    /// Port for this server.
    pub(crate) worker: u16,
    /// Port for the other ranks.
    pub(crate) peers: u16,
}

/// Address of a worker on a node, as this server reaches it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Listening {
    /// Host of the connection to the node.
    pub(crate) host: String,
    pub(crate) ports: Ports,
}

/// A worker's end: its exit status, or the reason why there is none (it never started, or its fork server ended).
pub(crate) type ExitResult = Result<ExitStatus, String>;

/// Events of one worker.
pub(crate) struct WorkerEvents {
    /// Resolves when the worker has opened its FIFOs, with its address if it is on a node; fails if it never does.
    pub(crate) started: oneshot::Receiver<Option<Listening>>,
    pub(crate) exited: oneshot::Receiver<ExitResult>,
}

/// The sending side of `WorkerEvents`.
pub(crate) struct WorkerEventSender {
    /// `None` once the worker has started.
    started: Option<oneshot::Sender<Option<Listening>>>,
    exited: oneshot::Sender<ExitResult>,
}

impl WorkerEvents {
    pub(crate) fn channel() -> (WorkerEventSender, Self) {
        let (started_sender, started) = oneshot::channel();
        let (exited_sender, exited) = oneshot::channel();
        (WorkerEventSender { started: Some(started_sender), exited: exited_sender }, Self { started, exited })
    }
}

/// A request to the fork server.
#[expect(clippy::large_enum_variant, reason = "few exist at a time")]
pub(crate) enum Command {
    Start {
        flags: WorkerFlags,
        events: WorkerEventSender,
    },
    Signal {
        name: String,
        signal: Signal,
    },
    /// A serialized LoadRequest in hexadecimal.
    Load {
        request: String,
    },
}

/// A line that the fork server reads.
#[derive(Deserialize, Serialize)]
#[expect(clippy::large_enum_variant, reason = "few exist at a time")]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    Start(WorkerFlags),
    Signal { name: String, number: i32 },
    Load { request: String },
}

/// A line that the fork server sends, or a node about it.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Ready {},
    Loaded {
        seconds: f64,
    },
    Started {
        name: String,
        pid: i32,
        /// Ports of a worker on a node.
        #[serde(default)]
        ports: Option<Ports>,
    },
    Refused {
        name: String,
        reason: String,
    },
    Ended {
        name: String,
        status: i32,
    },
    /// The first one of a node: it hosts this server.
    Accepted {},
    /// The first and last one of a node: it hosts another server, which may leave.
    Busy {
        reason: String,
    },
    /// The last one of a node: its fork server has ended, or it does not host this server.
    Lost {
        reason: String,
    },
}

/// The workers of one fork server that have not exited.
#[derive(Default)]
pub(crate) struct WorkerTable {
    /// Host of the fork server's node; `None`: this machine.
    host: Option<String>,
    by_name: HashMap<String, WorkerEventSender>,
}

impl WorkerTable {
    pub(crate) fn on_node(host: String) -> Self {
        Self { host: Some(host), by_name: HashMap::new() }
    }

    /// The line that sends `command`; empty if it cannot be expressed in JSON. A worker to be started joins the table.
    pub(crate) fn request(&mut self, command: Command) -> String {
        let line = |request: &Request| serde_json::to_string(request).map(|request| request + "\n");
        match command {
            Command::Signal { name, signal } => {
                line(&Request::Signal { name, number: signal as i32 }).unwrap_or_default()
            }
            Command::Load { request } => line(&Request::Load { request }).unwrap_or_default(),
            Command::Start { flags, events } => match (flags.name.clone(), line(&Request::Start(flags))) {
                (name, Ok(request)) => {
                    self.by_name.insert(name, events);
                    request
                }
                (_, Err(error)) => {
                    let _ = events.exited.send(Err(format!("its flags cannot be sent: {error}")));
                    String::new()
                }
            },
        }
    }

    /// Passes a report on to the worker's events.
    pub(crate) fn dispatch(&mut self, report: Report) {
        match report {
            Report::Ready {}
            | Report::Loaded { .. }
            | Report::Accepted {}
            | Report::Busy { .. }
            | Report::Lost { .. } => {}
            Report::Started { name, pid, ports } => {
                tracing::debug!(target: "worker", pid, "{name} has started");
                if let Some(started) = self.by_name.get_mut(&name).and_then(|events| events.started.take()) {
                    // The receiver is gone while the server stops.
                    let _ = started.send(self.host.clone().zip(ports).map(|(host, ports)| Listening { host, ports }));
                }
            }
            Report::Refused { name, reason } => self.remove(&name, Err(reason)),
            Report::Ended { name, status } => self.remove(&name, Ok(ExitStatus::from_raw(status))),
        }
    }

    fn remove(&mut self, name: &str, exit: ExitResult) {
        if let Some(events) = self.by_name.remove(name) {
            let _ = events.exited.send(exit);
        }
    }

    /// Reports every worker as lost, without an exit status.
    pub(crate) fn remove_all(&mut self, reason: &str) {
        for (_, events) in self.by_name.drain() {
            let _ = events.exited.send(Err(reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(workers: &mut WorkerTable, name: &str) -> (String, WorkerEvents) {
        let (sender, events) = WorkerEvents::channel();
        let flags = WorkerFlags {
            name: name.to_owned(),
            endpoint: "unix:/a/worker-1".to_owned(),
            rank: 1,
            world_size: 2,
            token: "t".to_owned(),
            node: None,
            stdout: "/a/out".into(),
            stderr: "/a/err".into(),
        };
        (workers.request(Command::Start { flags, events: sender }), events)
    }

    fn dispatch(workers: &mut WorkerTable, line: &str) {
        workers.dispatch(serde_json::from_str(line).unwrap());
    }

    #[test]
    fn requests_are_lines_of_json() {
        let mut workers = WorkerTable::default();
        assert_eq!(
            start(&mut workers, "a").0,
            "{\"start\":{\"name\":\"a\",\"endpoint\":\"unix:/a/worker-1\",\"rank\":1,\"world_size\":2,\"token\":\"t\",\"node\":null,\
             \"stdout\":\"/a/out\",\"stderr\":\"/a/err\"}}\n"
        );
        let signal = Command::Signal { name: "a".to_owned(), signal: Signal::SIGTERM };
        assert_eq!(workers.request(signal), "{\"signal\":{\"name\":\"a\",\"number\":15}}\n");
        let load = Command::Load { request: "0aff".to_owned() };
        assert_eq!(workers.request(load), "{\"load\":{\"request\":\"0aff\"}}\n");
    }

    #[test]
    fn a_report_reaches_the_worker_it_names() {
        let mut workers = WorkerTable::default();
        let (mut first, mut second) = (start(&mut workers, "a").1, start(&mut workers, "b").1);
        dispatch(&mut workers, r#"{"started": {"name": "a", "pid": 7}}"#);
        assert_eq!((first.started.try_recv(), second.started.try_recv().is_ok()), (Ok(None), false));
        dispatch(&mut workers, r#"{"ended": {"name": "a", "status": 9}}"#);
        dispatch(&mut workers, r#"{"refused": {"name": "b", "reason": "no more processes"}}"#);
        assert_eq!(first.exited.try_recv().unwrap().unwrap().signal(), Some(9));
        assert_eq!(second.exited.try_recv(), Ok(Err("no more processes".to_owned())));
        assert!(second.started.try_recv().is_err());
    }

    #[test]
    fn a_worker_on_a_node_listens_at_the_host_of_its_connection() {
        let mut workers = WorkerTable::on_node("10.0.0.2".to_owned());
        let mut events = start(&mut workers, "a").1;
        dispatch(&mut workers, r#"{"started": {"name": "a", "pid": 7, "ports": {"worker": 1, "peers": 2}}}"#);
        let listening = Listening { host: "10.0.0.2".to_owned(), ports: Ports { worker: 1, peers: 2 } };
        assert_eq!(events.started.try_recv(), Ok(Some(listening)));
    }

    #[test]
    fn the_end_of_the_fork_server_is_the_end_of_all_workers() {
        let mut workers = WorkerTable::default();
        let mut events = start(&mut workers, "a").1;
        dispatch(&mut workers, r#"{"started": {"name": "a", "pid": 7}}"#);
        workers.remove_all("it ended");
        assert_eq!(events.exited.try_recv(), Ok(Err("it ended".to_owned())));
    }

    #[test]
    fn other_output_is_not_taken_for_a_report() {
        assert_eq!(serde_json::from_str::<Report>(r#"{"ready": {}}"#).unwrap(), Report::Ready {});
        for line in ["", "site: hello", "{}", r#"{"ended": {"name": "a"}}"#, r#"{"other": {}}"#] {
            assert!(serde_json::from_str::<Report>(line).is_err(), "{line}");
        }
    }
}
