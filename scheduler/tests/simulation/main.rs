//! Runs the scheduler against a simulated worker in virtual time: random arrivals, lengths, common prefixes, groups,
//! priorities, stop tokens, cancels, failures, deaths of the worker, pool sizes, budgets, run-ahead depths and late
//! results. What is checked: `ledger.rs` (every plan), `worker.rs` (every block that is read), `world.rs` (every token
//! and every end) and `reference.rs` (without sharing: the whole plan). Other seeds and more steps:
//! `make simulate SEED=7 STEPS=20000000`.
#![allow(unreachable_pub)]

mod campaign;
mod ledger;
mod model;
mod reference;
mod regression;
mod scenario;
mod submitted;
mod tally;
mod worker;
mod world;

use campaign::Campaign;
use world::World;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name} is {value:?}, a whole number is needed")),
        Err(_) => default,
    }
}

#[test]
fn every_guarantee_holds_in_a_million_steps() {
    let seed = number("SIMULATION_SEED", 1);
    let steps = number("SIMULATION_STEPS", tally::FULL_STEPS);
    if let Err(failure) = (Campaign { seed, steps, is_verbose: std::env::var_os("SIMULATION_SEED").is_some() }).run() {
        panic!("{failure}");
    }
}

/// Fails if a plan depends on the iteration order of a hash map.
#[test]
fn the_same_seed_gives_the_same_plans_and_events() {
    for seed in 0..700 {
        let scenario = campaign::scenario(seed);
        assert_eq!(World::new(scenario.clone()).run(), World::new(scenario).run(), "seed {seed}");
    }
}
