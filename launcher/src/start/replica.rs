//! The processes of a replica, from its fork server to its loaded weights.

use std::sync::Arc;
use std::time::Instant;

use penstock_router::engine::RestartGroup;
use penstock_router::worker::{Description, Group, LoadOptions};

use crate::phase::Phases;
use crate::process::memory::Size;
use crate::process::share::MachineShare;
use crate::setup::Setup;
use crate::worker::fork_server::ForkServerOptions;
use crate::worker::group::{self, GroupError, Recipe};
use crate::worker::host::{Hosts, Placement};
use crate::worker::process::{Meeting, WorkerOptions, Workers, WorkersError};
use crate::worker::supervisor::Supervisor;

/// A replica whose fork server imports.
pub(crate) struct ImportingReplica {
    worker_options: WorkerOptions,
    pub(crate) hosts: Hosts,
}

/// A replica whose workers are forked as soon as the imports are done.
pub(crate) struct ForkingReplica {
    worker_options: WorkerOptions,
    hosts: Hosts,
    workers: Workers,
}

/// A replica whose weights are loaded.
pub(crate) struct LoadedReplica {
    pub(crate) worker_options: WorkerOptions,
    pub(crate) hosts: Hosts,
    pub(crate) workers: Workers,
    pub(crate) group: Group,
}

impl ImportingReplica {
    /// Starts the fork servers of all replicas.
    pub(crate) fn start_all(setup: Setup<'_>, placement: &Placement) -> Result<Vec<Self>, GroupError> {
        let (settings, num_replicas) = (setup.settings, setup.args().replicas);
        let devices = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let shares = MachineShare::of_each(num_replicas, settings.num_ranks, settings.num_devices, devices.as_deref());
        let start = |(replica, share)| Self::start(setup, placement, replica, share);
        shares.into_iter().enumerate().map(start).collect()
    }

    fn start(setup: Setup<'_>, placement: &Placement, replica: usize, share: MachineShare) -> Result<Self, GroupError> {
        let (args, settings) = (setup.args(), setup.settings);
        let options = ForkServerOptions {
            python: setup.python.to_owned(),
            num_threads: settings.num_threads,
            share,
            cpu_isa: args.cpu_isa,
            hub_cache: args.huggingface_hub_cache.clone(),
            node: None,
        };
        let mut hosts = Hosts::new(&options, placement);
        hosts.start().map_err(WorkersError::from)?;
        let worker_options = WorkerOptions {
            replica,
            num_replicas: args.replicas,
            num_ranks: settings.num_ranks,
            socket_prefix: args.shard_uds_path.clone(),
        };
        Ok(Self { worker_options, hosts })
    }

    /// Requests the workers. With `preloads`, the fork server loads the model before it forks them.
    pub(crate) fn fork(self, preloads: bool, load: &LoadOptions) -> Result<ForkingReplica, GroupError> {
        let Self { worker_options, mut hosts } = self;
        if preloads {
            hosts.preload(load);
        }
        let workers = Workers::spawn(&worker_options, &mut hosts, 0)?;
        Ok(ForkingReplica { worker_options, hosts, workers })
    }
}

impl ForkingReplica {
    /// Loads the first replica, whose imports began at `imports_start`. The model is the same in all replicas.
    pub(crate) async fn load_first(
        self,
        load: &LoadOptions,
        imports_start: Instant,
        phases: &mut Phases,
    ) -> Result<(LoadedReplica, Description), GroupError> {
        let Self { worker_options, hosts, mut workers } = self;
        let (connecting, fork_start) = (group::connect(&workers), Instant::now());
        let loading = async {
            // Workers are forked once the imports are done.
            let import_time = async { Ok(hosts.import_time().await) };
            let (import_time, (mut group, Meeting { rendezvous, token, .. })) =
                tokio::try_join!(import_time, connecting)?;
            phases.add("import", import_time);
            let preload_time = hosts.preload_time();
            if let Some(duration) = preload_time {
                phases.add("load before the fork", duration);
            }
            let importing = import_time.saturating_sub(fork_start - imports_start);
            let waiting = importing + preload_time.unwrap_or_default();
            phases.add("start workers", fork_start.elapsed().saturating_sub(waiting));
            let start = Instant::now();
            let model = group.load(&LoadOptions { rendezvous, token, ..load.clone() }).await?;
            phases.add_since("load", start);
            phases.add_parts("load", &model.phases);
            log_loaded(&model);
            Ok::<_, GroupError>((group, model))
        };
        let (group, model) = group::run(&mut workers, loading).await?;
        Ok((LoadedReplica { worker_options, hosts, workers, group }, model))
    }

    pub(crate) async fn load(self, load: &LoadOptions) -> Result<LoadedReplica, GroupError> {
        let Self { worker_options, hosts, mut workers } = self;
        let loading = group::load(load, &workers, false);
        let group = group::run(&mut workers, async { Ok(loading.await?.group) }).await?;
        Ok(LoadedReplica { worker_options, hosts, workers, group })
    }
}

impl LoadedReplica {
    /// Warms up a replica other than the first, as `recipe` says.
    pub(crate) async fn warm_up(mut self, recipe: &Recipe) -> Result<Self, GroupError> {
        group::run(&mut self.workers, recipe.warm_up(&mut self.group)).await?;
        Ok(self)
    }

    /// The group with what restarts it, and its supervisor. `recipe` is that of the first replica.
    pub(crate) fn supervised(self, recipe: &Recipe) -> ((Group, Arc<dyn RestartGroup>), Supervisor) {
        let Self { worker_options, hosts, workers, group } = self;
        let recipe = Recipe { workers: worker_options, ..recipe.clone() };
        let (supervisor, restarter) = Supervisor::new(recipe, hosts, workers, group.probe());
        ((group, Arc::new(restarter)), supervisor)
    }
}

fn log_loaded(model: &Description) {
    let Description { architecture, dtype, device, attention, weight_bytes, .. } = model;
    let size = Size(*weight_bytes);
    tracing::info!("loaded {architecture} as {dtype} on {device} with {attention} attention: {size} of weights");
}
