//! Runs one scenario per seed, on every core, until enough steps are done. A scenario that fails is shrunk.

use std::any::Any;
use std::cell::RefCell;
use std::fmt::{Display, Formatter};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Mutex;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::scenario::{Scenario, kinds};
use crate::tally::{FULL_STEPS, Tally};
use crate::world::World;

/// Scenarios that are tried to shrink a failing one.
const MAX_SHRINKS: u32 = 3000;

pub struct Campaign {
    /// Seed of the first scenario; the others count up from it.
    pub seed: u64,
    /// Minimum number of steps. From `FULL_STEPS` on, every hard case must have been met.
    pub steps: u64,
    /// Whether to report progress and the summary.
    pub is_verbose: bool,
}

/// Describes a guarantee that was violated.
pub struct Failure(String);

impl Display for Failure {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

impl Campaign {
    pub fn run(&self) -> Result<(), Failure> {
        let next = AtomicU64::new(self.seed);
        let total = Mutex::new((Tally::default(), None::<Failure>));
        let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..num_threads {
                scope.spawn(|| self.work(&next, &total));
            }
        });
        let (tally, failure) = total.into_inner().expect("no worker thread panics");
        if let Some(failure) = failure {
            return Err(failure);
        }
        let num_scenarios = next.into_inner() - self.seed;
        if self.is_verbose {
            println!("seeds {} to {}:\n{tally}", self.seed, self.seed + num_scenarios - 1);
        }
        match tally.missing() {
            missing if self.steps >= FULL_STEPS && !missing.is_empty() => {
                Err(Failure(format!("hard cases were not met often enough in {num_scenarios} scenarios: {missing:#?}")))
            }
            _ => Ok(()),
        }
    }

    /// Runs seed after seed on one thread, until enough steps are done or any thread has found a failure.
    fn work(&self, next: &AtomicU64, total: &Mutex<(Tally, Option<Failure>)>) {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let result = run_quietly(scenario(seed));
            let failure = result.as_ref().err().map(|message| shrink(seed, message));
            let (tally, first_failure) = &mut *total.lock().expect("no worker thread panics");
            let before = tally.get("steps");
            if let Ok(seen) = &result {
                *tally += seen;
            }
            if first_failure.is_none() {
                *first_failure = failure;
            }
            let steps = tally.get("steps");
            if self.is_verbose && before * 20 / self.steps != steps * 20 / self.steps {
                println!("{steps:>12} steps of {}, seed {seed}, {} deaths", self.steps, tally.get("deaths"));
            }
            if first_failure.is_some() || steps >= self.steps {
                return;
            }
        }
    }
}

/// The scenario of a seed. Consecutive seeds go through all kinds.
pub fn scenario(seed: u64) -> Scenario {
    tree(seed).current()
}

fn tree(seed: u64) -> Box<dyn ValueTree<Value = Scenario>> {
    let kinds = kinds();
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let (_, kind) = &kinds[(seed % kinds.len() as u64) as usize];
    kind.new_tree(&mut runner).expect("every scenario is a valid one")
}

fn shrink(seed: u64, message: &str) -> Failure {
    let mut tree = tree(seed);
    let mut smallest = (tree.current(), message.to_owned());
    let mut is_failing = true;
    for _ in 0..MAX_SHRINKS {
        if !(if is_failing { tree.simplify() } else { tree.complicate() }) {
            break;
        }
        let result = run_quietly(tree.current());
        is_failing = result.is_err();
        if let Err(message) = result {
            smallest = (tree.current(), message);
        }
    }
    let kinds = kinds();
    let (kind, _) = &kinds[(seed % kinds.len() as u64) as usize];
    Failure(format!(
        "seed {seed} ({kind}) violates a guarantee: {message}\nthe smallest such scenario: {:#?}\nits failure: {}\n\
         to reproduce it: make simulate SEED={seed} STEPS=1",
        smallest.0, smallest.1
    ))
}

thread_local! {
    /// Captures the panic message of the scenario that runs on this thread, so that it is not printed.
    static CAPTURED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The events of a run, or its panic message.
fn run_quietly(scenario: Scenario) -> Result<Tally, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let is_ours = CAPTURED
                .with_borrow_mut(|message| message.as_mut().map(|message| *message = info.to_string()).is_some());
            if !is_ours {
                usual(info);
            }
        }));
    });
    CAPTURED.set(Some(String::new()));
    let result = panic::catch_unwind(AssertUnwindSafe(|| World::new(scenario).run().0));
    let message = CAPTURED.take().unwrap_or_default();
    result.map_err(|_: Box<dyn Any + Send>| message)
}
