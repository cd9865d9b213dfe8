//! Every setting, declared once: its flag, environment variable, default and help.
//!
//! Names and defaults are text-generation-inference's. What it had and this server has not is in `compat.rs`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{BoolishValueParser, NonEmptyStringValueParser};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser, ValueEnum};

use crate::compat;

/// Serves a large language model over HTTP: TGI's routes and OpenAI's.
#[derive(Clone, Debug, Parser)]
#[command(name = "penstock", version, max_term_width = 120)]
pub struct Args {
    /// Model folder, .gguf file, or model id on the Hugging Face hub [default: a small embedded model]
    #[arg(long, env, value_parser = NonEmptyStringValueParser::new())]
    pub model_id: Option<String>,

    /// Branch, tag or commit of a hub model
    #[arg(long, env, value_parser = NonEmptyStringValueParser::new())]
    pub revision: Option<String>,

    /// Number format of the weights and the computation [default: chosen by the worker for its device]
    #[arg(long, env)]
    pub dtype: Option<Dtype>,

    /// Allow the checkpoint's own Python code; none is run in this version
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub trust_remote_code: bool,

    /// Whether to spread the model over several ranks; alone: over all visible devices
    #[arg(long, env)]
    pub sharded: Option<bool>,

    /// Over how many ranks, one process each [default: the number of visible devices, or 1]
    #[arg(long, env)]
    pub num_shard: Option<usize>,

    /// Requests that may be in the server at the same time; more are refused with 429
    #[arg(long, env, default_value_t = 128)]
    pub max_concurrent_requests: usize,

    /// Largest best_of
    #[arg(long, env, default_value_t = 2)]
    pub max_best_of: usize,

    /// Most stop sequences in a request
    #[arg(long, env, default_value_t = 4)]
    pub max_stop_sequences: usize,

    /// Largest top_n_tokens
    #[arg(long, env, default_value_t = 5)]
    pub max_top_n_tokens: u32,

    /// Most inputs in one request
    #[arg(long, env, default_value_t = 4)]
    pub max_client_batch_size: usize,

    /// Longest prompt, in tokens [default: max-total-tokens - 1]
    #[arg(long, env)]
    pub max_input_tokens: Option<u32>,

    /// Older name of max-input-tokens
    #[arg(long, env, conflicts_with = "max_input_tokens")]
    pub max_input_length: Option<u32>,

    /// Longest sequence, prompt and generated, in tokens [default: what the model and the memory allow]
    #[arg(long, env)]
    pub max_total_tokens: Option<u32>,

    /// Tokens that one step may compute, so the bound on how long running streams wait for somebody's prompt
    /// [default: 512 on a CPU, 4096 on a GPU]
    #[arg(long, env)]
    pub max_batch_prefill_tokens: Option<u32>,

    /// Tokens that the KV cache holds [default: what the memory allows]
    #[arg(long, env)]
    pub max_batch_total_tokens: Option<u32>,

    /// Sequences in one step [default: max-concurrent-requests, at most 256]
    #[arg(long, env)]
    pub max_batch_size: Option<u32>,

    /// Threads that tokenize long inputs
    #[arg(long, env, default_value_t = 2)]
    pub validation_workers: usize,

    /// Part of a device's memory that the server may use in all, over 0 and up to 1
    #[arg(long, env, default_value_t = 0.9)]
    pub cuda_memory_fraction: f64,

    /// IP address to listen on
    #[arg(long, env, default_value = "0.0.0.0")]
    pub hostname: String,

    /// Port to listen on; 0: any that is free
    #[arg(long, short, env, default_value_t = 3000)]
    pub port: u16,

    /// Origin that browsers may call from; repeat for several [default: any]
    #[arg(long, env, value_delimiter = ',')]
    pub cors_allow_origin: Vec<String>,

    /// Largest request body, in bytes
    #[arg(long, env, default_value_t = 2_000_000)]
    pub payload_limit: usize,

    /// Where hub models are kept [default: ~/.cache/huggingface/hub]
    #[arg(long, env)]
    pub huggingface_hub_cache: Option<PathBuf>,

    /// Beginning of the workers' socket paths, completed by -RANK [default: in a private temporary folder]
    #[arg(long, env)]
    pub shard_uds_path: Option<PathBuf>,

    /// How long running requests may take to finish after SIGTERM or Ctrl-C, in seconds
    #[arg(long, short, env, default_value_t = 90)]
    pub graceful_termination_timeout: u64,

    /// Logs as one JSON object per line
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub json_output: bool,

    /// Log the versions and the machine at start
    #[arg(long, short, action = ArgAction::SetTrue)]
    pub env: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    Float16,
    Bfloat16,
    Float32,
}

impl Dtype {
    pub fn name(self) -> &'static str {
        match self {
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
        }
    }
}

/// A setting that somebody chose, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    pub name: String,
    pub value: String,
    pub origin: Origin,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Flag => "given as a flag",
            Self::Environment => "from the environment",
        })
    }
}

#[derive(Debug)]
pub struct Parsed {
    pub args: Args,
    /// What was not left to its default; nothing secret can be among it.
    pub given: Vec<Given>,
    /// What was asked for and makes no difference here, with the reason.
    pub notes: Vec<String>,
}

/// The whole command line, with what is known from TGI.
pub fn command() -> clap::Command {
    let mut command = Args::command().next_help_heading("Known from TGI, without effect here");
    for flag in compat::FLAGS {
        command = command.arg(flag.arg());
    }
    // Help is printed into documentation; what this machine's environment holds has no place there.
    command.mut_args(|arg| arg.hide_env_values(true))
}

/// Flag over environment over default. Refuses what this server does not do.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Parsed, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    let notes = compat::check(&matches)
        .map_err(|refusals| command.error(clap::error::ErrorKind::UnknownArgument, refusals.join("\n       ")))?;
    let args = Args::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok(Parsed { args, given: given(&command, &matches), notes })
}

fn given(command: &clap::Command, matches: &ArgMatches) -> Vec<Given> {
    let given = |arg: &clap::Arg| {
        let id = arg.get_id().as_str();
        let origin = match matches.value_source(id)? {
            ValueSource::CommandLine => Origin::Flag,
            ValueSource::EnvVariable => Origin::Environment,
            _ => return None,
        };
        let values: Vec<_> = matches.get_raw(id)?.map(|value| value.to_string_lossy()).collect();
        Some(Given { name: arg.get_long()?.to_owned(), value: values.join(","), origin })
    };
    command.get_arguments().filter(|arg| !compat::is_known(arg.get_id().as_str())).filter_map(given).collect()
}
