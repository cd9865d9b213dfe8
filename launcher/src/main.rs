//! The `penstock` binary: serves a model, or runs a subcommand.
//!
//! Exit status: 0 after a signal; 1 if the server could not start, or if its workers failed repeatedly; 2 for wrong settings;
//! 128 + n after a second signal n.

mod agent;
mod flag;
mod heap;
mod init;
mod listen;
mod log;
mod model;
mod node;
mod phase;
mod process;
mod protocol;
mod resolve;
mod route;
mod run;
mod serve;
mod setup;
mod signal;
mod start;
mod worker;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use penstock_router::text::{RENDERER_ARGUMENT, run_chat_renderer};

use crate::flag::node::NodeArgs;
use crate::flag::tool::Tool;
use crate::flag::{command_line, engine_access, keys, reference};
use crate::node::secret::SecretError;
use crate::process::python;
use crate::run::Stopped;

fn main() -> ExitCode {
    if let Err(error) = signal::restore_defaults() {
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
    let python = python::find(|name| std::env::var_os(name), std::env::current_exe().ok().as_deref());
    match &parsed.args.tool {
        None => with_log(parsed.args.json_output, || run::run(&parsed, &python).map(status)),
        Some(Tool::Node(node)) => with_log(node.json_output, || run_node(node, &python).map(|()| ExitCode::SUCCESS)),
        Some(tool) => {
            let _ = writeln!(std::io::stderr(), "error: {}", tool.run(&python));
            ExitCode::FAILURE
        }
    }
}

fn status(stopped: Stopped) -> ExitCode {
    match stopped {
        Stopped::Drained => ExitCode::SUCCESS,
        Stopped::Immediately(signal) => ExitCode::from(128_u8.saturating_add(signal as u8)),
    }
}

/// Runs `program` with the log, and logs its error.
fn with_log(json: bool, program: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    let _flush = match log::start(json, std::env::var("LOG_LEVEL").ok().as_deref()) {
        Ok(flush) => flush,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: cannot start the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    program().unwrap_or_else(|error| {
        tracing::error!("{error:#}");
        ExitCode::from(if is_wrong_setting(&error) { 2 } else { 1 })
    })
}

fn is_wrong_setting(error: &anyhow::Error) -> bool {
    error.is::<resolve::ResolveError>()
        || error.is::<keys::KeyError>()
        || error.is::<engine_access::AccessError>()
        || error.is::<route::RouteError>()
        || error.is::<SecretError>()
}

/// Runs an agent until a signal, which is not an error.
fn run_node(args: &NodeArgs, python: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let (stop, second_signal) = signal::listen(args.stop_with_stdin).context("cannot listen for signals")?;
        tokio::select! {
            result = agent::run(args, python) => result,
            () = stop.cancelled() => Ok(()),
            _ = second_signal => Ok(()),
        }
    });
    // A blocking thread may still be reading standard input.
    runtime.shutdown_background();
    result
}
