//! The commands and flags as `--help` and `-h` show them.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error};

use crate::flag::group;

/// Columns of the help on a wide terminal.
const MAX_WIDTH: usize = 120;
const AFTER_HELP: &str = "\
Each flag has an environment variable, as in MODEL_ID for --model-id; the flag overrides it. docs/flags.md has the same list, compared \
with text-generation-inference.";

/// The extent of the help.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    /// `-h`: the most used flags, with a short text for each.
    Summary,
    /// `--help`: all flags in groups.
    All,
}

/// The command line of a server, in which `router` is a subcommand.
pub(crate) fn with_router(server: Command, router: Command, detail: Detail) -> Command {
    let hint = "`penstock --help` shows all flags, `penstock help COMMAND` those of a command.";
    with_notes(server, hint).mut_args(|arg| shown(arg, group::USUAL, detail)).subcommand(
        with_notes(router, "`penstock route --help` shows all flags.")
            .about("Serve with the engines of other servers (--engine-listen)")
            .display_order(0)
            .mut_args(|arg| shown(arg, group::USUAL_OF_ROUTERS, detail)),
    )
}

fn with_notes(command: Command, hint: &'static str) -> Command {
    command.max_term_width(MAX_WIDTH).after_help(hint).after_long_help(AFTER_HELP)
}

/// The flag under its heading; in a summary, with its short text, if it is one of the most used.
fn shown(arg: Arg, usual: &[(&str, &'static str)], detail: Detail) -> Arg {
    let id = arg.get_id().to_string();
    let Some(heading) = group::heading(&id) else { return arg };
    if detail == Detail::All {
        return arg.help_heading(heading);
    }
    let Some((_, text)) = usual.iter().find(|(usual, _)| *usual == id) else { return arg.hide_short_help(true) };
    let arg = arg.help(*text).hide_env(true);
    if !arg.get_action().takes_values() {
        return arg;
    }
    let has_own_name = arg.get_value_names().is_some_and(|names| names != [id.to_uppercase().as_str()]);
    let arg = arg.hide_possible_values(true);
    if has_own_name { arg } else { arg.value_name("VALUE") }
}

/// An error about an unknown command, with the names of the known ones. Other errors are returned as they are.
pub(crate) fn with_known_commands(command: &mut Command, error: Error) -> Error {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(given)) if error.kind() == ErrorKind::InvalidSubcommand => {
            let names: Vec<_> = command.get_subcommands().map(Command::get_name).collect();
            let message = format!("there is no command {given:?}; the commands are {}", names.join(", "));
            command.error(ErrorKind::InvalidSubcommand, message)
        }
        _ => error,
    }
}
