//! From settings to a running engine: worker processes, the prepared model, load, warm-up. Each phase is timed.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::{select_all, try_join_all};
use penstock_router::config::{AdapterConfig, AdapterSource};
use penstock_router::engine::{EngineOptions, RestartGroup};
use penstock_router::remote::ServerDescription;
use penstock_router::replica::Replicas;
use penstock_router::text::{LoadError, TextModel};
use penstock_router::worker::{Description, Group, LoadOptions, Phase, Pool, WarmUpOptions};
use penstock_scheduler::Limits;

use crate::flag::args::Args;
use crate::model::adapter::AdapterFlags;
use crate::model::fingerprint;
use crate::model::model_folder::{FolderError, ModelFolder};
use crate::model::prefetch;
use crate::model::quantize::Quantize;
use crate::model::weights::{self, PrepareError, Prepared};
use crate::resolve::machine_share::MachineShare;
use crate::resolve::{Choice, ResolveError, SequenceLimits, Settings};
use crate::route::replica_file::Follower;
use crate::worker::fork_server::ForkServerOptions;
use crate::worker::group::{self, GroupError, Recipe};
use crate::worker::hosts::{Hosts, Placement};
use crate::worker::standby::Standby;
use crate::worker::supervise::Supervisor;
use crate::worker::workers::{Meeting, WorkerOptions, Workers, WorkersError};

/// Waiting this long raises a request's rank by one priority, so that no request starves while urgent ones still go first.
const PRIORITY_AGEING: Duration = Duration::from_secs(10);
/// Shorter prompts overtake a long one until they have computed this many times its own tokens. That keeps the long one out
/// of their way and still bounds its wait.
const MAX_OVERTAKING: u32 = 4;

/// Draft tokens of a sequence without `--speculate`, which a grammar forces: as many as the longest usual keys of a schema.
const MAX_FORCED_TOKENS: u32 = 8;

/// A model that is ready to serve.
pub(crate) struct Started {
    pub(crate) replicas: Replicas,
    /// One for each replica.
    pub(crate) supervisors: Vec<Supervisor>,
    pub(crate) prepared: Prepared,
    pub(crate) folder: ModelFolder,
    pub(crate) text: TextModel,
    pub(crate) model: Description,
    pub(crate) limits: SequenceLimits,
    /// Of all replicas.
    pub(crate) num_blocks: usize,
    pub(crate) phases: Vec<Phase>,
    /// For routers elsewhere; `None` without `--engine-listen`.
    pub(crate) description: Option<ServerDescription>,
    /// `None` without `--replica-file`.
    pub(crate) follower: Option<Follower>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Tokenizer(LoadError),
    #[error("the thread that loads the tokenizer failed: {0}")]
    TokenizerThread(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Limits(#[from] ResolveError),
    #[error("cannot read the model's files: {0}")]
    Fingerprint(std::io::Error),
    #[error("--lora-adapters: {name} cannot be used: {reason}")]
    Adapter { name: String, reason: String },
}

/// The first group with its weights.
struct Loaded {
    group: Group,
    model: Description,
    phases: Vec<Phase>,
}

/// What the first group's memory allows, for all groups.
struct Measured {
    pool: Pool,
    warm_up: WarmUpOptions,
    step_tokens: u32,
    limits: SequenceLimits,
}

/// Call it on the main thread (see `process::python_module`). Dropping the future kills every process.
pub(crate) async fn start(
    args: &Args,
    settings: &Settings,
    adapters: &AdapterFlags,
    python: &Path,
    placement: &Placement,
) -> Result<Started, StartError> {
    let visible_devices = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let shares =
        MachineShare::of_each(args.replicas, settings.num_ranks, settings.num_devices, visible_devices.as_deref());
    let mut starting = Vec::new();
    for (replica, share) in shares.into_iter().enumerate() {
        starting.push(Starting::new(args, settings, python, replica, share, placement)?);
    }
    // The fork servers import meanwhile.
    let (began, mut phases) = (Instant::now(), Vec::new());
    let (prepared, folder, text) = tokio::select! {
        prepared = prepare(args, adapters, python, &mut phases) => prepared?,
        (reason, ..) = select_all(starting.iter().map(|starting| Box::pin(starting.hosts.end()))) => {
            return Err(GroupError::Exited(reason).into());
        }
    };
    let load = load_options(args, settings, adapters, &prepared, &folder);
    let mut spawned = Vec::new();
    for starting in starting {
        spawned.push(starting.spawn(settings, &load)?);
    }
    let Spawned { worker_options, hosts, mut workers } = spawned.remove(0);
    let (connecting, forking_began) = (group::connect(&workers), Instant::now());
    let loading = async {
        // Workers are forked once the imports are done.
        let import_time = async { Ok(hosts.import_time().await) };
        let (import_time, (group, meeting)) = tokio::try_join!(import_time, connecting)?;
        let Meeting { rendezvous, token, .. } = meeting;
        let load = LoadOptions { rendezvous, token, ..load.clone() };
        let preload_time = hosts.preload_time();
        let importing = import_time.saturating_sub(forking_began - began);
        let start_time = forking_began.elapsed().saturating_sub(importing + preload_time.unwrap_or_default());
        let spans = [
            ("import", Some(import_time)),
            ("load before the fork", preload_time),
            ("start workers", Some(start_time)),
        ];
        phases.extend(spans.into_iter().filter_map(|(name, duration)| Some(phase(name, duration?))));
        load_first(group, &load, phases).await
    };
    let mut loaded = group::run(&mut workers, loading).await?;
    // The scheduler counts in the first group's blocks.
    let load = LoadOptions { block_tokens: Some(loaded.model.block_tokens), ..load };
    let since = Instant::now();
    let others = spawned.into_iter().map(|Spawned { worker_options, hosts, mut workers }| {
        let loading = group::load(&load, &workers, false);
        async move {
            let group = group::run(&mut workers, async { Ok(loading.await?.group) }).await?;
            Ok::<_, GroupError>((worker_options, hosts, workers, group))
        }
    });
    // Before the first group measures the memory that is left for all.
    let others = try_join_all(others).await?;
    if !others.is_empty() {
        loaded.phases.push(phase("load other replicas", since.elapsed()));
    }
    let checked = async {
        check_adapters(&loaded.group, &adapters.config(&prepared.adapters)).await?;
        measure(args, settings, &mut loaded).await
    };
    let measured = match group::while_alive(&mut workers, checked).await? {
        Err(StartError::Group(error)) => return Err(error.explained(&mut workers).await.into()),
        result => result?,
    };
    let (prefix_caching, choice) = Settings::prefix_caching(args, &loaded.model);
    choice.iter().for_each(log_choice);
    let mut limits = Limits {
        max_step_tokens: measured.step_tokens,
        max_step_sequences: settings.max_step_sequences,
        max_sequence_tokens: measured.limits.max_total_tokens + loaded.model.num_prefix_tokens(),
        num_blocks: measured.pool.num_blocks,
        num_memory_slots: measured.warm_up.num_memory_slots,
        num_disk_slots: measured.warm_up.num_disk_slots,
        block_tokens: loaded.model.block_tokens,
        max_steps_in_flight: args.max_steps_in_flight,
        prefix_caching,
        priority_ageing: PRIORITY_AGEING,
        max_inter_token: settings.max_inter_token,
        max_overtaking: MAX_OVERTAKING,
        window_tokens: loaded.model.window_tokens,
        whole_prompts: loaded.model.is_prompt_whole(),
        max_draft_tokens: if args.speculate > 0 { args.speculate } else { MAX_FORCED_TOKENS },
        drafts_with_model: loaded.model.drafts_with_model,
        drafts_extend_lookup: loaded.model.drafts_extend_lookup,
        drafts_only_forced: args.speculate == 0,
        max_image_bytes: loaded.model.max_image_bytes(),
        num_stages: args.pipeline_parallel_size,
    };
    let (max_draft_tokens, choice) = Settings::speculation(&loaded.model, &limits);
    choice.iter().for_each(log_choice);
    limits.max_draft_tokens = max_draft_tokens;
    let options = EngineOptions {
        limits,
        step_deadline: args
            .step_timeout
            .map_or_else(|| EngineOptions::step_deadline(measured.pool.worst_step), Duration::from_secs),
        max_failures: EngineOptions::DEFAULT_MAX_FAILURES,
    };
    let num_blocks = Some(u64::from(measured.pool.num_blocks));
    let warm_up = WarmUpOptions { num_blocks, proven: true, ..measured.warm_up };
    let room = measured.pool.standby_room_bytes;
    // Each worker loads a draft model itself, whose bytes are part of the model's.
    let is_shared = hosts.preload_time().is_some() && args.drafting_model().is_none();
    let unshared_bytes = if is_shared { 0 } else { loaded.model.weight_bytes };
    let standby_bytes = settings.standby.host_bytes(unshared_bytes, room, settings.num_ranks);
    if let (Ok(_), Some(room)) = (&standby_bytes, room) {
        tracing::info!("a standby group is kept: the weights fit twice, and {} MiB of each GPU are left", room >> 20);
    }
    let recipe = |workers| Recipe {
        workers,
        load: load.clone(),
        warm_up: warm_up.clone(),
        standby_bytes: standby_bytes.clone(),
    };
    let mut phases = loaded.phases;
    let since = Instant::now();
    let starting = others.into_iter().map(|(worker_options, hosts, mut workers, mut group)| {
        let recipe = recipe(worker_options);
        async move {
            group::run(&mut workers, recipe.warm_up(&mut group)).await?;
            Ok::<_, GroupError>((recipe, hosts, workers, group))
        }
    });
    let mut started = vec![(recipe(worker_options), hosts, workers, loaded.group)];
    started.extend(try_join_all(starting).await?);
    if started.len() > 1 {
        phases.push(phase("warm up other replicas", since.elapsed()));
    }
    let num_blocks = started.len() * measured.pool.num_blocks as usize;
    let num_slots = started.len() * limits.num_slots();
    let (mut groups, mut supervisors) = (Vec::new(), Vec::new());
    for (recipe, hosts, workers, group) in started {
        let (supervisor, restart) = Supervisor::new(recipe, hosts, workers, group.probe());
        supervisors.push(supervisor);
        groups.push((group, Arc::new(restart) as Arc<dyn RestartGroup>));
    }
    let num_shards = settings.num_ranks / args.pipeline_parallel_size as usize;
    let description = match args.engine_listen {
        None => None,
        Some(_) => Some(ServerDescription {
            properties: fingerprint::properties(args, &loaded.model, num_shards, &folder.path, &prepared.weights)
                .map_err(StartError::Fingerprint)?,
            model: loaded.model.clone(),
            max_input_tokens: measured.limits.max_input_tokens,
            max_total_tokens: measured.limits.max_total_tokens,
            max_new_tokens: measured.limits.max_new_tokens,
            max_queued_tokens: measured.limits.max_queued_tokens,
            num_blocks: num_blocks as u64,
            num_slots: num_slots as u64,
            prefix_caching,
            step_deadline: options.step_deadline,
        }),
    };
    Ok(Started {
        replicas: Replicas::start(groups, options),
        description,
        follower: None,
        supervisors,
        prepared,
        folder,
        text: text.with_embeddings(loaded.model.vocab_size),
        model: loaded.model,
        limits: measured.limits,
        num_blocks,
        phases,
    })
}

/// A replica whose fork server imports.
struct Starting {
    worker_options: WorkerOptions,
    hosts: Hosts,
}

/// The processes of a replica.
struct Spawned {
    worker_options: WorkerOptions,
    hosts: Hosts,
    workers: Workers,
}

impl Starting {
    fn new(
        args: &Args,
        settings: &Settings,
        python: &Path,
        replica: usize,
        share: MachineShare,
        placement: &Placement,
    ) -> Result<Self, GroupError> {
        let options = ForkServerOptions {
            python: python.to_owned(),
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

    fn spawn(self, settings: &Settings, load: &LoadOptions) -> Result<Spawned, GroupError> {
        let Self { worker_options, mut hosts } = self;
        if settings.preloads() {
            hosts.preload(load);
        }
        let workers = Workers::spawn(&worker_options, &mut hosts, 0)?;
        Ok(Spawned { worker_options, hosts, workers })
    }
}

/// The model's folder with the changes that flags make, and its tokenizer.
pub(crate) async fn prepare(
    args: &Args,
    adapters: &AdapterFlags,
    python: &Path,
    phases: &mut Vec<Phase>,
) -> Result<(Prepared, ModelFolder, TextModel), StartError> {
    let began = Instant::now();
    let prepared = weights::prepare(python, args, adapters).await?;
    phases.push(phase("prepare model", began.elapsed()));
    tracing::info!("model {} is in {}", prepared.model_id, prepared.folder.display());
    prefetch::begin([&prepared.weights[..], &prepared.drafter_weights].concat());
    let folder = ModelFolder::new(&prepared.folder, args)?;
    let since = Instant::now();
    let (path, chat_template, num_threads) =
        (folder.path.clone(), folder.chat_template.clone(), args.validation_workers);
    let renderer = Path::new("/proc/self/exe");
    let load = move || TextModel::load(&path, num_threads, chat_template, renderer);
    let text = tokio::task::spawn_blocking(load).await?.map_err(StartError::Tokenizer)?;
    phases.push(phase("load tokenizer", since.elapsed()));
    Ok((prepared, folder, text))
}

/// What flags and model say of a load. Each group has a rendezvous and a token of its own.
fn load_options(
    args: &Args,
    settings: &Settings,
    adapters: &AdapterFlags,
    prepared: &Prepared,
    folder: &ModelFolder,
) -> LoadOptions {
    LoadOptions {
        model_folder: folder.path.clone(),
        dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
        kv_cache_dtype: args.kv_cache_dtype.name().map(str::to_owned),
        block_tokens: None,
        rendezvous: String::new(),
        token: String::new(),
        trust_remote_code: args.trust_remote_code,
        // A node divides its own cores.
        num_threads: u32::try_from(settings.num_threads).ok().filter(|_| settings.ranks_on.is_empty()),
        watermark_gamma: args.watermark_gamma,
        dequantize: args.dequantize,
        quantize: args.quantize.map(Quantize::name),
        activation_bits: args.activation_bits,
        deterministic: args.deterministic,
        background: false,
        max_adapters: u32::try_from(adapters.max_loaded).unwrap_or(u32::MAX),
        max_adapter_rank: args.max_lora_rank,
        speculative_model: prepared.speculative_model.clone(),
        drafts_with_mtp: args.drafts_with_mtp(),
        recent_answer_tokens: args.speculate_recent_tokens,
        num_stages: args.pipeline_parallel_size,
        watermark_delta: args.watermark_delta,
        attention: args.attention.name().map(str::to_owned),
        cpu_isa: args.cpu_isa.name().map(str::to_owned),
    }
}

/// Loads the first group.
async fn load_first(mut group: Group, load: &LoadOptions, mut phases: Vec<Phase>) -> Result<Loaded, GroupError> {
    let since = Instant::now();
    let model = group.load(load).await?;
    phases.push(phase("load", since.elapsed()));
    phases.extend(model.phases.iter().map(|phase| part_of("load", phase)));
    tracing::info!(
        "loaded {} as {} on {} with {} attention: {} MiB of weights",
        model.architecture,
        model.dtype,
        model.device,
        model.attention,
        model.weight_bytes >> 20,
    );
    Ok(Loaded { group, model, phases })
}

/// Refuses adapters that requests could never use. Only at the start: a server that serves restarts its workers without those
/// whose files have gone meanwhile.
async fn check_adapters(group: &Group, adapters: &AdapterConfig) -> Result<(), StartError> {
    let mut checked = HashSet::new();
    for AdapterSource { name, path } in &adapters.sources {
        if checked.insert(path) {
            let usable = group.check_adapter(path).await.map_err(GroupError::from)?;
            usable.map_err(|reason| StartError::Adapter { name: name.clone(), reason })?;
        }
    }
    Ok(())
}

/// Warms up the first group, whose limits and memory hold for all others.
async fn measure(args: &Args, settings: &Settings, loaded: &mut Loaded) -> Result<Measured, StartError> {
    let Loaded { group, model, phases } = loaded;
    let since = Instant::now();
    let (step_tokens, choice) = settings.step_tokens(args, model);
    choice.iter().for_each(log_choice);
    if let Some(given) = args.max_total_tokens.filter(|given| *given > model.max_total_tokens()) {
        return Err(ResolveError::BeyondModel { given, allowed: model.max_total_tokens() }.into());
    }
    let ([num_memory_slots, num_disk_slots], choice) = Settings::num_slots(args, model);
    choice.iter().for_each(log_choice);
    let warm_up = WarmUpOptions {
        max_step_tokens: step_tokens,
        max_step_sequences: settings.max_step_sequences,
        max_sequence_tokens: args
            .max_total_tokens
            .map(|tokens| tokens + model.num_prefix_tokens() - model.num_uncomputed_tokens()),
        num_blocks: Settings::num_blocks(args, model).map(u64::from),
        memory_fraction: settings.memory_fraction,
        proven: false,
        graph_sizes: args.cuda_graphs.clone(),
        reserves_standby: settings.standby == Standby::Reserve,
        num_memory_slots,
        num_disk_slots,
        offload_folder: args
            .kv_offload_folder
            .as_ref()
            .map(|folder| std::path::absolute(folder).unwrap_or_else(|_| folder.clone())),
        num_groups: u32::try_from(args.replicas).unwrap_or(u32::MAX),
    };
    if !args.cuda_graphs.is_empty() && model.device.starts_with("cpu") {
        tracing::info!("--cuda-graphs has no effect: the model runs on a CPU");
    }
    let pool = group.warm_up(&warm_up).await.map_err(GroupError::from)?;
    phases.push(phase("warm up", since.elapsed()));
    phases.extend(pool.phases.iter().map(|phase| part_of("warm up", phase)));
    let capacity_tokens = u64::from(pool.num_blocks) * u64::from(model.block_tokens);
    tracing::info!(
        "the KV cache holds {capacity_tokens} tokens in {} blocks ({} MiB)",
        pool.num_blocks,
        (u64::from(pool.num_blocks) * model.kv_bytes_per_block) >> 20,
    );
    let limits = SequenceLimits::resolve(args, settings, model, step_tokens, pool.num_blocks)?;
    limits.choices.iter().for_each(log_choice);
    Ok(Measured { pool, warm_up, step_tokens, limits })
}

fn phase(name: &str, duration: Duration) -> Phase {
    Phase { name: name.to_owned(), duration }
}

/// A phase that the workers measured within `whole`.
fn part_of(whole: &str, phase: &Phase) -> Phase {
    Phase { name: format!("{whole}: {}", phase.name), duration: phase.duration }
}

/// Logs a value that was chosen, with its reason.
pub(crate) fn log_choice(choice: &Choice) {
    tracing::info!("{} is {} ({})", choice.name, choice.value, choice.reason);
}
