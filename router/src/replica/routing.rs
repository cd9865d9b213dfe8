//! Chooses an engine for each sequence: the one where it would finish its prompt first.
//!
//! Work is counted in tokens to compute, and an engine that is slower than the others has more of it in effect (`slowness`). Cached prompt
//! tokens cost nothing. One that another engine has cached counts two to four times: for this sequence, and for those that wait behind it. So
//! requests follow their prefix until another engine has less to do, with that added. Then that engine computes the prefix too, so that no
//! prefix makes one engine a hot spot. The same goes for images, each of which counts as `IMAGE_TOKENS`.
//!
//! INVARIANT: the chosen engine has at most as much work as any other open one with four times the whole prompt and its images added, both
//! times their slowness.

#[cfg(test)]
pub(super) mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use penstock_scheduler::SequenceId;

use super::prefix::PrefixIndex;
use super::slowness::Slowness;
use crate::generator::{MAX_ENGINES, Routed};
use crate::sequence::{Image, SequenceRequest};

/// New tokens of a sequence, before any has ended.
const FIRST_MEAN_NEW_TOKENS: f64 = 128.0;
/// Tokens that an engine could compute in the time that it takes to encode an image.
const IMAGE_TOKENS: u64 = 2048;
/// Images of each engine that are remembered. An engine keeps fewer of them.
const MAX_IMAGES: usize = 1024;
/// What a prompt token counts that an engine would compute although another one has it cached, when no sequence waits. At 1 each request goes
/// where it would begin first, and what it computes again delays the others (docs/adr/replicas-and-routing.md).
const MIN_COPY_WEIGHT: f64 = 2.0;
/// Added for each sequence that waits for its first token, in the mean of the open engines: as many will probably wait behind this one, by
/// Little's law.
const WEIGHT_PER_WAITING: f64 = 0.25;
/// Bounds the imbalance, because the number of waiting sequences has no bound.
const MAX_COPY_WEIGHT: f64 = 4.0;
/// How much one ended sequence changes the mean.
const MEAN_WEIGHT: f64 = 0.02;

/// The KV cache of an engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    pub(super) block_tokens: usize,
    /// Blocks of the pool, and slots beside it.
    pub(super) num_blocks: usize,
    pub(super) prefix_caching: bool,
}

pub(super) struct Routing {
    /// By number.
    routed: Vec<Routed>,
    slowness: Slowness,
    places: HashMap<SequenceId, RoutedSequence>,
    /// Sequences that wait for the first token from their engine.
    num_waiting: usize,
    prefixes: PrefixIndex,
    /// Each image is a prefix of its own.
    images: PrefixIndex,
    cache: CacheShape,
    num_engines: usize,
    mean_new_tokens: f64,
}

/// The engine of a sequence, and what the sequence adds to its work.
#[derive(Debug)]
struct RoutedSequence {
    engine: usize,
    /// For the first token from this engine.
    is_waiting: Arc<AtomicBool>,
    /// 0 once they are computed.
    num_prompt_tokens: u64,
    /// Expected.
    num_new_tokens: u64,
}

/// An engine for a sequence.
struct Choice {
    engine: usize,
    /// The sequence's blocks, for the prefix index.
    blocks: Vec<u64>,
    /// Tokens that the engine has to have in its cache before the next token: the prompt, and what was generated elsewhere.
    num_tokens: u64,
    /// Prompt tokens that the engine has in its cache.
    num_cached_tokens: u64,
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

    /// Chooses among the engines that are open. One that lacks an image of the sequence would encode it within a step.
    pub(super) fn place(&mut self, id: SequenceId, request: &SequenceRequest, open: &[usize]) -> usize {
        let choice = self.choose(request, open);
        let routed = &mut self.routed[choice.engine];
        routed.num_sequences += 1;
        routed.num_prompt_tokens += choice.num_tokens;
        routed.num_cached_tokens += choice.num_cached_tokens;
        let num_new_tokens = u64::from(request.max_new_tokens).min(self.mean_new_tokens as u64);
        self.add(id, request, choice, num_new_tokens, Arc::default())
    }

    /// Whether the sequence waits for the first token from its engine. Clones stay up to date.
    pub(super) fn is_waiting(&self, id: SequenceId) -> Arc<AtomicBool> {
        self.places.get(&id).map(|place| Arc::clone(&place.is_waiting)).unwrap_or_default()
    }

    fn choose(&self, request: &SequenceRequest, open: &[usize]) -> Choice {
        let tokens: Cow<'_, [u32]> = match &request.generated_token_ids[..] {
            [] => Cow::Borrowed(&request.prompt_token_ids),
            generated => [&request.prompt_token_ids, generated].concat().into(),
        };
        let blocks = match self.cache.prefix_caching {
            true => self.prefixes.blocks(&tokens, request.cache_salt, &request.content_salts),
            false => Vec::new(),
        };
        let num_tokens = tokens.len() as u64;
        let num_cached = self.prefixes.num_tokens(&blocks);
        let num_missing = self.num_missing_images(request.images.iter().map(|span| &span.image));
        let most_cached = open.iter().map(|engine| num_cached[*engine]).max().unwrap_or(0);
        let fewest_missing = open.iter().map(|engine| num_missing[*engine]).min().unwrap_or(0);
        let num_new = num_tokens - most_cached + IMAGE_TOKENS * fewest_missing;
        let copy_weight = self.copy_weight(open.len());
        let engine = self.cheapest(open, |engine| {
            let num_images = num_missing[engine] - fewest_missing;
            let num_copied = most_cached - num_cached[engine] + IMAGE_TOKENS * num_images;
            num_new as f64 + copy_weight * num_copied as f64
        });
        Choice { engine, blocks, num_tokens, num_cached_tokens: num_cached[engine] }
    }

    /// The sequence is on its way to the chosen engine, which computes all its tokens.
    fn add(
        &mut self,
        id: SequenceId,
        request: &SequenceRequest,
        choice: Choice,
        num_new_tokens: u64,
        is_waiting: Arc<AtomicBool>,
    ) -> usize {
        let Choice { engine, blocks, num_tokens, num_cached_tokens } = choice;
        self.prefixes.insert(&blocks, engine);
        let images: Vec<_> = request.images.iter().map(|span| image_key(&span.image)).collect();
        self.images.insert(&images, engine);
        is_waiting.store(true, Ordering::Relaxed);
        let place =
            RoutedSequence { engine, is_waiting, num_prompt_tokens: num_tokens - num_cached_tokens, num_new_tokens };
        self.routed[engine].num_work_tokens += place.num_tokens();
        self.num_waiting += 1;
        self.places.insert(id, place);
        engine
    }

    /// Takes a sequence from the work of its engine.
    fn remove(&mut self, id: SequenceId) -> Option<RoutedSequence> {
        let place = self.places.remove(&id)?;
        self.num_waiting -= usize::from(place.is_waiting.load(Ordering::Relaxed));
        self.routed[place.engine].num_work_tokens -= place.num_tokens();
        Some(place)
    }

    /// What a prompt token counts that another engine has cached, as does each of the `IMAGE_TOKENS` of an image that it has encoded: the more
    /// sequences wait, the more of them it delays.
    fn copy_weight(&self, num_open: usize) -> f64 {
        let num_waiting_per_engine = self.num_waiting as f64 / num_open.max(1) as f64;
        (MIN_COPY_WEIGHT + WEIGHT_PER_WAITING * num_waiting_per_engine).min(MAX_COPY_WEIGHT)
    }

    /// The engine of `open` with the least to do. `num_more` is the tokens that are added to its work.
    fn cheapest(&self, open: &[usize], num_more: impl Fn(usize) -> f64) -> usize {
        let seconds =
            |engine: usize| (self.routed[engine].num_work_tokens as f64 + num_more(engine)) * self.slowness.of(engine);
        let by_seconds = |one: &usize, other: &usize| seconds(*one).total_cmp(&seconds(*other));
        open.iter().copied().min_by(by_seconds).unwrap_or(0)
    }

    /// Chooses an engine to encode images. Returns it with the work that this adds to it until `end_encoding`.
    pub(super) fn begin_encoding(&mut self, images: &[Image], open: &[usize]) -> (usize, u64) {
        let num_missing = self.num_missing_images(images.iter());
        let engine = self.cheapest(open, |engine| (IMAGE_TOKENS * num_missing[engine]) as f64);
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

    /// Chooses another engine for a sequence, which computes its tokens again. `None`: none is open.
    pub(super) fn replace(&mut self, id: SequenceId, request: &SequenceRequest, open: &[usize]) -> Option<usize> {
        if open.is_empty() {
            return None;
        }
        let left = self.remove(id);
        let choice = self.choose(request, open);
        // It is missing if its stream has just been dropped.
        let Some(left) = left else { return Some(choice.engine) };
        self.routed[left.engine].num_handovers += 1;
        Some(self.add(id, request, choice, left.num_new_tokens, left.is_waiting))
    }

    /// The first token of a sequence from its engine has arrived.
    pub(super) fn prompt_computed(&mut self, id: SequenceId) {
        if let Some(place) = self.places.get_mut(&id) {
            self.num_waiting -= usize::from(place.is_waiting.swap(false, Ordering::Relaxed));
            self.routed[place.engine].num_work_tokens -= std::mem::take(&mut place.num_prompt_tokens);
        }
    }

    /// A sequence has ended, with this many tokens; `None`: it was aborted or failed, which says nothing about the length of others.
    pub(super) fn end(&mut self, id: SequenceId, num_new_tokens: Option<u64>) {
        if self.remove(id).is_some()
            && let Some(num) = num_new_tokens
        {
            self.mean_new_tokens += MEAN_WEIGHT * (num as f64 - self.mean_new_tokens);
        }
    }
}

/// The first bytes of the hash. Two images with the same ones only make a choice worse.
fn image_key(image: &Image) -> u64 {
    image.hash().iter().take(8).fold(0, |key, byte| key << 8 | u64::from(*byte))
}

impl RoutedSequence {
    fn num_tokens(&self) -> u64 {
        self.num_prompt_tokens + self.num_new_tokens
    }
}
