//! The engines by number, and which of them are leaving.

use super::prefix::MAX_ENGINES;
use crate::engine::{Engine, Generator};

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
pub(super) struct List(Vec<Option<Replica>>);

impl List {
    /// The engines with their numbers.
    pub(super) fn replicas(&self) -> impl Iterator<Item = (usize, &Replica)> {
        self.0.iter().enumerate().filter_map(|(number, replica)| Some((number, replica.as_ref()?)))
    }

    pub(super) fn engines(&self) -> Vec<Engine> {
        self.replicas().map(|(_, replica)| replica.engine.clone()).collect()
    }

    pub(super) fn get(&self, number: usize) -> Option<&Replica> {
        self.0.get(number)?.as_ref()
    }

    /// Whether sequences that need no particular engine may go there at this moment.
    pub(super) fn takes_steps(&self, number: usize) -> bool {
        self.get(number).is_some_and(|replica| !replica.is_leaving && replica.engine.health().is_healthy())
    }

    /// The engines to choose from: those that take steps, or, if none does, those that may again.
    pub(super) fn candidates(&self) -> Vec<usize> {
        let staying = || self.replicas().filter(|(_, replica)| !replica.is_leaving).map(|(number, _)| number);
        let open: Vec<_> = staying().filter(|number| self.takes_steps(*number)).collect();
        if open.is_empty() { staying().collect() } else { open }
    }

    /// For each of the engines, the mean seconds between two tokens of a sequence there, if known.
    pub(super) fn speeds(&self, numbers: &[usize]) -> Vec<(usize, Option<f64>)> {
        let speed = |number: usize| self.get(number).and_then(|replica| replica.engine.seconds_per_token());
        numbers.iter().map(|number| (*number, speed(*number))).collect()
    }

    /// Whether an engine of this name stays.
    pub(super) fn has(&self, name: &str) -> bool {
        self.replicas().any(|(_, replica)| !replica.is_leaving && replica.name == name)
    }

    pub(super) fn free_number(&self) -> Option<usize> {
        (0..MAX_ENGINES).find(|number| self.get(*number).is_none())
    }

    pub(super) fn insert(&mut self, number: usize, name: String, engine: Engine) {
        self.0.resize_with(self.0.len().max(number + 1), || None);
        self.0[number] = Some(Replica { name, engine, is_leaving: false });
    }

    /// Lets the engines whose name `must_leave` accepts give their sequences to the others. Returns how many begin to leave.
    pub(super) fn leave(&mut self, must_leave: impl Fn(&str) -> bool) -> usize {
        let leaving = self.0.iter_mut().flatten().filter(|replica| !replica.is_leaving && must_leave(&replica.name));
        let leave = |replica: &mut Replica| {
            replica.is_leaving = true;
            replica.engine.leave();
        };
        leaving.map(leave).count()
    }

    pub(super) fn remove(&mut self, number: usize) {
        self.0[number] = None;
    }
}
