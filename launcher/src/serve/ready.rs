//! Log lines of a server that is ready.

use std::time::Duration;

use super::Started;
use crate::listen::listener::Place;

/// Logs limits, phases, the URL and an example request.
pub(super) fn log(started: &Started, total: Duration, place: &Place, has_keys: bool) {
    let limits = &started.limits;
    tracing::info!(
        "limits: max-input-tokens {}, max-total-tokens {}, max-queued-tokens {}",
        limits.max_input_tokens,
        limits.max_total_tokens,
        limits.max_queued_tokens
    );
    started.phases.log();
    let seconds = (total.as_secs_f64() * 100.0).round() / 100.0;
    tracing::info!(url = place.to_string(), seconds, "ready");
    tracing::info!("try: {}", example(place, has_keys));
}

fn example(place: &Place, has_keys: bool) -> String {
    let url = match place {
        Place::Port(_) => place.to_string(),
        Place::Socket(path) => format!("--unix-socket {} http://localhost", path.display()),
    };
    let key = if has_keys { "-H 'authorization: Bearer KEY' " } else { "" };
    format!(
        "curl {url}/v1/chat/completions {key}-H 'content-type: application/json' \
         -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is the capital of Japan?\"}}],\"max_tokens\":40}}'"
    )
}
