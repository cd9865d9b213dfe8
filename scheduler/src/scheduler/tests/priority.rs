//! Sequences are admitted and preempted in the order of their priorities.

use super::*;

const AGEING: Duration = Duration::from_secs(10);

fn ageing(priority_ageing: Duration, num_blocks: u32) -> Scheduler {
    Scheduler::new(Limits { priority_ageing, max_step_sequences: 2, ..limits(num_blocks, 1) })
}

fn submit_with(scheduler: &mut Scheduler, id: u64, priority: i32, arrived_at_s: u64) {
    let submission = Submission { priority, ..submission(id, 1, 1) };
    scheduler.submit(submission, Duration::from_secs(arrived_at_s)).unwrap();
}

/// Ids of the queued sequences in the order in which they are admitted.
fn admitted(scheduler: &mut Scheduler) -> Vec<u64> {
    let mut admitted = Vec::new();
    while scheduler.stats().num_queued > 0 {
        admitted.extend(new_ids(&step(scheduler).0));
    }
    admitted
}

#[test]
fn the_higher_priority_is_admitted_first_and_then_the_earlier_arrival() {
    let mut scheduler = ageing(Duration::MAX, 8);
    for (id, priority, arrived_at_s) in [(1, 0, 0), (2, -1, 0), (3, 5, 900), (4, 0, 1), (5, 5, 800)] {
        submit_with(&mut scheduler, id, priority, arrived_at_s);
    }
    assert_eq!(admitted(&mut scheduler), [5, 3, 1, 4, 2]);
}

#[test]
fn waiting_counts_as_priority() {
    let mut scheduler = ageing(AGEING, 8);
    for (id, priority, arrived_at_s) in [(1, 0, 0), (2, 1, 9), (3, 1, 11), (4, 2, 19), (5, 2, 21)] {
        submit_with(&mut scheduler, id, priority, arrived_at_s);
    }
    assert_eq!(admitted(&mut scheduler), [2, 4, 1, 3, 5]);
}

#[test]
fn ageing_prevents_starvation_by_an_endless_stream_of_higher_priorities() {
    for (priority_ageing, is_admitted) in [(AGEING, true), (Duration::MAX, false)] {
        let mut scheduler = ageing(priority_ageing, 8);
        submit_with(&mut scheduler, 0, -3, 0);
        let mut starts = Vec::new();
        for id in 1..200 {
            submit_with(&mut scheduler, 2 * id, 0, id);
            submit_with(&mut scheduler, 2 * id + 1, 0, id);
            starts.extend(new_ids(&step(&mut scheduler).0));
        }
        assert_eq!(starts.contains(&0), is_admitted, "{priority_ageing:?}");
    }
}

#[test]
fn extreme_priorities_and_times_keep_their_order() {
    let mut scheduler = ageing(Duration::MAX, 8);
    for (id, priority) in [(1, i32::MIN), (2, i32::MAX), (3, 0)] {
        scheduler.submit(Submission { priority, ..submission(id, 1, 1) }, Duration::MAX).unwrap();
    }
    assert_eq!(admitted(&mut scheduler), [2, 3, 1]);
}

#[test]
fn the_youngest_of_the_lowest_priority_is_preempted() {
    let mut scheduler = Scheduler::new(limits(8, 1));
    for (id, priority) in [(1, 0), (2, 1), (3, 0), (4, 1)] {
        submit(&mut scheduler, Submission { priority, ..submission(id, 4, 20) });
    }
    let mut preempted = Vec::new();
    while scheduler.stats().num_running + scheduler.stats().num_queued > 0 && preempted.len() < 3 {
        let planned = plan(&mut scheduler);
        let gone = planned.freed_sequence_ids.iter().filter(|id| scheduler.sequences.contains_key(id)).map(|id| id.0);
        preempted.extend(gone);
        scheduler.apply(&answer(&planned, TOKEN)).unwrap();
    }
    assert_eq!(preempted, [3, 1, 4]);
}

#[test]
fn two_sequences_never_preempt_each_other_in_turn() {
    // Each grows to the whole pool.
    let mut scheduler = Scheduler::new(limits(4, 2));
    submit(&mut scheduler, submission(1, 4, 12));
    submit(&mut scheduler, Submission { priority: 1, ..submission(2, 4, 12) });
    let mut in_flight: Option<Plan> = None;
    let mut starts = Vec::new();
    loop {
        let next = scheduler.plan(Duration::ZERO);
        starts.extend(next.iter().flat_map(new_ids));
        let Some(done) = in_flight.take().or(next.clone()) else { break };
        scheduler.apply(&answer(&done, TOKEN)).unwrap();
        in_flight = next.filter(|plan| plan.step != done.step);
    }
    assert_eq!(starts, [2, 1, 1], "the lower priority is preempted once, and returns when the other has ended");
}
