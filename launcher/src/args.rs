//! Every setting, declared once: its flag, environment variable, default and help.
//!
//! Names and defaults are text-generation-inference's. What it had and this server has not is in `compat.rs`.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{BoolishValueParser, NonEmptyStringValueParser, RangedU64ValueParser};
use clap::{ArgAction, Parser, ValueEnum};

use crate::tool::Tool;

/// Serves a large language model over HTTP: TGI's routes and OpenAI's.
#[derive(Clone, Debug, Parser)]
#[command(name = "penstock", version, max_term_width = 120, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    pub tool: Option<Tool>,

    /// Model folder, .gguf file, or model id on the Hugging Face hub [default: a small embedded model]
    #[arg(long, env, value_parser = NonEmptyStringValueParser::new())]
    pub model_id: Option<String>,

    /// Branch, tag or commit of a hub model
    #[arg(long, env, value_parser = NonEmptyStringValueParser::new())]
    pub revision: Option<String>,

    /// Number format of the weights and the computation [default: chosen by the worker for its device]
    #[arg(long, env)]
    pub dtype: Option<Dtype>,

    /// Run the checkpoint's own Python code, where the model type is known by nothing else; it may do anything
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

    /// Tokens, of prompts and the most that may be generated, that may wait for their first step; more are refused with 429
    /// [default: room for 128 of the longest sequences, or sixteen times the KV cache where that is more]
    #[arg(long, env)]
    pub max_queued_tokens: Option<u64>,

    /// How long a request may wait for its first step, in seconds; then 429 [default: for ever]
    #[arg(long, env)]
    pub queue_timeout: Option<u64>,

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

    /// Longest prompt, in tokens; an encoder's must fit into a step [default: max-total-tokens - 1; of an encoder 1024 on a CPU,
    /// 4096 on a GPU]
    #[arg(long, env)]
    pub max_input_tokens: Option<u32>,

    /// Older name of max-input-tokens
    #[arg(long, env, conflicts_with = "max_input_tokens")]
    pub max_input_length: Option<u32>,

    /// Longest sequence, prompt and generated, in tokens [default: what the model and the memory allow]
    #[arg(long, env)]
    pub max_total_tokens: Option<u32>,

    /// Tokens that one step may compute; while streams run, max-inter-token-ms bounds it further
    /// [default: 512 on a CPU, 4096 on a GPU, or what an encoder's prompt needs]
    #[arg(long, env)]
    pub max_batch_prefill_tokens: Option<u32>,

    /// Tokens that the KV cache holds [default: what the memory allows]
    #[arg(long, env)]
    pub max_batch_total_tokens: Option<u32>,

    /// Sequences in one step [default: max-concurrent-requests, at most 256]
    #[arg(long, env)]
    pub max_batch_size: Option<u32>,

    /// How long a step may take while streams run, in milliseconds: what would make it longer of other prompts is left to
    /// later steps, bar a block of one prompt a step. Less makes streams steadier and prompts slower
    /// [default: 1.75 times what the step takes without prompts, as measured]
    #[arg(long, env)]
    pub max_inter_token_ms: Option<u64>,

    /// Steps that may be on their way to the worker; with 1 it waits for each result to be read before its next step
    #[arg(long, env, default_value_t = 2, value_parser = RangedU64ValueParser::<u32>::new().range(1..=16))]
    pub max_steps_in_flight: u32,

    /// Threads that tokenize long inputs
    #[arg(long, env, default_value_t = 2)]
    pub validation_workers: usize,

    /// Part of a device's memory that the server may use in all, over 0 and up to 1
    #[arg(long, env, default_value_t = 0.9)]
    pub cuda_memory_fraction: f64,

    /// Share the KV cache of prompts that begin alike
    #[arg(long, env, default_value_t = true, action = ArgAction::Set, value_parser = BoolishValueParser::new())]
    pub prefix_caching: bool,

    /// Refuse requests that constrain their answer by a grammar, a schema or tools
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub disable_grammar_support: bool,

    /// Let requests ask for the logprobs of their prompt (decoder_input_details)
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub enable_prefill_logprobs: bool,

    /// Part of the vocabulary that a watermark prefers, between 0 and 1 [default: 0.5]
    #[arg(long, env)]
    pub watermark_gamma: Option<f32>,

    /// What a watermark adds to the logits of the preferred part [default: 2.0]
    #[arg(long, env)]
    pub watermark_delta: Option<f32>,

    /// A tokenizer_config.json in place of the model's own, its chat template included
    #[arg(long, env, value_name = "FILE")]
    pub tokenizer_config_path: Option<PathBuf>,

    /// Chat template in place of the model's own: a file, or the template itself
    #[arg(long, env, value_name = "FILE_OR_TEMPLATE", value_parser = NonEmptyStringValueParser::new())]
    pub chat_template: Option<String>,

    /// How to stretch the model's positions beyond those it was trained for: linear [default with a factor: linear]
    #[arg(long, env)]
    pub rope_scaling: Option<RopeScaling>,

    /// By how much to stretch them, at least 1; the longest sequence grows as much [default with a scaling: 1.0]
    #[arg(long, env)]
    pub rope_factor: Option<f64>,

    /// IP address to listen on
    #[arg(long, env, default_value = "0.0.0.0")]
    pub hostname: String,

    /// Port to listen on; 0: any that is free
    #[arg(long, short, env, default_value_t = 3000)]
    pub port: u16,

    /// Origin that browsers may call from; repeat for several [default: any]
    #[arg(long, env, value_delimiter = ',')]
    pub cors_allow_origin: Vec<String>,

    /// Key that requests must bring as `Authorization: Bearer KEY`; repeat, or separate by commas, for several. Other
    /// users of the machine can read a process's arguments: prefer --api-key-file, or the variable
    #[arg(long, env, value_delimiter = ',', value_name = "KEY")]
    pub api_key: Vec<Secret>,

    /// File of keys, one a line, `#` before a comment; read once, at the start
    #[arg(long, env, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// Largest request body, in bytes
    #[arg(long, env, default_value_t = 2_000_000)]
    pub payload_limit: usize,

    /// Where hub models are kept [default: ~/.cache/huggingface/hub]
    #[arg(long, env)]
    pub huggingface_hub_cache: Option<PathBuf>,

    /// A folder with the weights of a hub model, whose configuration and tokenizer alone are then downloaded
    #[arg(long, env)]
    pub weights_cache_override: Option<PathBuf>,

    /// Beginning of the workers' socket paths, completed by -RANK [default: in a private temporary folder]
    #[arg(long, env)]
    pub shard_uds_path: Option<PathBuf>,

    /// How long running requests may take to finish after SIGTERM or Ctrl-C, in seconds
    #[arg(long, short, env, default_value_t = 90)]
    pub graceful_termination_timeout: u64,

    /// A worker that says nothing for so many seconds, or a step in which no rank computes for so long, hangs, and the
    /// workers are restarted [default: 20 times the slowest step of the warm-up, at least 10]
    #[arg(long, env)]
    pub step_timeout: Option<u64>,

    /// Logs as one JSON object per line
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub json_output: bool,

    /// Log the versions and the machine at start
    #[arg(long, short, action = ArgAction::SetTrue)]
    pub env: bool,

    /// Print a page of the reference under docs/ and exit
    #[arg(long, hide = true)]
    pub reference: Option<Page>,
}

/// A page that is generated from the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Page {
    Flags,
    Metrics,
}

/// Something that is never printed.
#[derive(Clone)]
pub struct Secret(pub String);

impl FromStr for Secret {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("(hidden)")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RopeScaling {
    Linear,
    Dynamic,
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
