//! Runs a server from its settings to its end.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use nix::sys::signal::Signal;
use penstock_router::remote::Remote;
use tokio_util::sync::CancellationToken;

use crate::flag::command_line::Parsed;
use crate::flag::{engine_access, keys};
use crate::listen::listener::{Reserved, ReservedPort};
use crate::model::adapter::AdapterFlags;
use crate::resolve::{Choice, Settings, machine};
use crate::serve::{self, Entrances};
use crate::setup::Setup;
use crate::start::{self, placement};
use crate::worker::host::Placement;
use crate::{route, signal};

/// The end of a server that has not failed.
pub(crate) enum Stopped {
    Drained,
    /// A second signal arrived.
    Immediately(Signal),
}

/// The engines that compute the sequences.
enum Source {
    /// Workers of this server.
    Workers(Placement),
    /// The engines of other servers.
    Servers(Vec<Remote>),
}

/// Returns when the server has stopped. The error says why it did not start, or why it failed.
pub(crate) fn run(parsed: &Parsed, python: &Path) -> anyhow::Result<Stopped> {
    let args = &parsed.args;
    let this_machine = machine::this();
    let settings = Settings::resolve(args, this_machine)?;
    let api_keys = keys::read(args)?;
    log_settings(parsed, &settings);
    if args.env {
        machine::report(python, this_machine).iter().for_each(|line| tracing::info!("environment: {line}"));
    }
    let adapters = AdapterFlags::new(args)?;
    let setup = Setup { parsed, settings: &settings, adapters: &adapters, python };
    let access = engine_access::read(args, std::env::var(engine_access::SECRET).ok())?;
    let source = match &access {
        Some(access) if args.route => Source::Servers(route::servers(args, access)?),
        _ => Source::Workers(placement::placement(setup)?),
    };
    let listener = Reserved::bind(&settings.place)?;
    let engine = args.engine_listen.map(ReservedPort::bind).transpose()?;
    let entrances = Entrances { listener, api_keys, engine, access };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start threads")?;
    // The main thread runs this future, so the processes that it spawns live as long as this one (`python::module`).
    let stopped = runtime.block_on(async {
        let (stop, second_signal) = signal::listen(args.stop_with_stdin).context("cannot listen for signals")?;
        tokio::select! {
            result = start_and_serve(setup, source, entrances, stop) => result.map(|()| Stopped::Drained),
            signal = second_signal => Ok(Stopped::Immediately(signal)),
        }
    });
    // A blocking thread may still be tokenizing a long input.
    runtime.shutdown_background();
    stopped
}

async fn start_and_serve(
    setup: Setup<'_>,
    source: Source,
    entrances: Entrances,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let access = entrances.access.clone();
    let start = async {
        match source {
            Source::Workers(placement) => anyhow::Ok(start::start(setup, &placement).await?),
            Source::Servers(servers) => Ok(route::start(setup, servers, access).await?),
        }
    };
    let started = tokio::select! {
        started = start => started?,
        () = stop.cancelled() => return Ok(()),
    };
    serve::serve(setup, started, entrances, began, stop).await
}

/// Logs what was given in one line, what replaces a given value, and every warning.
fn log_settings(parsed: &Parsed, settings: &Settings) {
    let given: Vec<_> = parsed.given.iter().map(|it| format!("{} is {} ({})", it.name, it.value, it.origin)).collect();
    if !given.is_empty() {
        tracing::info!("settings: {}", given.join(", "));
    }
    settings.choices.iter().for_each(Choice::log);
    parsed.notes.iter().for_each(|note| tracing::info!("{note}"));
    settings.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
}
