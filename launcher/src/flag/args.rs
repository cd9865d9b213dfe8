//! Every flag, declared once: its name, environment variable, default and help.
//!
//! Names and defaults are those of text-generation-inference. `compat.rs` lists the TGI flags that this server lacks.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{BoolishValueParser, NonEmptyStringValueParser, RangedU64ValueParser};
use clap::{ArgAction, Parser, ValueEnum};
use penstock_router::{AllowedHost, ImageUrlConfig};

use crate::flag::attention::Attention;
use crate::flag::dtype::{Dtype, KvCacheDtype};
use crate::flag::generation_config::{GenerationConfig, Overrides};
use crate::flag::isa::CpuIsa;
use crate::flag::priority::PriorityOrder;
use crate::flag::quantize::Quantize;
use crate::flag::ranks_on::RanksOn;
use crate::flag::standby::Standby;
use crate::flag::tool::Tool;

/// Serves a large language model over HTTP, with the routes of TGI and of OpenAI.
#[derive(Clone, Debug, Parser)]
#[command(name = "penstock", version, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) tool: Option<Tool>,

    /// Model to serve: a folder, a .gguf file, or a model id on the Hugging Face Hub [default: a small embedded model]
    #[arg(long, env, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) model_id: Option<String>,

    /// Branch, tag or commit of a Hub model
    #[arg(long, env, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) revision: Option<String>,

    /// Data type of weights and computation [default: chosen by the worker for its device]
    #[arg(long, env)]
    pub(crate) dtype: Option<Dtype>,

    /// Data type of the KV cache; auto is that of the computation. fp8 halves the cache's size and rounds keys and
    /// values
    #[arg(long, env, value_enum, default_value_t = KvCacheDtype::Auto)]
    pub(crate) kv_cache_dtype: KvCacheDtype,

    /// Attention implementation: auto takes the fastest that supports a layer on this device. Each other one must support
    /// every layer: native (CPUs), flash (FlashAttention-2 on GPUs), triton (GPUs) or reference (slow)
    #[arg(long, env, value_enum, default_value_t = Attention::Auto)]
    pub(crate) attention: Attention,

    /// Give a token the same bits in every batch and for every cut of its prompt into chunks. On a CPU with native operators
    /// this always holds; on a GPU it makes matrix products slower and rules FlashAttention out. Refused where it cannot hold
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) deterministic: bool,

    /// Instruction set of the native CPU kernels: auto takes the fastest that the CPU has. Each other one must be there
    #[arg(long, env, value_enum, default_value_t = CpuIsa::Auto)]
    pub(crate) cpu_isa: CpuIsa,

    /// Run the checkpoint's own Python code if neither this server nor transformers knows the model type. That code can
    /// do anything
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) trust_remote_code: bool,

    /// LoRA adapters that requests may name, separated by commas, each as NAME=FOLDER, FOLDER, or the id of an adapter on the hub, as
    /// ID or ID@REVISION
    #[arg(long, env, value_delimiter = ',', value_name = "ADAPTERS")]
    pub(crate) lora_adapters: Vec<String>,

    /// Maximum number of LoRA adapters that are loaded at a time. The least recently used one gives way to another, when no
    /// request uses it; a request waits until there is one
    #[arg(long, env, default_value_t = 8, value_parser = RangedU64ValueParser::<u32>::new().range(1..=1024))]
    pub(crate) max_lora_slots: u32,

    /// Maximum rank of a LoRA adapter. The KV cache leaves room for --max-lora-slots adapters of this rank
    #[arg(long, env, default_value_t = 64, value_parser = RangedU64ValueParser::<u32>::new().range(1..=4096))]
    pub(crate) max_lora_rank: u32,

    /// Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, with which clients add LoRA adapters from the server's folders or
    /// the hub, and remove them. Includes --check-model-name
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) enable_lora_updates: bool,

    /// Shard the model across ranks; without --num-shard, across all visible devices
    #[arg(long, env)]
    pub(crate) sharded: Option<bool>,

    /// Number of ranks to shard the model across, one process each [default: number of visible devices, or 1]
    #[arg(long, env)]
    pub(crate) num_shard: Option<usize>,

    /// Number of pipeline stages, each with --num-shard ranks: a stage holds some of the layers and its part of the KV cache, so a model
    /// can be larger than the memory of one device, process or node (--ranks-on). Steps of other sequences run on the stages at the
    /// same time. Without --speculate, LoRA adapters and images
    #[arg(long, env, default_value_t = 1, value_parser = RangedU64ValueParser::<u32>::new().range(1..=64))]
    pub(crate) pipeline_parallel_size: u32,

    /// Number of replicas of the model, each with --num-shard ranks on devices, or on a part of the cores, of its own. A request goes to
    /// the replica that has the longest part of its prompt in its cache or the least to do, and when a replica loses its
    /// workers, the others continue its streams
    #[arg(long, env, default_value_t = 1)]
    pub(crate) replicas: usize,

    /// Nodes that the ranks run on instead of this machine, as node://HOST:PORT of a `penstock node`; repeat, or separate by commas, for
    /// several. Each has one rank, or equally many of --num-shard. They read the model from the same path as this machine, and compute on CPUs
    /// without --unencrypted-gpus. Needs --node-secret-file. Or ray://HOST:PORT, the address of a Ray cluster that this machine is part of:
    /// Ray chooses a node for each rank of --num-shard [default: none]
    #[arg(long, env, value_delimiter = ',', value_name = "NODES")]
    pub(crate) ranks_on: Vec<RanksOn>,

    /// File with the secret that this server and the nodes of --ranks-on share, at least 32 characters
    #[arg(long, env, value_name = "FILE", requires = "ranks_on")]
    pub(crate) node_secret_file: Option<PathBuf>,

    /// Run each rank of --ranks-on on a GPU of its node. The GPUs exchange tensors by NCCL, which neither encrypts nor checks who connects:
    /// only for a private network. Nodes need the flag too; those of Ray get it. Has not been run on GPUs yet
    #[arg(long, env, requires = "ranks_on")]
    pub(crate) unencrypted_gpus: bool,

    /// Server that computes the sequences, as http://HOST:PORT or https://HOST:PORT of its --engine-listen; repeat, or separate by commas,
    /// for several. Only for `penstock route`, which loads no model and serves with the engines of these servers
    #[arg(long, env, value_delimiter = ',', value_name = "URL")]
    pub(crate) replica: Vec<String>,

    /// File with the servers of `penstock route`, a URL as in --replica on each line, instead of --replica. It is read again each second: a new
    /// server joins, and the sequences of one that is no longer there move to the others
    #[arg(long, env, value_name = "FILE")]
    pub(crate) replica_file: Option<PathBuf>,

    /// Seconds without a sign of life after which a server of --replica counts as lost, and the others continue its streams
    #[arg(long, env, default_value_t = 10, value_parser = RangedU64ValueParser::<u64>::new().range(2..=3600))]
    pub(crate) replica_timeout: u64,

    /// IP address and port on which a router (`penstock route`) uses this server's engine; port 0 picks a free one. Needs
    /// --engine-secret-file, and, beyond this machine, --engine-tls-cert [default: none]
    #[arg(long, env, value_name = "ADDRESS")]
    pub(crate) engine_listen: Option<SocketAddr>,

    /// File with the secret that a router and the servers behind it share, at least 16 characters. The variable ENGINE_SECRET has the secret
    /// itself
    #[arg(long, env, value_name = "FILE")]
    pub(crate) engine_secret_file: Option<PathBuf>,

    /// PEM file with the certificate of --engine-listen; for `penstock route`, that of the router, if the servers require one
    #[arg(long, env, value_name = "FILE", requires = "engine_tls_key")]
    pub(crate) engine_tls_cert: Option<PathBuf>,

    /// PEM file with the key of --engine-tls-cert
    #[arg(long, env, value_name = "FILE", requires = "engine_tls_cert")]
    pub(crate) engine_tls_key: Option<PathBuf>,

    /// PEM file with the authority that signed the certificates of the other side. A server with it accepts only routers with such a
    /// certificate; a router needs it for https
    #[arg(long, env, value_name = "FILE")]
    pub(crate) engine_tls_ca: Option<PathBuf>,

    /// DANGEROUS: let --engine-listen and --replica cross the network without TLS. Anyone on the network can then read the secret,
    /// prompts and answers
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) engine_without_tls: bool,

    /// Maximum number of requests in the server at a time; further requests get status 429
    #[arg(long, env, default_value_t = 128)]
    pub(crate) max_concurrent_requests: usize,

    /// Maximum number of tokens that wait for their first step, counting each prompt and the most it may generate; further
    /// requests get status 429 [default: 128 sequences of maximum length or 16 times the KV cache, whichever is larger]
    #[arg(long, env)]
    pub(crate) max_queued_tokens: Option<u64>,

    /// Seconds that a request may wait for its first step before it gets status 429 [default: no limit]
    #[arg(long, env)]
    pub(crate) queue_timeout: Option<u64>,

    /// Maximum value of best_of
    #[arg(long, env, default_value_t = 2)]
    pub(crate) max_best_of: usize,

    /// Maximum number of stop sequences in a request
    #[arg(long, env, default_value_t = 4)]
    pub(crate) max_stop_sequences: usize,

    /// Maximum value of top_n_tokens, and of logprobs in completions if above 5
    #[arg(long, env, default_value_t = 5)]
    pub(crate) max_top_n_tokens: u32,

    /// Maximum number of prompts in a request to /v1/completions
    #[arg(long, env, default_value_t = 128)]
    pub(crate) max_client_batch_size: usize,

    /// Maximum length of a prompt in tokens; an encoder must read its prompt in one step [default: max-total-tokens - 1;
    /// for an encoder 1024 on a CPU, 4096 on a GPU]
    #[arg(long, env)]
    pub(crate) max_input_tokens: Option<u32>,

    /// Former name of --max-input-tokens
    #[arg(long, env, conflicts_with = "max_input_tokens")]
    pub(crate) max_input_length: Option<u32>,

    /// Maximum length of a sequence in tokens, prompt and generated text together [default: the model's limit, or what
    /// fits in memory]
    #[arg(long, env)]
    pub(crate) max_total_tokens: Option<u32>,

    /// Maximum number of tokens computed in one step; while streams run, --max-inter-token-ms limits it further
    /// [default: 512 on a CPU, 4096 on a GPU, or what a prompt that is read in one step needs]
    #[arg(long, env)]
    pub(crate) max_batch_prefill_tokens: Option<u32>,

    /// Capacity of the KV cache in tokens [default: what fits in memory]
    #[arg(long, env)]
    pub(crate) max_batch_total_tokens: Option<u32>,

    /// Maximum number of sequences in one step [default: max-concurrent-requests, at most 256]
    #[arg(long, env)]
    pub(crate) max_batch_size: Option<u32>,

    /// Maximum duration in milliseconds of a step while streams run: prompt tokens that would exceed it wait for later
    /// steps, except one block of one prompt per step, or what must be read in one step. Lower values make streams
    /// steadier and prompts slower
    /// [default: 1.75 times the measured duration of a step without prompts, and at least 40]
    #[arg(long, env)]
    pub(crate) max_inter_token_ms: Option<u64>,

    /// Maximum number of steps in flight to the worker; each pipeline stage after the first adds one. 1 disables run-ahead,
    /// so the worker idles between steps
    #[arg(long, env, default_value_t = 2, value_parser = RangedU64ValueParser::<u32>::new().range(1..=16))]
    pub(crate) max_steps_in_flight: u32,

    /// Maximum number of draft tokens that a step verifies for one sequence; with 0, only those that a grammar forces. Drafts
    /// are what --speculative-model proposes, or else the multi-token prediction (MTP) layer of the checkpoint, or else what
    /// followed the last tokens of a sequence where they occurred in it before (n-grams), or what its grammar forces. They
    /// change no token, logprob or stop. On a GPU without --deterministic, rounding depends on the batch, with drafts as with
    /// other sequences. A step with prompts or with as many sequences as --max-batch-size has none
    #[arg(long, env, default_value_t = 0, value_parser = RangedU64ValueParser::<u32>::new().range(0..=16))]
    pub(crate) speculate: u32,

    /// Number of tokens of recent answers in which --speculate looks up drafts, as well as in a sequence's own text; 0 is off.
    /// Answers of other clients count, so the time of an answer can tell a client that another one got a similar answer;
    /// `cache_salt` and adapters separate them. Does not apply to requests with a grammar, nor to steps that draft with a draft
    /// model, an EAGLE-3 head or an MTP layer
    #[arg(long, env, default_value_t = 0, value_parser = RangedU64ValueParser::<u32>::new().range(0..=1 << 17))]
    pub(crate) speculate_recent_tokens: u32,

    /// Source of the draft tokens of --speculate: a smaller model with the same vocabulary, as a folder, a .gguf file, or an
    /// id or ID@REVISION on the Hugging Face hub; or heads that were made for the model: EAGLE-3 in the published layout, or Medusa
    /// in TGI's layouts or as a chain; or `ngram`: n-grams. Without it, drafts come from the checkpoint's MTP layer, or from
    /// n-grams if it has none. A step uses n-grams instead where they are expected to save more time
    #[arg(long, env)]
    pub(crate) speculative_model: Option<String>,

    /// Number of threads that tokenize long inputs
    #[arg(long, env, default_value_t = 2)]
    pub(crate) validation_workers: usize,

    /// Fraction of a device's memory that the server may use in total, above 0 and at most 1
    #[arg(long, env, default_value_t = 0.9)]
    pub(crate) cuda_memory_fraction: f64,

    /// Whether a second worker group, with its weights loaded, waits to replace a failed one. auto: if memory is left
    /// for it; reserve: the KV cache of a GPU leaves room for it; off: never
    #[arg(long, env, value_enum, default_value_t = Standby::Auto)]
    pub(crate) standby: Standby,

    /// Batch sizes for which decode steps are recorded as CUDA graphs, separated by commas; each draft token counts as a sequence. A
    /// smaller batch uses the next larger graph, and batches beyond the largest none. 0: no graphs. No effect on a CPU
    /// [default: chosen by the worker]
    #[arg(long, env, value_name = "SIZES", value_delimiter = ',')]
    pub(crate) cuda_graphs: Vec<u32>,

    /// Method of quantization. Without it, the checkpoint's own config decides; one that contradicts the checkpoint is an
    /// error. An unquantized checkpoint is quantized at load: to 8 bits by eetq, bitsandbytes and fp8, to 4 by
    /// bitsandbytes-nf4 and bitsandbytes-fp4
    #[arg(long, env, value_enum, value_name = "METHOD")]
    pub(crate) quantize: Option<Quantize>,

    /// Bits of the inputs that quantized weights are multiplied with on a CPU: 8 or 16. 16 are slower in large batches and
    /// more accurate [default: 8]
    #[arg(long, env, value_name = "BITS", value_parser = activation_bits)]
    pub(crate) activation_bits: Option<u32>,

    /// Dequantize the weights of a quantized checkpoint at load: more memory and slower, but with the accuracy of --dtype
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) dequantize: bool,

    /// Reuse the KV cache for prompts with a common prefix
    #[arg(long, env, default_value_t = true, action = ArgAction::Set, value_parser = BoolishValueParser::new())]
    pub(crate) prefix_caching: bool,

    /// Host memory budget in GiB for prefixes evicted from the KV cache, per replica. Restoring a prefix is much faster
    /// than computing it again
    #[arg(long, env, default_value_t = 0.0, value_name = "GIB")]
    pub(crate) kv_offload_gib: f64,

    /// Disk budget in GiB for prefixes that --kv-offload-gib has no room for, in --kv-offload-folder, per replica
    #[arg(long, env, default_value_t = 0.0, value_name = "GIB")]
    pub(crate) kv_offload_disk_gib: f64,

    /// Folder on a disk for --kv-offload-disk-gib, which is reserved at the start, in a file without a name
    #[arg(long, env, value_name = "FOLDER")]
    pub(crate) kv_offload_folder: Option<PathBuf>,

    /// Snapshots of states, for models that keep states between tokens, per replica. Such a model reuses a prefix only
    /// where there is a snapshot [default: as many as take the memory of the KV cache]
    #[arg(long, env, value_name = "SNAPSHOTS")]
    pub(crate) state_snapshots: Option<u32>,

    /// Refuse requests that have a grammar, a schema or tools
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) disable_grammar_support: bool,

    /// Do not serve the playground, a page for browsers at /playground and /
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) disable_playground: bool,

    /// Allow requests for the logprobs of their prompt (decoder_input_details)
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) enable_prefill_logprobs: bool,

    /// Number of newest responses of /v1/responses that are kept in memory, so that requests can continue, read and
    /// delete them; 0 keeps none
    #[arg(long, env, default_value_t = 0)]
    pub(crate) max_stored_responses: usize,

    /// Name that requests may call the model by; repeat, or separate by commas, for several. Answers name the first
    /// [default: the model id]
    #[arg(long, env, value_delimiter = ',', value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) served_model_name: Vec<String>,

    /// Answer 404 to a request that names another model than --served-model-name; by default, any name is accepted
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) check_model_name: bool,

    /// Let requests bring a chat template, as `chat_template` of /v1/chat/completions; it runs within limits of time and
    /// memory
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) trust_request_chat_template: bool,

    /// Most tokens of the thoughts of a chat's answer, after which they are ended; a request may say otherwise
    /// [default: no limit]
    #[arg(long, env)]
    pub(crate) reasoning_budget: Option<u32>,

    /// Refuse requests with fields that this server does not know; by default, they are served, and the header
    /// x-penstock-warning of the answer and the log name the fields
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) strict_requests: bool,

    /// Whether requests with a higher or, as in vLLM, a lower `priority` are served first
    #[arg(long, env, value_enum, default_value_t = PriorityOrder::HighestFirst, value_name = "ORDER")]
    pub(crate) priority_order: PriorityOrder,

    /// Fraction of the vocabulary that a watermark favours, between 0 and 1 [default: 0.5]
    #[arg(long, env)]
    pub(crate) watermark_gamma: Option<f32>,

    /// Bias that a watermark adds to the logits of favoured tokens [default: 2.0]
    #[arg(long, env)]
    pub(crate) watermark_delta: Option<f32>,

    /// tokenizer_config.json that replaces the model's own, including its chat template
    #[arg(long, env, value_name = "FILE")]
    pub(crate) tokenizer_config_path: Option<PathBuf>,

    /// Chat template that replaces the model's own: a file, or the template itself
    #[arg(long, env, value_name = "FILE_OR_TEMPLATE", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) chat_template: Option<String>,

    /// Sampling parameters of requests that leave them out, except on TGI's routes: auto takes those of the model's
    /// generation_config.json; none takes the APIs' defaults; a folder has a generation_config.json that replaces the model's,
    /// including its end-of-sequence tokens
    #[arg(long, env, default_value = "auto", value_name = "FOLDER")]
    pub(crate) generation_config: GenerationConfig,

    /// Entries that replace those of --generation-config, as in {"temperature": 0.6, "top_k": null}; null removes one
    #[arg(long, env, value_name = "JSON")]
    pub(crate) override_generation_config: Option<Overrides>,

    /// RoPE scaling for positions beyond those the model was trained for, in place of the model's own [default with
    /// --rope-factor: linear]
    #[arg(long, env)]
    pub(crate) rope_scaling: Option<RopeScaling>,

    /// RoPE scaling factor, at least 1: the model's maximum sequence length becomes its original length times the factor
    /// [default with --rope-scaling linear or dynamic: 1.0]
    #[arg(long, env)]
    pub(crate) rope_factor: Option<f64>,

    /// Original length of RoPE scaling in tokens: the sequences that the model was trained for before its positions were
    /// scaled [default with --rope-factor: original_max_position_embeddings of the model's config.json, or else
    /// max_position_embeddings]
    #[arg(long, env, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rope_original_max_tokens: Option<u32>,

    /// IP address to listen on
    #[arg(long, env, default_value = "0.0.0.0")]
    pub(crate) hostname: String,

    /// Port to listen on; 0 picks a free port
    #[arg(long, short, env, default_value_t = 3000)]
    pub(crate) port: u16,

    /// Path of a unix socket to listen on, instead of a port. The umask decides which users may connect: with 022 only this user,
    /// with 007 also the group
    #[arg(long, env, value_name = "PATH")]
    pub(crate) uds: Option<PathBuf>,

    /// Stop, as after SIGTERM, when standard input ends. For a program that starts the server as its child: the kernel
    /// closes its end of the pipe even if it is killed
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) stop_with_stdin: bool,

    /// Origin that browsers may call from; repeat for several [default: any]
    #[arg(long, env, value_delimiter = ',')]
    pub(crate) cors_allow_origin: Vec<String>,

    /// API key that requests must send as `Authorization: Bearer KEY`; repeat, or separate by commas, for several. Other
    /// users of this machine can read command lines: prefer --api-key-file, or the environment variable
    #[arg(long, env, value_delimiter = ',', value_name = "KEY")]
    pub(crate) api_key: Vec<Secret>,

    /// File with one API key per line; a line that starts with `#` is a comment. Read once, at startup
    #[arg(long, env, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// Maximum size of a request body in bytes
    #[arg(long, env, default_value_t = 2_000_000)]
    pub(crate) payload_limit: usize,

    /// Fetch images that requests name by http or https URLs, from hosts with public addresses; otherwise images are data URIs
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) allow_image_urls: bool,

    /// Hosts from which images are fetched although their addresses are not public, separated by commas: names
    /// (images.internal), endings (*.internal) or networks (10.1.0.0/16)
    #[arg(long, env, value_delimiter = ',', value_name = "HOSTS", requires = "allow_image_urls")]
    pub(crate) allowed_image_hosts: Vec<AllowedHost>,

    /// Maximum size, in bytes, of the images that one prompt names by URL, together
    #[arg(long, env, default_value_t = 20_000_000, value_name = "BYTES")]
    pub(crate) max_image_fetch_size: usize,

    /// Folder that holds Hub models [default: ~/.cache/huggingface/hub]
    #[arg(long, env)]
    pub(crate) huggingface_hub_cache: Option<PathBuf>,

    /// Folder with the weights of a Hub model; only its configuration and tokenizer are then downloaded
    #[arg(long, env)]
    pub(crate) weights_cache_override: Option<PathBuf>,

    /// Prefix of the workers' socket paths, completed by -RANK [default: in a private temporary folder]
    #[arg(long, env)]
    pub(crate) shard_uds_path: Option<PathBuf>,

    /// Seconds that running requests have to finish after SIGTERM or Ctrl-C
    #[arg(long, short, env, default_value_t = 90)]
    pub(crate) graceful_termination_timeout: u64,

    /// Seconds after which a worker that sends nothing, or a step in which no rank makes progress, counts as hung; the
    /// worker group is then restarted [default: 20 times the slowest warm-up step, at least 10]
    #[arg(long, env)]
    pub(crate) step_timeout: Option<u64>,

    /// Log one JSON object per line
    #[arg(long, env, action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) json_output: bool,

    /// OpenTelemetry collector that gets a trace of each request, as http://HOST:PORT: OTLP over gRPC without TLS
    /// [default: no traces]
    #[arg(long, env, value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,

    /// Name of this service in its traces
    #[arg(long, env, default_value = "text-generation-inference.router", value_name = "NAME")]
    pub(crate) otlp_service_name: String,

    /// Log versions and hardware at startup
    #[arg(long, short, action = ArgAction::SetTrue)]
    pub(crate) env: bool,

    /// Whether the command is `penstock route`.
    #[arg(skip)]
    pub(crate) route: bool,

    /// Print a generated page of docs/ and exit
    #[arg(long, hide = true)]
    pub(crate) reference: Option<Page>,
}

/// A page of docs/ that is generated from the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Page {
    Flags,
    Metrics,
    /// The flags as JSON, for the Python package.
    Settings,
}

impl Args {
    /// The URLs of images that are fetched; `None`: none.
    pub(crate) fn image_urls(&self) -> Option<ImageUrlConfig> {
        let config =
            || ImageUrlConfig { allowed_hosts: self.allowed_image_hosts.clone(), max_bytes: self.max_image_fetch_size };
        self.allow_image_urls.then(config)
    }

    /// The model that `--speculative-model` names; `None`: n-grams, or no value.
    pub(crate) fn drafting_model(&self) -> Option<&str> {
        self.speculative_model.as_deref().filter(|given| *given != "ngram")
    }

    /// Whether the checkpoint's multi-token prediction layer drafts, if it has one.
    pub(crate) const fn drafts_with_mtp(&self) -> bool {
        self.speculate > 0 && self.speculative_model.is_none()
    }
}

/// A string that `Debug` hides.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) String);

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

/// TGI's methods of `--rope-scaling`, and YaRN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RopeScaling {
    Linear,
    Dynamic,
    Yarn,
}

impl RopeScaling {
    /// The name in a model's configuration.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Dynamic => "dynamic",
            Self::Yarn => "yarn",
        }
    }
}

fn activation_bits(text: &str) -> Result<u32, String> {
    match text {
        "8" => Ok(8),
        "16" => Ok(16),
        _ => Err("must be 8 or 16".to_owned()),
    }
}
