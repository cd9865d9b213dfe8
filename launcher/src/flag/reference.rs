//! Generates the pages of docs/ that describe flags and metrics. A test compares them with the committed pages.

use std::fmt::Write;

use clap::{Arg, ArgAction};

use crate::flag::args::Page;
use crate::flag::command_line;
use crate::flag::compat::{self, CompatFlag, Verdict};
use crate::flag::group::{FlagGroup, GROUPS};
use crate::flag::variable::{Effect, VARIABLES};

/// Differences of flags from TGI's flags of the same names. Flags that are not listed behave as in TGI.
const DIFFERENCES: &[(&str, &str)] = &[
    ("api-key", "several keys; case-sensitive, unlike in TGI; also protects `/chat_tokenize`"),
    ("attention", "TGI has only the variable; its values mean `auto`"),
    ("cors-allow-origin", "also a comma-separated list; requests may carry `Authorization`"),
    ("cuda-graphs", "default: the workers choose, up to max-batch-size"),
    ("cuda-memory-fraction", "TGI: 1.0, with a hidden factor"),
    ("dtype", "also `float32`"),
    ("graceful-termination-timeout", "applies to the whole server, not to each process"),
    ("hostname", "also `localhost`"),
    ("kv-cache-dtype", "also `auto`, the default"),
    ("max-batch-prefill-tokens", "limits a step; TGI derives it from FLOPs, or uses 4096"),
    ("max-batch-total-tokens", "applies to every model; TGI ignores it for paged models"),
    ("max-client-batch-size", "TGI's default: 4"),
    ("max-image-fetch-size", "of all images of a prompt; TGI: of each, 1073741824, a variable only"),
    ("model-id", "also .gguf files; TGI's default: `bigscience/bloom-560m`"),
    ("otlp-endpoint", "a `traceparent` that is not sampled is honoured; `http://` only, checked at startup"),
    ("port", "0 picks a free port"),
    ("quantize", "also serves GGUF files as they are; `exl2` is refused"),
    ("rope-scaling", "also `yarn`; the factor lengthens the context"),
    ("shard-uds-path", "default: a private folder, not /tmp"),
    ("trust-remote-code", "TGI also runs it for model types that it knows"),
    ("validation-workers", "TGI forces 1 for slow tokenizers; this server converts them"),
    ("watermark-gamma", "between 0 and 1, checked at startup"),
];
/// Flags that TGI lacks.
const OURS: &[&str] = &[
    "activation-bits",
    "allow-image-urls",
    "allowed-image-hosts",
    "api-key-file",
    "chat-template",
    "check-model-name",
    "cpu-isa",
    "dequantize",
    "deterministic",
    "disable-playground",
    "enable-lora-updates",
    "engine-listen",
    "engine-secret-file",
    "engine-tls-ca",
    "engine-tls-cert",
    "engine-tls-key",
    "engine-without-tls",
    "generation-config",
    "kv-offload-disk-gib",
    "kv-offload-folder",
    "kv-offload-gib",
    "max-inter-token-ms",
    "max-lora-rank",
    "max-lora-slots",
    "max-queued-tokens",
    "node-secret-file",
    "override-generation-config",
    "pipeline-parallel-size",
    "ranks-on",
    "replica",
    "replica-file",
    "replica-timeout",
    "replicas",
    "rope-original-max-tokens",
    "max-steps-in-flight",
    "max-stored-responses",
    "prefix-caching",
    "priority-order",
    "queue-timeout",
    "served-model-name",
    "standby",
    "state-snapshots",
    "step-timeout",
    "speculate-recent-tokens",
    "speculative-model",
    "stop-with-stdin",
    "trust-request-chat-template",
    "uds",
    "unencrypted-gpus",
];

/// The page as Markdown.
pub(crate) fn render(page: Page) -> String {
    match page {
        Page::Flags => flags(),
        Page::Settings => settings(),
        Page::Metrics => penstock_router::telemetry::metrics::reference(),
    }
}

const INTRODUCTION: &str = "\
# Flags and environment variables

Generated from the code by `make docs`; do not edit. A flag overrides its environment variable, which overrides the default
of the platform (SageMaker, Vertex AI), which overrides the default below. Each flag of text-generation-inference is in one
of the three tables. If the server has API keys, every route requires one except `/health` and its parts, `/ping`, GET `/`,
`/metrics`, `/info`, `/version`, `/v1/models`, the playground's page and the API documentation. The server speaks HTTP/1.1 and HTTP/2 on one port or unix socket, without TLS;
use a proxy for TLS.
";

const HEADER: &str = "| flag | variable | default | description | compared with TGI |\n|---|---|---|---|---|\n";

fn flags() -> String {
    let mut page = INTRODUCTION.to_owned();
    page += "\n## Flags\n";
    let mut command = command_line::flags();
    command.build();
    for FlagGroup { heading, ids } in GROUPS {
        let _ = write!(page, "\n### {heading}\n\n{HEADER}");
        for id in *ids {
            page.extend(command.get_arguments().find(|arg| arg.get_id() == id).map(row));
        }
    }
    let _ = write!(page, "\n### Help\n\n{HEADER}");
    page.extend(command.get_arguments().filter(|arg| is_help(arg)).map(row));
    let table = |title: &str, reason: fn(&Verdict) -> Option<&'static str>| {
        let mut table = format!("\n## {title}\n\n| flag | variable | why |\n|---|---|---|\n");
        for CompatFlag { name, verdict, .. } in compat::FLAGS {
            if let Some(why) = reason(verdict) {
                let _ = writeln!(table, "| `--{name}` | `{}` | {} |", compat::env_name(name), cell(why));
            }
        }
        table
    };
    page += &table("Flags of TGI that are accepted without effect", |verdict| match verdict {
        Verdict::Neutral(why) => Some(why),
        Verdict::Refused(_) => None,
    });
    page += &table("Flags of TGI that are refused at startup", |verdict| match verdict {
        Verdict::Refused(why) => Some(why),
        Verdict::Neutral(_) => None,
    });
    page += "\n## Other environment variables\n\n| variable | effect |\n|---|---|\n";
    for (name, effect) in VARIABLES {
        let effect = match effect {
            Effect::Honoured(what) => cell(what),
            Effect::Neutral(why) => format!("none: {}", cell(why)),
        };
        let _ = writeln!(page, "| `{name}` | {effect} |");
    }
    page
}

/// Every flag, those that only TGI has included: its name, its variable, and whether it is a switch.
fn settings() -> String {
    let mut command = command_line::flags();
    command.build();
    let setting = |arg: &Arg| {
        serde_json::json!({
            "name": arg.get_long(),
            "variable": arg.get_env().map(|name| name.to_string_lossy()),
            "switch": matches!(arg.get_action(), ArgAction::SetTrue),
        })
    };
    let settings: Vec<_> = command.get_arguments().filter(|arg| !is_help(arg)).map(setting).collect();
    serde_json::Value::from(settings).to_string()
}

/// Whether the flag prints something about the program.
fn is_help(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version)
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
        None if OURS.contains(&name) => "not in TGI",
        None => "same",
    };
    format!("| `--{name}`{short} | {variable} | {} | {} | {compared} |\n", cell(&default), cell(&help))
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
