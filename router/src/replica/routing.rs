//! Chooses an engine for each sequence: the one where it would finish its prompt first.
//!
//! Work is counted in tokens to compute, and an engine that is slower than the others has more of it in effect (`slowness`). Cached prompt
//! tokens cost nothing. One that another engine has cached counts two to four times: for this sequence, and for those that wait behind it. So
//! requests follow their prefix until another engine has less to do, with that added. Then that engine computes the prefix too, so that no
//! prefix makes one engine a hot spot.
//!
//! INVARIANT: the chosen engine has at most as much work as any other open one with four times the whole prompt added, both times their
//! slowness.

use std::collections::HashMap;

use penstock_scheduler::SequenceId;

use super::engine_set::MAX_ENGINES;
use super::prefix::PrefixIndex;
use super::slowness::Slowness;
use crate::sequence::{Image, SequenceRequest};

/// New tokens of a sequence, before any has ended.
const FIRST_MEAN_NEW_TOKENS: f64 = 128.0;
/// Tokens that an engine could compute in the time that it takes to encode an image.
const IMAGE_TOKENS: u64 = 2048;
/// Images of each engine that are remembered. An engine keeps fewer of them.
const MAX_IMAGES: usize = 1024;
/// What a prompt token counts that an engine would compute although another one has it cached, when no sequence waits. At 1 each request goes
/// where it would begin first, and what it computes again delays the others (ADR 112).
const MIN_COPY_WEIGHT: f64 = 2.0;
/// Added for each sequence that waits for its first token, in the mean of the open engines: as many will probably wait behind this one, by
/// Little's law (ADR 124).
const WEIGHT_PER_WAITING: f64 = 0.25;
/// Bounds the imbalance, because the number of waiting sequences has no bound.
const MAX_COPY_WEIGHT: f64 = 4.0;
/// How much one ended sequence changes the mean.
const MEAN_WEIGHT: f64 = 0.02;

/// The KV cache of an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    pub(super) block_tokens: usize,
    pub(super) num_blocks: usize,
    pub(super) prefix_caching: bool,
}

/// What went to an engine's number since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Routed {
    /// What the engine has to compute at this moment, with the tokens that its sequences are expected to generate.
    pub num_work_tokens: u64,
    /// Sequences that were routed there when they arrived.
    pub num_sequences: u64,
    /// Sequences that left the engine for another one.
    pub num_handovers: u64,
    /// Tokens of the prompts of the routed sequences.
    pub num_prompt_tokens: u64,
    /// Those of them that the engine computed before, as far as is known here.
    pub num_cached_tokens: u64,
}

pub(super) struct Routing {
    /// By number.
    routed: Vec<Routed>,
    slowness: Slowness,
    places: HashMap<SequenceId, Place>,
    /// Places with prompt tokens.
    num_waiting: usize,
    prefixes: PrefixIndex,
    /// Each image is a prefix of its own.
    images: PrefixIndex,
    cache: CacheShape,
    num_engines: usize,
    mean_new_tokens: f64,
}

/// Where a sequence is, and what it adds to the work there.
#[derive(Debug)]
struct Place {
    engine: usize,
    /// 0 once they are computed.
    num_prompt_tokens: u64,
    /// Expected.
    num_new_tokens: u64,
}

impl Routing {
    pub(super) fn new(cache: CacheShape) -> Self {
        Self {
            routed: Vec::new(),
            slowness: Slowness::default(),
            places: HashMap::new(),
            num_waiting: 0,
            prefixes: PrefixIndex::new(cache.block_tokens),
            images: PrefixIndex::new(1),
            cache,
            num_engines: 0,
            mean_new_tokens: FIRST_MEAN_NEW_TOKENS,
        }
    }

    pub(super) fn add_engine(&mut self, engine: usize) {
        self.routed.resize(self.routed.len().max(engine + 1), Routed::default());
        self.set_num_engines(self.num_engines + 1);
    }

    /// The engine has no sequences any more. Its number may be used again.
    pub(super) fn remove_engine(&mut self, engine: usize) {
        self.forget_prefixes(engine);
        self.slowness.forget(engine);
        self.set_num_engines(self.num_engines - 1);
    }

    fn set_num_engines(&mut self, num_engines: usize) {
        self.num_engines = num_engines;
        self.prefixes.set_max_blocks(num_engines * self.cache.num_blocks);
        self.images.set_max_blocks(num_engines * MAX_IMAGES);
    }

    /// Open sequences of the engine.
    pub(super) fn num_sequences(&self, engine: usize) -> usize {
        self.places.values().filter(|place| place.engine == engine).count()
    }

    #[cfg(test)]
    pub(super) fn num_remembered_blocks(&self) -> usize {
        self.prefixes.num_blocks()
    }

    /// By number.
    pub(super) fn routed(&self) -> &[Routed] {
        &self.routed
    }

    /// For each engine, the mean seconds between two tokens of a sequence there, if known.
    pub(super) fn observe_speed(&mut self, seconds_per_token: &[(usize, Option<f64>)]) {
        self.slowness.observe(seconds_per_token);
    }

    /// Chooses among the engines that are open. Engines that have the sequence's images go first: another one would encode them
    /// within a step.
    pub(super) fn place(&mut self, id: SequenceId, request: &SequenceRequest, open: &[usize]) -> usize {
        let prompt = &request.prompt_token_ids;
        let blocks = match self.cache.prefix_caching {
            true => self.prefixes.blocks(prompt, request.cache_salt, &request.content_salts),
            false => Vec::new(),
        };
        let num_cached = self.prefixes.num_tokens(&blocks);
        let num_missing = self.num_missing_images(request.images.iter().map(|span| &span.image));
        let most_cached = open.iter().map(|engine| num_cached[*engine]).max().unwrap_or(0);
        let copy_weight = self.copy_weight(open.len());
        let engine = self.cheapest(open, |engine| {
            let num_copied = most_cached - num_cached[engine];
            let num_new = prompt.len() as u64 - most_cached;
            (num_missing[engine], num_new as f64 + copy_weight * num_copied as f64)
        });
        self.prefixes.insert(&blocks, engine);
        let images: Vec<_> = request.images.iter().map(|span| image_key(&span.image)).collect();
        self.images.insert(&images, engine);
        let place = Place {
            engine,
            num_prompt_tokens: prompt.len() as u64 - num_cached[engine],
            num_new_tokens: u64::from(request.max_new_tokens).min(self.mean_new_tokens as u64),
        };
        let routed = &mut self.routed[engine];
        routed.num_work_tokens += place.num_tokens();
        routed.num_sequences += 1;
        routed.num_prompt_tokens += prompt.len() as u64;
        routed.num_cached_tokens += num_cached[engine];
        self.num_waiting += usize::from(place.is_waiting());
        self.places.insert(id, place);
        engine
    }

    /// What a prompt token counts that another engine has cached: the more sequences wait, the more of them it delays.
    fn copy_weight(&self, num_open: usize) -> f64 {
        let num_waiting_per_engine = self.num_waiting as f64 / num_open.max(1) as f64;
        (MIN_COPY_WEIGHT + WEIGHT_PER_WAITING * num_waiting_per_engine).min(MAX_COPY_WEIGHT)
    }

    /// The engine of `open` with the least to do. `cost` is what goes before any work, and the tokens that are added to the work.
    fn cheapest(&self, open: &[usize], cost: impl Fn(usize) -> (u64, f64)) -> usize {
        let seconds = |engine: usize, num_tokens: f64| {
            (self.routed[engine].num_work_tokens as f64 + num_tokens) * self.slowness.of(engine)
        };
        let rank = |engine: &usize| {
            let (first, num_tokens) = cost(*engine);
            (first, seconds(*engine, num_tokens))
        };
        let by_rank = |one: &usize, other: &usize| {
            let (one, other) = (rank(one), rank(other));
            one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
        };
        open.iter().copied().min_by(by_rank).unwrap_or(0)
    }

    /// Chooses an engine to encode images. Returns it with the work that this adds to it until `end_encoding`.
    pub(super) fn begin_encoding(&mut self, images: &[Image], open: &[usize]) -> (usize, u64) {
        let num_missing = self.num_missing_images(images.iter());
        let engine = self.cheapest(open, |engine| (0, (IMAGE_TOKENS * num_missing[engine]) as f64));
        self.images.insert(&images.iter().map(image_key).collect::<Vec<_>>(), engine);
        let num_tokens = IMAGE_TOKENS * num_missing[engine];
        self.routed[engine].num_work_tokens += num_tokens;
        (engine, num_tokens)
    }

    pub(super) fn end_encoding(&mut self, engine: usize, num_tokens: u64) {
        self.routed[engine].num_work_tokens -= num_tokens;
    }

    /// For each engine, how many of the images it has not encoded.
    fn num_missing_images<'a>(&self, images: impl Iterator<Item = &'a Image>) -> [u64; MAX_ENGINES] {
        let mut num_missing = [0; MAX_ENGINES];
        for image in images {
            let found = self.images.num_tokens(&[image_key(image)]);
            num_missing.iter_mut().zip(found).for_each(|(num_missing, found)| *num_missing += 1 - found);
        }
        num_missing
    }

    /// The engine has lost its cache.
    pub(super) fn forget_prefixes(&mut self, engine: usize) {
        self.prefixes.forget(engine);
        self.images.forget(engine);
    }

    /// Chooses another engine for a sequence. `None`: none is open.
    pub(super) fn replace(&mut self, id: SequenceId, open: &[usize]) -> Option<usize> {
        let engine = (!open.is_empty()).then(|| self.cheapest(open, |_| (0, 0.0)))?;
        // It is missing if its stream has just been dropped.
        if let Some(place) = self.places.get_mut(&id) {
            self.routed[place.engine].num_work_tokens -= place.num_tokens();
            self.routed[place.engine].num_handovers += 1;
            self.routed[engine].num_work_tokens += place.num_tokens();
            place.engine = engine;
        }
        Some(engine)
    }

    /// The first token of a sequence has arrived.
    pub(super) fn prompt_computed(&mut self, id: SequenceId) {
        if let Some(place) = self.places.get_mut(&id) {
            self.num_waiting -= usize::from(place.is_waiting());
            self.routed[place.engine].num_work_tokens -= std::mem::take(&mut place.num_prompt_tokens);
        }
    }

    /// A sequence has ended, with this many tokens; `None`: it was aborted or failed, which says nothing about the length of others.
    pub(super) fn end(&mut self, id: SequenceId, num_new_tokens: Option<u64>) {
        if let Some(place) = self.places.remove(&id) {
            self.num_waiting -= usize::from(place.is_waiting());
            self.routed[place.engine].num_work_tokens -= place.num_tokens();
            if let Some(num) = num_new_tokens {
                self.mean_new_tokens += MEAN_WEIGHT * (num as f64 - self.mean_new_tokens);
            }
        }
    }
}

/// The first bytes of the hash. Two images with the same ones only make a choice worse.
fn image_key(image: &Image) -> u64 {
    image.hash().iter().take(8).fold(0, |key, byte| key << 8 | u64::from(*byte))
}

impl Place {
    fn is_waiting(&self) -> bool {
        self.num_prompt_tokens > 0
    }

    fn num_tokens(&self) -> u64 {
        self.num_prompt_tokens + self.num_new_tokens
    }
}

#[cfg(test)]
pub(super) mod tests {
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
            timeline: None,
        }
    }

    fn place(routing: &mut Routing, number: u32, num_shared: u32) -> usize {
        let all: Vec<_> = (0..routing.routed.len()).collect();
        routing.place(SequenceId(u64::from(number)), &request(number, num_shared), &all)
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
            routing.place(SequenceId(number.into()), &with_image(request(number, 0), &images[0]), &[0, 1]);
        }
        assert_eq!(routing.begin_encoding(&images[..1], &[0, 1]), (1, IMAGE_TOKENS), "a second home");
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
        assert_eq!(routing.replace(SequenceId(1), &[1]), Some(1));
        let [first, second] = routing.routed() else { panic!() };
        let prompt_tokens = u64::from(64 * BLOCK_TOKENS);
        assert_eq!((first.num_sequences, first.num_handovers, second.num_sequences), (2, 1, 0));
        assert_eq!(
            (first.num_prompt_tokens, first.num_cached_tokens),
            (2 * prompt_tokens, 60 * u64::from(BLOCK_TOKENS))
        );
        assert_eq!((first.num_work_tokens, second.num_work_tokens), (100, 100 + 4 * u64::from(BLOCK_TOKENS)));
    }

    #[test]
    fn the_number_of_an_engine_that_left_can_be_used_again() {
        let mut routing = routing(2);
        place(&mut routing, 0, 60);
        routing.replace(SequenceId(0), &[1]);
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
                routing.replace(id, &[1 - engine]);
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
        assert_eq!(routing.replace(SequenceId(0), &[1, 2]), Some(1));
        assert_eq!(routing.replace(SequenceId(3), &[1, 2]), Some(2));
        assert_eq!(routing.replace(SequenceId(3), &[]), None);
        routing.forget_prefixes(0);
        let again = routing.prefixes.blocks(&request(0, 0).prompt_token_ids, None, &[]);
        assert_eq!(routing.prefixes.num_tokens(&again)[0], 0);
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
}
