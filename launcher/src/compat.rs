//! TGI's flags that this server does not have: refused by name with the way around, or accepted because leaving them
//! without effect changes nothing that anybody relies on. Never ignored silently.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};

pub struct CompatFlag {
    pub name: &'static str,
    kind: Kind,
    pub verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Value,
    Switch,
}

pub enum Verdict {
    /// Why, and what to do instead.
    Refused(&'static str),
    /// Why it makes no difference.
    Neutral(&'static str),
}

const fn refused(name: &'static str, kind: Kind, why: &'static str) -> CompatFlag {
    CompatFlag { name, kind, verdict: Verdict::Refused(why) }
}

const fn neutral(name: &'static str, kind: Kind, why: &'static str) -> CompatFlag {
    CompatFlag { name, kind, verdict: Verdict::Neutral(why) }
}

use Kind::{Switch, Value};

pub const FLAGS: &[CompatFlag] = &[
    refused("quantize", Value, "quantized computation is not supported yet; serve the model as it is, with --dtype"),
    refused("speculate", Value, "speculation is not supported yet; leave it out"),
    refused("kv-cache-dtype", Value, "the KV cache has the model's dtype; leave it out"),
    refused("otlp-endpoint", Value, "traces are not exported yet; leave it out, metrics are at /metrics"),
    refused("ngrok", Switch, "tunnels are not supported; run a tunnel beside the server"),
    refused("ngrok-authtoken", Value, "tunnels are not supported; run a tunnel beside the server"),
    refused("ngrok-edge", Value, "tunnels are not supported; run a tunnel beside the server"),
    refused("lora-adapters", Value, "adapters are not supported yet; merge the adapter into the weights"),
    neutral("waiting-served-ratio", Value, "waiting requests join the running ones at every step"),
    neutral("max-waiting-tokens", Value, "waiting requests join the running ones at every step"),
    neutral("cuda-graphs", Value, "no CUDA graphs are captured"),
    neutral("disable-custom-kernels", Switch, "kernels are chosen by what the machine has"),
    neutral("prometheus-port", Value, "metrics are at /metrics of the main port"),
    neutral("master-addr", Value, "the ranks of one machine meet in a private folder, not on a port"),
    neutral("master-port", Value, "the ranks of one machine meet in a private folder, not on a port"),
    neutral("otlp-service-name", Value, "traces are not exported"),
    neutral("usage-stats", Value, "nothing is ever sent anywhere"),
];

impl CompatFlag {
    pub fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).env(env_name(self.name)).action(ArgAction::Append);
        let arg = match self.kind {
            Value => arg.num_args(1),
            // A switch; its environment variable says true or false.
            Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        };
        match self.verdict {
            Verdict::Refused(_) => arg.hide(true),
            Verdict::Neutral(why) => arg.help(format!("No effect: {why}")).hide_short_help(true),
        }
    }

    fn is_asked_for(&self, values: &[String]) -> bool {
        let is_no = |value: &String| value.is_empty() || (self.kind == Switch && is_false(value));
        !values.iter().all(is_no)
    }
}

pub fn is_known(id: &str) -> bool {
    FLAGS.iter().any(|flag| flag.name == id)
}

/// Notes on what makes no difference, or why this server must not start.
pub fn check(matches: &ArgMatches) -> Result<Vec<String>, Vec<String>> {
    let (mut notes, mut refusals) = (Vec::new(), Vec::new());
    for flag in FLAGS {
        let values: Vec<String> = matches.get_many(flag.name).into_iter().flatten().cloned().collect();
        if !flag.is_asked_for(&values) {
            continue;
        }
        let name = match matches.value_source(flag.name) {
            Some(ValueSource::EnvVariable) => format!("environment variable {}", env_name(flag.name)),
            _ => format!("--{}", flag.name),
        };
        match flag.verdict {
            Verdict::Refused(why) => refusals.push(format!("{name} is refused: {why}")),
            Verdict::Neutral(why) => notes.push(format!("{name} has no effect: {why}")),
        }
    }
    if refusals.is_empty() { Ok(notes) } else { Err(refusals) }
}

/// TGI's rule for the environment variable of a flag.
pub fn env_name(flag: &str) -> String {
    flag.replace('-', "_").to_uppercase()
}

fn is_false(value: &str) -> bool {
    ["false", "0", "no", "off", "n", "f"].contains(&value.to_lowercase().as_str())
}
