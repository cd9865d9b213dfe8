//! Where the ranks of a replica run: a fork server on this machine, or one on each of several nodes, with equally many ranks.

use std::time::Duration;

use futures::future::{join_all, select_all};
use penstock_router::worker::LoadOptions;

use crate::fork_server::{ForkServer, ForkServerOptions, SpawnError};
use crate::node::NodeOptions;

/// Not empty, and all on this machine or all on nodes.
pub(crate) struct Hosts(Vec<ForkServer>);

/// A rank's place among those of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalRank {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Hosts {
    /// On `nodes`, or on this machine if there are none.
    pub(crate) fn new(options: &ForkServerOptions, nodes: &[NodeOptions]) -> Self {
        if nodes.is_empty() {
            return Self(vec![ForkServer::new(options.clone())]);
        }
        let on =
            |node: &NodeOptions| ForkServer::new(ForkServerOptions { node: Some(node.clone()), ..options.clone() });
        Self(nodes.iter().map(on).collect())
    }

    /// Starts every fork server that does not run. Call it on the main thread (see `process::python_module`).
    pub(crate) fn start(&mut self) -> Result<(), SpawnError> {
        self.0.iter_mut().try_for_each(ForkServer::start)
    }

    /// The fork server of a rank, and the rank's place there. Consecutive ranks share a machine.
    pub(crate) fn of_rank(&mut self, rank: usize, num_ranks: usize) -> (&mut ForkServer, LocalRank) {
        let size = num_ranks.div_ceil(self.0.len());
        (&mut self.0[rank / size], LocalRank { rank: rank % size, size })
    }

    /// As `ForkServer::preload`, on all machines.
    pub(crate) fn preload(&mut self, load: &LoadOptions) {
        self.0.iter_mut().for_each(|host| host.preload(load));
    }

    /// As `ForkServer::preload_time`, of the slowest.
    pub(crate) fn preload_time(&self) -> Option<Duration> {
        self.0.iter().filter_map(ForkServer::preload_time).max()
    }

    /// As `ForkServer::import_time`, of the slowest.
    pub(crate) fn import_time(&self) -> impl Future<Output = Duration> + use<> {
        let times = join_all(self.0.iter().map(ForkServer::import_time));
        async move { times.await.into_iter().max().unwrap_or_default() }
    }

    /// Resolves when a fork server ends, with a sentence that says why.
    pub(crate) async fn end(&self) -> String {
        select_all(self.0.iter().map(|host| Box::pin(host.end()))).await.0
    }

    /// As `ForkServer::abandon`.
    pub(crate) async fn abandon(&mut self) {
        join_all(self.0.iter_mut().map(ForkServer::abandon)).await;
    }

    /// As `ForkServer::stop`.
    pub(crate) async fn stop(self) {
        join_all(self.0.into_iter().map(ForkServer::stop)).await;
    }
}
