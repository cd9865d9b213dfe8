//! What is said between this process and the one that forks workers, and whom it concerns.
//!
//! The protocol is in `server/penstock_server/fork_server.py`.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

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

/// What becomes of a worker.
pub struct Life {
    /// When it has its FIFOs open; an error if it never will.
    pub started: oneshot::Receiver<()>,
    pub ended: oneshot::Receiver<End>,
}

/// A worker's exit status; or why there is none: it never began, or its fork server has ended.
pub type End = Result<ExitStatus, String>;

/// What the fork server is to do.
pub enum Command {
    Start { flags: WorkerFlags, life: LifeSender },
    Signal { name: String, signal: Signal },
}

/// Tells what becomes of a worker.
pub struct LifeSender {
    /// Until it has started.
    started: Option<oneshot::Sender<()>>,
    ended: oneshot::Sender<End>,
}

impl Life {
    /// Of a worker to be started, and who tells it.
    pub fn new() -> (LifeSender, Self) {
        let (started_sender, started) = oneshot::channel();
        let (ended_sender, ended) = oneshot::channel();
        (LifeSender { started: Some(started_sender), ended: ended_sender }, Self { started, ended })
    }
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Request<'a> {
    Start(&'a WorkerFlags),
    Signal { name: &'a str, number: i32 },
}

/// What the fork server says.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    Ready {},
    Started { name: String, pid: i32 },
    Refused { name: String, reason: String },
    Ended { name: String, status: i32 },
}

/// The workers that have not ended, by name.
#[derive(Default)]
pub struct Lives(HashMap<String, LifeSender>);

impl Lives {
    /// The line that asks for it, if it can be said.
    pub fn request(&mut self, command: Command) -> String {
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

    /// Tells the worker that it is about.
    pub fn hear(&mut self, report: Report) {
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

    /// Tells all that there is no exit status to come.
    pub fn end(&mut self, reason: &str) {
        for (_, life) in self.0.drain() {
            let _ = life.ended.send(Err(reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(lives: &mut Lives, name: &str) -> (String, Life) {
        let (sender, life) = Life::new();
        let flags = WorkerFlags {
            name: name.to_owned(),
            socket: "/a/worker-1".into(),
            rank: 1,
            world_size: 2,
            stdout: "/a/out".into(),
            stderr: "/a/err".into(),
        };
        (lives.request(Command::Start { flags, life: sender }), life)
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
