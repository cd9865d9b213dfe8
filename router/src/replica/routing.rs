//! Chooses an engine for each sequence: the one where it would finish its prompt first.
//!
//! Work is counted in tokens to compute. What an engine has of the prompt is no work there, so requests follow their prefix until
//! another engine, prompt included, has less to do. Then that engine gets the prefix too: no prefix makes one engine a hot spot.

use std::collections::HashMap;

use penstock_scheduler::SequenceId;

use super::prefix::PrefixIndex;
use crate::sequence::{Image, SequenceRequest};

/// New tokens of a sequence, before any has ended.
const FIRST_MEAN_NEW_TOKENS: f64 = 128.0;
/// Tokens that an engine could compute in the time that it takes to encode an image.
const IMAGE_TOKENS: u64 = 2048;
/// Images of each engine that are remembered. An engine keeps fewer of them.
const MAX_IMAGES: usize = 1024;
/// How much one ended sequence changes the mean.
const MEAN_WEIGHT: f64 = 0.02;

/// The KV cache of an engine, and the blocks of all.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    pub(super) block_tokens: usize,
    pub(super) num_blocks: usize,
    pub(super) prefix_caching: bool,
}

pub(super) struct Routing {
    /// What each engine has to compute.
    num_tokens: Vec<u64>,
    places: HashMap<SequenceId, Place>,
    prefixes: PrefixIndex,
    /// Each image is a prefix of its own.
    images: PrefixIndex,
    prefix_caching: bool,
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
    pub(super) fn new(num_engines: usize, cache: CacheShape) -> Self {
        Self {
            num_tokens: vec![0; num_engines],
            places: HashMap::new(),
            prefixes: PrefixIndex::new(cache.block_tokens, cache.num_blocks),
            images: PrefixIndex::new(1, num_engines * MAX_IMAGES),
            prefix_caching: cache.prefix_caching,
            mean_new_tokens: FIRST_MEAN_NEW_TOKENS,
        }
    }

    /// Chooses among the engines that are open; among all of them if none is. Engines that have the sequence's images go first: another
    /// one would encode them within a step.
    pub(super) fn place(
        &mut self,
        id: SequenceId,
        request: &SequenceRequest,
        is_open: impl Fn(usize) -> bool,
    ) -> usize {
        let prompt = &request.prompt_token_ids;
        let blocks = match self.prefix_caching {
            true => self.prefixes.blocks(prompt, request.cache_salt, &request.content_salts),
            false => Vec::new(),
        };
        let num_cached = self.prefixes.num_tokens(&blocks, self.num_tokens.len());
        let work = |engine: usize| self.num_tokens[engine] + prompt.len() as u64 - num_cached[engine];
        let num_missing = self.num_missing_images(request.images.iter().map(|span| &span.image));
        let engines = self.open(is_open).into_iter();
        let engine = engines.min_by_key(|&engine| (num_missing[engine], work(engine))).unwrap_or(0);
        self.prefixes.insert(&blocks, engine);
        let images: Vec<_> = request.images.iter().map(|span| image_key(&span.image)).collect();
        self.images.insert(&images, engine);
        let place = Place {
            engine,
            num_prompt_tokens: prompt.len() as u64 - num_cached[engine],
            num_new_tokens: u64::from(request.max_new_tokens).min(self.mean_new_tokens as u64),
        };
        self.num_tokens[engine] += place.num_tokens();
        self.places.insert(id, place);
        engine
    }

    /// Chooses an engine to encode images. Returns it with the work that this adds to it until `end_encoding`.
    pub(super) fn begin_encoding(&mut self, images: &[Image], is_open: impl Fn(usize) -> bool) -> (usize, u64) {
        let num_missing = self.num_missing_images(images.iter());
        let work = |engine: usize| self.num_tokens[engine] + IMAGE_TOKENS * num_missing[engine];
        let engine = self.open(is_open).into_iter().min_by_key(|engine| work(*engine)).unwrap_or(0);
        self.images.insert(&images.iter().map(image_key).collect::<Vec<_>>(), engine);
        let num_tokens = IMAGE_TOKENS * num_missing[engine];
        self.num_tokens[engine] += num_tokens;
        (engine, num_tokens)
    }

    pub(super) fn end_encoding(&mut self, engine: usize, num_tokens: u64) {
        self.num_tokens[engine] -= num_tokens;
    }

    /// The engines that are open; all of them if none is.
    fn open(&self, is_open: impl Fn(usize) -> bool) -> Vec<usize> {
        let all = 0..self.num_tokens.len();
        let open: Vec<_> = all.clone().filter(|engine| is_open(*engine)).collect();
        if open.is_empty() { all.collect() } else { open }
    }

    /// For each engine, how many of the images it has not encoded.
    fn num_missing_images<'a>(&self, images: impl Iterator<Item = &'a Image>) -> Vec<u64> {
        let mut num_missing = vec![0; self.num_tokens.len()];
        for image in images {
            let found = self.images.num_tokens(&[image_key(image)], self.num_tokens.len());
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
    pub(super) fn replace(&mut self, id: SequenceId, is_open: impl Fn(usize) -> bool) -> Option<usize> {
        let open = (0..self.num_tokens.len()).filter(|engine| is_open(*engine));
        let engine = open.min_by_key(|engine| self.num_tokens[*engine])?;
        // It is missing if its stream has just been dropped.
        if let Some(place) = self.places.get_mut(&id) {
            self.num_tokens[place.engine] -= place.num_tokens();
            self.num_tokens[engine] += place.num_tokens();
            place.engine = engine;
        }
        Some(engine)
    }

    /// The first token of a sequence has arrived.
    pub(super) fn prompt_computed(&mut self, id: SequenceId) {
        if let Some(place) = self.places.get_mut(&id) {
            self.num_tokens[place.engine] -= std::mem::take(&mut place.num_prompt_tokens);
        }
    }

    /// A sequence has ended, with this many tokens; `None`: it was aborted or failed, which says nothing about the length of others.
    pub(super) fn end(&mut self, id: SequenceId, num_new_tokens: Option<u64>) {
        if let Some(place) = self.places.remove(&id) {
            self.num_tokens[place.engine] -= place.num_tokens();
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
    fn num_tokens(&self) -> u64 {
        self.num_prompt_tokens + self.num_new_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::{ImageSpan, greedy};

    const BLOCK_TOKENS: u32 = 16;

    fn routing(num_engines: usize) -> Routing {
        let cache =
            CacheShape { block_tokens: BLOCK_TOKENS as usize, num_blocks: num_engines * 4096, prefix_caching: true };
        Routing::new(num_engines, cache)
    }

    /// A prompt of 64 blocks that begins with `num_shared` blocks of every other such prompt.
    fn request(number: u32, num_shared: u32) -> SequenceRequest {
        let (shared, all) = (num_shared * BLOCK_TOKENS, 64 * BLOCK_TOKENS);
        SequenceRequest {
            prompt_token_ids: (0..shared).chain((shared..all).map(|token| 10_000 * (number + 1) + token)).collect(),
            generated_token_ids: Vec::new(),
            num_source_tokens: 0,
            max_new_tokens: 100,
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
        routing.place(SequenceId(u64::from(number)), &request(number, num_shared), |_| true)
    }

    fn with_image(request: SequenceRequest, image: &Image) -> SequenceRequest {
        let span = ImageSpan { image: image.clone(), offset: 0, num_tokens: 1, is_whole: false };
        SequenceRequest { images: [span].into(), ..request }
    }

    #[test]
    fn a_sequence_runs_where_its_images_were_encoded() {
        let mut routing = routing(3);
        let image = |number: u8| Image::new(vec![number]);
        let encode = |routing: &mut Routing, number| {
            let (engine, work) = routing.begin_encoding(&[image(number)], |_| true);
            routing.end_encoding(engine, work);
            engine
        };
        routing.place(SequenceId(1), &request(1, 0), |_| true);
        assert_eq!(encode(&mut routing, 1), 1, "the first engine has work");
        assert_eq!(routing.place(SequenceId(2), &with_image(request(2, 0), &image(1)), |_| true), 1);
        assert_eq!(encode(&mut routing, 1), 1, "it has the image");
        assert_eq!(routing.place(SequenceId(3), &with_image(request(3, 0), &image(1)), |engine| engine != 1), 2);
        routing.forget_prefixes(1);
        routing.end(SequenceId(1), Some(0));
        assert_eq!(encode(&mut routing, 1), 2, "it encoded the image in a step, and the second engine has lost it");
    }

    #[test]
    fn images_are_encoded_by_all_engines_when_one_has_much_to_do() {
        let mut routing = routing(2);
        let images: Vec<_> = (0..4).map(|number| Image::new(vec![number])).collect();
        let began: Vec<_> =
            images.iter().map(|image| routing.begin_encoding(std::slice::from_ref(image), |_| true)).collect();
        assert_eq!(began.iter().map(|(engine, _)| *engine).collect::<Vec<_>>(), [0, 1, 0, 1]);
        for number in 0..8 {
            routing.place(SequenceId(number.into()), &with_image(request(number, 0), &images[0]), |_| true);
        }
        assert_eq!(routing.begin_encoding(&images[..1], |_| true), (1, IMAGE_TOKENS), "a second home");
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
    fn only_open_engines_are_chosen_unless_none_is_open() {
        let mut routing = routing(3);
        for number in 0..9 {
            assert_eq!(routing.place(SequenceId(number), &request(number as u32, 0), |engine| engine == 2), 2);
        }
        assert_eq!(routing.place(SequenceId(100), &request(100, 0), |_| false), 0);
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
                routing.replace(id, |other| other != engine);
            }
            routing.end(id, Some(7));
            routing.end(id, Some(7));
        }
        assert_eq!((routing.num_tokens.as_slice(), routing.places.len()), (&[0, 0][..], 0));
        assert!((routing.mean_new_tokens - 7.0).abs() < 0.1);
    }

    #[test]
    fn a_sequence_moves_to_the_open_engine_with_the_least_work_and_the_lost_prefix_is_forgotten() {
        let mut routing = routing(3);
        for number in 0..4 {
            place(&mut routing, number, 0);
        }
        assert_eq!(routing.replace(SequenceId(0), |engine| engine != 0), Some(1));
        assert_eq!(routing.replace(SequenceId(3), |engine| engine != 0), Some(2));
        assert_eq!(routing.replace(SequenceId(3), |_| false), None);
        routing.forget_prefixes(0);
        let again = routing.prefixes.blocks(&request(0, 0).prompt_token_ids, None, &[]);
        assert_eq!(routing.prefixes.num_tokens(&again, 3)[0], 0);
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
