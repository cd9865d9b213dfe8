//! The pages under docs/ that are made from the code; a test compares them with what is there.

use std::fmt::Write;

use clap::{Arg, ArgAction};

use crate::args::Page;
use crate::command_line;
use crate::compat::{self, CompatFlag, Verdict};
use crate::variable::{Effect, VARIABLES};

/// Where a flag of TGI's is here and something about it differs. A flag that is not here is as TGI has it.
const DIFFERENCES: &[(&str, &str)] = &[
    ("api-key", "several keys; compared exactly, TGI ignored their case; also protects `/chat_tokenize`"),
    ("cors-allow-origin", "also several separated by commas; requests may carry `Authorization`"),
    ("cuda-memory-fraction", "TGI: 1.0, with a hidden factor"),
    ("dtype", "also `float32`"),
    ("graceful-termination-timeout", "of the server as a whole, not of each process"),
    ("hostname", "also `localhost`"),
    ("max-batch-prefill-tokens", "the tokens of one step; TGI derives it from FLOPs, or 4096"),
    ("max-batch-total-tokens", "honoured for every model; TGI ignores it where it pages"),
    ("model-id", "also .gguf files; TGI's default: `bigscience/bloom-560m`"),
    ("port", "0 takes any that is free"),
    ("rope-scaling", "`linear` only, and its factor is applied"),
    ("shard-uds-path", "a private folder in place of /tmp"),
    ("trust-remote-code", "run only where neither this version nor transformers knows the model type"),
    ("validation-workers", "TGI forces 1 for slow tokenizers, which are converted here"),
    ("watermark-gamma", "between 0 and 1, checked at the start"),
];
/// Flags that TGI has not.
const OURS: &[&str] = &[
    "api-key-file",
    "chat-template",
    "max-inter-token-ms",
    "max-queued-tokens",
    "max-steps-in-flight",
    "prefix-caching",
    "queue-timeout",
    "step-timeout",
];

pub fn render(page: Page) -> String {
    match page {
        Page::Flags => flags(),
        Page::Metrics => penstock_router::telemetry::metrics::reference(),
    }
}

const INTRODUCTION: &str = "\
# Flags and environment variables

Made from the code by `make docs`; do not edit. A flag goes before its variable, a variable before what a platform
(SageMaker, Vertex AI) says, and that before the default. Every flag of text-generation-inference is in one of the three
tables. `/health` and its parts, `/ping`, GET `/`, `/metrics`, `/info`, `/v1/models` and the documentation need no API key;
every other route does once there is one. TLS is a proxy's business: the server speaks HTTP/1.1 and HTTP/2 without it, on one
port.
";

fn flags() -> String {
    let mut page = INTRODUCTION.to_owned();
    page += "\n## Flags\n\n| flag | variable | default | what it does | compared with TGI |\n|---|---|---|---|---|\n";
    let mut command = command_line::command();
    command.build();
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && !compat::is_known(arg.get_id().as_str())) {
        page += &row(arg);
    }
    let table = |title: &str, is_in: fn(&Verdict) -> Option<&'static str>| {
        let mut table = format!("\n## {title}\n\n| flag | variable | why |\n|---|---|---|\n");
        for CompatFlag { name, verdict, .. } in compat::FLAGS {
            if let Some(why) = is_in(verdict) {
                let _ = writeln!(table, "| `--{name}` | `{}` | {} |", compat::env_name(name), cell(why));
            }
        }
        table
    };
    page += &table("Known from TGI, accepted without effect", |verdict| match verdict {
        Verdict::Neutral(why) => Some(why),
        Verdict::Refused(_) => None,
    });
    page += &table("Known from TGI, refused at the start", |verdict| match verdict {
        Verdict::Refused(why) => Some(why),
        Verdict::Neutral(_) => None,
    });
    page += "\n## Other environment variables\n\n| variable | effect |\n|---|---|\n";
    for variable in VARIABLES {
        let effect = match variable.effect {
            Effect::Honoured(what) => cell(what),
            Effect::Neutral(why) => format!("none: {}", cell(why)),
        };
        let _ = writeln!(page, "| `{}` | {effect} |", variable.name);
    }
    page
}

fn row(arg: &Arg) -> String {
    let name = arg.get_long().unwrap_or_default();
    let short = arg.get_short().map(|short| format!(", `-{short}`")).unwrap_or_default();
    let variable = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
    let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let mut default =
        if is_switch || defaults.is_empty() { String::new() } else { format!("`{}`", defaults.join(",")) };
    if let Some((text, stated)) = help.clone().split_once(" [default") {
        (help, default) = (text.to_owned(), stated.trim_start_matches(": ").trim().trim_end_matches(']').to_owned());
    }
    let compared = match DIFFERENCES.iter().find(|(differs, _)| *differs == name) {
        Some((_, difference)) => difference,
        None if OURS.contains(&name) => "ours",
        None => "same",
    };
    format!("| `--{name}`{short} | {variable} | {} | {} | {compared} |\n", cell(&default), cell(&help))
}

/// Text that does not end its table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
