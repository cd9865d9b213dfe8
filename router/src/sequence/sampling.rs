//! How a sequence's tokens are chosen.
//!
//! `Sampling` is the protocol's own message: a new parameter is a field in proto/worker.proto, where each field is
//! specified, and what the API makes of it.

pub use penstock_proto::{BadWord, LogitBias, Sampling};

/// The neutral parameters: greedy, everything off. `Sampling::default()` is all zeros, which is not neutral for factors.
pub fn greedy() -> Sampling {
    Sampling { temperature: 1.0, top_p: 1.0, typical_p: 1.0, repetition_penalty: 1.0, ..Sampling::default() }
}
