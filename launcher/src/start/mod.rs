//! Starts a model: from settings to workers that are ready, by way of processes, the prepared model, load and warm-up.

pub(crate) mod placement;

mod load;
mod measure;
mod replica;

use std::time::Instant;

use futures::future::{select_all, try_join_all};
use penstock_router::remote::ServerDescription;
use penstock_router::replica::Replicas;
use penstock_router::worker::{Description, LoadOptions};

use self::measure::Measured;
use self::replica::{ForkingReplica, ImportingReplica, LoadedReplica};
use crate::model::fingerprint;
use crate::model::local::{LocalModel, LocalModelError};
use crate::phase::Phases;
use crate::process::memory::Size;
use crate::resolve::ResolveError;
use crate::serve::Started;
use crate::setup::Setup;
use crate::worker::group::{self, GroupError, Recipe};
use crate::worker::host::Placement;
use crate::worker::standby;

/// Errors of a start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Files(#[from] LocalModelError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Limits(#[from] ResolveError),
    #[error("cannot read the model's files: {0}")]
    Fingerprint(std::io::Error),
    #[error("--lora-adapters: {name} cannot be used: {reason}")]
    Adapter { name: String, reason: String },
}

/// Call it on the main thread (see `python::module`). Dropping the future kills every process.
pub(crate) async fn start(setup: Setup<'_>, placement: &Placement) -> Result<Started, StartError> {
    let (imports_start, mut phases) = (Instant::now(), Phases::default());
    let importing = ImportingReplica::start_all(setup, placement)?;
    let local = prepare_while_importing(setup, &importing, &mut phases).await?;
    let load = load::options(setup, &local);
    let fork = |replica: ImportingReplica| replica.fork(setup.settings.preloads(), &load);
    let mut forking = importing.into_iter().map(fork).collect::<Result<Vec<_>, _>>()?;
    let (mut first, model) = forking.remove(0).load_first(&load, imports_start, &mut phases).await?;
    // The scheduler counts in the first group's blocks.
    let load = LoadOptions { block_tokens: Some(model.block_tokens), ..load };
    // Before the first group measures the memory that is left for all.
    let others = load_others(forking, &load, &mut phases).await?;
    let measured = measure(setup, &mut first, &model, &local, &mut phases).await?;
    let recipe = recipe(setup, &first, &model, load, &measured);
    let others = warm_up_others(others, &recipe, &mut phases).await?;
    let num_replicas = 1 + others.len();
    let description = setup.args().engine_listen.map(|_| describe(setup, &local, &model, &measured, num_replicas));
    let replicas = std::iter::once(first).chain(others);
    let (groups, supervisors) = replicas.map(|replica| replica.supervised(&recipe)).unzip();
    Ok(Started {
        replicas: Replicas::start(groups, measured.options),
        supervisors,
        local: local.with_embeddings(model.vocab_size),
        model,
        num_blocks: num_replicas * measured.pool.num_blocks as usize,
        limits: measured.limits,
        phases,
        description: description.transpose()?,
        follower: None,
    })
}

/// Prepares the model while the fork servers import.
async fn prepare_while_importing(
    setup: Setup<'_>,
    importing: &[ImportingReplica],
    phases: &mut Phases,
) -> Result<LocalModel, StartError> {
    tokio::select! {
        local = LocalModel::prepare(setup.args(), setup.adapters, setup.python, phases) => Ok(local?),
        (reason, ..) = select_all(importing.iter().map(|replica| Box::pin(replica.hosts.end()))) => {
            Err(GroupError::Exited(reason).into())
        }
    }
}

/// Loads all replicas after the first.
async fn load_others(
    replicas: Vec<ForkingReplica>,
    load: &LoadOptions,
    phases: &mut Phases,
) -> Result<Vec<LoadedReplica>, GroupError> {
    let start = Instant::now();
    let loaded = try_join_all(replicas.into_iter().map(|replica| replica.load(load))).await?;
    if !loaded.is_empty() {
        phases.add_since("load other replicas", start);
    }
    Ok(loaded)
}

/// Warms up all replicas after the first.
async fn warm_up_others(
    replicas: Vec<LoadedReplica>,
    recipe: &Recipe,
    phases: &mut Phases,
) -> Result<Vec<LoadedReplica>, GroupError> {
    let start = Instant::now();
    let warm = try_join_all(replicas.into_iter().map(|replica| replica.warm_up(recipe))).await?;
    if !warm.is_empty() {
        phases.add_since("warm up other replicas", start);
    }
    Ok(warm)
}

/// Checks the adapters, and warms up the first replica.
async fn measure(
    setup: Setup<'_>,
    first: &mut LoadedReplica,
    model: &Description,
    local: &LocalModel,
    phases: &mut Phases,
) -> Result<Measured, StartError> {
    let LoadedReplica { workers, group, .. } = first;
    let checked = async {
        load::check_adapters(group, &setup.adapters.config(&local.prepared.adapters)).await?;
        Measured::take(setup, group, model, phases).await
    };
    match group::while_alive(workers, checked).await? {
        Err(StartError::Group(error)) => Err(error.explained(workers).await.into()),
        result => result,
    }
}

/// The recipe of later groups of the first replica.
fn recipe(
    setup: Setup<'_>,
    first: &LoadedReplica,
    model: &Description,
    load: LoadOptions,
    measured: &Measured,
) -> Recipe {
    let (args, settings) = (setup.args(), setup.settings);
    let room = measured.pool.standby_room_bytes;
    // Each worker loads a draft model itself, whose bytes are part of the model's.
    let is_shared = first.hosts.preload_time().is_some() && args.drafting_model().is_none();
    let unshared_bytes = if is_shared { 0 } else { model.weight_bytes };
    let standby_bytes = standby::host_bytes(settings.standby, unshared_bytes, room, settings.num_ranks);
    if let (Ok(_), Some(room)) = (&standby_bytes, room) {
        let room = Size(room.unsigned_abs());
        tracing::info!("a standby group is kept: the weights fit twice, and {room} of each GPU are left");
    }
    Recipe { workers: first.worker_options.clone(), load, warm_up: measured.warm_up(), standby_bytes }
}

/// The description of this server for routers elsewhere.
fn describe(
    setup: Setup<'_>,
    local: &LocalModel,
    model: &Description,
    measured: &Measured,
    num_replicas: usize,
) -> Result<ServerDescription, StartError> {
    let args = setup.args();
    let num_shards = setup.settings.num_ranks / args.pipeline_parallel_size as usize;
    let properties = fingerprint::properties(args, model, num_shards, &local.folder.path, &local.prepared.weights);
    let Measured { pool, limits, options, .. } = measured;
    Ok(ServerDescription {
        properties: properties.map_err(StartError::Fingerprint)?,
        model: model.clone(),
        max_input_tokens: limits.max_input_tokens,
        max_total_tokens: limits.max_total_tokens,
        max_new_tokens: limits.max_new_tokens,
        max_queued_tokens: limits.max_queued_tokens,
        num_blocks: num_replicas as u64 * u64::from(pool.num_blocks),
        num_slots: (num_replicas * options.limits.num_slots()) as u64,
        prefix_caching: options.limits.prefix_caching,
        step_deadline: options.step_deadline,
    })
}
