//! The engines by number, and which of them are leaving.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crate::engine::Engine;
use crate::generator::Generator;
use crate::generator::MAX_ENGINES;
use crate::sequence::AdapterHash;

/// An engine that has a number.
pub(super) struct Replica {
    /// The URL of a server; empty for an engine of this process.
    name: String,
    pub(super) engine: Engine,
    /// It gets no sequences, and its own ones move on.
    is_leaving: bool,
}

/// INVARIANT: at most `MAX_ENGINES`. A number is used again only after its engine has ended, and thus has no sequence.
#[derive(Default)]
pub(super) struct List {
    /// By number.
    replicas: Vec<Option<Replica>>,
    /// Numbers that were used and may be used again, the one that was freed first at the front.
    free: VecDeque<usize>,
}

impl List {
    /// The engines with their numbers.
    pub(super) fn replicas(&self) -> impl Iterator<Item = (usize, &Replica)> {
        self.replicas.iter().enumerate().filter_map(|(number, replica)| Some((number, replica.as_ref()?)))
    }

    pub(super) fn engines(&self) -> Vec<Engine> {
        self.replicas().map(|(_, replica)| replica.engine.clone()).collect()
    }

    pub(super) fn get(&self, number: usize) -> Option<&Replica> {
        self.replicas.get(number)?.as_ref()
    }

    /// Whether sequences that need no particular engine may go there at this moment.
    pub(super) fn takes_steps(&self, number: usize) -> bool {
        self.get(number).is_some_and(|replica| !replica.is_leaving && replica.engine.health().is_healthy())
    }

    /// The engines to choose from: those that take steps, or, if none does, those that may again. All of them have the adapter.
    pub(super) fn candidates(&self, adapter: Option<&AdapterHash>) -> Vec<usize> {
        let has_adapter = |engine: &Engine| adapter.is_none_or(|hash| engine.server_adapters().hashes.contains(hash));
        let able = || self.staying().filter(|(_, replica)| has_adapter(&replica.engine)).map(|(number, _)| number);
        let open: Vec<_> = able().filter(|number| self.takes_steps(*number)).collect();
        if open.is_empty() { able().collect() } else { open }
    }

    /// The adapter of this name. Where engines have different ones, that of the first engine that takes steps.
    pub(super) fn adapter(&self, name: &str) -> Option<AdapterHash> {
        let mut named: Vec<_> = self
            .staying()
            .filter_map(|(number, replica)| Some((number, *replica.engine.server_adapters().by_name.get(name)?)))
            .collect();
        named.sort_by_key(|(number, _)| !self.takes_steps(*number));
        named.first().map(|(_, hash)| *hash)
    }

    /// Names of all adapters of engines that stay.
    pub(super) fn adapter_names(&self) -> BTreeSet<Arc<str>> {
        let names = |replica: &Replica| {
            replica.engine.server_adapters().by_name.keys().map(|name| name.as_str().into()).collect::<Vec<_>>()
        };
        self.staying().flat_map(|(_, replica)| names(replica)).collect()
    }

    fn staying(&self) -> impl Iterator<Item = (usize, &Replica)> {
        self.replicas().filter(|(_, replica)| !replica.is_leaving)
    }

    /// For each of the engines, the mean seconds between two tokens of a sequence there, if known.
    pub(super) fn speeds(&self, numbers: &[usize]) -> Vec<(usize, Option<f64>)> {
        let speed = |number: usize| self.get(number).and_then(|replica| replica.engine.seconds_per_token());
        numbers.iter().map(|number| (*number, speed(*number))).collect()
    }

    pub(super) fn is_leaving(&self, number: usize) -> bool {
        self.get(number).is_some_and(|replica| replica.is_leaving)
    }

    /// Whether an engine of this name stays.
    pub(super) fn has(&self, name: &str) -> bool {
        self.replicas().any(|(_, replica)| !replica.is_leaving && replica.name == name)
    }

    /// The number that was freed longest ago: metrics of an engine that has just left stay readable for a while.
    pub(super) fn free_number(&self) -> Option<usize> {
        self.free.front().copied().or_else(|| Some(self.replicas.len()).filter(|number| *number < MAX_ENGINES))
    }

    pub(super) fn insert(&mut self, number: usize, name: String, engine: Engine) {
        self.free.retain(|free| *free != number);
        self.replicas.resize_with(self.replicas.len().max(number + 1), || None);
        self.replicas[number] = Some(Replica { name, engine, is_leaving: false });
    }

    /// Lets the engines whose name `must_leave` accepts give their sequences to the others. If no engine would stay, the best candidate does.
    /// Returns the numbers and names of those that begin to leave.
    pub(super) fn leave(&mut self, must_leave: impl Fn(&str) -> bool) -> Vec<(usize, String)> {
        let stays = |(_, replica): (usize, &Replica)| !replica.is_leaving && !must_leave(&replica.name);
        let last = if self.replicas().any(stays) { None } else { self.candidates(None).first().copied() };
        let mut left = Vec::new();
        for (number, replica) in self.replicas.iter_mut().enumerate() {
            let Some(replica) = replica else { continue };
            if replica.is_leaving || !must_leave(&replica.name) || last == Some(number) {
                continue;
            }
            replica.is_leaving = true;
            replica.engine.leave();
            left.push((number, replica.name.clone()));
        }
        left
    }

    pub(super) fn remove(&mut self, number: usize) {
        self.replicas[number] = None;
        self.free.push_back(number);
    }
}
