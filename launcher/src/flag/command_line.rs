//! Parses the command line and the environment. A flag overrides its variable, which overrides the platform's default, which
//! overrides ours. Unsupported flags are refused, and each setting's origin is reported.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use penstock_router::config::VertexRoutes;

use crate::flag::args::Args;
use crate::flag::help::{self, Detail};
use crate::flag::platform::Platform;
use crate::flag::{compat, variable};

/// The only flag whose values are secret.
const SECRET: &str = "api_key";

/// A setting that was not left at its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    pub(crate) name: String,
    pub(crate) value: String,
    /// Origin of the value, for the log.
    pub(crate) origin: String,
}

/// The parsed command line and environment.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) args: Args,
    /// Secret values are hidden.
    pub(crate) given: Vec<Given>,
    /// Settings that were given but have no effect, with the reason.
    pub(crate) notes: Vec<String>,
    pub(crate) vertex_routes: VertexRoutes,
}

/// The subcommand that makes this program a router in front of other servers.
const ROUTE: &str = "route";
/// COMPAT: SageMaker runs a container as `docker run IMAGE serve`, and the entry point of TGI's image ignores the word.
const SERVE: &str = "serve";
/// Flags of `penstock route` alone.
const OF_ROUTERS: [&str; 3] = ["replica", "replica_file", "replica_timeout"];

/// Flags of servers with a model, which have no effect with `penstock route`.
const OF_MODELS: [&str; 35] = [
    "activation_bits",
    "attention",
    "cpu_isa",
    "cuda_graphs",
    "cuda_memory_fraction",
    "dequantize",
    "deterministic",
    "dtype",
    "enable_lora_updates",
    "engine_listen",
    "kv_cache_dtype",
    "kv_offload_disk_gib",
    "kv_offload_folder",
    "kv_offload_gib",
    "lora_adapters",
    "max_batch_prefill_tokens",
    "max_batch_size",
    "max_batch_total_tokens",
    "max_inter_token_ms",
    "max_steps_in_flight",
    "num_shard",
    "pipeline_parallel_size",
    "prefix_caching",
    "quantize",
    "ranks_on",
    "replicas",
    "sharded",
    "shard_uds_path",
    "speculate",
    "speculate_recent_tokens",
    "speculative_model",
    "standby",
    "state_snapshots",
    "step_timeout",
    "unencrypted_gpus",
];

/// All flags, including those that only TGI has.
pub(crate) fn flags() -> clap::Command {
    let command = compat::FLAGS.iter().fold(Args::command(), |command, flag| command.arg(flag.arg()));
    // Generated documentation must not contain this machine's environment.
    command.mut_args(|arg| arg.hide_env_values(true))
}

/// The command line. `penstock route` has the same flags, of which the help hides those without effect.
fn command(platform: &Platform, detail: Detail) -> clap::Command {
    let flags = platform.apply(flags());
    let hidden = |arg: clap::Arg, ids: &[&str]| {
        let hides = ids.contains(&arg.get_id().as_str());
        if hides { arg.hide(true) } else { arg }
    };
    let mut of_router: Vec<_> = flags.get_arguments().cloned().map(|arg| hidden(arg, &OF_MODELS)).collect();
    // The help begins with the group of the first flag.
    of_router.sort_by_key(|arg| !OF_ROUTERS.contains(&arg.get_id().as_str()));
    let router = clap::Command::new(ROUTE).args(of_router);
    help::with_router(flags.mut_args(|arg| hidden(arg, &OF_ROUTERS)), router, detail)
}

/// Reads flags and environment. An error is ready to be printed.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    get_env: impl Fn(&str) -> Option<String>,
) -> Result<Parsed, clap::Error> {
    let mut arguments: Vec<_> = arguments.into_iter().collect();
    let says_serve = arguments.get(1).is_some_and(|word| word == SERVE);
    if says_serve {
        arguments.remove(1);
    }
    let platform = Platform::detect(says_serve, &get_env);
    let detail = if arguments.iter().any(|argument| argument == "-h") { Detail::Summary } else { Detail::All };
    let mut command = command(&platform, detail);
    let parsed = command.try_get_matches_from_mut(arguments);
    let mut matches = parsed.map_err(|error| help::with_known_commands(&mut command, error))?;
    let is_router = matches.subcommand_name() == Some(ROUTE);
    if is_router && let Some((name, of_router)) = matches.remove_subcommand() {
        matches = of_router;
        command = command.find_subcommand(&name).cloned().unwrap_or(command);
    }
    check_route(&mut command, &matches, is_router)?;
    // A subcommand starts no server, so a refused variable does not concern it.
    let checked = if matches.subcommand_name().is_some() { Ok(Vec::new()) } else { compat::check(&matches) };
    let mut notes =
        checked.map_err(|refusals| command.error(ErrorKind::UnknownArgument, refusals.join("\n       ")))?;
    notes.extend(variable::check(&get_env));
    notes.extend(unused_port(&mut command, &matches)?);
    let args = Args::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    let args = Args { route: is_router, ..args };
    let given = given(&command, &matches, &platform);
    Ok(Parsed { args, given, notes, vertex_routes: platform.vertex_routes })
}

/// A router has servers and no model; a server has no servers.
fn check_route(command: &mut clap::Command, matches: &ArgMatches, is_router: bool) -> Result<(), clap::Error> {
    let given =
        |id: &str| matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
    let [has_urls, has_file] = ["replica", "replica_file"].map(|id| matches.contains_id(id));
    let refusal = match (is_router, has_urls || has_file) {
        (true, false) => {
            "`penstock route` needs --replica, the URL of a server's --engine-listen, or --replica-file".to_owned()
        }
        (false, true) => {
            format!("--{} is only for `penstock route`", if has_urls { "replica" } else { "replica-file" })
        }
        (true, true) if has_urls && has_file => "--replica and --replica-file cannot be used together".to_owned(),
        (true, true) => match OF_MODELS.into_iter().find(|id| given(id)) {
            Some(id) => {
                format!("--{} has no effect with `penstock route`: set it on the servers", id.replace('_', "-"))
            }
            None => return Ok(()),
        },
        (false, false) => return Ok(()),
    };
    Err(command.error(ErrorKind::ArgumentConflict, refusal))
}

/// With a unix socket there is no port. A flag for one is refused; a variable is only noted, because containers set them.
fn unused_port(command: &mut clap::Command, matches: &ArgMatches) -> Result<Vec<String>, clap::Error> {
    let mut notes = Vec::new();
    if matches.contains_id("uds") {
        for name in ["port", "hostname"] {
            match matches.value_source(name) {
                Some(ValueSource::CommandLine) => {
                    let message = format!("--{name} cannot be used with --uds: the server listens on one of them");
                    return Err(command.error(ErrorKind::ArgumentConflict, message));
                }
                Some(ValueSource::EnvVariable) => {
                    notes.push(format!("environment variable {} has no effect: --uds is set", name.to_uppercase()));
                }
                _ => {}
            }
        }
    }
    Ok(notes)
}

fn given(command: &clap::Command, matches: &ArgMatches, platform: &Platform) -> Vec<Given> {
    let given = |arg: &clap::Arg| {
        let id = arg.get_id().as_str();
        let origin = match matches.value_source(id)? {
            ValueSource::CommandLine => "given as a flag".to_owned(),
            ValueSource::EnvVariable => "from the environment".to_owned(),
            _ => format!("from {}", platform.origin(id)?),
        };
        let values: Vec<_> = matches.get_raw(id)?.map(|value| value.to_string_lossy()).collect();
        let value = if id == SECRET { "(hidden)".to_owned() } else { values.join(",") };
        Some(Given { name: arg.get_long()?.to_owned(), value, origin })
    };
    command.get_arguments().filter(|arg| !compat::is_known(arg.get_id().as_str())).filter_map(given).collect()
}
