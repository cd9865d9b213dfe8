//! What a server behind a router serves, and whether two servers give the same tokens.

use std::sync::Arc;
use std::time::Duration;

use penstock_scheduler::Stats;

use super::RemoteError;
use crate::sequence::ServerAdapters;
use crate::worker::Description;

/// What decides the bits of a token, as (name, value). Each name occurs once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties(pub Vec<(String, String)>);

/// A server, as its router sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerDescription {
    /// What decides the bits of a token.
    pub properties: Properties,
    /// The model as it was loaded.
    pub model: Description,
    /// Tokens of an input.
    pub max_input_tokens: u32,
    /// Tokens of input and answer together.
    pub max_total_tokens: u32,
    /// Generated tokens, for an encoder–decoder.
    pub max_new_tokens: Option<u32>,
    /// Prompt tokens plus `max_new_tokens`, of all queued generations.
    pub max_queued_tokens: u64,
    /// KV blocks of all replicas of the server.
    pub num_blocks: u64,
    /// Slots for evicted blocks beside the pools of all replicas of the server.
    pub num_slots: u64,
    /// Whether prompts with a common prefix share blocks.
    pub prefix_caching: bool,
    /// With work and without a finished step for this long, the server counts as hung.
    pub step_deadline: Duration,
}

/// What a server reports of itself.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ServerState {
    /// Why it takes no steps; `None`: it does.
    pub(crate) unhealthy: Option<String>,
    pub(crate) is_draining: bool,
    pub(crate) stats: Stats,
    /// Its adapters; `None`: those that it reported before.
    pub(crate) adapters: Option<Arc<ServerAdapters>>,
}

/// What a router accepts. Each of its servers must accept it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Tokens of an input.
    pub max_input_tokens: u32,
    /// Tokens of input and answer together.
    pub max_total_tokens: u32,
    /// Generated tokens, for an encoder–decoder.
    pub max_new_tokens: Option<u32>,
    /// What the images of a sequence may take of `ImageInput::max_bytes`.
    pub max_image_bytes: u64,
}

impl RequestLimits {
    /// Fails with the limits of the server that are smaller than these.
    pub fn check(&self, server: &ServerDescription) -> Result<(), RemoteError> {
        let limits = [
            ("--max-input-tokens", Some(self.max_input_tokens.into()), Some(server.max_input_tokens.into())),
            ("--max-total-tokens", Some(self.max_total_tokens.into()), Some(server.max_total_tokens.into())),
            ("limit of new tokens", self.max_new_tokens.map(u64::from), server.max_new_tokens.map(u64::from)),
            ("limit of image bytes", Some(self.max_image_bytes), Some(server.model.max_image_bytes())),
        ];
        let is_smaller = |(name, ours, theirs): (&str, Option<u64>, Option<u64>)| {
            let (ours, theirs) = (ours?, theirs?);
            (theirs < ours).then(|| format!("its {name} is {theirs}, that of this router is {ours}"))
        };
        let smaller: Vec<_> = limits.into_iter().filter_map(is_smaller).collect();
        match smaller.is_empty() {
            true => Ok(()),
            false => Err(RemoteError::Smaller(smaller.join("; "))),
        }
    }
}

impl Properties {
    /// Fails with the names and values that differ from these.
    pub fn check(&self, other: &Self) -> Result<(), RemoteError> {
        let value = |all: &Self, name: &str| {
            all.0.iter().find(|(other, _)| other == name).map_or("unknown", |(_, value)| value.as_str()).to_owned()
        };
        let mut names: Vec<_> = self.0.iter().chain(&other.0).map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let differ = |name| {
            let (ours, theirs) = (value(self, name), value(other, name));
            (ours != theirs).then(|| format!("its {name} is {theirs}, that of the other servers is {ours}"))
        };
        let differences: Vec<_> = names.into_iter().filter_map(differ).collect();
        match differences.is_empty() {
            true => Ok(()),
            false => Err(RemoteError::Different(differences.join("; "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_with_both_values() {
        let properties = |pairs: &[(&str, &str)]| {
            Properties(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
        };
        let ours = properties(&[("dtype", "float32"), ("weights", "1a"), ("old", "x")]);
        assert_eq!(ours.check(&properties(&[("weights", "1a"), ("old", "x"), ("dtype", "float32")])), Ok(()));
        let error = ours.check(&properties(&[("dtype", "bfloat16"), ("weights", "1a")])).unwrap_err().to_string();
        assert_eq!(
            error,
            "it differs: its dtype is bfloat16, that of the other servers is float32; \
             its old is unknown, that of the other servers is x"
        );
    }
}
