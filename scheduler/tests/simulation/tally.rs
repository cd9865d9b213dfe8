//! Counts events by name, and knows which events a long run must have met.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result};
use std::ops::AddAssign;

/// A campaign of at least this many steps must have met every hard case.
pub const FULL_STEPS: u64 = 1_000_000;

/// The hard cases, and how often each must happen in `FULL_STEPS`: at most a tenth of what is usual. A simulation that
/// does not reach these states proves little.
const REQUIRED: [(&str, u64); 57] = [
    ("sequences", 20_000),
    ("sequences of one token", 1_000),
    ("all of a sequence is source", 500),
    ("finished by length", 10_000),
    ("finished by a stop token", 2_000),
    ("failed", 1_000),
    ("rejected", 100),
    ("cancelled in the queue", 300),
    ("cancelled while prefilling", 60),
    ("cancelled while decoding", 300),
    ("cancelled with the last token in flight", 30),
    ("chunks without a sample", 10_000),
    ("preemptions", 5_000),
    ("tokens discarded", 5_000),
    ("cancelled while others waited for it", 150),
    ("ids reused while the worker knows them", 30),
    ("hit tokens", 50_000),
    ("hit tokens in groups", 800),
    ("blocks shared before they were written", 1_000),
    ("blocks evicted", 5_000),
    ("blocks offloaded", 5_000),
    ("blocks brought back from memory", 1_000),
    ("blocks brought back from disk", 1_000),
    ("blocks moved from memory to disk", 5_000),
    ("overtaken while blocked on a prefix", 200),
    ("overtaken while waiting for image room", 100),
    ("images rejected", 100),
    ("prompt logprobs asked for", 2_000),
    ("preempted after a failure of another", 20),
    ("deaths", 2_000),
    ("on the worker in a death", 5_000),
    ("continued after a death", 2_000),
    ("quarantined and cleared", 200),
    ("waited for blocks to retire", 1_000),
    ("steps at depth 1", 10_000),
    ("steps at depth 3 and more", 10_000),
    ("steps predicted by the reference", 50_000),
    ("blocks released before a window", 25_000),
    ("hits of a window", 150),
    ("hits with an image", 200),
    ("sources", 2_000),
    ("sources rejected", 300),
    ("sources in a step with others", 1_500),
    ("sources recomputed", 250),
    ("sources that did not fit into a step", 10_000),
    ("right drafts", 1_000),
    ("drafts that were not right", 1_000),
    ("drafts before the result of earlier ones", 1_000),
    ("steps of disjoint decodes", 5_000),
    ("drafts with a window", 2_000),
    ("forced drafts", 1_000),
    ("steps with all state slots in use", 15_000),
    ("snapshots saved", 3_000),
    ("snapshots saved in the place of others", 2_000),
    ("snapshots restored", 600),
    ("longest snapshots continued", 25),
    ("results that show that a last step is in flight", 100),
];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub fn add(&mut self, name: &'static str, count: u64) {
        if count > 0 {
            *self.0.entry(name).or_default() += count;
        }
    }

    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// The hard cases that happened too rarely, as text.
    pub fn missing(&self) -> Vec<String> {
        let rare = REQUIRED.iter().filter(|(name, least)| self.get(name) < *least);
        rare.map(|(name, least)| format!("{name}: {}, at least {least} were expected", self.get(name))).collect()
    }
}

impl AddAssign<&Tally> for Tally {
    fn add_assign(&mut self, other: &Tally) {
        for (name, count) in &other.0 {
            self.add(name, *count);
        }
    }
}

impl Display for Tally {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        for (name, count) in &self.0 {
            writeln!(formatter, "{count:>12}  {name}")?;
        }
        Ok(())
    }
}
