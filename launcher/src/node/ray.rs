//! Ray chooses the nodes: `penstock_server.process.ray` asks it for one actor per node, and each actor runs an agent (`penstock node`).
//!
//! INVARIANT: the actors live as long as the Python process, and the agents as long as their actors.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::node::client::{NodeOptions, NodePlace};
use crate::node::secret::NodeSecret;
use crate::process::output::{Lines, StderrTail};
use crate::process::python::{self, SpawnError};

/// Time limit for the process to leave the cluster.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
const NAME: &str = "the process that asks Ray for nodes";

#[derive(Clone, Debug)]
pub(crate) struct RayOptions {
    pub(crate) python: PathBuf,
    /// HOST:PORT of the cluster's control service.
    pub(crate) cluster: String,
    pub(crate) num_nodes: usize,
    pub(crate) ranks_per_node: usize,
    /// Each rank has a GPU.
    pub(crate) uses_gpus: bool,
}

/// Starts its process again when nodes are needed after it has ended.
pub(crate) struct RayNodes {
    options: RayOptions,
    secret: NodeSecret,
    /// The place of each node.
    places: Vec<watch::Sender<NodePlace>>,
    process: Option<JoinHandle<()>>,
    stop: CancellationToken,
}

/// The line that the process reads. It has a secret, so it has no `Debug`.
#[derive(Serialize)]
struct Order<'a> {
    cluster: &'a str,
    num_nodes: usize,
    ranks_per_node: usize,
    secret: &'a str,
    uses_gpus: bool,
}

/// A line that the process prints.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Report {
    /// An agent listens.
    Placed { node: usize, address: String },
    /// Ray places the node again.
    Lost { node: usize, reason: String },
}

impl RayNodes {
    pub(crate) fn new(options: RayOptions) -> Self {
        let places = (0..options.num_nodes).map(|_| watch::channel(NodePlace::Awaited).0).collect();
        Self { options, secret: NodeSecret::make(), places, process: None, stop: CancellationToken::new() }
    }

    /// The nodes, in the order of their ranks.
    pub(crate) fn nodes(&self) -> Vec<NodeOptions> {
        let node = |place: &watch::Sender<_>| NodeOptions {
            place: place.subscribe(),
            secret: self.secret.clone(),
            by_ray: true,
            num_ranks: self.options.ranks_per_node,
            uses_gpus: self.options.uses_gpus,
        };
        self.places.iter().map(node).collect()
    }

    /// Starts the process unless it runs. Call it on the main thread (see `python::module`).
    pub(crate) fn start(&mut self) -> Result<(), SpawnError> {
        if self.process.as_ref().is_some_and(|process| !process.is_finished()) {
            return Ok(());
        }
        let mut command = python::module(&self.options.python, "penstock_server.process.ray");
        command.stdin(std::process::Stdio::piped());
        let child = command.spawn().map_err(|source| SpawnError::new(&self.options.python, source))?;
        self.places.iter().for_each(|place| drop(place.send_replace(NodePlace::Awaited)));
        let Self { options, secret, places, stop, .. } = self;
        let RayOptions { cluster, num_nodes, ranks_per_node, uses_gpus, .. } = options;
        let order = Order {
            cluster: cluster.as_str(),
            num_nodes: *num_nodes,
            ranks_per_node: *ranks_per_node,
            secret: secret.text(),
            uses_gpus: *uses_gpus,
        };
        let order = serde_json::to_string(&order).expect("invariant: strings and numbers are JSON") + "\n";
        self.process = Some(tokio::spawn(follow(child, order, places.clone(), stop.clone())));
        Ok(())
    }

    /// Leaves the cluster, which ends the actors.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        if let Some(process) = self.process {
            // An error means that the task has ended.
            let _ = process.await;
        }
    }
}

/// Passes on the places of the nodes, until the process ends or `stop`.
async fn follow(mut child: Child, order: String, places: Vec<watch::Sender<NodePlace>>, stop: CancellationToken) {
    let (Some(mut stdin), Some(stdout), Some(stderr)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        unreachable!("invariant: all three are piped")
    };
    let tail = StderrTail::default();
    let mut following = tokio::spawn(tail.clone().follow(None, stderr));
    let mut lines = Lines::new(stdout);
    let reports = async {
        // An error means that the process has ended, which its output shows.
        let _ = stdin.write_all(order.as_bytes()).await;
        while let Some(line) = lines.next().await {
            match serde_json::from_str(&line) {
                Ok(report) => apply(report, &places),
                // Printed by Ray.
                Err(_) => tracing::info!(target: "worker", "{line}"),
            }
        }
    };
    tokio::select! {
        () = reports => {}
        () = stop.cancelled() => {}
    }
    let reason = end(child, stdin, &tail, &mut following).await;
    let is_stopping = stop.is_cancelled();
    if !is_stopping {
        tracing::warn!("{reason}");
    }
    places.iter().for_each(|place| drop(place.send_replace(NodePlace::Unavailable(reason.clone()))));
}

/// Ends the process by closing its standard input. Returns a sentence that says how it ended.
async fn end(mut child: Child, stdin: ChildStdin, tail: &StderrTail, following: &mut JoinHandle<()>) -> String {
    drop(stdin);
    if tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await.is_err() {
        let _ = child.start_kill();
    }
    let status = child.wait().await;
    if tokio::time::timeout(EXIT_TIMEOUT, &mut *following).await.is_err() {
        following.abort();
    }
    match status {
        Ok(status) => tail.exit_reason(NAME, status),
        Err(error) => format!("{NAME} cannot be watched: {error}"),
    }
}

fn apply(report: Report, places: &[watch::Sender<NodePlace>]) {
    let (node, place) = match report {
        Report::Placed { node, address } => match address.parse() {
            Ok(address) => {
                tracing::info!("Ray has placed node {node}: {address}");
                (node, NodePlace::At(address))
            }
            Err(error) => {
                let reason = format!("Ray's node {node} cannot be used: {error}");
                tracing::warn!("{reason}");
                (node, NodePlace::Unavailable(reason))
            }
        },
        Report::Lost { node, reason } => {
            tracing::warn!("Ray places node {node} again: {reason}");
            (node, NodePlace::Awaited)
        }
    };
    if let Some(sender) = places.get(node) {
        sender.send_replace(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_used_is_a_reason_and_not_awaited() {
        let places = [watch::channel(NodePlace::Awaited).0];
        let placed = |address: &str| apply(Report::Placed { node: 0, address: address.to_owned() }, &places);
        placed("10.0.0.2");
        let place = places[0].borrow().clone();
        assert!(matches!(&place, NodePlace::Unavailable(reason) if reason.contains("node 0")), "{place:?}");
        placed("node://10.0.0.2:7");
        assert!(matches!(&*places[0].borrow(), NodePlace::At(address) if address.port == 7));
    }
}
