//! Several stages: which sequences the steps in flight advance, and what the plans tell the stages that do not sample.

use super::*;

fn stages(num_stages: u32) -> Limits {
    Limits { num_stages, ..limits(64, 2) }
}

#[test]
fn steps_in_flight_decode_disjoint_shares() {
    let mut scheduler = scheduler(stages(2), &[(1, 1, 9), (2, 1, 9), (3, 1, 9)]);
    step(&mut scheduler);
    let (first, second) = (plan(&mut scheduler), plan(&mut scheduler));
    assert_eq!((advances(&first), advances(&second)), (vec![(1, 1), (2, 1)], vec![(3, 1)]));
    assert!(nothing_to_plan(&mut scheduler), "each sequence waits for its token");
    scheduler.apply(&answer(&first, TOKEN)).unwrap();
    assert_eq!(advances(&plan(&mut scheduler)), [(1, 1), (2, 1)]);
    scheduler.apply(&answer(&second, TOKEN)).unwrap();
    assert_eq!(advances(&plan(&mut scheduler)), [(3, 1)]);
}

#[test]
fn chunks_of_one_prompt_follow_each_other_without_waiting() {
    let mut scheduler = scheduler(stages(2), &[(1, 40, 2)]);
    let plans: Vec<_> = (0..3).map(|_| plan(&mut scheduler)).collect();
    assert_eq!(plans.iter().map(advances).collect::<Vec<_>>(), [[(1, 16)], [(1, 16)], [(1, 8)]]);
    assert!(nothing_to_plan(&mut scheduler), "a step for each stage and one more are in flight");
}

#[test]
fn until_durations_are_known_a_prompt_fills_every_step() {
    let mut scheduler = scheduler(stages(2), &[(1, 1, 9)]);
    step(&mut scheduler);
    submit(&mut scheduler, submission(2, 40, 9));
    let planned: Vec<_> = (0..3).map(|_| advances(&plan(&mut scheduler))).collect();
    assert_eq!(planned, [vec![(1, 1), (2, 15)], vec![(2, 16)], vec![(2, 9)]]);
}

#[test]
fn plans_carry_the_last_known_token_to_the_stages() {
    let mut scheduler = scheduler(stages(3), &[(1, 1, 9)]);
    let prompt = plan(&mut scheduler);
    assert_eq!(prompt.advances[0].last_token_id, Some(TOKEN));
    scheduler.apply(&answer(&prompt, 7)).unwrap();
    assert_eq!(plan(&mut scheduler).advances[0].last_token_id, Some(7));
}

#[test]
fn a_quarantined_sequence_is_alone_in_flight() {
    let mut scheduler = scheduler(stages(2), &[(1, 40, 2)]);
    scheduler.quarantine(Some(SequenceId(1)));
    plan(&mut scheduler);
    assert!(nothing_to_plan(&mut scheduler));
}
