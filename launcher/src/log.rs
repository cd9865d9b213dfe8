//! Logging: one line per event on stdout, compact text or JSON; `LOG_LEVEL` says how much.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// `level`: the value of `LOG_LEVEL`. A plain level means ours; anything longer is a tracing filter.
pub fn start(json: bool, level: Option<&str>) {
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter(level));
    if json {
        subscriber.json().flatten_event(false).with_current_span(false).with_span_list(false).init();
    } else {
        subscriber.compact().with_ansi(std::io::stdout().is_terminal()).with_target(false).init();
    }
}

fn filter(level: Option<&str>) -> EnvFilter {
    let level = level.filter(|level| !level.is_empty()).unwrap_or("info").to_lowercase();
    if ["trace", "debug", "info", "warn", "error", "off"].contains(&level.as_str()) {
        return EnvFilter::new(format!("warn,penstock={level},penstock_router={level},worker={level}"));
    }
    EnvFilter::new(level)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_level_means_our_own_events() {
        let filter = filter(Some("DEBUG")).to_string();
        assert!(filter.contains("penstock=debug") && filter.contains("warn"), "{filter}");
    }

    #[test]
    fn a_filter_is_taken_as_it_is() {
        assert_eq!(filter(Some("hyper=trace")).to_string(), "hyper=trace");
    }
}
