//! The model: from what the user wrote to a folder that router and workers can read. Python does the work.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokio::io::AsyncReadExt;

use crate::args::Args;
use crate::process;

/// A model that is ready to be loaded.
#[derive(Clone, Debug, Deserialize)]
pub struct Prepared {
    pub model_id: String,
    pub folder: PathBuf,
    pub sha: Option<String>,
    pub pipeline_tag: Option<String>,
    /// The files that hold its weights.
    pub weights: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("cannot start {}: {source}; set PENSTOCK_PYTHON to the interpreter that has penstock_server", .python.display())]
    Spawn { python: PathBuf, source: std::io::Error },
    #[error("cannot watch the preparation of the model: {0}")]
    Io(#[from] std::io::Error),
    /// Its own words.
    #[error("{0}")]
    Failed(String),
    #[error("the preparation of the model answered {answer:?}: {source}")]
    Answer { answer: String, source: serde_json::Error },
}

/// Finds, downloads or converts the model. Its progress is logged. Dropping the future ends the process.
pub async fn prepare(python: &Path, args: &Args) -> Result<Prepared, PrepareError> {
    let mut command = process::python_module(python, "penstock_server.prepare");
    command.args(args.model_id.iter().flat_map(|id| ["--model-id", id]));
    command.args(args.revision.iter().flat_map(|revision| ["--revision", revision]));
    if args.trust_remote_code {
        command.arg("--trust-remote-code");
    }
    if let Some(weights) = &args.weights_cache_override {
        command.arg("--weights").arg(weights);
    }
    if let Some(cache) = &args.huggingface_hub_cache {
        command.env("HF_HUB_CACHE", cache);
    }
    let spawn_error = |source| PrepareError::Spawn { python: python.to_owned(), source };
    let mut child = command.spawn().map_err(spawn_error)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());

    let mut last_words = String::new();
    let follow = async {
        if let Some(stderr) = stderr {
            process::for_each_line(stderr, |line| {
                if let Some(reason) = line.strip_prefix("error: ") {
                    last_words = reason.to_owned();
                } else {
                    tracing::info!("preparing the model: {line}");
                    last_words = line.to_owned();
                }
            })
            .await;
        }
    };
    let read = async {
        let mut answer = String::new();
        if let Some(mut stdout) = stdout {
            stdout.read_to_string(&mut answer).await?;
        }
        Ok::<_, std::io::Error>(answer)
    };
    let ((), answer, status) = tokio::join!(follow, read, child.wait());
    let (answer, status) = (answer?, status?);
    if !status.success() {
        let reason = if last_words.is_empty() { format!("it ended with {status}") } else { last_words };
        return Err(PrepareError::Failed(format!("the model cannot be prepared: {reason}")));
    }
    serde_json::from_str(&answer).map_err(|source| PrepareError::Answer { answer, source })
}
