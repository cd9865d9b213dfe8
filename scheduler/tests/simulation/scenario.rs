//! Random scenarios, one kind for each sort of trouble. proptest draws them, so a failing scenario can be shrunk.

use std::time::Duration;

use penstock_scheduler::Limits;
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;

use crate::model::Images;

#[derive(Clone, Debug)]
pub struct Scenario {
    pub limits: Limits,
    pub arrivals: Vec<Arrival>,
    /// Durations of the steps, used cyclically.
    pub latencies_ticks: Vec<u64>,
    /// The engine plans once in this many ticks.
    pub ticks_per_plan: u64,
    /// Whether a failed sequence also fails in the later steps that are already planned.
    pub repeats_failures: bool,
    /// Whether different blocks often have the same hash.
    pub has_poor_hash: bool,
    /// Whether the scheduler observes_durations the durations of steps, and so limits them.
    pub observes_durations: bool,
    /// Ticks at which the worker dies, ascending.
    pub deaths: Vec<u64>,
    /// Whether the sequences in flight at a death are quarantined, each until it gets a token.
    pub quarantines: bool,
}

#[derive(Clone, Debug)]
pub struct Arrival {
    pub tick: u64,
    pub id: u64,
    pub num_prompt_tokens: usize,
    pub max_new_tokens: u32,
    /// Whether the model's stop token ends the sequence.
    pub stops: bool,
    pub abort_after_ticks: Option<u64>,
    /// Computing this position fails.
    pub fail_position: Option<u32>,
    /// The prompt begins with `num_text_tokens` tokens of this text, followed by its own.
    pub text: u64,
    pub num_text_tokens: usize,
    /// The prompt begins with the prompt and answer of an earlier sequence instead; 0 is the last one.
    pub continues: Option<usize>,
    pub priority: i32,
    pub group: Option<u64>,
    pub needs_prompt_outputs: bool,
    /// Limited to the length of the prompt.
    pub num_source_tokens: usize,
    /// Limited to the prompt.
    pub images: Images,
}

impl Scenario {
    /// Whether prompts are computed strictly in order of precedence, as far as budgets and the pool allow.
    pub fn is_in_order(&self) -> bool {
        !self.observes_durations && self.limits.max_overtaking == 0
    }

    /// Whether the reference can predict every plan: it knows no sharing and no drafts.
    pub fn is_predictable(&self) -> bool {
        self.shares_nothing() && self.is_in_order() && self.limits.max_draft_tokens == 0
    }

    /// Whether no two sequences can share a block.
    pub fn shares_nothing(&self) -> bool {
        !self.limits.prefix_caching && self.arrivals.iter().all(|arrival| arrival.group.is_none())
    }
}

fn arrival(last_tick: u64) -> impl Strategy<Value = Arrival> {
    let life = (0..=last_tick, 0..10u64, 1..40usize, 1..24u32, any::<bool>(), weighted(0.3, 0..80u64));
    let prefix = (0..3u64, 0..40usize, weighted(0.3, 0..4usize), weighted(0.15, 0..50u32));
    let kind = (-1..2i32, weighted(0.5, 0..2u64), 0..8u32, weighted(0.12, 1..30usize), weighted(0.1, any::<bool>()));
    let image = || weighted(0.2, (0..30u32, 0..2u64));
    let kind = (kind, [image(), image()]);
    (life, prefix, kind).prop_map(|(life, prefix, kind)| {
        let (tick, id, num_prompt_tokens, max_new_tokens, stops, abort_after_ticks) = life;
        let (text, num_text_tokens, continues, fail_position) = prefix;
        let ((priority, group, logprobs, source, pooled), images) = kind;
        // A pooled sequence ends with its vector, which is one token here; an encoder's is one source.
        let (max_new_tokens, stops, source) = match pooled {
            Some(is_encoder) => (1, false, is_encoder.then_some(num_prompt_tokens)),
            None => (max_new_tokens, stops, source),
        };
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
            group,
            needs_prompt_outputs: logprobs == 0,
            num_source_tokens: source.unwrap_or(0),
            images: Images(images),
        }
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    let sizes = (1..32u32, 1..8u32, 1..80u32, 1..24u32, 1..6u32, 1..6u32);
    let turns = (prop_oneof![Just(0), 1..6u32], weighted(0.3, 0..20u64), weighted(0.35, 1..40u32));
    let slots = || prop_oneof![Just(0), 1..6u32, 6..40u32];
    let drafts_and_slots = (prop_oneof![Just(0), 1..6u32], slots(), slots());
    let states = prop_oneof![1 => Just((0, 0, 1)), 1 => (1..8u32, prop_oneof![1 => Just(0), 3 => 1..9u32], 1..20u32)];
    let stages_and_images = (prop_oneof![3 => Just(1), 1 => 2..4u32], 4..8u64, states);
    (sizes, 0..5u32, weighted(0.5, 0..60u64), turns, drafts_and_slots, stages_and_images).prop_map(
        |(
            sizes,
            caching,
            ageing_ticks,
            turns,
            (drafts, num_memory_slots, num_disk_slots),
            (num_stages, max_image_bytes, (num_state_slots, num_snapshots, snapshot_reach_tokens)),
        )| {
            let drafts = if num_stages == 1 { drafts } else { 0 };
            let (
                max_step_tokens,
                max_step_sequences,
                max_sequence_tokens,
                num_blocks,
                block_tokens,
                max_steps_in_flight,
            ) = sizes;
            Limits {
                max_step_tokens,
                max_step_sequences,
                max_sequence_tokens,
                num_blocks,
                num_memory_slots,
                num_disk_slots,
                block_tokens,
                max_steps_in_flight,
                prefix_caching: caching != 0,
                priority_ageing: ageing_ticks.map_or(Duration::MAX, Duration::from_millis),
                max_inter_token: turns.1.map(Duration::from_millis),
                max_overtaking: turns.0,
                window_tokens: turns.2,
                whole_prompts: false,
                max_draft_tokens: drafts,
                drafts_with_model: drafts % 2 == 1,
                drafts_extend_lookup: drafts == 3,
                drafts_only_forced: drafts == 4,
                max_image_bytes,
                num_state_slots,
                num_snapshots,
                snapshot_reach_tokens,
                num_stages,
            }
        },
    )
}

/// With `last_tick` 0, all sequences arrive at once.
fn scenario(last_tick: u64) -> impl Strategy<Value = Scenario> {
    scenario_of(arrival(last_tick), 16)
}

fn scenario_of(arrival: impl Strategy<Value = Arrival>, max_arrivals: usize) -> impl Strategy<Value = Scenario> {
    (limits(), vec(arrival, 1..max_arrivals), vec(1..8u64, 1..6), 1..4u64, any::<(bool, bool, bool)>()).prop_map(
        |(limits, arrivals, latencies_ticks, ticks_per_plan, (repeats_failures, has_poor_hash, observes_durations))| {
            Scenario {
                limits,
                arrivals,
                latencies_ticks,
                ticks_per_plan,
                repeats_failures,
                has_poor_hash,
                observes_durations,
                deaths: Vec::new(),
                quarantines: false,
            }
        },
    )
}

/// Many sequences at once, for long enough to fill the cache and evict from it.
fn long_run() -> impl Strategy<Value = Scenario> {
    scenario_of(arrival(600), 120).prop_map(|mut scenario| {
        let limits = &mut scenario.limits;
        limits.max_step_tokens += 16;
        limits.max_step_sequences += 8;
        limits.num_blocks += 16;
        limits.max_sequence_tokens = 80;
        for (arrival, id) in scenario.arrivals.iter_mut().zip(0..) {
            arrival.id = id;
            arrival.abort_after_ticks = arrival.abort_after_ticks.filter(|_| id % 2 == 0);
        }
        scenario
    })
}

/// Every sequence grows to most of the pool, so that preemptions are frequent.
fn exhausted_pool() -> impl Strategy<Value = Scenario> {
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

/// Most sequences that arrive at the same time have the same prompt, and many fail in it.
fn common_prompts() -> impl Strategy<Value = Scenario> {
    scenario(30).prop_map(|mut scenario| {
        let limits = &mut scenario.limits;
        limits.max_steps_in_flight = limits.max_steps_in_flight.max(2);
        limits.max_step_tokens = limits.max_step_tokens.max(8);
        limits.max_step_sequences = limits.max_step_sequences.max(3);
        limits.block_tokens = limits.block_tokens.min(3);
        // In half of the scenarios the pool is also too small.
        limits.num_blocks += if scenario.repeats_failures { 16 } else { 4 };
        limits.max_sequence_tokens = 80;
        for arrival in &mut scenario.arrivals {
            arrival.text = arrival.tick / 8;
            arrival.group = arrival.group.map(|_| 0);
            arrival.num_text_tokens = arrival.num_text_tokens.max(25);
            arrival.num_prompt_tokens = arrival.num_prompt_tokens.max(10);
            arrival.max_new_tokens = arrival.max_new_tokens.min(8);
            arrival.fail_position = (arrival.id.is_multiple_of(3)).then_some(arrival.num_prompt_tokens as u32 * 3 / 4);
        }
        scenario
    })
}

/// Common prompts take many steps, and their producer is often cancelled before it has computed them.
fn producers_leave() -> impl Strategy<Value = Scenario> {
    common_prompts().prop_map(|mut scenario| {
        let limits = &mut scenario.limits;
        limits.max_step_tokens = limits.max_step_tokens % 6 + 2;
        limits.max_step_sequences = limits.max_step_sequences.min(limits.max_step_tokens);
        limits.num_blocks += 48;
        for arrival in &mut scenario.arrivals {
            arrival.text = 0;
            arrival.continues = None;
            arrival.num_prompt_tokens = arrival.num_prompt_tokens.max(30);
            arrival.num_text_tokens = 40;
            arrival.abort_after_ticks = arrival.abort_after_ticks.map(|ticks| ticks % 60 + 5);
            if arrival.id % 2 == 0 {
                arrival.abort_after_ticks = Some(arrival.tick % 7 * 8 + 5);
            }
        }
        scenario
    })
}

/// The worker dies repeatedly, often before any result of its replacement has come back.
fn worker_dies() -> impl Strategy<Value = Scenario> {
    let scenario = prop_oneof![scenario(60), exhausted_pool(), common_prompts()];
    (scenario, vec((0..100u64, 0..4u64), 1..8), any::<bool>()).prop_map(|(scenario, deaths, quarantines)| {
        let deaths = deaths.into_iter().flat_map(|(tick, again_after)| [tick, tick + again_after]);
        let mut deaths: Vec<_> = deaths.collect();
        deaths.sort_unstable();
        Scenario { deaths, quarantines, ..scenario }
    })
}

/// No blocks are shared, so the reference can predict every plan and every event.
fn without_sharing() -> impl Strategy<Value = Scenario> {
    prop_oneof![scenario(150), exhausted_pool(), worker_dies(), long_run()].prop_map(|mut scenario| {
        scenario.limits.prefix_caching = false;
        scenario.limits.max_draft_tokens = 0;
        scenario.limits.max_overtaking = 0;
        scenario.observes_durations = false;
        for arrival in &mut scenario.arrivals {
            arrival.group = None;
        }
        scenario
    })
}

/// All kinds of scenarios.
pub fn kinds() -> [(&'static str, BoxedStrategy<Scenario>); 8] {
    [
        ("random traffic", scenario(150).boxed()),
        ("all at once", scenario(0).boxed()),
        ("an exhausted pool", exhausted_pool().boxed()),
        ("common prompts", common_prompts().boxed()),
        ("producers leave", producers_leave().boxed()),
        ("the worker dies", worker_dies().boxed()),
        ("a long run", long_run().boxed()),
        ("no sharing", without_sharing().boxed()),
    ]
}
