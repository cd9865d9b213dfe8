//! From settings to a running engine: worker processes, the prepared model, load, warm-up; each with its time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_router::engine::{Engine, EngineOptions};
use penstock_router::text::{LoadError, TextModel};
use penstock_router::worker::{Description, Group, LoadOptions, Phase, Pool, WarmUpOptions, WorkerError};
use penstock_scheduler::Limits;

use crate::args::Args;
use crate::fork_server::{ForkServer, ForkServerOptions};
use crate::model_folder::{FolderError, ModelFolder};
use crate::prefetch;
use crate::resolve::{BLOCK_TOKENS, Choice, ResolveError, SequenceLimits, Settings};
use crate::supervise::{Recipe, Supervisor};
use crate::weights::{self, PrepareError, Prepared};
use crate::workers::{WorkerOptions, Workers, WorkersError};

/// How long Python may take until it listens. Its imports read hundreds of megabytes from a cold disk.
const CONNECT_PATIENCE: Duration = Duration::from_secs(300);
/// After a lost connection: how long to wait for the process's own explanation.
const DEATH_PATIENCE: Duration = Duration::from_secs(2);
/// Waiting so long outweighs one priority: nobody waits for ever, and a burst of urgent requests is still urgent.
const PRIORITY_AGEING: Duration = Duration::from_secs(10);
/// A long prompt lets shorter ones pass until they have cost so many times what it costs itself: enough for it to be in
/// nobody's way, and it still ends some day.
const MAX_OVERTAKING: u32 = 4;

/// A model that is ready to serve.
pub struct Started {
    pub engine: Engine,
    pub supervisor: Supervisor,
    pub prepared: Prepared,
    pub folder: ModelFolder,
    pub text: TextModel,
    pub model: Description,
    pub limits: SequenceLimits,
    pub num_blocks: u32,
    pub phases: Vec<Phase>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Tokenizer(LoadError),
    #[error("loading the tokenizer broke: {0}")]
    TokenizerBroke(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Spawn(#[from] WorkersError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("{0}")]
    Died(String),
    #[error(transparent)]
    Limits(#[from] ResolveError),
}

/// What comes out of the workers before the engine is started.
struct Loaded {
    group: Group,
    prepared: Prepared,
    folder: ModelFolder,
    text: TextModel,
    model: Description,
    pool: Pool,
    load: LoadOptions,
    warm_up: WarmUpOptions,
    step_tokens: u32,
    limits: SequenceLimits,
    phases: Vec<Phase>,
}

/// Call it on the main thread (see `process::python_module`). Dropping the future ends every process.
pub async fn start(args: &Args, settings: &Settings, python: &Path) -> Result<Started, StartError> {
    let mut fork_server = ForkServer::new(ForkServerOptions {
        python: python.to_owned(),
        num_threads: settings.num_threads,
        hub_cache: args.huggingface_hub_cache.clone(),
    });
    let worker_options = WorkerOptions { num_ranks: settings.num_ranks, socket_prefix: args.shard_uds_path.clone() };
    let mut workers = Workers::spawn(&worker_options, &mut fork_server, 0)?;
    let sockets = workers.sockets().to_vec();
    let rendezvous = workers.rendezvous();
    let connecting = async {
        // The workers are forked when the imports are done.
        let import_time = async { Ok(fork_server.import_time().await) };
        tokio::try_join!(import_time, connect(&sockets))
    };
    let loaded = while_alive(&mut workers, load(args, settings, python, connecting, rendezvous)).await?;
    let (prefix_caching, choice) = Settings::prefix_caching(args, &loaded.model);
    choice.iter().for_each(log_choice);
    let limits = Limits {
        max_step_tokens: loaded.step_tokens,
        max_step_sequences: settings.max_step_sequences,
        max_sequence_tokens: loaded.limits.max_total_tokens + loaded.model.num_prefix_tokens(),
        num_blocks: loaded.pool.num_blocks,
        block_tokens: BLOCK_TOKENS,
        max_steps_in_flight: args.max_steps_in_flight,
        prefix_caching,
        priority_ageing: PRIORITY_AGEING,
        max_inter_token: settings.max_inter_token,
        max_overtaking: MAX_OVERTAKING,
        window_tokens: loaded.model.window_tokens,
    };
    let options = EngineOptions {
        limits,
        step_deadline: args
            .step_timeout
            .map_or_else(|| EngineOptions::step_deadline(loaded.pool.worst_step), Duration::from_secs),
        max_failures: EngineOptions::DEFAULT_MAX_FAILURES,
    };
    let num_blocks = Some(u64::from(loaded.pool.num_blocks));
    let warm_up = WarmUpOptions { num_blocks, proven: true, ..loaded.warm_up };
    // Two copies of the weights are for a machine's memory, not for a device's.
    let weight_bytes = loaded.model.device.starts_with("cpu").then_some(loaded.model.weight_bytes);
    let recipe = Recipe { workers: worker_options, load: loaded.load, warm_up, weight_bytes };
    let (supervisor, restart) = Supervisor::new(recipe, fork_server, workers);
    Ok(Started {
        engine: Engine::start(loaded.group, options, Arc::new(restart)),
        supervisor,
        prepared: loaded.prepared,
        folder: loaded.folder,
        text: loaded.text,
        model: loaded.model,
        limits: loaded.limits,
        num_blocks: loaded.pool.num_blocks,
        phases: loaded.phases,
    })
}

/// Gives up when a worker dies before; then the reason is in the process's words, as far as it has any.
pub async fn while_alive<T>(
    workers: &mut Workers,
    future: impl Future<Output = Result<T, StartError>>,
) -> Result<T, StartError> {
    let result = tokio::select! {
        result = future => result,
        reason = workers.death() => return Err(StartError::Died(reason)),
    };
    match result {
        Err(StartError::Worker(error)) if error.is_loss() => {
            // The process knows more about its end than the socket.
            let reason = last_words(workers).await;
            Err(reason.map_or(StartError::Worker(error), StartError::Died))
        }
        result => result,
    }
}

/// Why a worker ended, if one has.
pub async fn last_words(workers: &mut Workers) -> Option<String> {
    tokio::time::timeout(DEATH_PATIENCE, workers.death()).await.ok()
}

/// Waits until the workers listen.
pub async fn connect(sockets: &[PathBuf]) -> Result<Group, StartError> {
    Ok(Group::connect(sockets, CONNECT_PATIENCE).await?)
}

async fn load(
    args: &Args,
    settings: &Settings,
    python: &Path,
    connecting: impl Future<Output = Result<(Duration, Group), StartError>>,
    rendezvous: String,
) -> Result<Loaded, StartError> {
    let mut phases = Vec::new();
    let began = Instant::now();
    let timed = |name: &str, since: Instant| Phase { name: name.to_owned(), duration: since.elapsed() };
    let prepare = async {
        let prepared = weights::prepare(python, args).await?;
        phases.push(timed("prepare model", began));
        tracing::info!("model {} is in {}", prepared.model_id, prepared.folder.display());
        prefetch::begin(prepared.weights.clone());
        let folder = ModelFolder::new(&prepared.folder, args)?;
        let since = Instant::now();
        let (path, chat_template, num_threads) =
            (folder.path.clone(), folder.chat_template.clone(), args.validation_workers);
        let text = tokio::task::spawn_blocking(move || TextModel::load(&path, num_threads, chat_template))
            .await?
            .map_err(StartError::Tokenizer)?;
        phases.push(timed("load tokenizer", since));
        Ok::<_, StartError>((prepared, folder, text))
    };
    let connect = async {
        let (import_time, group) = connecting.await?;
        let start_time = began.elapsed().saturating_sub(import_time);
        Ok((group, [("import", import_time), ("start workers", start_time)]))
    };
    let ((prepared, folder, text), (mut group, begun)) = tokio::try_join!(prepare, connect)?;
    phases.extend(begun.map(|(name, duration)| Phase { name: name.to_owned(), duration }));

    let since = Instant::now();
    let load = LoadOptions {
        model_folder: folder.path.clone(),
        dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
        block_tokens: BLOCK_TOKENS,
        rendezvous,
        trust_remote_code: args.trust_remote_code,
        num_threads: u32::try_from(settings.num_threads).ok(),
        watermark_gamma: args.watermark_gamma,
        watermark_delta: args.watermark_delta,
    };
    let model = group.load(&load).await?;
    phases.push(timed("load", since));
    phases.extend(model.phases.iter().map(|phase| part_of("load", phase)));
    tracing::info!(
        "loaded {} as {} on {} with {} attention: {} MiB of weights",
        model.architecture,
        model.dtype,
        model.device,
        model.attention,
        model.weight_bytes >> 20,
    );

    let since = Instant::now();
    let (step_tokens, choice) = settings.step_tokens(args, &model);
    choice.iter().for_each(log_choice);
    if let Some(given) = args.max_total_tokens.filter(|given| *given > model.max_total_tokens()) {
        return Err(ResolveError::BeyondModel { given, allowed: model.max_total_tokens() }.into());
    }
    let warm_up = WarmUpOptions {
        max_step_tokens: step_tokens,
        max_step_sequences: settings.max_step_sequences,
        max_sequence_tokens: args.max_total_tokens.map(|tokens| tokens + model.num_prefix_tokens()),
        num_blocks: settings.num_blocks.map(u64::from),
        memory_fraction: settings.memory_fraction,
        proven: false,
    };
    let pool = group.warm_up(&warm_up).await?;
    phases.push(timed("warm up", since));
    phases.extend(pool.phases.iter().map(|phase| part_of("warm up", phase)));
    let capacity_tokens = u64::from(pool.num_blocks) * u64::from(BLOCK_TOKENS);
    tracing::info!(
        "the KV cache holds {capacity_tokens} tokens in {} blocks: {} MiB",
        pool.num_blocks,
        (u64::from(pool.num_blocks) * model.kv_bytes_per_block) >> 20,
    );
    let limits = SequenceLimits::resolve(args, settings, &model, step_tokens, pool.num_blocks)?;
    limits.choices.iter().for_each(log_choice);
    Ok(Loaded { group, prepared, folder, text, model, pool, load, warm_up, step_tokens, limits, phases })
}

fn part_of(whole: &str, phase: &Phase) -> Phase {
    Phase { name: format!("{whole}: {}", phase.name), duration: phase.duration }
}

pub fn log_choice(choice: &Choice) {
    tracing::info!("{} is {} ({})", choice.name, choice.value, choice.reason);
}
