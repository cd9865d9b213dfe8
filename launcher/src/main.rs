//! The `penstock` binary. It resolves settings, binds the port, starts the workers and the router, and handles signals. Its
//! subcommands run without a server.
//!
//! Exit status: 0 after a signal; 1 if the server could not start, or if its workers failed repeatedly; 2 for wrong settings;
//! 128 + n after a second signal n.

mod flag;
mod heap;
mod init;
mod listen;
mod log;
mod model;
mod node;
mod resolve;
mod route;
mod signals;
mod start;
mod tool;
mod worker;

use std::convert::Infallible;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::future::{join_all, select_all};
use nix::sys::signal::Signal;
use penstock_router::config::ApiKeys;
use penstock_router::engine::Generator;
use penstock_router::limits::{ConnectionLimits, QueueLimits, RequestLimits};
use penstock_router::remote::{self, Access, EngineListener, Remote, RoutedQueue, ServerDescription};
use penstock_router::replica::Replicas;
use penstock_router::telemetry::metrics::{self, Exporter};
use penstock_router::text::{RENDERER_ARGUMENT, run_chat_renderer};
use penstock_router::worker::Phase;
use penstock_router::{Adapters, Config, SamplingDefaults, Services};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::flag::args::Args;
use crate::flag::command_line;
use crate::flag::command_line::Parsed;
use crate::flag::engine_access;
use crate::flag::keys;
use crate::flag::reference;
use crate::listen::listener::{Place, Reserved, ReservedPort};
use crate::model::adapter::AdapterFlags;
use crate::model::adapter_download;
use crate::model::generation_config;
use crate::node::{NodeArgs, NodeOptions, NodePlace, NodeSecret, RanksOn, RayOptions, SecretError};
use crate::resolve::Settings;
use crate::resolve::environment;
use crate::route::replica_file::Follower;
use crate::start::{Started, log_choice};
use crate::tool::Tool;
use crate::worker::hosts::Placement;
use crate::worker::process;
use crate::worker::supervise::Supervisor;

/// How long workers may take to exit. They drop their work, so this is ample.
const WORKER_GRACE: Duration = Duration::from_secs(10);

/// How the server stopped.
enum Stopped {
    Drained,
    /// By a second signal.
    Immediately(Signal),
}

fn main() -> ExitCode {
    if let Err(error) = signals::restore_defaults() {
        let _ = writeln!(std::io::stderr(), "error: cannot restore the default actions of signals: {error}");
        return ExitCode::FAILURE;
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == RENDERER_ARGUMENT) {
        return if run_chat_renderer().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if let Some(status) = init::run_as_first_process() {
        return status;
    }
    let parsed = match command_line::parse(std::env::args_os(), |name| std::env::var(name).ok()) {
        Ok(parsed) => parsed,
        Err(error) => error.exit(),
    };
    if let Some(page) = parsed.args.reference {
        print!("{}", reference::render(page));
        return ExitCode::SUCCESS;
    }
    if let Some(Tool::Node(node)) = &parsed.args.tool {
        return run_node(node);
    }
    if let Some(tool) = &parsed.args.tool {
        let error = tool.run(&find_python());
        let _ = writeln!(std::io::stderr(), "error: {error}");
        return ExitCode::FAILURE;
    }
    let _flush = match log::start(parsed.args.json_output, std::env::var("LOG_LEVEL").ok().as_deref()) {
        Ok(flush) => flush,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: cannot start the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    match run(&parsed) {
        Ok(Stopped::Drained) => ExitCode::SUCCESS,
        Ok(Stopped::Immediately(signal)) => ExitCode::from(128_u8.saturating_add(signal as u8)),
        Err(error) => {
            tracing::error!("{error:#}");
            let is_setting = error.is::<resolve::ResolveError>()
                || error.is::<keys::KeyError>()
                || error.is::<engine_access::AccessError>()
                || error.is::<route::RouteError>()
                || error.is::<SecretError>();
            ExitCode::from(if is_setting { 2 } else { 1 })
        }
    }
}

/// Runs an agent until a signal, which is not an error.
fn run_node(args: &NodeArgs) -> ExitCode {
    let _flush = match log::start(args.json_output, std::env::var("LOG_LEVEL").ok().as_deref()) {
        Ok(flush) => flush,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: cannot start the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(async {
            let (stop, second_signal) = signals::listen(args.stop_with_stdin).context("cannot listen for signals")?;
            let python = find_python();
            tokio::select! {
                result = node::run(args, &python) => result,
                () = stop.cancelled() => Ok(()),
                _ = second_signal => Ok(()),
            }
        });
        // A blocking thread may still be reading standard input.
        runtime.shutdown_background();
        result
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::from(if error.is::<SecretError>() { 2 } else { 1 })
        }
    }
}

fn run(parsed: &Parsed) -> anyhow::Result<Stopped> {
    let machine = environment::machine();
    let settings = Settings::resolve(&parsed.args, machine)?;
    let api_keys = keys::read(&parsed.args)?;
    report_settings(parsed, &settings);
    let python = find_python();
    if parsed.args.env {
        environment::report(&python, machine).iter().for_each(|line| tracing::info!("environment: {line}"));
    }
    let access = engine_access::read(&parsed.args, std::env::var(engine_access::SECRET).ok())?;
    let servers = match &access {
        Some(access) => route::servers(&parsed.args, access)?,
        None => Vec::new(),
    };
    let placement = placement(&parsed.args, &settings, &python)?;
    let listener = Reserved::bind(&settings.place)?;
    let engine_listener = parsed.args.engine_listen.map(ReservedPort::bind).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start threads")?;
    // The main thread runs this future, so the processes that it spawns live as long as this one (`process::python_module`).
    let stopped = runtime.block_on(async {
        let (stop, second_signal) =
            signals::listen(parsed.args.stop_with_stdin).context("cannot listen for signals")?;
        let settings = &settings;
        let setup = Setup { parsed, settings, api_keys, access, engine_listener, servers, placement, python: &python };
        tokio::select! {
            result = serve(setup, listener, stop) => {
                result.map(|()| Stopped::Drained)
            }
            signal = second_signal => Ok(Stopped::Immediately(signal)),
        }
    });
    // A blocking thread may still be tokenizing a long input.
    runtime.shutdown_background();
    stopped
}

/// Where --ranks-on puts the ranks. Each node has its share of them; one that Ray chooses has a stage, because the ranks of a stage
/// exchange most, or one rank if there are no stages.
fn placement(args: &Args, settings: &Settings, python: &Path) -> Result<Placement, SecretError> {
    let nodes: Vec<_> = match &args.ranks_on[..] {
        [] => return Ok(Placement::Here),
        [RanksOn::Ray(cluster)] => {
            let (python, cluster) = (python.to_owned(), cluster.clone());
            let num_nodes = match args.pipeline_parallel_size {
                1 => settings.num_ranks,
                num_stages => num_stages as usize,
            };
            let (ranks_per_node, uses_gpus) = (settings.num_ranks / num_nodes, args.unencrypted_gpus);
            return Ok(Placement::Ray(RayOptions { python, cluster, num_nodes, ranks_per_node, uses_gpus }));
        }
        hosts => hosts.iter().filter_map(RanksOn::node).collect(),
    };
    let num_nodes = nodes.len();
    let secret = NodeSecret::read(args.node_secret_file.as_deref().ok_or(SecretError::Missing)?)?;
    let node = |address| NodeOptions {
        place: NodePlace::fixed(address),
        secret: secret.clone(),
        by_ray: false,
        num_ranks: settings.num_ranks / num_nodes,
        uses_gpus: args.unencrypted_gpus,
    };
    Ok(Placement::Nodes(nodes.into_iter().map(node).collect()))
}

fn find_python() -> PathBuf {
    process::find_python(|name| std::env::var_os(name), std::env::current_exe().ok().as_deref())
}

fn report_settings(parsed: &Parsed, settings: &Settings) {
    for given in &parsed.given {
        tracing::info!("{} is {} ({})", given.name, given.value, given.origin);
    }
    settings.choices.iter().for_each(log_choice);
    parsed.notes.iter().for_each(|note| tracing::info!("{note}"));
    settings.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
}

/// What is known before any process is started.
struct Setup<'a> {
    parsed: &'a Parsed,
    settings: &'a Settings,
    api_keys: ApiKeys,
    access: Option<Access>,
    engine_listener: Option<ReservedPort>,
    /// Not empty: they compute, and nothing is loaded here.
    servers: Vec<Remote>,
    placement: Placement,
    python: &'a Path,
}

/// Starts, serves until `stop`, drains, and stops the workers.
async fn serve(setup: Setup<'_>, listener: Reserved, stop: CancellationToken) -> anyhow::Result<()> {
    let Setup { parsed, settings, api_keys, access, engine_listener, servers, placement, python } = setup;
    let Parsed { args, vertex_routes, .. } = parsed;
    let began = Instant::now();
    let adapters = AdapterFlags::new(args)?;
    let start = async {
        match servers.is_empty() {
            true => anyhow::Ok(start::start(args, settings, &adapters, python, &placement).await?),
            false => Ok(route::start(args, &adapters, python, servers, access.clone()).await?),
        }
    };
    let started = tokio::select! {
        started = start => started?,
        () = stop.cancelled() => return Ok(()),
    };
    // `folder` is dropped, with its links, when serving ends.
    let Started {
        replicas,
        mut supervisors,
        prepared,
        folder,
        text,
        model,
        limits,
        num_blocks,
        phases,
        description,
        follower,
    } = started;
    let sampling_defaults = match &model.pooling {
        None => generation_config::defaults(&folder.path, args)?,
        Some(_) => SamplingDefaults::NONE,
    };
    let queue = QueueLimits { max_tokens: limits.max_queued_tokens, timeout: settings.queue_timeout };
    let limits = RequestLimits {
        max_concurrent_requests: args.max_concurrent_requests,
        max_best_of: args.max_best_of,
        max_stop_sequences: args.max_stop_sequences,
        max_top_n_tokens: args.max_top_n_tokens,
        max_input_tokens: limits.max_input_tokens as usize,
        max_total_tokens: limits.max_total_tokens as usize,
        max_new_tokens: limits.max_new_tokens,
        max_client_batch_size: args.max_client_batch_size,
    };
    let config = Config {
        served_model_names: match &args.served_model_name[..] {
            [] => vec![prepared.model_id.clone()],
            names => names.to_vec(),
        },
        check_model_names: args.check_model_name,
        adapters: adapters.config(&prepared.adapters),
        trusts_request_chat_templates: args.trust_request_chat_template,
        strict_requests: args.strict_requests,
        reasoning_budget: args.reasoning_budget,
        priority_order: args.priority_order.into(),
        model_id: prepared.model_id,
        model_sha: prepared.sha,
        pipeline_tag: prepared.pipeline_tag.or_else(|| model.pipeline_tag().map(str::to_owned)),
        model_folder: folder.path.clone(),
        sampling_defaults,
        limits,
        decoder_prefix: model.decoder_prefix,
        pooling: model.pooling,
        image_input: model.image_input,
        image_urls: args.image_urls(),
        queue,
        validation_workers: args.validation_workers,
        payload_limit_bytes: args.payload_limit,
        cors_allow_origins: args.cors_allow_origin.clone(),
        api_keys,
        compute_type: compute_type(settings.num_ranks, &model.device),
        grammar_support: !args.disable_grammar_support,
        prefill_logprobs: args.enable_prefill_logprobs,
        max_stored_responses: args.max_stored_responses,
        playground: !args.disable_playground,
        vertex_routes: vertex_routes.clone(),
        connections: ConnectionLimits::new(&limits),
        graceful_termination_timeout: settings.graceful_termination_timeout,
        traces: settings.traces.clone(),
    };
    let has_keys = !config.api_keys.is_empty();
    let exporter = Exporter::install(&config.limits)?;
    metrics::kv_pool(num_blocks, model.block_tokens);
    metrics::standby_groups(0);
    let place = listener.place();
    // The socket's file is removed when serving ends.
    let (listener, _socket_file) = listener.open()?;
    let routed_queue = RoutedQueue::default();
    let (grace, queue) = (settings.graceful_termination_timeout, routed_queue.clone());
    let engine = open_engine(engine_listener, access, description, grace, queue)?;
    report_ready(&phases, began.elapsed(), &place, has_keys);
    // After a failure of the workers every open request has failed, so draining takes no time.
    let drain = stop.child_token();
    let (adapter_downloads, asked) = mpsc::channel(1);
    let generator: Arc<dyn Generator> = Arc::new(replicas.clone());
    let adapters = Adapters::new(&config.adapters, Arc::clone(&generator));
    let services = Services {
        engine: Arc::clone(&generator),
        text,
        metrics: exporter,
        adapters: adapters.clone(),
        adapter_downloads,
        routed_queue,
    };
    let watch = async {
        let reason = tokio::select! {
            reason = failure(&replicas, &mut supervisors) => reason,
            never = adapter_download::run(asked, python, args) => match never {},
            never = follow(follower) => match never {},
        };
        drain.cancel();
        reason
    };
    let served = Box::pin(async {
        let http = penstock_router::serve(config, services, listener, drain.clone());
        let engine = async {
            let Some(engine) = engine else { return Ok(()) };
            let served = remote::serve(engine, generator, adapters, drain.clone()).await;
            drain.cancel();
            served.context("cannot serve --engine-listen")
        };
        let (http, engine) = tokio::join!(http, engine);
        engine.and(http.map_err(Into::into))
    });
    let (served, failure) = join_until_served(served, watch).await;
    replicas.shut_down().await;
    join_all(supervisors.into_iter().map(|supervisor| supervisor.stop(WORKER_GRACE))).await;
    served?;
    failure.map_or(Ok(()), |reason| Err(anyhow::anyhow!(reason)))
}

/// Follows `--replica-file`, if it is given.
async fn follow(follower: Option<Follower>) -> Infallible {
    match follower {
        Some(follower) => follower.run().await,
        None => std::future::pending().await,
    }
}

/// Opens `--engine-listen`, if it is given.
fn open_engine(
    reserved: Option<ReservedPort>,
    access: Option<Access>,
    description: Option<ServerDescription>,
    grace: Duration,
    queue: RoutedQueue,
) -> anyhow::Result<Option<EngineListener>> {
    let (Some(reserved), Some(access), Some(description)) = (reserved, access, description) else { return Ok(None) };
    let scheme = if access.identity.is_some() { "https" } else { "http" };
    tracing::info!(engine = format!("{scheme}://{}", reserved.address), "routers can use this server's engine");
    Ok(Some(EngineListener { listener: reserved.open()?, access, description, grace, queue }))
}

/// Awaits `served`. Also returns the reason if the workers failed before that.
async fn join_until_served<T>(
    served: impl Future<Output = T>,
    failure: impl Future<Output = String>,
) -> (T, Option<String>) {
    let (mut served, mut failure) = (std::pin::pin!(served), std::pin::pin!(failure));
    tokio::select! {
        served = &mut served => (served, None),
        reason = &mut failure => (served.await, Some(reason)),
    }
}

/// Supervises the workers. Resolves when they cannot be restarted any more, with the best explanation there is.
async fn failure(replicas: &Replicas, supervisors: &mut [Supervisor]) -> String {
    if supervisors.is_empty() {
        return replicas.failure().await; // The workers are elsewhere.
    }
    let supervising = select_all(supervisors.iter_mut().map(|supervisor| Box::pin(supervisor.run())));
    let mut reason = tokio::select! {
        reason = replicas.failure() => reason,
        (never, ..) = supervising => match never {},
    };
    // A process that exited knows more than the engine's lost connection.
    for supervisor in supervisors {
        if let Some(exit) = supervisor.exit_reason().await.filter(|exit| !reason.contains(exit)) {
            reason = format!("{reason}; {exit}");
        }
    }
    reason
}

/// The value of the header `x-compute-type`. COMPAT: `COMPUTE_TYPE` overrides it.
fn compute_type(num_ranks: usize, device: &str) -> String {
    let device = device.split(':').next().unwrap_or(device);
    std::env::var("COMPUTE_TYPE").unwrap_or_else(|_| format!("{num_ranks}-{device}"))
}

/// Logs the startup phases, the URL and an example request.
fn report_ready(phases: &[Phase], total: Duration, place: &Place, has_keys: bool) {
    for phase in phases {
        tracing::info!(seconds = rounded(phase.duration), "phase {}", phase.name);
    }
    tracing::info!(url = place.to_string(), seconds = rounded(total), "ready");
    tracing::info!("try:\n{}", example(place, has_keys));
}

/// Seconds, to the millisecond.
fn rounded(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

fn example(place: &Place, has_keys: bool) -> String {
    let url = match place {
        Place::Port(_) => place.to_string(),
        Place::Socket(path) => format!("--unix-socket {} http://localhost", path.display()),
    };
    let key = if has_keys { "-H 'authorization: Bearer KEY' " } else { "" };
    format!(
        "curl {url}/v1/chat/completions {key}-H 'content-type: application/json' \
         -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is the capital of Japan?\"}}],\"max_tokens\":40}}'"
    )
}
