//! The room that the worker has for images.

use super::*;

/// `num_bytes` of room for images.
fn with_room(max_image_bytes: u64) -> Scheduler {
    Scheduler::new(Limits { max_image_bytes, max_step_tokens: 64, ..limits(64, 1) })
}

/// Four prompt tokens and `max_new_tokens`, with these images, given by their keys and bytes.
fn submit_with(scheduler: &mut Scheduler, id: u64, max_new_tokens: u32, images: &[(u64, u64)]) {
    let images = images.iter().map(|&(key, num_bytes)| ImageGroup { key, num_bytes }).collect();
    submit(scheduler, Submission { images, ..submission(id, 4, max_new_tokens) });
}

/// The sequences that each step starts, until all have ended.
fn starts(scheduler: &mut Scheduler) -> Vec<Vec<u64>> {
    let started = run_to_end(scheduler).iter().map(new_ids).collect::<Vec<_>>();
    started.into_iter().filter(|ids| !ids.is_empty()).collect()
}

#[test]
fn a_sequence_waits_until_there_is_room_for_its_images() {
    let mut scheduler = with_room(10);
    submit_with(&mut scheduler, 1, 3, &[(1, 6)]);
    submit_with(&mut scheduler, 2, 1, &[(2, 5)]);
    assert_eq!(starts(&mut scheduler), [[1], [2]]);
}

#[test]
fn sequences_with_equal_images_share_their_room() {
    let mut scheduler = with_room(10);
    for id in 1..4 {
        submit_with(&mut scheduler, id, 3, &[(1, 6), (2, 4)]);
    }
    submit_with(&mut scheduler, 4, 3, &[(3, 1)]);
    assert_eq!(starts(&mut scheduler), [vec![1, 2, 3], vec![4]]);
}

#[test]
fn sequences_without_images_pass_one_that_waits_and_those_with_images_do_not() {
    let mut scheduler = with_room(10);
    submit_with(&mut scheduler, 1, 3, &[(1, 6)]);
    submit_with(&mut scheduler, 2, 3, &[(2, 9)]);
    submit_with(&mut scheduler, 3, 3, &[(3, 1)]);
    submit_with(&mut scheduler, 4, 3, &[]);
    assert_eq!(starts(&mut scheduler), [vec![1, 4], vec![2, 3]]);
}

#[test]
fn a_short_prompt_does_not_take_the_room_of_a_longer_one_before_it() {
    let started_first = |num_bytes| {
        let mut scheduler =
            Scheduler::new(Limits { max_image_bytes: 10, max_step_tokens: 16, max_overtaking: 4, ..limits(64, 1) });
        for (id, num_prompt_tokens, num_bytes) in [(1, 40, 6), (2, 4, num_bytes)] {
            let images = [ImageGroup { key: id, num_bytes }].into();
            submit(&mut scheduler, Submission { images, ..submission(id, num_prompt_tokens, 9) });
        }
        starts(&mut scheduler)[0][0]
    };
    assert_eq!(started_first(4), 2, "there is room for both");
    assert_eq!(started_first(6), 1);
}

#[test]
fn a_sequence_that_leaves_the_queue_lets_those_behind_it_go_on() {
    let mut scheduler = with_room(10);
    submit_with(&mut scheduler, 1, 9, &[(1, 6)]);
    submit_with(&mut scheduler, 2, 1, &[(2, 9)]);
    submit_with(&mut scheduler, 3, 1, &[(3, 4)]);
    assert_eq!(new_ids(&step(&mut scheduler).0), [1]);
    scheduler.abort(SequenceId(2));
    scheduler.audit();
    assert_eq!(new_ids(&step(&mut scheduler).0), [3]);
}

#[test]
fn of_many_that_wait_only_the_first_becomes_ready() {
    let mut scheduler = with_room(10);
    submit_with(&mut scheduler, 1, 9, &[(1, 10)]);
    (2..100).for_each(|id| submit_with(&mut scheduler, id, 9, &[(id, 10)]));
    assert_eq!(new_ids(&step(&mut scheduler).0), [1]);
    let num_ready = |scheduler: &mut Scheduler, aborted| {
        scheduler.abort(SequenceId(aborted));
        scheduler.audit();
        scheduler.queue.num_ready()
    };
    assert_eq!(num_ready(&mut scheduler, 50), 0, "it was not the first, and there is no room");
    assert_eq!(num_ready(&mut scheduler, 1), 1, "there is room for one");
    assert_eq!(num_ready(&mut scheduler, 2), 1, "the next one is the first");
    assert_eq!(new_ids(&step(&mut scheduler).0), [3]);
    assert_eq!(scheduler.queue.num_ready(), 0);
}

#[test]
fn a_preempted_sequence_gives_up_its_room_and_waits_for_it() {
    // Both grow to the whole pool.
    let mut scheduler = Scheduler::new(Limits { max_image_bytes: 10, ..limits(4, 1) });
    submit_with(&mut scheduler, 1, 12, &[]);
    submit_with(&mut scheduler, 2, 12, &[(1, 6)]);
    let mut starts = Vec::new();
    while scheduler.stats().num_preemptions == 0 {
        starts.extend(new_ids(&step(&mut scheduler).0));
    }
    assert_eq!(starts, [1, 2]);
    submit(
        &mut scheduler,
        Submission { priority: 1, images: [ImageGroup { key: 2, num_bytes: 5 }].into(), ..submission(3, 4, 1) },
    );
    assert_eq!(run_to_end(&mut scheduler).iter().flat_map(new_ids).collect::<Vec<_>>(), [3, 2]);
}

#[test]
fn nothing_is_held_after_the_loss_of_the_worker() {
    let mut scheduler = with_room(10);
    submit_with(&mut scheduler, 1, 3, &[(1, 6)]);
    submit_with(&mut scheduler, 2, 3, &[(2, 9)]);
    step(&mut scheduler);
    scheduler.restart();
    scheduler.audit();
    assert_eq!(starts(&mut scheduler), [[1], [2]]);
}

#[test]
fn a_quarantined_sequence_waits_behind_no_other() {
    let mut scheduler = with_room(10);
    submit_with(&mut scheduler, 1, 3, &[(1, 6)]);
    submit_with(&mut scheduler, 2, 3, &[(2, 9)]);
    submit_with(&mut scheduler, 3, 3, &[(3, 8)]);
    step(&mut scheduler);
    scheduler.quarantine(Some(SequenceId(3)));
    assert_eq!(new_ids(&step(&mut scheduler).0), [3]);
    scheduler.quarantine(None);
    assert_eq!(starts(&mut scheduler), [[1], [2]]);
}

#[test]
fn images_that_never_fit_are_refused() {
    let mut scheduler = with_room(10);
    let images = [ImageGroup { key: 1, num_bytes: 6 }, ImageGroup { key: 2, num_bytes: 5 }].into();
    let refused = scheduler.submit(Submission { images, ..submission(1, 4, 1) }, Duration::ZERO);
    assert_eq!(refused, Err(SubmitError::ImagesTooLarge { num_bytes: 11, max_image_bytes: 10 }));
}
