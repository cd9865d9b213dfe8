//! The command line and the environment → settings: flag over variable over platform over default. Refuses what this
//! server does not do, and says where each setting came from.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use penstock_router::config::VertexRoutes;

use crate::args::Args;
use crate::platform::Platform;
use crate::{compat, variable};

/// The one flag whose values nobody may see.
const SECRET: &str = "api_key";

/// A setting that somebody chose, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    pub name: String,
    pub value: String,
    pub origin: String,
}

#[derive(Debug)]
pub struct Parsed {
    pub args: Args,
    /// What was not left to its default; nothing secret can be among it.
    pub given: Vec<Given>,
    /// What was asked for and makes no difference here, with the reason.
    pub notes: Vec<String>,
    pub vertex_routes: VertexRoutes,
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

pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    get_env: impl Fn(&str) -> Option<String>,
) -> Result<Parsed, clap::Error> {
    let platform = Platform::detect(&get_env);
    let mut command = platform.apply(command());
    let matches = command.try_get_matches_from_mut(arguments)?;
    // What the environment asks of a server is nothing to a tool that starts none.
    let checked = if matches.subcommand_name().is_some() { Ok(Vec::new()) } else { compat::check(&matches) };
    let mut notes =
        checked.map_err(|refusals| command.error(ErrorKind::UnknownArgument, refusals.join("\n       ")))?;
    notes.extend(variable::check(&get_env));
    let args = Args::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    let given = given(&command, &matches, &platform);
    Ok(Parsed { args, given, notes, vertex_routes: platform.vertex_routes })
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
