//! The fields that every OpenAI answer begins with.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::api::openai::Envelope;

const FINGERPRINT: &str = concat!(env!("CARGO_PKG_VERSION"), "-native");

pub(super) fn new(object: &'static str, id_prefix: &str, model: String) -> Envelope {
    Envelope {
        object,
        id: format!("{id_prefix}-{:032x}", rand::random::<u128>()),
        created: unix_seconds(),
        model,
        system_fingerprint: FINGERPRINT,
    }
}

#[allow(clippy::disallowed_methods)] // the wall clock is what is wanted
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
