//! Resolves flags into settings for this machine and model. Pure: the machine is an argument.
//!
//! It happens in three stages: `Settings` before any process is started, `step_tokens` once the device is known, and
//! `SequenceLimits` once the model and its memory are known. Each chosen value carries its reason, for the log.

pub(crate) mod machine;

mod nodes;
mod range;
mod sequence_limits;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use penstock_router::config::{EndpointError, TraceConfig};
use penstock_router::worker::Description;
use penstock_scheduler::Limits;

use crate::flag::args::Args;
use crate::flag::attention::Attention;
use crate::flag::ranks_on::RanksOn;
use crate::flag::standby::Standby;
use crate::listen::listener::Place;
use machine::Machine;
pub(crate) use sequence_limits::SequenceLimits;

/// Default limit on the sequences of a step.
const DEFAULT_MAX_STEP_SEQUENCES: u32 = 256;
/// A CPU computes some thousand prompt tokens per second of a small model. With a larger model, more tokens per step would
/// stall running streams for seconds.
const DEFAULT_STEP_TOKENS_CPU: u32 = 512;
const DEFAULT_STEP_TOKENS_GPU: u32 = 4096;
/// Limits the source of an encoder, which is computed in one step: the 8192 and more tokens that a T5 accepts would take
/// too long.
const DEFAULT_SOURCE_TOKENS_CPU: u32 = 1024;
/// An image in a prompt that is read in one step has up to 1,024 tokens.
const DEFAULT_WHOLE_PROMPT_TOKENS_CPU: u32 = 2048;
const DEFAULT_SOURCE_TOKENS_GPU: u32 = 4096;

/// A value that this module chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) reason: String,
    /// The usual default, which the log has only at the level debug.
    is_usual: bool,
}

impl Choice {
    /// A value that differs from the usual one, or from what was given.
    fn new(name: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self { name, value: value.to_string(), reason: reason.into(), is_usual: false }
    }

    fn usual(name: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self { is_usual: true, ..Self::new(name, value, reason) }
    }

    /// Logs the value with its reason.
    pub(crate) fn log(&self) {
        let Self { name, value, reason, is_usual } = self;
        match is_usual {
            true => tracing::debug!("{name} is {value} ({reason})"),
            false => tracing::info!("{name} is {value} ({reason})"),
        }
    }
}

/// Settings that depend on flags and machine only.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) place: Place,
    /// Ranks of one replica.
    pub(crate) num_ranks: usize,
    /// Nodes of the ranks; empty: this machine.
    pub(crate) ranks_on: Vec<RanksOn>,
    /// CPU threads per rank.
    pub(crate) num_threads: usize,
    /// 0 if the model runs on a CPU.
    pub(crate) num_devices: usize,
    pub(crate) max_step_sequences: u32,
    /// `--max-input-tokens`, or its former name.
    pub(crate) max_input_tokens: Option<u32>,
    pub(crate) memory_fraction: f64,
    pub(crate) standby: Standby,
    pub(crate) graceful_termination_timeout: Duration,
    /// Limit on a step with decodes; `None` lets the scheduler choose by measurement.
    pub(crate) max_inter_token: Option<Duration>,
    pub(crate) queue_timeout: Option<Duration>,
    /// Destination of traces; `None`: there are no traces.
    pub(crate) traces: Option<TraceConfig>,
    pub(crate) choices: Vec<Choice>,
    /// Given values that were replaced, or need attention.
    pub(crate) warnings: Vec<String>,
}

/// Why settings cannot be used: they contradict each other, the model or the machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResolveError {
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
    #[error("--sharded needs more than one device, {found}; set the number of ranks with --num-shard")]
    NothingToShardOver { found: String },
    #[error(
        "--num-shard is {num_shard}{}{}, but {devices} device(s) are visible, and each rank needs one of its own; lower it, \
         make more devices visible (CUDA_VISIBLE_DEVICES, docker's --gpus), or serve on the CPU with CUDA_VISIBLE_DEVICES=\"\"",
        if *stages == 1 { String::new() } else { format!(" and --pipeline-parallel-size is {stages}") },
        if *replicas == 1 { String::new() } else { format!(" and --replicas is {replicas}") }
    )]
    TooFewDevices { num_shard: usize, stages: u32, replicas: usize, devices: usize },
    #[error("--max-total-tokens is {given}, but the model supports sequences of at most {allowed} tokens")]
    BeyondModel { given: u32, allowed: u32 },
    #[error(
        "--{name} is {given}, but the memory holds a KV cache of only {capacity} tokens; \
         lower it, or allow the server more memory (--cuda-memory-fraction, --max-batch-total-tokens)"
    )]
    BeyondMemory { name: &'static str, given: u32, capacity: u64 },
    #[error("--max-input-tokens is {given}, but sequences can have at most {max_total_tokens} tokens ({reason})")]
    InputBeyondTotal { given: u32, max_total_tokens: u32, reason: String },
    #[error("--max-input-tokens is {given}, but this model's inputs can have at most {allowed} tokens ({reason})")]
    InputBeyondSource { given: u32, allowed: u32, reason: &'static str },
    #[error(transparent)]
    OtlpEndpoint(#[from] EndpointError),
}

impl Settings {
    /// Whether the fork server loads the model: on CPUs, where one rank has all of it.
    pub(crate) fn preloads(&self) -> bool {
        self.num_devices == 0 && self.num_ranks == 1 && self.ranks_on.is_empty()
    }

    /// Checks the flags and fills in defaults.
    pub(crate) fn resolve(args: &Args, machine: Machine) -> Result<Self, ResolveError> {
        range::check(args)?;
        let (mut choices, mut warnings) = (Vec::new(), Vec::new());
        let num_ranks = num_shards(args, machine, &mut choices)? * args.pipeline_parallel_size as usize;
        let num_threads = (machine.num_cores / (num_ranks * args.replicas)).max(1);
        let ranks = match args.replicas {
            1 => format!("{num_ranks} rank(s)"),
            replicas => format!("{replicas} replicas of {num_ranks} rank(s)"),
        };
        choices.push(Choice::usual("threads per rank", num_threads, format!("{} cores, {ranks}", machine.num_cores)));
        let standby = standby(args, &mut choices)?;
        if args.trust_remote_code {
            // COMPAT: many deployments set it for models that do not need it.
            let warning = "trust-remote-code: the checkpoint's own code runs if its model type is unknown otherwise";
            warnings.push(warning.to_owned());
        }
        if args.attention == Attention::Tgi {
            // COMPAT: deployments of TGI choose a library that this server does not use.
            let warning = "attention: TGI's libraries are not used here; the choice is automatic, as with auto";
            warnings.push(warning.to_owned());
        }
        let max_step_sequences = max_step_sequences(args, &mut choices);
        let max_input_tokens = args.max_input_tokens.or(args.max_input_length);
        range::check_order(args, max_input_tokens, max_step_sequences)?;
        Ok(Self {
            place: place(args, &mut warnings),
            num_ranks,
            ranks_on: args.ranks_on.clone(),
            num_threads,
            num_devices: machine.num_visible_devices.filter(|_| args.ranks_on.is_empty()).unwrap_or(0),
            max_step_sequences,
            max_input_tokens,
            memory_fraction: args.cuda_memory_fraction,
            standby,
            graceful_termination_timeout: Duration::from_secs(args.graceful_termination_timeout),
            max_inter_token: max_inter_token(args, &mut choices),
            queue_timeout: args.queue_timeout.map(Duration::from_secs),
            traces: traces(args)?,
            choices,
            warnings,
        })
    }

    /// Limit on the tokens of one step, on the device that holds the model.
    pub(crate) fn step_tokens(&self, args: &Args, model: &Description) -> (u32, Option<Choice>) {
        if let Some(tokens) = args.max_batch_prefill_tokens {
            return (tokens, None);
        }
        let (wanted, longest, device) = match (model.device.starts_with("cpu"), model.is_prompt_whole()) {
            (true, false) => (DEFAULT_STEP_TOKENS_CPU, DEFAULT_SOURCE_TOKENS_CPU, "CPU"),
            (true, true) => (DEFAULT_STEP_TOKENS_CPU, DEFAULT_WHOLE_PROMPT_TOKENS_CPU, "CPU"),
            (false, _) => (DEFAULT_STEP_TOKENS_GPU, DEFAULT_SOURCE_TOKENS_GPU, "GPU"),
        };
        let longest = self.max_input_tokens.unwrap_or(longest);
        let whole_tokens = model.max_whole_tokens().min(longest).min(args.max_total_tokens.unwrap_or(u32::MAX));
        // Each running sequence advances in every step by at least one token.
        // A sequence that is pooled has one step, or few, so steps are shared by many sequences.
        let wanted = if model.pooling.is_some() { wanted } else { wanted.min(model.max_position_tokens) };
        let tokens = wanted.max(whole_tokens.saturating_add(self.max_step_sequences));
        let reason = format!("the default on a {device}, adjusted to the model and max-batch-size");
        (tokens, Some(Choice::usual("max-batch-prefill-tokens", tokens, reason)))
    }

    /// KV blocks that `--max-batch-total-tokens` requests.
    pub(crate) fn num_blocks(args: &Args, model: &Description) -> Option<u32> {
        args.max_batch_total_tokens.map(|tokens| tokens.div_ceil(model.block_tokens))
    }

    /// Whether prompts with a common prefix share their KV cache.
    pub(crate) fn prefix_caching(args: &Args, model: &Description) -> (bool, Option<Choice>) {
        if !args.prefix_caching || model.max_source_tokens == 0 {
            return (args.prefix_caching, None);
        }
        let reason = "every token of an encoder's source depends on the whole source, so prefixes cannot be shared";
        (false, Some(Choice::new("prefix-caching", false, reason)))
    }

    /// Slots beside the KV pool, each with one block of every rank: in host memory, and on disk.
    pub(crate) fn num_slots(args: &Args, model: &Description) -> ([u32; 2], Option<Choice>) {
        let gib = [("kv-offload-gib", args.kv_offload_gib), ("kv-offload-disk-gib", args.kv_offload_disk_gib)];
        let reason = if let (false, _) = Self::prefix_caching(args, model) {
            Some("no prefix is cached, so there is nothing to offload")
        } else {
            (model.kv_bytes_per_block == 0).then_some("the model keeps no keys and values that could be offloaded")
        };
        if let Some(reason) = reason {
            let given = gib.iter().find(|(_, gib)| *gib > 0.0);
            return ([0, 0], given.map(|(name, _)| Choice::new(name, 0, reason)));
        }
        let num_slots = |(_, gib)| (gib * f64::from(1 << 30) / model.kv_bytes_per_block as f64) as u32;
        (gib.map(num_slots), None)
    }

    /// Draft tokens per sequence and step, of `--speculate` or forced by grammars. 0 where drafts cannot be verified with
    /// the same bits, or where the KV pool of `limits` is too small for them. `limits`: of the scheduler, with the drafts.
    pub(crate) fn speculation(model: &Description, limits: &Limits) -> (u32, Option<Choice>) {
        let reason = if !model.can_draft {
            no_drafts(model)
        } else if !limits.has_room_for_drafts() {
            format!(
                "the KV pool of {} tokens does not hold a sliding window and the drafts of {} steps in flight; raise \
                 --max-batch-total-tokens, or lower --speculate",
                u64::from(limits.num_blocks) * u64::from(limits.block_tokens),
                limits.max_steps_in_flight
            )
        } else {
            return (limits.max_draft_tokens, None);
        };
        (0, (!limits.drafts_only_forced).then(|| Choice::new("speculate", 0, reason)))
    }
}

/// Why a model on one pipeline stage verifies no drafts, and what to do.
fn no_drafts(model: &Description) -> String {
    if model.pooling.is_some() {
        return "the model makes vectors or scores, and no tokens; leave out --speculate".to_owned();
    }
    let kernels = if model.device.starts_with("cuda") { "Triton" } else { "native" };
    format!(
        "{kernels} kernels verify drafts on this device, and {} has {} attention, or is run by transformers; leave out \
         --attention, or else --speculate",
        model.architecture, model.attention
    )
}

/// Other replicas take over what a replica loses, so that it needs no standby group.
fn standby(args: &Args, choices: &mut Vec<Choice>) -> Result<Standby, ResolveError> {
    if !args.ranks_on.is_empty() && args.standby != Standby::Off {
        choices.push(Choice::new("standby", "off", "the memory of the nodes is not measured"));
        return Ok(Standby::Off);
    }
    match args.standby {
        Standby::Auto if args.replicas > 1 => {
            choices.push(Choice::new("standby", "off", "other replicas take over the streams of a lost one"));
            Ok(Standby::Off)
        }
        Standby::Reserve if args.replicas > 1 => Err(ResolveError::OutOfRange {
            name: "standby",
            value: "reserve".to_owned(),
            allowed: "auto or off with --replicas: other replicas take over the streams of a lost one",
        }),
        standby => Ok(standby),
    }
}

/// Ranks of one pipeline stage of one replica.
fn num_shards(args: &Args, machine: Machine, choices: &mut Vec<Choice>) -> Result<usize, ResolveError> {
    if !args.ranks_on.is_empty() {
        return nodes::num_shards(args, choices);
    }
    let (replicas, stages) = (args.replicas, args.pipeline_parallel_size);
    let devices = machine.num_visible_devices.map(|devices| devices / (replicas * stages as usize));
    let too_few = |num_shard, devices| Err(ResolveError::TooFewDevices { num_shard, stages, replicas, devices });
    if let Some(found @ 1..) = machine.num_visible_devices
        && devices == Some(0)
    {
        return too_few(1, found);
    }
    match (args.sharded, args.num_shard, devices) {
        (Some(true), Some(1), _) => Err(ResolveError::NothingToShardOver { found: "--num-shard is 1".to_owned() }),
        (Some(false), Some(2..), _) => Err(ResolveError::OutOfRange {
            name: "num-shard",
            value: args.num_shard.unwrap_or_default().to_string(),
            allowed: "1 with --sharded false",
        }),
        // On a machine whose environment names devices that are not there, the worker reports what it sees.
        (_, Some(num_shard), Some(devices @ 1..)) if num_shard > devices => {
            too_few(num_shard, machine.num_visible_devices.unwrap_or(devices))
        }
        (_, Some(num_shard), _) => Ok(num_shard),
        (Some(true), None, Some(devices @ 2..)) => {
            choices.push(Choice::new("num-shard", devices, "--sharded, one rank per visible device"));
            Ok(devices)
        }
        (Some(true), None, devices) => {
            Err(ResolveError::NothingToShardOver { found: format!("{} are visible", devices.unwrap_or(0)) })
        }
        (None, None, Some(devices @ 2..)) => {
            choices.push(Choice::new("num-shard", devices, "one rank per visible device"));
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
    choices.push(Choice::usual("max-batch-size", size, "max-concurrent-requests, limited by what a step can hold"));
    size
}

/// COMPAT: an empty variable is as good as none.
fn traces(args: &Args) -> Result<Option<TraceConfig>, EndpointError> {
    let endpoint = args.otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    endpoint.map(|endpoint| TraceConfig::new(endpoint, &args.otlp_service_name)).transpose()
}

fn max_inter_token(args: &Args, choices: &mut Vec<Choice>) -> Option<Duration> {
    if args.max_inter_token_ms.is_none() {
        let reason = "of the duration of a step without prompts, measured while serving";
        choices.push(Choice::usual("max-inter-token-ms", "a small multiple", reason));
    }
    args.max_inter_token_ms.map(Duration::from_millis)
}

fn place(args: &Args, warnings: &mut Vec<String>) -> Place {
    match &args.uds {
        Some(path) => Place::Socket(path.clone()),
        None => Place::Port(SocketAddr::new(listen_ip(&args.hostname, warnings), args.port)),
    }
}

/// COMPAT: containers set `HOSTNAME` to the machine's name. Like TGI, the server then listens on all addresses and warns.
fn listen_ip(hostname: &str, warnings: &mut Vec<String>) -> IpAddr {
    if hostname == "localhost" {
        return Ipv4Addr::LOCALHOST.into();
    }
    hostname.trim_matches(['[', ']']).parse().unwrap_or_else(|_| {
        warnings.push(format!("hostname {hostname:?} is not an IP address; listening on 0.0.0.0"));
        Ipv4Addr::UNSPECIFIED.into()
    })
}

#[cfg(test)]
pub(crate) mod tests;
