//! The machines of a replica's ranks: a fork server on this machine, or one on each of several nodes, with equally many ranks. Ray may
//! choose the nodes.

use std::time::Duration;

use futures::future::{join_all, select_all};
use penstock_router::worker::LoadOptions;

use crate::node::client::NodeOptions;
use crate::node::ray::{RayNodes, RayOptions};
use crate::process::python::SpawnError;
use crate::worker::fork_server::{ForkServer, ForkServerOptions};

/// The machines of a replica's ranks.
#[derive(Clone, Debug)]
pub(crate) enum Placement {
    Here,
    Nodes(Vec<NodeOptions>),
    Ray(RayOptions),
}

pub(crate) struct Hosts {
    /// Fork servers, at least one: all on this machine, or all on nodes.
    servers: Vec<ForkServer>,
    /// Finds the nodes.
    ray: Option<RayNodes>,
}

/// A rank's place among those of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalRank {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Hosts {
    pub(crate) fn new(options: &ForkServerOptions, placement: &Placement) -> Self {
        let on = |node: NodeOptions| ForkServer::new(ForkServerOptions { node: Some(node), ..options.clone() });
        let all_on = |nodes: Vec<NodeOptions>| nodes.into_iter().map(on).collect();
        match placement {
            Placement::Here => Self { servers: vec![ForkServer::new(options.clone())], ray: None },
            Placement::Nodes(nodes) => Self { servers: all_on(nodes.clone()), ray: None },
            Placement::Ray(options) => {
                let ray = RayNodes::new(options.clone());
                Self { servers: all_on(ray.nodes()), ray: Some(ray) }
            }
        }
    }

    /// Starts every process that does not run. Call it on the main thread (see `python::module`).
    pub(crate) fn start(&mut self) -> Result<(), SpawnError> {
        self.ray.as_mut().map_or(Ok(()), RayNodes::start)?;
        self.servers.iter_mut().try_for_each(ForkServer::start)
    }

    /// The fork server of a rank, and the rank's place there. Consecutive ranks share a machine.
    pub(crate) fn of_rank(&mut self, rank: usize, num_ranks: usize) -> (&mut ForkServer, LocalRank) {
        let size = num_ranks.div_ceil(self.servers.len());
        (&mut self.servers[rank / size], LocalRank { rank: rank % size, size })
    }

    /// Like `ForkServer::preload`, on all machines.
    pub(crate) fn preload(&mut self, load: &LoadOptions) {
        self.servers.iter_mut().for_each(|host| host.preload(load));
    }

    /// Like `ForkServer::preload_time`: the longest.
    pub(crate) fn preload_time(&self) -> Option<Duration> {
        self.servers.iter().filter_map(ForkServer::preload_time).max()
    }

    /// Like `ForkServer::import_time`: the longest.
    pub(crate) fn import_time(&self) -> impl Future<Output = Duration> + use<> {
        let times = join_all(self.servers.iter().map(ForkServer::import_time));
        async move { times.await.into_iter().max().unwrap_or_default() }
    }

    /// Resolves when a fork server ends, with a sentence that says why.
    pub(crate) async fn end(&self) -> String {
        select_all(self.servers.iter().map(|host| Box::pin(host.end()))).await.0
    }

    /// Like `ForkServer::abandon`, on all machines.
    pub(crate) async fn abandon(&mut self) {
        join_all(self.servers.iter_mut().map(ForkServer::abandon)).await;
    }

    /// Like `ForkServer::stop`, on all machines. Ray's nodes end too.
    pub(crate) async fn stop(self) {
        join_all(self.servers.into_iter().map(ForkServer::stop)).await;
        if let Some(ray) = self.ray {
            ray.stop().await;
        }
    }
}
