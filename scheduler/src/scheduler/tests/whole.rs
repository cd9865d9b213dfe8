//! Spans of prompt tokens that attend to each other: no advance ends inside of one.

#![expect(clippy::single_range_in_vec_init, reason = "a prompt with one span")]

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::*;

fn with_spans(id: u64, num_tokens: usize, max_new_tokens: u32, spans: &[Range<u32>]) -> Submission {
    Submission { whole_spans: spans.into(), ..submission(id, num_tokens, max_new_tokens) }
}

#[test]
fn a_span_that_is_out_of_order_or_longer_than_a_step_is_rejected() {
    let mut scheduler = Scheduler::new(limits(64, 1));
    let bad = [(vec![0..17], 0), (vec![9..9], 0), (vec![4..8, 7..9], 1), (vec![15..21], 0)];
    for (spans, index) in bad {
        let rejected = SubmitError::WholeSpan { span: spans[index].clone(), max_step_tokens: 16 };
        assert_eq!(scheduler.submit(with_spans(1, 20, 3, &spans), Duration::ZERO), Err(rejected));
    }
}

#[test]
fn a_chunk_ends_before_a_span_that_it_does_not_hold() {
    let mut scheduler = Scheduler::new(limits(64, 1));
    submit(&mut scheduler, with_spans(1, 30, 2, &[10..22, 22..24, 25..30]));
    let shares: Vec<_> = (0..4).map(|_| advances(&step(&mut scheduler).0)).collect();
    assert_eq!(shares, [[(1, 10)], [(1, 15)], [(1, 5)], [(1, 1)]]);
}

#[test]
fn a_span_waits_for_a_step_with_room_for_all_of_it() {
    let mut scheduler = scheduler(limits(64, 1), &[(1, 3, 4)]);
    submit(&mut scheduler, with_spans(2, 18, 2, &[1..17]));
    let shares: Vec<_> = (0..6).map(|_| advances(&step(&mut scheduler).0)).collect();
    assert_eq!(shares[0], [(1, 3), (2, 1)]);
    assert_eq!(shares[1..4], [[(1, 1)], [(1, 1)], [(1, 1)]], "15 tokens are left beside the decode");
    assert_eq!(shares[4..], [[(2, 16)], [(2, 1)]]);
}

#[test]
fn the_rest_of_a_span_whose_beginning_is_cached_is_computed_in_one_step() {
    let mut scheduler = Scheduler::new(Limits { prefix_caching: true, ..limits(64, 1) });
    for id in [1, 2] {
        submit(&mut scheduler, with_spans(id, 20, 1, &[6..19]));
        let mut shares = Vec::new();
        while scheduler.stats().num_queued + scheduler.stats().num_running > 0 {
            shares.extend(advances(&step(&mut scheduler).0));
        }
        let expected = if id == 1 { vec![(1, 6), (1, 14)] } else { vec![(2, 4)] };
        assert_eq!(shares, expected, "the second one has 16 tokens from the cache");
    }
}

#[test]
fn no_advance_of_random_traffic_ends_inside_of_a_span_and_all_sequences_end() {
    let mut state = 1_u64;
    let mut draw = |below: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as u32) % below
    };
    for round in 0..40 {
        let steps_in_flight = 1 + round % 2;
        let mut scheduler = Scheduler::new(limits(25 + draw(20), steps_in_flight));
        let (mut spans, mut computed, mut in_flight) = (HashMap::new(), HashMap::new(), VecDeque::new());
        for id in 0..12 {
            let (num_tokens, mut begin, mut whole) = (1 + draw(70), 0, Vec::new());
            loop {
                let start = begin + draw(12);
                let end = start + 1 + draw(15);
                if end > num_tokens {
                    break;
                }
                whole.push(start..end);
                begin = end;
            }
            submit(&mut scheduler, with_spans(id, num_tokens as usize, 1 + draw(20), &whole));
            spans.insert(SequenceId(id), whole);
        }
        for steps in 0.. {
            assert!(steps < 2000, "a sequence starves");
            let plan = scheduler.plan(Duration::ZERO);
            if let Some(plan) = plan {
                scheduler.audit();
                computed.extend(plan.new_sequences.iter().map(|new| (new.id, new.num_computed_tokens)));
                for advance in &plan.advances {
                    let end = computed.get_mut(&advance.id).unwrap();
                    *end += advance.num_tokens;
                    let is_inside = |span: &Range<u32>| span.start < *end && *end < span.end;
                    assert!(!spans[&advance.id].iter().any(is_inside), "round {round}: {advance:?} ends at {end}");
                }
                in_flight.push_back(plan);
                if in_flight.len() < steps_in_flight as usize {
                    continue;
                }
            }
            let Some(oldest) = in_flight.pop_front() else { break };
            scheduler.apply(&answer(&oldest, TOKEN)).unwrap();
        }
        assert_eq!((scheduler.stats().num_queued, scheduler.stats().num_running), (0, 0), "round {round}");
    }
}

#[test]
fn a_whole_prompt_is_computed_in_one_step_also_with_generated_tokens_behind_it() {
    let mut scheduler = Scheduler::new(Limits { whole_prompts: true, ..limits(64, 1) });
    let rejected = SubmitError::WholePrompt { num_prompt_tokens: 17, max_step_tokens: 16 };
    assert_eq!(scheduler.submit(submission(1, 17, 3), Duration::ZERO), Err(rejected));
    submit(&mut scheduler, submission(1, 10, 3));
    submit(&mut scheduler, submission(2, 10, 3));
    let shares: Vec<_> = (0..3).map(|_| advances(&step(&mut scheduler).0)).collect();
    assert_eq!(shares, [vec![(1, 10)], vec![(1, 1), (2, 10)], vec![(1, 1), (2, 1)]]);
    let continued = Submission { generated_token_ids: vec![TOKEN; 12], ..submission(3, 10, 20) };
    submit(&mut scheduler, continued);
    let (mut computed, mut ends) = (0, Vec::new());
    while computed < 22 {
        let share = advances(&step(&mut scheduler).0).into_iter().find(|(id, _)| *id == 3);
        computed += share.map_or(0, |(_, num_tokens)| num_tokens);
        ends.extend(share.map(|_| computed));
    }
    assert!(ends.iter().all(|end| *end >= 10), "{ends:?}");
}
