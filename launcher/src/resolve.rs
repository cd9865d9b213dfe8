//! What was asked for → what it means on this machine and for this model. Pure: the machine is an argument.
//!
//! Three moments: `Settings` before anything is started, `step_tokens` when the device is known, `SequenceLimits` when
//! the model and its memory are known. Every value that was not simply given carries its reason, for the log.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use penstock_router::worker::Description;
use penstock_scheduler::BlockLayout;

use crate::args::{Args, RopeScaling};

/// Tokens in one KV block.
pub const BLOCK_TOKENS: u32 = 16;

/// Most sequences in a step unless the user says so.
const DEFAULT_MAX_STEP_SEQUENCES: u32 = 256;
/// A CPU computes some thousand prompt tokens of a small model a second: more than this in a step would stall running
/// streams for seconds with a larger one.
const DEFAULT_STEP_TOKENS_CPU: u32 = 512;
const DEFAULT_STEP_TOKENS_GPU: u32 = 4096;
/// An encoder's source is computed in one step, however long that takes; what T5 could read is longer than anybody wants.
const DEFAULT_SOURCE_TOKENS_CPU: u32 = 1024;
const DEFAULT_SOURCE_TOKENS_GPU: u32 = 4096;

/// What may wait by default: as many of the longest sequences as `--max-concurrent-requests` lets in by default, so that
/// nobody is refused who would not be by it; and more where the KV cache would soon have room for more.
const QUEUED_SEQUENCES: u64 = 128;
const QUEUED_POOLS: u64 = 16;

/// A day, as for a request's own timeout.
const MAX_QUEUE_TIMEOUT_S: u64 = 86_400;

/// What this machine has.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub num_cores: usize,
    /// Accelerators that the environment makes visible, where it says so.
    pub num_visible_devices: Option<usize>,
}

/// A value and why it is that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub name: &'static str,
    pub value: String,
    pub reason: String,
}

impl Choice {
    fn new(name: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self { name, value: value.to_string(), reason: reason.into() }
    }
}

/// What is known before anything is started.
#[derive(Clone, Debug)]
pub struct Settings {
    pub address: SocketAddr,
    pub num_ranks: usize,
    /// CPU threads of each rank.
    pub num_threads: usize,
    pub max_step_sequences: u32,
    /// `--max-input-tokens` or its older name.
    pub max_input_tokens: Option<u32>,
    /// KV blocks asked for by `--max-batch-total-tokens`.
    pub num_blocks: Option<u32>,
    pub memory_fraction: f64,
    pub graceful_termination_timeout: Duration,
    /// How long a step with decodes may take; `None`: the scheduler's own measure.
    pub max_inter_token: Option<Duration>,
    pub queue_timeout: Option<Duration>,
    pub choices: Vec<Choice>,
    /// What was given and cannot be taken as it is.
    pub warnings: Vec<String>,
}

/// How long one sequence may be, and how much of them may wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLimits {
    pub max_input_tokens: u32,
    pub max_total_tokens: u32,
    /// Of an encoder–decoder's answer alone.
    pub max_new_tokens: Option<u32>,
    pub max_queued_tokens: u64,
    pub choices: Vec<Choice>,
}

/// Settings that contradict each other, the model or the machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    #[error("--{name} is {value}, must be {allowed}")]
    OutOfRange { name: &'static str, value: String, allowed: &'static str },
    #[error("--{small} is {small_value} and --{large} is {large_value}; {small} must be {relation} {large}")]
    Contradiction {
        small: &'static str,
        small_value: u32,
        relation: &'static str,
        large: &'static str,
        large_value: u32,
    },
    #[error("--sharded needs more than one device, {found}; say how many ranks with --num-shard")]
    NothingToShardOver { found: String },
    #[error("--max-total-tokens is {given}, but the model was made for sequences of at most {allowed} tokens")]
    BeyondModel { given: u32, allowed: u32 },
    #[error(
        "--{name} is {given}, but the memory holds a KV cache of only {capacity} tokens; \
         lower it, or give the server more memory (--cuda-memory-fraction, --max-batch-total-tokens)"
    )]
    BeyondMemory { name: &'static str, given: u32, capacity: u64 },
    #[error("--max-input-tokens is {given}, but sequences can have at most {max_total_tokens} tokens ({reason})")]
    InputBeyondTotal { given: u32, max_total_tokens: u32, reason: String },
    #[error("--max-input-tokens is {given}, but this model's inputs can have at most {allowed} tokens ({reason})")]
    InputBeyondSource { given: u32, allowed: u32, reason: &'static str },
}

impl Settings {
    pub fn resolve(args: &Args, machine: Machine) -> Result<Self, ResolveError> {
        check_ranges(args)?;
        let (mut choices, mut warnings) = (Vec::new(), Vec::new());
        let num_ranks = num_ranks(args, machine, &mut choices)?;
        let num_threads = (machine.num_cores / num_ranks).max(1);
        choices.push(Choice::new(
            "threads per rank",
            num_threads,
            format!("{} cores, {num_ranks} rank(s)", machine.num_cores),
        ));
        if args.trust_remote_code {
            // COMPAT: many deployments set it for models that need none of it.
            let warning = "trust-remote-code: a model type that nothing else knows is run by the checkpoint's own code";
            warnings.push(warning.to_owned());
        }
        let max_step_sequences = max_step_sequences(args, &mut choices);
        let max_input_tokens = args.max_input_tokens.or(args.max_input_length);
        check_contradictions(args, max_input_tokens, max_step_sequences)?;
        Ok(Self {
            address: SocketAddr::new(listen_ip(&args.hostname, &mut warnings), args.port),
            num_ranks,
            num_threads,
            max_step_sequences,
            max_input_tokens,
            num_blocks: args.max_batch_total_tokens.map(|tokens| tokens.div_ceil(BLOCK_TOKENS)),
            memory_fraction: args.cuda_memory_fraction,
            graceful_termination_timeout: Duration::from_secs(args.graceful_termination_timeout),
            max_inter_token: max_inter_token(args, &mut choices),
            queue_timeout: args.queue_timeout.map(Duration::from_secs),
            choices,
            warnings,
        })
    }

    /// Tokens that one step may compute, on the device that the model was loaded to.
    pub fn step_tokens(&self, args: &Args, model: &Description) -> (u32, Option<Choice>) {
        if let Some(tokens) = args.max_batch_prefill_tokens {
            return (tokens, None);
        }
        let (wanted, longest_source, device) = if model.device.starts_with("cpu") {
            (DEFAULT_STEP_TOKENS_CPU, DEFAULT_SOURCE_TOKENS_CPU, "CPU")
        } else {
            (DEFAULT_STEP_TOKENS_GPU, DEFAULT_SOURCE_TOKENS_GPU, "GPU")
        };
        let longest_source = self.max_input_tokens.unwrap_or(longest_source);
        let source_tokens = model.max_source_tokens.min(longest_source).min(args.max_total_tokens.unwrap_or(u32::MAX));
        // Every running sequence advances in every step, so each needs its token.
        let tokens = wanted.min(model.max_position_tokens).max(source_tokens.saturating_add(self.max_step_sequences));
        let reason = format!("the default on a {device}, within what the model and max-batch-size need");
        (tokens, Some(Choice::new("max-batch-prefill-tokens", tokens, reason)))
    }

    /// Whether sequences share what is computed of prompts that begin alike.
    pub fn prefix_caching(args: &Args, model: &Description) -> (bool, Option<Choice>) {
        if !args.prefix_caching || !model.is_encoder_decoder() {
            return (args.prefix_caching, None);
        }
        let reason = "in an encoder–decoder every token of a source depends on all of it";
        (false, Some(Choice::new("prefix-caching", false, reason)))
    }
}

impl SequenceLimits {
    /// `step_tokens`: what one step may compute.
    pub fn resolve(
        args: &Args,
        settings: &Settings,
        model: &Description,
        step_tokens: u32,
        num_blocks: u32,
    ) -> Result<Self, ResolveError> {
        let mut choices = Vec::new();
        let capacity = u64::from(num_blocks) * u64::from(BLOCK_TOKENS);
        let capacity = capacity.saturating_sub(u64::from(model.num_prefix_tokens()));
        let model_limit = model.max_total_tokens();
        // With a window on every layer a sequence holds no more of the cache than its window, however long it becomes.
        let layout = BlockLayout { block_tokens: BLOCK_TOKENS, window_tokens: model.window_tokens };
        let fits = |tokens| layout.num_required_blocks(tokens + model.num_prefix_tokens()) <= num_blocks as usize;
        let (max_total_tokens, reason) = match args.max_total_tokens {
            Some(given) if given > model_limit => {
                return Err(ResolveError::BeyondModel { given, allowed: model_limit });
            }
            Some(given) if !fits(given) => {
                return Err(ResolveError::BeyondMemory { name: "max-total-tokens", given, capacity });
            }
            Some(given) => (given, "as given".to_owned()),
            None => {
                let tokens = if fits(model_limit) { model_limit } else { u32::try_from(capacity).unwrap_or(u32::MAX) };
                let reason = if tokens == model_limit {
                    format!("the model's limit; the KV cache holds {capacity} tokens")
                } else {
                    format!("what the KV cache holds; the model's limit is {model_limit}")
                };
                choices.push(Choice::new("max-total-tokens", tokens, reason.clone()));
                (tokens, reason)
            }
        };
        let max_input_tokens = match settings.max_input_tokens {
            Some(given) if given >= max_total_tokens => {
                return Err(ResolveError::InputBeyondTotal { given, max_total_tokens, reason });
            }
            Some(given) => check_source(given, model, step_tokens)?,
            None => {
                let (tokens, reason) = default_input(settings, model, step_tokens, max_total_tokens);
                choices.push(Choice::new("max-input-tokens", tokens, reason));
                tokens
            }
        };
        let max_queued_tokens = args.max_queued_tokens.unwrap_or_else(|| {
            let tokens = (QUEUED_POOLS * capacity).max(QUEUED_SEQUENCES * u64::from(max_total_tokens));
            let reason = "128 of the longest sequences, or sixteen times the KV cache where that is more";
            choices.push(Choice::new("max-queued-tokens", tokens, reason));
            tokens
        });
        let max_new_tokens = model.max_new_tokens();
        Ok(Self { max_input_tokens, max_total_tokens, max_new_tokens, max_queued_tokens, choices })
    }
}

/// An encoder reads its source in one step, or not at all.
fn check_source(given: u32, model: &Description, step_tokens: u32) -> Result<u32, ResolveError> {
    let (allowed, reason) = if model.max_source_tokens <= step_tokens {
        (model.max_source_tokens, "the model's longest source")
    } else {
        (step_tokens, "max-batch-prefill-tokens: an encoder reads its source in one step")
    };
    if model.is_encoder_decoder() && given > allowed {
        return Err(ResolveError::InputBeyondSource { given, allowed, reason });
    }
    Ok(given)
}

/// In tokens, and why.
fn default_input(
    settings: &Settings,
    model: &Description,
    step_tokens: u32,
    max_total_tokens: u32,
) -> (u32, &'static str) {
    let total = (max_total_tokens.saturating_sub(1), "max-total-tokens - 1");
    if !model.is_encoder_decoder() {
        return total;
    }
    let beside_others = step_tokens.saturating_sub(settings.max_step_sequences).max(step_tokens / 2);
    let step = (beside_others, "what an encoder can read in one step, beside the other sequences' tokens");
    let source = (model.max_source_tokens, "the model's longest source");
    [source, step, total].into_iter().min_by_key(|(tokens, _)| *tokens).unwrap_or(total)
}

fn check_ranges(args: &Args) -> Result<(), ResolveError> {
    let positive = [
        ("max-concurrent-requests", Some(args.max_concurrent_requests)),
        ("max-queued-tokens", args.max_queued_tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX))),
        ("max-best-of", Some(args.max_best_of)),
        ("max-client-batch-size", Some(args.max_client_batch_size)),
        ("validation-workers", Some(args.validation_workers)),
        ("payload-limit", Some(args.payload_limit)),
        ("num-shard", args.num_shard),
        ("max-input-tokens", args.max_input_tokens.map(|tokens| tokens as usize)),
        ("max-input-length", args.max_input_length.map(|tokens| tokens as usize)),
        ("max-batch-prefill-tokens", args.max_batch_prefill_tokens.map(|tokens| tokens as usize)),
        ("max-batch-total-tokens", args.max_batch_total_tokens.map(|tokens| tokens as usize)),
        ("max-batch-size", args.max_batch_size.map(|size| size as usize)),
        ("max-inter-token-ms", args.max_inter_token_ms.map(|ms| ms as usize)),
        ("step-timeout", args.step_timeout.map(|seconds| usize::try_from(seconds).unwrap_or(usize::MAX))),
    ];
    for (name, value) in positive {
        if value == Some(0) {
            return Err(ResolveError::OutOfRange { name, value: "0".to_owned(), allowed: "at least 1" });
        }
    }
    if let Some(tokens @ 0..2) = args.max_total_tokens {
        let allowed = "at least 2: a token of prompt and one to generate";
        return Err(ResolveError::OutOfRange { name: "max-total-tokens", value: tokens.to_string(), allowed });
    }
    let seconds = args.queue_timeout.unwrap_or(1);
    in_range("queue-timeout", seconds, (1..=MAX_QUEUE_TIMEOUT_S).contains(&seconds), "from 1 to 86400")?;
    let fraction = args.cuda_memory_fraction;
    in_range("cuda-memory-fraction", fraction, fraction > 0.0 && fraction <= 1.0, "over 0 and at most 1")?;
    let gamma = args.watermark_gamma.unwrap_or(0.5);
    in_range("watermark-gamma", gamma, gamma > 0.0 && gamma < 1.0, "over 0 and under 1")?;
    let delta = args.watermark_delta.unwrap_or(2.0);
    in_range("watermark-delta", delta, delta > 0.0 && delta.is_finite(), "over 0")?;
    let factor = args.rope_factor.unwrap_or(1.0);
    in_range("rope-factor", factor, factor >= 1.0 && factor.is_finite(), "at least 1")?;
    // The angles of cached keys would have to change as their sequence grows.
    let is_linear = args.rope_scaling != Some(RopeScaling::Dynamic);
    in_range(
        "rope-scaling",
        "dynamic",
        is_linear,
        "linear; for others, write rope_scaling into the model's config.json",
    )
}

fn in_range(name: &'static str, value: impl ToString, holds: bool, allowed: &'static str) -> Result<(), ResolveError> {
    if holds { Ok(()) } else { Err(ResolveError::OutOfRange { name, value: value.to_string(), allowed }) }
}

/// What no model and no machine can make true (spec §5.3).
fn check_contradictions(
    args: &Args,
    max_input_tokens: Option<u32>,
    max_step_sequences: u32,
) -> Result<(), ResolveError> {
    let below = |small: (&'static str, Option<u32>), or_equal: bool, large: (&'static str, Option<u32>)| {
        let ((small, Some(small_value)), (large, Some(large_value))) = (small, large) else { return Ok(()) };
        if small_value < large_value || (or_equal && small_value == large_value) {
            return Ok(());
        }
        let relation = if or_equal { "at most" } else { "less than" };
        Err(ResolveError::Contradiction { small, small_value, relation, large, large_value })
    };
    let total = ("max-total-tokens", args.max_total_tokens);
    let prefill = ("max-batch-prefill-tokens", args.max_batch_prefill_tokens);
    let pool = ("max-batch-total-tokens", args.max_batch_total_tokens);
    below(("max-input-tokens", max_input_tokens), false, total)?;
    below(total, true, pool)?;
    below(prefill, true, pool)?;
    // Every running sequence advances in every step, so each needs its token.
    below(("max-batch-size", Some(max_step_sequences)), true, prefill)
}

fn num_ranks(args: &Args, machine: Machine, choices: &mut Vec<Choice>) -> Result<usize, ResolveError> {
    match (args.sharded, args.num_shard, machine.num_visible_devices) {
        (Some(true), Some(1), _) => Err(ResolveError::NothingToShardOver { found: "--num-shard is 1".to_owned() }),
        (Some(false), Some(2..), _) => Err(ResolveError::OutOfRange {
            name: "num-shard",
            value: args.num_shard.unwrap_or_default().to_string(),
            allowed: "1 with --sharded false",
        }),
        (_, Some(num_shard), _) => Ok(num_shard),
        (Some(true), None, Some(devices @ 2..)) => {
            choices.push(Choice::new("num-shard", devices, "--sharded, over the visible devices"));
            Ok(devices)
        }
        (Some(true), None, devices) => {
            Err(ResolveError::NothingToShardOver { found: format!("{} are visible", devices.unwrap_or(0)) })
        }
        (None, None, Some(devices @ 2..)) => {
            choices.push(Choice::new("num-shard", devices, "the visible devices"));
            Ok(devices)
        }
        (_, None, _) => Ok(1),
    }
}

fn max_step_sequences(args: &Args, choices: &mut Vec<Choice>) -> u32 {
    if let Some(size) = args.max_batch_size {
        return size;
    }
    let requests = u32::try_from(args.max_concurrent_requests).unwrap_or(u32::MAX);
    let most = DEFAULT_MAX_STEP_SEQUENCES.min(args.max_batch_prefill_tokens.unwrap_or(u32::MAX));
    let size = requests.min(most);
    choices.push(Choice::new("max-batch-size", size, "max-concurrent-requests, within what a step can hold"));
    size
}

fn max_inter_token(args: &Args, choices: &mut Vec<Choice>) -> Option<Duration> {
    if args.max_inter_token_ms.is_none() {
        let reason = "of what a step takes without prompts, measured while serving";
        choices.push(Choice::new("max-inter-token-ms", "a small multiple", reason));
    }
    args.max_inter_token_ms.map(Duration::from_millis)
}

/// COMPAT: containers set `HOSTNAME` to the machine's name; TGI then listens everywhere, with a warning.
fn listen_ip(hostname: &str, warnings: &mut Vec<String>) -> IpAddr {
    if hostname == "localhost" {
        return Ipv4Addr::LOCALHOST.into();
    }
    hostname.trim_matches(['[', ']']).parse().unwrap_or_else(|_| {
        warnings.push(format!("hostname {hostname:?} is not an IP address; listening on 0.0.0.0"));
        Ipv4Addr::UNSPECIFIED.into()
    })
}

/// How many accelerators the environment makes visible; `list_all` counts those of the machine.
pub fn visible_devices(
    get_env: impl Fn(&str) -> Option<String>,
    list_all: impl FnOnce() -> Option<usize>,
) -> Option<usize> {
    let count = |list: &str| list.split(',').filter(|device| !device.trim().is_empty()).count();
    if let Some(list) = get_env("CUDA_VISIBLE_DEVICES") {
        return Some(count(&list));
    }
    match get_env("NVIDIA_VISIBLE_DEVICES").as_deref() {
        None => get_env("ZE_AFFINITY_MASK").map(|list| count(&list)),
        Some("all" | "") => list_all(),
        Some("void" | "none") => Some(0),
        Some(list) => Some(count(list)),
    }
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
