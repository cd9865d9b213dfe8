//! What the binary does beside serving: its subcommands. Python knows the answers, so this process becomes Python.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};

use crate::args::Dtype;

#[derive(Clone, Debug, Subcommand)]
pub enum Tool {
    /// List the architectures, formats and number types that can be served
    Models {
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Say what a model is, how it would be served here, and all that is wrong with it; nothing is started or loaded
    Check(Check),
}

/// Exit status 0 when the model can be served as asked, 1 when it cannot. Of a hub model only the small files are
/// downloaded, and of its weights the headers are read.
#[derive(Clone, Debug, Args)]
pub struct Check {
    /// Model folder, .gguf file, or model id on the Hugging Face hub [default: the embedded model]
    model: Option<String>,

    /// Branch, tag or commit of a hub model
    #[arg(long)]
    revision: Option<String>,

    /// Over how many ranks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    num_shard: u16,

    /// Number format of the weights and the computation [default: as the server chooses on this machine]
    #[arg(long)]
    dtype: Option<Dtype>,

    /// Part of a device's memory that the server may use in all
    #[arg(long, default_value_t = 0.9)]
    cuda_memory_fraction: f64,

    /// Where hub models are kept [default: ~/.cache/huggingface/hub]
    #[arg(long)]
    huggingface_hub_cache: Option<PathBuf>,

    /// As one JSON object
    #[arg(long)]
    json: bool,
}

impl Tool {
    /// Returns only when the interpreter cannot be started.
    pub fn run(&self, python: &Path) -> io::Error {
        let mut command = Command::new(python);
        // COMPAT: a third name of the hub's token, which the hub's own library does not know.
        if let (None, Some(token)) = (std::env::var_os("HF_TOKEN"), std::env::var_os("HF_API_TOKEN")) {
            command.env("HF_TOKEN", token);
        }
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
            // A model's name may begin like a flag.
            command.arg("--").arg(model);
        }
        command
    }
}
