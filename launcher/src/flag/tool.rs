//! The subcommands. Each but `node` replaces this process by the Python module that implements it.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand, ValueEnum};

use crate::flag::dtype::Dtype;
use crate::flag::node::NodeArgs;
use crate::process::python;

/// A subcommand.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Tool {
    #[command(display_order = 1)]
    Node(NodeArgs),
    /// Describe a model and every problem with it, without loading it
    #[command(display_order = 2)]
    Check(Check),
    /// List the supported architectures, formats and data types
    #[command(display_order = 3)]
    Models {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Measure a running server, or two side by side
    #[command(display_order = 4)]
    Bench(Bench),
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

    /// Number of pipeline stages, each with --num-shard ranks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pipeline_parallel_size: u16,

    /// Data type of weights and computation [default: the server's choice on this machine]
    #[arg(long)]
    dtype: Option<Dtype>,

    /// Fraction of a device's memory that the server may use in total
    #[arg(long, default_value_t = 0.9)]
    cuda_memory_fraction: f64,

    /// Require that a token has the same bits in every batch
    #[arg(long)]
    deterministic: bool,

    /// Fetch and run the checkpoint's own Python code
    #[arg(long)]
    trust_remote_code: bool,

    /// Folder that holds Hub models [default: ~/.cache/huggingface/hub]
    #[arg(long)]
    huggingface_hub_cache: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Writes result.json and plot.svg. Needs AIPerf: pip install '.[bench]' in the source tree. A server's API key is read from OPENAI_API_KEY.
#[derive(Clone, Debug, Args)]
pub(crate) struct Bench {
    /// Server to measure
    #[arg(long, default_value = "http://127.0.0.1:3000")]
    url: String,

    /// Second server, which gets the same load after the first
    #[arg(long, value_name = "URL")]
    against: Option<String>,

    /// Numbers of concurrent streams, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,8,32", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: Vec<u32>,

    /// Route to measure
    #[arg(long, value_enum, default_value_t = Endpoint::Chat)]
    endpoint: Endpoint,

    /// Tokens of random text in each prompt
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    input_tokens: u32,

    /// Tokens to generate for each request
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..))]
    output_tokens: u32,

    /// Requests that each stream sends, one after the other
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    requests_per_stream: u32,

    /// Seed of the random text; the result has it [default: random, so that no prompt is in a prefix cache from an earlier run]
    #[arg(long)]
    seed: Option<u32>,

    /// Prompts instead of random text: a JSONL file with a "text" in each line, or the name of a public data set of AIPerf
    #[arg(long, conflicts_with = "input_tokens")]
    dataset: Option<String>,

    /// Tokenizer that measures the prompts: a folder, a model id on the Hugging Face Hub, or "builtin" [default: the model's]
    #[arg(long)]
    tokenizer: Option<String>,

    /// Let answers end early. Without this, requests have "ignore_eos", so that all answers are of equal length
    #[arg(long)]
    stop_at_eos: bool,

    /// Folder for the result
    #[arg(long, default_value = "penstock-bench")]
    output: PathBuf,
}

/// A route that can be measured.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Endpoint {
    Chat,
    Completions,
    Generate,
    Responses,
    Messages,
}

impl Bench {
    fn arguments(&self, command: &mut Command) {
        let endpoint = match self.endpoint {
            Endpoint::Chat => "chat",
            Endpoint::Completions => "completions",
            Endpoint::Generate => "generate",
            Endpoint::Responses => "responses",
            Endpoint::Messages => "messages",
        };
        let numbers = [
            ("--input-tokens", self.input_tokens),
            ("--output-tokens", self.output_tokens),
            ("--requests-per-stream", self.requests_per_stream),
        ];
        let texts = [("--against", &self.against), ("--dataset", &self.dataset), ("--tokenizer", &self.tokenizer)];
        command.args(["-m", "penstock_server.bench", "--endpoint", endpoint]).arg(format!("--url={}", self.url));
        command.args(numbers.map(|(name, number)| format!("{name}={number}")));
        // In one argument, because a value may begin with a dash.
        command.args(self.seed.map(|seed| format!("--seed={seed}")));
        command.args(texts.iter().filter_map(|(name, text)| Some(format!("{name}={}", text.as_ref()?))));
        command.args(self.stop_at_eos.then_some("--stop-at-eos"));
        command.arg("--concurrency").args(self.concurrency.iter().map(u32::to_string));
        command.arg("--output").arg(&self.output);
    }
}

impl Tool {
    /// Returns only if the interpreter cannot be started.
    pub(crate) fn run(&self, python: &Path) -> io::Error {
        let mut command = Command::new(python);
        command.envs(python::hub_token());
        let error = self.arguments(&mut command).exec();
        let hint = "set PENSTOCK_PYTHON to the interpreter that has penstock_server";
        io::Error::new(error.kind(), format!("cannot start {}: {error}; {hint}", python.display()))
    }

    fn arguments<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let json = match self {
            Self::Bench(bench) => {
                bench.arguments(command);
                &false
            }
            Self::Node(_) => unreachable!("invariant: a node runs in this process"),
            Self::Models { json } => {
                command.args(["-m", "penstock_server.inspection.catalog"]);
                json
            }
            Self::Check(check) => {
                command.args(["-m", "penstock_server.inspection.check", "--num-shard", &check.num_shard.to_string()]);
                command.args(["--pipeline-parallel-size", &check.pipeline_parallel_size.to_string()]);
                command.args(["--cuda-memory-fraction", &check.cuda_memory_fraction.to_string()]);
                command.args(check.dtype.iter().flat_map(|dtype| ["--dtype", dtype.name()]));
                command.args(check.deterministic.then_some("--deterministic"));
                command.args(check.trust_remote_code.then_some("--trust-remote-code"));
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
