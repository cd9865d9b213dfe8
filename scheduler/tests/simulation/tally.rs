//! Counts what happened in a run, by name, and knows what must have happened in a long one.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result};
use std::ops::AddAssign;

/// Steps from which on a campaign has to have reached every hard case.
pub const FULL_STEPS: u64 = 1_000_000;

/// Each with how often it has to happen in `FULL_STEPS`: a tenth or less of what is usual. A simulation that does not get
/// into these states proves little.
const REQUIRED: [(&str, u64); 36] = [
    ("sequences", 20_000),
    ("finished by length", 10_000),
    ("finished by a stop token", 2_000),
    ("failed", 1_000),
    ("refused", 100),
    ("cancelled in the queue", 300),
    ("cancelled while prefilling", 60),
    ("cancelled while decoding", 300),
    ("cancelled with the last token in flight", 30),
    ("chunks without a sample", 10_000),
    ("preemptions", 5_000),
    ("tokens discarded", 5_000),
    ("left while others waited for it", 150),
    ("ids reused while the worker knows them", 30),
    ("hit tokens", 50_000),
    ("hit tokens in groups", 800),
    ("blocks shared before they were written", 1_000),
    ("blocks evicted", 5_000),
    ("overtaken while waiting for another's blocks", 200),
    ("prompt logprobs asked for", 2_000),
    ("restarted after another's failure", 20),
    ("deaths", 2_000),
    ("lost in a death", 5_000),
    ("went on after a death", 2_000),
    ("run alone and cleared", 200),
    ("waited for blocks to retire", 1_000),
    ("steps at depth 1", 10_000),
    ("steps at depth 3 and more", 10_000),
    ("steps foretold by the reference", 50_000),
    ("blocks passed", 25_000),
    ("hits of a window", 150),
    ("sources", 2_000),
    ("sources refused", 300),
    ("sources beside others", 1_500),
    ("sources computed again", 250),
    ("sources that did not fit into a step", 10_000),
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

    /// What happened too rarely for so many steps, in words.
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
