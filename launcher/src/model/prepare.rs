//! Prepares the model: turns what the user named into a folder that router and workers can read. Python does the work.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::flag::args::Args;
use crate::model::adapter::AdapterFlags;
use crate::process::output::Lines;
use crate::process::python;

/// Limit on what the process may print. Its answer names every weight file, so it can exceed `output::Lines`.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// A model on disk, ready to be loaded.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Prepared {
    pub(crate) model_id: String,
    pub(crate) folder: PathBuf,
    pub(crate) sha: Option<String>,
    pub(crate) pipeline_tag: Option<String>,
    /// Files that hold the weights.
    pub(crate) weights: Vec<PathBuf>,
    /// The folders of adapters that were downloaded, by what was given.
    pub(crate) adapters: HashMap<String, PathBuf>,
    /// The folder of `--speculative-model`.
    pub(crate) speculative_model: Option<PathBuf>,
    /// Files that hold the weights of `speculative_model`. No token depends on them.
    pub(crate) drafter_weights: Vec<PathBuf>,
}

/// Why the model cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("cannot start {}: {source}; set PENSTOCK_PYTHON to the interpreter that has penstock_server", .python.display())]
    Spawn { python: PathBuf, source: std::io::Error },
    #[error("cannot follow the preparation: {0}")]
    Io(#[from] std::io::Error),
    /// The reason that the process gave.
    #[error("{0}")]
    Failed(String),
    #[error("the preparation printed {answer:?}: {source}")]
    Answer { answer: String, source: serde_json::Error },
}

/// Finds, downloads or converts the model and the one that drafts, and downloads adapters. Logs the progress. Dropping the future kills the
/// process.
pub(crate) async fn prepare(python: &Path, args: &Args, adapters: &AdapterFlags) -> Result<Prepared, PrepareError> {
    let mut command = python::module(python, "penstock_server.prepare");
    command.args(args.model_id.iter().flat_map(|id| ["--model-id", id]));
    command.args(args.revision.iter().flat_map(|revision| ["--revision", revision]));
    if args.trust_remote_code {
        command.arg("--trust-remote-code");
    }
    if let Some(weights) = &args.weights_cache_override {
        command.arg("--weights").arg(weights);
    }
    command.args(args.route.then_some("--without-weights"));
    command.args(adapters.on_hub().flat_map(|given| ["--adapter", given]));
    command.args(args.drafting_model().iter().flat_map(|given| ["--speculative-model", given]));
    answer_of(command, python, args, "the model").await.map_err(|error| match error {
        PrepareError::Failed(reason) => PrepareError::Failed(format!("the model cannot be prepared: {reason}")),
        other => other,
    })
}

/// Downloads an adapter, given as `ID` or `ID@REVISION`. Logs the progress. Dropping the future kills the process.
pub(crate) async fn prepare_adapter(python: &Path, args: &Args, given: &str) -> Result<PathBuf, PrepareError> {
    let mut command = python::module(python, "penstock_server.prepare");
    command.args(["--only-adapter", given]);
    answer_of(command, python, args, "an adapter").await
}

/// The answer that the process prints. `what`: the prepared thing, for the log.
async fn answer_of<T: DeserializeOwned>(
    mut command: Command,
    python: &Path,
    args: &Args,
    what: &str,
) -> Result<T, PrepareError> {
    if let Some(cache) = &args.huggingface_hub_cache {
        command.env("HF_HUB_CACHE", cache);
    }
    let spawn_error = |source| PrepareError::Spawn { python: python.to_owned(), source };
    let mut child = command.spawn().map_err(spawn_error)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());

    let mut last_line = String::new();
    let follow = async {
        let Some(stderr) = stderr else { return };
        let mut lines = Lines::new(stderr);
        while let Some(line) = lines.next().await {
            if let Some(reason) = line.strip_prefix("error: ") {
                last_line = reason.to_owned();
            } else {
                tracing::info!("preparing {what}: {line}");
                last_line = line;
            }
        }
    };
    let read = async {
        let mut answer = String::new();
        if let Some(stdout) = stdout {
            stdout.take(MAX_ANSWER_BYTES).read_to_string(&mut answer).await?;
        }
        Ok::<_, std::io::Error>(answer)
    };
    let ((), answer, status) = tokio::join!(follow, read, child.wait());
    let (answer, status) = (answer?, status?);
    if !status.success() {
        let reason = if last_line.is_empty() { format!("the process ended with {status}") } else { last_line };
        return Err(PrepareError::Failed(reason));
    }
    serde_json::from_str(&answer).map_err(|source| PrepareError::Answer { answer, source })
}
