//! Messages between this process and the fork server, and the table of workers that the replies are about.
//!
//! `server/penstock_server/fork_server.py` documents the protocol.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// What a worker is started with.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WorkerFlags {
    /// Unique among all workers of this fork server.
    pub(crate) name: String,
    pub(crate) socket: PathBuf,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// FIFOs, open for reading.
    pub(crate) stdout: PathBuf,
    pub(crate) stderr: PathBuf,
}

/// How a worker ended: its exit status, or the reason why there is none (it never started, or its fork server ended).
pub(crate) type ExitResult = Result<ExitStatus, String>;

/// What happens to one worker.
pub(crate) struct WorkerEvents {
    /// Resolves when the worker has opened its FIFOs; fails if it never does.
    pub(crate) started: oneshot::Receiver<()>,
    pub(crate) exited: oneshot::Receiver<ExitResult>,
}

/// The sending side of `WorkerEvents`.
pub(crate) struct WorkerEventSender {
    /// `None` once the worker has started.
    started: Option<oneshot::Sender<()>>,
    exited: oneshot::Sender<ExitResult>,
}

impl WorkerEvents {
    pub(crate) fn channel() -> (WorkerEventSender, Self) {
        let (started_sender, started) = oneshot::channel();
        let (exited_sender, exited) = oneshot::channel();
        (WorkerEventSender { started: Some(started_sender), exited: exited_sender }, Self { started, exited })
    }
}

/// What the fork server is asked to do.
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

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Request<'a> {
    Start(&'a WorkerFlags),
    Signal { name: &'a str, number: i32 },
    Load { request: &'a str },
}

/// A line that the fork server sends.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Ready {},
    Loaded { seconds: f64 },
    Started { name: String, pid: i32 },
    Refused { name: String, reason: String },
    Ended { name: String, status: i32 },
}

/// The workers that have not exited, by name.
#[derive(Default)]
pub(crate) struct WorkerTable(HashMap<String, WorkerEventSender>);

impl WorkerTable {
    /// The line that sends `command`; empty if it cannot be expressed in JSON. A worker to be started joins the table.
    pub(crate) fn request(&mut self, command: Command) -> String {
        let line = |request: Request<'_>| serde_json::to_string(&request).map(|request| request + "\n");
        match command {
            Command::Signal { name, signal } => {
                line(Request::Signal { name: &name, number: signal as i32 }).unwrap_or_default()
            }
            Command::Load { request } => line(Request::Load { request: &request }).unwrap_or_default(),
            Command::Start { flags, events } => match line(Request::Start(&flags)) {
                Ok(request) => {
                    self.0.insert(flags.name, events);
                    request
                }
                Err(error) => {
                    let _ = events.exited.send(Err(format!("its flags cannot be sent: {error}")));
                    String::new()
                }
            },
        }
    }

    /// Passes a report on to the worker's events.
    pub(crate) fn dispatch(&mut self, report: Report) {
        match report {
            Report::Ready {} | Report::Loaded { .. } => {}
            Report::Started { name, pid } => {
                tracing::debug!(target: "worker", pid, "{name} has started");
                if let Some(started) = self.0.get_mut(&name).and_then(|events| events.started.take()) {
                    // The receiver is gone while the server stops.
                    let _ = started.send(());
                }
            }
            Report::Refused { name, reason } => self.remove(&name, Err(reason)),
            Report::Ended { name, status } => self.remove(&name, Ok(ExitStatus::from_raw(status))),
        }
    }

    fn remove(&mut self, name: &str, exit: ExitResult) {
        if let Some(events) = self.0.remove(name) {
            let _ = events.exited.send(exit);
        }
    }

    /// Reports every worker as lost, without an exit status.
    pub(crate) fn remove_all(&mut self, reason: &str) {
        for (_, events) in self.0.drain() {
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
            socket: "/a/worker-1".into(),
            rank: 1,
            world_size: 2,
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
            "{\"start\":{\"name\":\"a\",\"socket\":\"/a/worker-1\",\"rank\":1,\"world_size\":2,\
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
        assert_eq!((first.started.try_recv(), second.started.try_recv().is_ok()), (Ok(()), false));
        dispatch(&mut workers, r#"{"ended": {"name": "a", "status": 9}}"#);
        dispatch(&mut workers, r#"{"refused": {"name": "b", "reason": "no more processes"}}"#);
        assert_eq!(first.exited.try_recv().unwrap().unwrap().signal(), Some(9));
        assert_eq!(second.exited.try_recv(), Ok(Err("no more processes".to_owned())));
        assert!(second.started.try_recv().is_err());
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
