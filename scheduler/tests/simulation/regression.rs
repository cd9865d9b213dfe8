//! Shrunk scenarios that have failed.

use penstock_scheduler::Limits;

use crate::model::Images;
use crate::scenario::{Arrival, Scenario};
use crate::world::World;

/// Arrivals with 40 common tokens.
const ARRIVAL: Arrival = Arrival {
    tick: 0,
    id: 1,
    num_prompt_tokens: 30,
    max_new_tokens: 1,
    stops: false,
    abort_after_ticks: None,
    fail_position: None,
    text: 0,
    num_text_tokens: 40,
    continues: None,
    priority: 0,
    group: None,
    needs_prompt_outputs: false,
    num_source_tokens: 0,
    images: Images([None; 2]),
};

/// A sequence stayed blocked although its prefix was in the cache again: in the blocks of a sequence that had also
/// computed it and had ended.
#[test]
fn a_blocked_sequence_is_unblocked_when_a_second_copy_replaces_a_lost_block() {
    let limits = Limits {
        max_step_tokens: 4,
        max_step_sequences: 3,
        max_sequence_tokens: 80,
        num_blocks: 68,
        block_tokens: 1,
        max_steps_in_flight: 5,
        prefix_caching: true,
        max_image_bytes: u64::MAX,
        ..Limits::PLAIN
    };
    let arrivals = vec![
        Arrival { tick: 7, id: 5, needs_prompt_outputs: true, ..ARRIVAL },
        Arrival { tick: 27, id: 2, abort_after_ticks: Some(53), ..ARRIVAL },
        Arrival { max_new_tokens: 7, needs_prompt_outputs: true, ..ARRIVAL },
        Arrival {
            tick: 5,
            id: 3,
            num_prompt_tokens: 31,
            max_new_tokens: 4,
            fail_position: Some(23),
            priority: 1,
            ..ARRIVAL
        },
    ];
    World::new(Scenario {
        limits,
        arrivals,
        latencies_ticks: vec![2, 3, 1, 3],
        ticks_per_plan: 1,
        repeats_failures: false,
        has_poor_hash: false,
        observes_durations: true,
        deaths: Vec::new(),
        quarantines: false,
    })
    .run();
}

/// A sequence was preempted while the step in flight computed its last tokens, which were lost: its drafts were right.
#[test]
fn a_sequence_that_may_end_with_its_drafts_in_flight_is_not_preempted() {
    let limits = Limits {
        max_step_tokens: 5,
        max_step_sequences: 4,
        max_sequence_tokens: 12,
        num_blocks: 3,
        block_tokens: 5,
        max_steps_in_flight: 3,
        max_draft_tokens: 3,
        drafts_with_model: true,
        max_image_bytes: u64::MAX,
        ..Limits::PLAIN
    };
    let arrival = Arrival { num_text_tokens: 0, ..ARRIVAL };
    let arrivals = vec![
        Arrival { id: 0, num_prompt_tokens: 4, max_new_tokens: 3, priority: -1, ..arrival.clone() },
        Arrival { num_prompt_tokens: 1, max_new_tokens: 6, ..arrival },
    ];
    World::new(Scenario {
        limits,
        arrivals,
        latencies_ticks: vec![2],
        ticks_per_plan: 1,
        repeats_failures: false,
        has_poor_hash: false,
        observes_durations: false,
        deaths: Vec::new(),
        quarantines: false,
    })
    .run();
}
