//! TGI flags that this server lacks. Each is either refused, with a workaround, or accepted without effect and reported in
//! the log, because no client can observe the difference.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};

/// A flag of TGI that has no effect here.
pub(crate) struct CompatFlag {
    pub(crate) name: &'static str,
    kind: Kind,
    pub(crate) verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Value,
    Switch,
}

/// Treatment of the flag when it is given.
pub(crate) enum Verdict {
    /// The server does not start; says why and what to do instead.
    Refused(&'static str),
    /// The flag has no effect; says why.
    Neutral(&'static str),
}

const fn refused(name: &'static str, kind: Kind, why: &'static str) -> CompatFlag {
    CompatFlag { name, kind, verdict: Verdict::Refused(why) }
}

const fn neutral(name: &'static str, kind: Kind, why: &'static str) -> CompatFlag {
    CompatFlag { name, kind, verdict: Verdict::Neutral(why) }
}

use Kind::{Switch, Value};

const RENDEZVOUS: &str = "ranks meet through a file in a private folder, and their TCP connections stay on the loopback \
     interface (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another one)";

pub(crate) const FLAGS: &[CompatFlag] = &[
    refused("ngrok", Switch, "tunnels are not supported; run a separate tunnel process"),
    refused("ngrok-authtoken", Value, "tunnels are not supported; run a separate tunnel process"),
    refused("ngrok-edge", Value, "tunnels are not supported; run a separate tunnel process"),
    neutral("waiting-served-ratio", Value, "waiting requests join the batch at every step"),
    neutral("max-waiting-tokens", Value, "waiting requests join the batch at every step"),
    neutral("disable-custom-kernels", Switch, "kernels are chosen for the machine's hardware"),
    neutral("prometheus-port", Value, "metrics are served at /metrics on the main port"),
    neutral("master-addr", Value, RENDEZVOUS),
    neutral("master-port", Value, RENDEZVOUS),
    neutral("usage-stats", Value, "the server never reports usage"),
];

impl CompatFlag {
    /// The flag for clap.
    pub(crate) fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).env(env_name(self.name)).action(ArgAction::Append);
        let arg = match self.kind {
            Value => arg.num_args(1),
            // The environment variable of a switch is true or false.
            Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        };
        arg.hide(true)
    }

    /// Whether any of `values` turns the flag on.
    fn is_requested(&self, values: &[String]) -> bool {
        let is_off = |value: &String| value.is_empty() || (self.kind == Switch && is_false(value));
        !values.iter().all(is_off)
    }
}

/// Whether `id` names one of `FLAGS`.
pub(crate) fn is_known(id: &str) -> bool {
    FLAGS.iter().any(|flag| flag.name == id)
}

/// A note for each given flag without effect; or the refusals, if any flag is refused.
pub(crate) fn check(matches: &ArgMatches) -> Result<Vec<String>, Vec<String>> {
    let (mut notes, mut refusals) = (Vec::new(), Vec::new());
    for flag in FLAGS {
        let values: Vec<String> = matches.get_many(flag.name).into_iter().flatten().cloned().collect();
        if !flag.is_requested(&values) {
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

/// The environment variable of a flag, by TGI's rule.
pub(crate) fn env_name(flag: &str) -> String {
    flag.replace('-', "_").to_uppercase()
}

fn is_false(value: &str) -> bool {
    ["false", "0", "no", "off", "n", "f"].contains(&value.to_lowercase().as_str())
}
