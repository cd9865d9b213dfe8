//! The subcommands. Each replaces this process by the Python module that implements it.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};

use crate::dtype::Dtype;
use crate::process;

/// A subcommand.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Tool {
    /// List the supported architectures, formats and data types
    Models {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Describe a model, how it would be served here, and every problem with it, without loading it
    Check(Check),
}

/// Exits with status 0 if the model can be served with these options, 1 if it cannot. Downloads only the small files of a
/// Hub model, and reads only the headers of its weights.
#[derive(Clone, Debug, Args)]
pub(crate) struct Check {
    /// Model to check: a folder, a .gguf file, or a model id on the Hugging Face Hub [default: the embedded model]
    model: Option<String>,

    /// Branch, tag or commit of a Hub model
    #[arg(long)]
    revision: Option<String>,

    /// Number of ranks to shard the model across
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    num_shard: u16,

    /// Data type of weights and computation [default: the server's choice on this machine]
    #[arg(long)]
    dtype: Option<Dtype>,

    /// Fraction of a device's memory that the server may use in total
    #[arg(long, default_value_t = 0.9)]
    cuda_memory_fraction: f64,

    /// Require that a token has the same bits in every batch
    #[arg(long)]
    deterministic: bool,

    /// Folder that holds Hub models [default: ~/.cache/huggingface/hub]
    #[arg(long)]
    huggingface_hub_cache: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Tool {
    /// Returns only if the interpreter cannot be started.
    pub(crate) fn run(&self, python: &Path) -> io::Error {
        let mut command = Command::new(python);
        command.envs(process::hub_token());
        let error = self.arguments(&mut command).exec();
        let hint = "set PENSTOCK_PYTHON to the interpreter that has penstock_server";
        io::Error::new(error.kind(), format!("cannot start {}: {error}; {hint}", python.display()))
    }

    fn arguments<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let json = match self {
            Self::Models { json } => {
                command.args(["-m", "penstock_server.catalog"]);
                json
            }
            Self::Check(check) => {
                command.args(["-m", "penstock_server.check", "--num-shard", &check.num_shard.to_string()]);
                command.args(["--cuda-memory-fraction", &check.cuda_memory_fraction.to_string()]);
                command.args(check.dtype.iter().flat_map(|dtype| ["--dtype", dtype.name()]));
                command.args(check.deterministic.then_some("--deterministic"));
                command.args(check.revision.iter().flat_map(|revision| ["--revision", revision]));
                if let Some(cache) = &check.huggingface_hub_cache {
                    command.env("HF_HUB_CACHE", cache);
                }
                &check.json
            }
        };
        if *json {
            command.arg("--json");
        }
        if let Self::Check(Check { model: Some(model), .. }) = self {
            // After `--`, because the name may begin with a dash.
            command.arg("--").arg(model);
        }
        command
    }
}
