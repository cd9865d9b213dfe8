//! Sequences and images go to the engines that they should go to.

use proptest::prelude::*;

use super::*;
use crate::sequence::{ImageSpan, greedy};

const BLOCK_TOKENS: u32 = 16;

fn routing(num_engines: usize) -> Routing {
    let cache = CacheShape { block_tokens: BLOCK_TOKENS as usize, num_blocks: 4096, prefix_caching: true };
    let mut routing = Routing::new(cache);
    (0..num_engines).for_each(|engine| routing.add_engine(engine));
    routing
}

/// A prompt of 64 blocks that begins with `num_shared` blocks of every other such prompt.
fn request(number: u32, num_shared: u32) -> SequenceRequest {
    let (shared, all) = (num_shared * BLOCK_TOKENS, 64 * BLOCK_TOKENS);
    let tokens = (0..shared).chain((shared..all).map(|token| 10_000 * (number + 1) + token));
    SequenceRequest { max_new_tokens: 100, ..plain_request(tokens.collect()) }
}

pub(in super::super) fn plain_request(prompt_token_ids: Vec<u32>) -> SequenceRequest {
    SequenceRequest {
        prompt_token_ids,
        generated_token_ids: Vec::new(),
        num_source_tokens: 0,
        max_new_tokens: 1,
        sampling: greedy(),
        grammar: None,
        images: [].into(),
        num_second_text_tokens: 0,
        needs_prompt_outputs: false,
        priority: 0,
        group: None,
        cache_salt: None,
        content_salts: [].into(),
        adapter: None,
        adapter_hash: None,
        timeline: None,
    }
}

fn place(routing: &mut Routing, number: u32, num_shared: u32) -> usize {
    let all: Vec<_> = (0..routing.routed.len()).collect();
    routing.place(SequenceId(u64::from(number)), &request(number, num_shared), &all)
}

fn replace(routing: &mut Routing, number: u32, num_shared: u32, open: &[usize]) -> Option<usize> {
    routing.replace(SequenceId(u64::from(number)), &request(number, num_shared), open)
}

fn with_image(request: SequenceRequest, image: &Image) -> SequenceRequest {
    let span = ImageSpan { image: image.clone(), offset: 0, num_tokens: 1, is_whole: false, num_bytes: 1 };
    SequenceRequest { images: [span].into(), ..request }
}

#[test]
fn a_sequence_runs_where_its_images_were_encoded() {
    let mut routing = routing(3);
    let image = |number: u8| Image::new(vec![number]);
    let encode = |routing: &mut Routing, number| {
        let (engine, work) = routing.begin_encoding(&[image(number)], &[0, 1, 2]);
        routing.end_encoding(engine, work);
        engine
    };
    routing.place(SequenceId(1), &request(1, 0), &[0, 1, 2]);
    assert_eq!(encode(&mut routing, 1), 1, "the first engine has work");
    assert_eq!(routing.place(SequenceId(2), &with_image(request(2, 0), &image(1)), &[0, 1, 2]), 1);
    assert_eq!(encode(&mut routing, 1), 1, "it has the image");
    assert_eq!(routing.place(SequenceId(3), &with_image(request(3, 0), &image(1)), &[0, 2]), 2);
    routing.forget_prefixes(1);
    routing.end(SequenceId(1), Some(0));
    assert_eq!(encode(&mut routing, 1), 2, "it encoded the image in a step, and the second engine has lost it");
}

#[test]
fn images_are_encoded_by_all_engines_when_one_has_much_to_do() {
    let mut routing = routing(2);
    let images: Vec<_> = (0..4).map(|number| Image::new(vec![number])).collect();
    let began: Vec<_> =
        images.iter().map(|image| routing.begin_encoding(std::slice::from_ref(image), &[0, 1])).collect();
    assert_eq!(began.iter().map(|(engine, _)| *engine).collect::<Vec<_>>(), [0, 1, 0, 1]);
    for number in 0..8 {
        routing.place(SequenceId(number.into()), &with_image(request(number, 0), &images[0]), &[0]);
    }
    assert_eq!(routing.begin_encoding(&images[..1], &[0, 1]), (1, IMAGE_TOKENS), "a second home");
}

#[test]
fn a_hot_image_does_not_make_a_hot_spot() {
    let mut routing = routing(4);
    let mut counts = [0; 4];
    for number in 0..400 {
        let request = with_image(request(number, 0), &Image::new(vec![1]));
        counts[routing.place(SequenceId(number.into()), &request, &[0, 1, 2, 3])] += 1;
    }
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(most - least <= 10, "{counts:?}");
}

/// What happens, the sequence or engine that it happens to, and blocks and image of a new request.
type Action = (u8, prop::sample::Index, u32, Option<u8>);

proptest! {
    #[test]
    fn the_invariant_holds_for_new_and_for_moved_sequences(actions in prop::collection::vec(any::<Action>(), 1..150)) {
        check_bound(actions);
    }
}

fn check_bound(actions: Vec<Action>) {
    let (mut routing, all) = (routing(4), [0, 1, 2, 3]);
    let mut requests: Vec<SequenceRequest> = Vec::new();
    for (action, index, number, image) in actions {
        let new_id = requests.len() as u32;
        let old_id = index.index(requests.len().max(1));
        let id = SequenceId(old_id as u64);
        match action % 8 {
            0 => routing.prompt_computed(id),
            1 => routing.end(id, Some(u64::from(number % 200))),
            2 => routing.observe_speed(&[
                (0, Some(0.01)),
                (1, Some(0.01)),
                (2, Some(0.001 * f64::from(1 + number % 90))),
            ]),
            3 => routing.forget_prefixes(index.index(4)),
            4 => {
                let Some(place) = routing.places.get(&id) else { continue };
                let (engine, num_tokens) = (place.engine, place.num_tokens());
                let mut work: Vec<_> = routing.routed.iter().map(|routed| routed.num_work_tokens).collect();
                work[engine] -= num_tokens;
                let chosen = routing.replace(id, &requests[old_id], &all).unwrap();
                assert_bound(&routing, &work, chosen, &requests[old_id]);
            }
            _ => {
                let mut request = request(new_id, number % 65);
                if let Some(image) = image {
                    request = with_image(request, &Image::new(vec![image % 3]));
                }
                let work: Vec<_> = routing.routed.iter().map(|routed| routed.num_work_tokens).collect();
                let chosen = routing.place(SequenceId(new_id.into()), &request, &all);
                assert_bound(&routing, &work, chosen, &request);
                requests.push(request);
            }
        }
    }
}

/// `work`: that of each engine before the choice.
fn assert_bound(routing: &Routing, work: &[u64], chosen: usize, request: &SequenceRequest) {
    let num_more = 4 * (request.prompt_token_ids.len() as u64 + IMAGE_TOKENS * request.images.len() as u64);
    let seconds = |engine: usize, num_tokens: u64| num_tokens as f64 * routing.slowness.of(engine);
    for (other, num_tokens) in work.iter().enumerate() {
        assert!(seconds(chosen, work[chosen]) <= seconds(other, num_tokens + num_more) + 1e-6, "{work:?} {chosen}");
    }
}

#[test]
fn requests_without_a_common_prefix_are_spread_evenly() {
    let mut routing = routing(3);
    let mut counts = [0; 3];
    for number in 0..300 {
        counts[place(&mut routing, number, 0)] += 1;
    }
    assert_eq!(counts, [100; 3]);
}

#[test]
fn a_conversation_returns_to_its_prefix_while_the_work_there_is_less_than_what_it_saves() {
    let mut routing = routing(2);
    assert_eq!(place(&mut routing, 0, 60), 0);
    routing.prompt_computed(SequenceId(0));
    assert_eq!(place(&mut routing, 1, 60), 0, "60 blocks are there, and one sequence generates");
    assert_eq!(place(&mut routing, 2, 0), 1, "it has no prefix, and the other engine is idle");
}

#[test]
fn a_hot_prefix_does_not_make_a_hot_spot() {
    let mut routing = routing(4);
    let mut counts = [0; 4];
    for number in 0..400 {
        let engine = place(&mut routing, number, 60);
        routing.prompt_computed(SequenceId(u64::from(number)));
        counts[engine] += 1;
    }
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(most - least <= 10, "{counts:?}");
}

#[test]
fn the_more_sequences_wait_the_more_work_a_conversation_stays_with_up_to_a_bound() {
    let stays = |num_waiting, num_work_tokens| {
        let mut routing = routing(2);
        assert_eq!(place(&mut routing, 0, 60), 0);
        routing.prompt_computed(SequenceId(0));
        (routing.num_waiting, routing.routed[0].num_work_tokens) = (num_waiting, num_work_tokens);
        place(&mut routing, 1, 60) == 0
    };
    let num_cached = 60 * u64::from(BLOCK_TOKENS);
    for (num_waiting, weight) in [(0, 2), (8, 3), (16, 4), (1000, 4)] {
        assert!(stays(num_waiting, weight * num_cached), "{num_waiting} sequences wait");
        assert!(!stays(num_waiting, weight * num_cached + 1), "{num_waiting} sequences wait");
    }
}

#[test]
fn a_sequence_waits_until_its_first_token_even_if_its_prompt_is_cached() {
    let mut routing = routing(1);
    place(&mut routing, 0, 64);
    routing.prompt_computed(SequenceId(0));
    place(&mut routing, 1, 64);
    assert_eq!((routing.routed[0].num_cached_tokens, routing.num_waiting), (64 * u64::from(BLOCK_TOKENS), 1));
    routing.prompt_computed(SequenceId(1));
    routing.prompt_computed(SequenceId(1));
    assert_eq!(routing.num_waiting, 0);
}

#[test]
fn only_open_engines_are_chosen() {
    let mut routing = routing(3);
    for number in 0..9 {
        assert_eq!(routing.place(SequenceId(number), &request(number as u32, 0), &[2]), 2);
    }
}

#[test]
fn a_slow_engine_gets_less_work_and_an_equal_share_again_when_it_is_as_fast_as_the_others() {
    let mut routing = routing(4);
    let shares = |routing: &mut Routing, ids: std::ops::Range<u32>| {
        let mut counts = [0; 4];
        ids.for_each(|number| counts[place(routing, number, 0)] += 1);
        counts
    };
    let speeds = |slow| [(0, Some(slow)), (1, Some(0.01)), (2, Some(0.01)), (3, None)];
    routing.observe_speed(&speeds(0.04));
    let counts = shares(&mut routing, 0..130);
    assert_eq!(counts, [10, 40, 40, 40], "it has a quarter of the speed of the others");
    (0..130).for_each(|number| routing.end(SequenceId(number), None));
    routing.observe_speed(&speeds(0.011));
    assert_eq!(shares(&mut routing, 200..300), [25; 4]);
}

#[test]
fn counts_tell_where_sequences_went() {
    let mut routing = routing(2);
    place(&mut routing, 0, 60);
    routing.prompt_computed(SequenceId(0));
    place(&mut routing, 1, 60);
    assert_eq!(replace(&mut routing, 1, 60, &[1]), Some(1));
    let [first, second] = routing.routed() else { panic!() };
    let prompt_tokens = u64::from(64 * BLOCK_TOKENS);
    assert_eq!((first.num_sequences, first.num_handovers, second.num_sequences), (2, 1, 0));
    assert_eq!((first.num_prompt_tokens, first.num_cached_tokens), (2 * prompt_tokens, 60 * u64::from(BLOCK_TOKENS)));
    assert_eq!(
        (first.num_work_tokens, second.num_work_tokens),
        (100, 100 + prompt_tokens),
        "the other engine computes the whole prompt"
    );
}

#[test]
fn the_number_of_an_engine_that_left_can_be_used_again() {
    let mut routing = routing(2);
    place(&mut routing, 0, 60);
    replace(&mut routing, 0, 60, &[1]);
    routing.remove_engine(0);
    routing.add_engine(0);
    let blocks = routing.prefixes.blocks(&request(0, 60).prompt_token_ids, None, &[]);
    assert_eq!(routing.prefixes.num_tokens(&blocks)[0], 0, "the new engine has no prefix");
    routing.end(SequenceId(0), Some(5));
    assert!(routing.routed.iter().all(|routed| routed.num_work_tokens == 0));
}

#[test]
fn an_ended_sequence_is_no_work_and_teaches_the_mean() {
    let mut routing = routing(2);
    for number in 0..1000 {
        let engine = place(&mut routing, number, 0);
        let id = SequenceId(u64::from(number));
        if number % 2 == 0 {
            routing.prompt_computed(id);
        }
        if number % 3 == 0 {
            replace(&mut routing, number, 0, &[1 - engine]);
        }
        routing.end(id, Some(7));
        routing.end(id, Some(7));
    }
    assert!(routing.routed.iter().all(|routed| routed.num_work_tokens == 0));
    assert!(routing.places.is_empty());
    assert_eq!(routing.num_waiting, 0);
    assert!((routing.mean_new_tokens - 7.0).abs() < 0.1);
}

#[test]
fn a_sequence_moves_to_the_open_engine_with_the_least_work_and_the_lost_prefix_is_forgotten() {
    let mut routing = routing(3);
    for number in 0..4 {
        place(&mut routing, number, 0);
    }
    assert_eq!(replace(&mut routing, 0, 0, &[1, 2]), Some(1));
    assert_eq!(replace(&mut routing, 3, 0, &[1, 2]), Some(2));
    assert_eq!(replace(&mut routing, 3, 0, &[]), None);
    routing.forget_prefixes(0);
    let again = routing.prefixes.blocks(&request(0, 0).prompt_token_ids, None, &[]);
    assert_eq!(routing.prefixes.num_tokens(&again)[0], 0);
}

#[test]
fn an_engine_that_continues_a_sequence_computes_its_tokens_and_has_them_for_the_next_turn() {
    let mut routing = routing(3);
    assert_eq!(place(&mut routing, 0, 0), 0);
    routing.prompt_computed(SequenceId(0));
    let generated_token_ids: Vec<u32> = (0..2 * BLOCK_TOKENS).collect();
    let moving = SequenceRequest { generated_token_ids, ..request(0, 0) };
    routing.forget_prefixes(0);
    assert_eq!(routing.replace(SequenceId(0), &moving, &[1, 2]), Some(1));
    let num_tokens = u64::from(66 * BLOCK_TOKENS);
    assert_eq!((routing.num_waiting, routing.routed[1].num_work_tokens), (1, 100 + num_tokens));
    assert_eq!(place(&mut routing, 1, 0), 0, "the second engine computes the prompt again");
    routing.end(SequenceId(1), None);
    routing.prompt_computed(SequenceId(0));
    assert_eq!((routing.num_waiting, routing.routed[1].num_work_tokens), (0, 100));
    let next_turn = plain_request([&moving.prompt_token_ids[..], &moving.generated_token_ids, &[7; 20]].concat());
    assert_eq!(routing.place(SequenceId(2), &next_turn, &[0, 1, 2]), 1);
    assert_eq!(routing.routed[1].num_cached_tokens, num_tokens);
}

#[test]
fn an_aborted_sequence_says_nothing_about_the_length_of_others() {
    let mut routing = routing(2);
    for number in 0..100 {
        place(&mut routing, number, 0);
        routing.end(SequenceId(u64::from(number)), None);
    }
    assert_eq!(routing.mean_new_tokens, FIRST_MEAN_NEW_TOKENS);
}
