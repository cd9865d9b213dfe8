//! The scheduler against a simulated worker in virtual time: random arrivals, lengths, common prefixes, salts, groups,
//! priorities, stop tokens, aborts, failures, deaths of the worker, pool sizes, budgets, run-ahead depths and late results.
//! What is checked: `ledger.rs` (every plan) and `world.rs` (every token, every end). More cases:
//! `PROPTEST_CASES=100000 cargo test -p penstock-scheduler --test simulation`.

mod ledger;
mod model;
mod submitted;
mod worker;
mod world;

use std::time::Duration;

use penstock_scheduler::Limits;
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;

use world::{Arrival, Scenario, World};

fn arrival(last_tick: u64) -> impl Strategy<Value = Arrival> {
    let life = (0..=last_tick, 0..10u64, 1..40usize, 1..24u32, any::<bool>(), weighted(0.3, 0..80u64));
    let prefix = (0..3u64, 0..40usize, weighted(0.3, 0..4usize), weighted(0.15, 0..50u32));
    let kind = (-1..2i32, 0..4u64, weighted(0.5, 0..2u64), 0..8u32, 0..8u32);
    (life, prefix, kind).prop_map(|(life, prefix, kind)| {
        let (tick, id, num_prompt_tokens, max_new_tokens, stops, abort_after_ticks) = life;
        let (text, num_text_tokens, continues, fail_position) = prefix;
        let (priority, salt, group, caching, logprobs) = kind;
        Arrival {
            tick,
            id,
            num_prompt_tokens,
            max_new_tokens,
            stops,
            abort_after_ticks,
            fail_position,
            text,
            num_text_tokens,
            continues,
            priority,
            salt: salt / 3,
            group,
            prefix_caching: caching != 0,
            needs_prompt_logprobs: logprobs == 0,
        }
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    let sizes = (1..32u32, 1..8u32, 1..80u32, 1..24u32, 1..6u32, 1..4u32);
    (sizes, 0..5u32, weighted(0.5, 0..60u64)).prop_map(|(sizes, caching, ageing_ticks)| {
        let (max_step_tokens, max_step_sequences, max_sequence_tokens, num_blocks, block_tokens, max_steps_in_flight) =
            sizes;
        Limits {
            max_step_tokens,
            max_step_sequences,
            max_sequence_tokens,
            num_blocks,
            block_tokens,
            max_steps_in_flight,
            prefix_caching: caching != 0,
            priority_ageing: ageing_ticks.map(Duration::from_millis),
            max_inter_token: None,
            max_overtaking: 0,
        }
    })
}

/// `last_tick` 0: everybody comes at once.
fn scenario(last_tick: u64) -> impl Strategy<Value = Scenario> {
    (limits(), vec(arrival(last_tick), 1..16), vec(1..8u64, 1..6), 1..4u64, any::<(bool, bool)>()).prop_map(
        |(limits, arrivals, latencies_ticks, ticks_per_plan, (reports_dead, has_poor_hash))| Scenario {
            limits,
            arrivals,
            latencies_ticks,
            ticks_per_plan,
            reports_dead,
            has_poor_hash,
            deaths: Vec::new(),
            isolates: false,
        },
    )
}

/// Every sequence grows to most of the pool, so that they keep running into each other.
fn crowded() -> impl Strategy<Value = Scenario> {
    scenario(20).prop_map(|mut scenario| {
        let limits = &mut scenario.limits;
        limits.max_step_tokens = limits.max_step_tokens.max(8);
        limits.max_step_sequences = limits.max_step_sequences.max(4);
        limits.max_sequence_tokens = 80;
        for arrival in &mut scenario.arrivals {
            let most_tokens = limits.num_blocks * limits.block_tokens + 1;
            arrival.num_prompt_tokens = arrival.num_prompt_tokens.min(most_tokens as usize / 4).max(1);
            arrival.max_new_tokens = most_tokens.min(60) - arrival.num_prompt_tokens as u32;
            arrival.stops = false;
        }
        scenario
    })
}

/// Almost all who come at the same time have the same prompt, and many fail in it.
fn kindred() -> impl Strategy<Value = Scenario> {
    scenario(30).prop_map(|mut scenario| {
        let limits = &mut scenario.limits;
        limits.max_steps_in_flight = limits.max_steps_in_flight.max(2);
        limits.max_step_tokens = limits.max_step_tokens.max(8);
        limits.max_step_sequences = limits.max_step_sequences.max(3);
        limits.block_tokens = limits.block_tokens.min(3);
        // Every other time the pool is dry too.
        limits.num_blocks += if scenario.reports_dead { 16 } else { 4 };
        limits.max_sequence_tokens = 80;
        for arrival in &mut scenario.arrivals {
            arrival.text = arrival.tick / 8;
            arrival.salt = 0;
            arrival.group = arrival.group.map(|_| 0);
            arrival.num_text_tokens = arrival.num_text_tokens.max(25);
            arrival.num_prompt_tokens = arrival.num_prompt_tokens.max(10);
            arrival.max_new_tokens = arrival.max_new_tokens.min(8);
            arrival.fail_position = (arrival.id.is_multiple_of(3)).then_some(arrival.num_prompt_tokens as u32 * 3 / 4);
        }
        scenario
    })
}

/// The worker dies now and then, often again before anything has come back.
fn mortal() -> impl Strategy<Value = Scenario> {
    let scenario = prop_oneof![scenario(60), crowded(), kindred()];
    (scenario, vec((0..100u64, 0..4u64), 1..8), any::<bool>()).prop_map(|(scenario, deaths, isolates)| {
        let deaths = deaths.into_iter().flat_map(|(tick, again_after)| [tick, tick + again_after]);
        let mut deaths: Vec<_> = deaths.collect();
        deaths.sort_unstable();
        Scenario { deaths, isolates, ..scenario }
    })
}

fn config() -> ProptestConfig {
    // The environment counts only where a test sets nothing itself.
    let default = ProptestConfig::default();
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => default,
        None => ProptestConfig { cases: 1500, ..default },
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_promise_holds_under_random_traffic(scenario in scenario(150)) {
        World::new(scenario).run();
    }

    #[test]
    fn every_promise_holds_when_everybody_comes_at_once(scenario in scenario(0)) {
        World::new(scenario).run();
    }

    #[test]
    fn every_promise_holds_when_the_pool_is_always_dry(scenario in crowded()) {
        World::new(scenario).run();
    }

    #[test]
    fn every_promise_holds_when_everybody_shares(scenario in kindred()) {
        World::new(scenario).run();
    }

    #[test]
    fn every_promise_holds_when_the_worker_dies(scenario in mortal()) {
        World::new(scenario).run();
    }
}

/// Guards the simulation itself: it would prove little if these did not happen.
#[test]
fn the_simulation_reaches_the_hard_cases() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let mut seen = world::Tally::default();
    for _ in 0..300 {
        for scenario in [crowded().boxed(), kindred().boxed(), mortal().boxed()] {
            let scenario = scenario.new_tree(&mut runner).expect("a scenario").current();
            seen += World::new(scenario).run();
        }
    }
    assert!(seen.num_preemptions > 300, "{seen:?}");
    assert!(seen.num_discarded_tokens > 300, "{seen:?}");
    assert!(seen.num_aborts_on_worker > 100, "{seen:?}");
    assert!(seen.num_failures > 50, "{seen:?}");
    assert!(seen.num_reused_ids > 3, "{seen:?}");
    assert!(seen.num_hit_tokens > 5_000, "{seen:?}");
    assert!(seen.num_shared_unwritten > 100, "{seen:?}");
    assert!(seen.num_overtaken > 15, "{seen:?}");
    assert!(seen.num_voided > 3, "{seen:?}");
    assert!(seen.num_lost > 1000, "{seen:?}");
    assert!(seen.num_replayed > 500, "{seen:?}");
    assert!(seen.num_cleared > 80, "{seen:?}");
}
