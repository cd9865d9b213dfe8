//! The scheduler: ties queue, residents, steps in flight and cache together. Planning starts in `step.rs`, results in
//! `apply.rs`.
//!
//! INVARIANT: every known sequence is in exactly one state:
//! - ready: queued, the worker does not know it (`queue.rs`);
//! - blocked: queued, and waiting for a prefix that another sequence is computing (`queue.rs`);
//! - awaiting image room: queued, and waiting for room that the images of running sequences take (`queue.rs`);
//! - running: the worker knows it and it will be advanced further (`resident.rs`);
//! - finishing: the worker knows it and it awaits the result of its last step (`resident.rs`).

mod admission;
mod apply;
mod audit;
mod failure;
mod pipeline;
mod plan_builder;
mod prefill;
mod restart;
mod speculate;
mod step;
#[cfg(test)]
mod tests;
mod timing;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::cache::Cache;
use crate::cost::CostModel;
use crate::error::SubmitError;
use crate::image::ImageRoom;
use crate::in_flight::InFlightSteps;
use crate::layout::BlockLayout;
use crate::plan::{BlockHash, Limits, SequenceId, Stats, Submission, TokenId};
use crate::precedence::Precedence;
use crate::prefix::Root;
use crate::queue::Queue;
use crate::resident::Residents;
use crate::sequence::Sequence;
use crate::speculation::DraftingCost;

/// The state machine that plans steps. See the crate's documentation for the order of calls.
pub struct Scheduler {
    limits: Limits,
    /// All known sequences.
    sequences: FxHashMap<SequenceId, Sequence>,
    queue: Queue,
    /// With snapshots: sequences that were submitted since the last plan.
    arrivals: Vec<SequenceId>,
    residents: Residents,
    in_flight: InFlightSteps,
    cache: Cache,
    image_room: ImageRoom,
    cost: CostModel,
    drafting_cost: DraftingCost,
    /// While set, no other sequence advances.
    quarantined: Option<SequenceId>,
    num_submissions: u64,
    num_preemptions: u64,
    num_finished_steps: u64,
}

impl Scheduler {
    /// A scheduler without sequences. Limits that must be at least 1 are raised to 1. With a pool of 0 blocks every
    /// submission is rejected.
    pub fn new(limits: Limits) -> Self {
        Self::with_hash(limits, hash_block)
    }

    /// A scheduler whose prefix cache uses another hash. For tests of collisions.
    pub fn with_hash(limits: Limits, hash: BlockHash) -> Self {
        let limits = Limits {
            max_step_tokens: limits.max_step_tokens.max(1),
            max_step_sequences: limits.max_step_sequences.max(1),
            block_tokens: limits.block_tokens.max(1),
            max_steps_in_flight: limits.max_steps_in_flight.max(1),
            num_stages: limits.num_stages.max(1),
            window_tokens: limits.window_tokens.map(|window| window.max(1)),
            snapshot_reach_tokens: limits.snapshot_reach_tokens.max(1),
            max_draft_tokens: if limits.has_room_for_drafts() { limits.max_draft_tokens } else { 0 },
            ..limits
        };
        let layout = BlockLayout { block_tokens: limits.block_tokens, window_tokens: limits.window_tokens };
        Self {
            limits,
            sequences: FxHashMap::default(),
            queue: Queue::default(),
            arrivals: Vec::new(),
            residents: Residents::default(),
            in_flight: InFlightSteps::default(),
            cache: Cache::new(&limits, layout, hash),
            image_room: ImageRoom::new(limits.max_image_bytes),
            cost: CostModel::default(),
            drafting_cost: DraftingCost::default(),
            quarantined: None,
            num_submissions: 0,
            num_preemptions: 0,
            num_finished_steps: 0,
        }
    }

    /// Queues a sequence. It ends with exactly one terminal event, unless it is aborted.
    ///
    /// `arrived_at` is a time on any monotonic clock; `plan` uses the same one. It decides, together with the priority,
    /// when the sequence is admitted.
    pub fn submit(&mut self, mut submission: Submission, arrived_at: Duration) -> Result<(), SubmitError> {
        if self.limits.whole_prompts {
            submission.whole_spans = std::iter::once(0..submission.prompt_token_ids.len() as u32).collect();
        }
        self.check(&submission)?;
        let Submission { id, priority, .. } = submission;
        let precedence = Precedence::new(priority, self.limits.priority_ageing, arrived_at, self.num_submissions);
        self.num_submissions += 1;
        let (root, layout) = (self.root(&submission), self.layout(&submission));
        self.queue.insert(precedence, id);
        if self.limits.num_snapshots > 0 {
            self.arrivals.push(id);
        }
        self.sequences.insert(id, Sequence::new(submission, precedence, root, layout, arrived_at));
        Ok(())
    }

    /// The decoder attends to a whole source, whatever the window.
    fn layout(&self, submission: &Submission) -> BlockLayout {
        let window_tokens = self.limits.window_tokens.filter(|_| submission.num_source_tokens == 0);
        BlockLayout { block_tokens: self.limits.block_tokens, window_tokens }
    }

    fn root(&self, submission: &Submission) -> Option<Root> {
        let has_states = self.limits.num_state_slots > 0;
        if submission.num_source_tokens > 0 || has_states && self.limits.num_snapshots == 0 {
            // The content of the source's blocks is not a function of the ids before them. States are not in blocks.
            None
        } else if self.limits.prefix_caching {
            Some(Root::Cache { salt: submission.cache_salt })
        } else {
            submission.group.map(Root::Group)
        }
    }

    fn check(&self, submission: &Submission) -> Result<(), SubmitError> {
        let num_prompt_tokens = submission.prompt_token_ids.len();
        let max_new_tokens = submission.max_new_tokens;
        if num_prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if max_new_tokens == 0 {
            return Err(SubmitError::NoNewTokens);
        }
        let num_generated_tokens = submission.generated_token_ids.len();
        if num_generated_tokens >= max_new_tokens as usize {
            return Err(SubmitError::Complete { num_generated_tokens, max_new_tokens });
        }
        let max_sequence_tokens = self.limits.max_sequence_tokens;
        let max_tokens = u32::try_from(num_prompt_tokens).ok().and_then(|n| n.checked_add(max_new_tokens));
        let Some(max_tokens) = max_tokens.filter(|n| *n <= max_sequence_tokens) else {
            return Err(SubmitError::TooLong { num_prompt_tokens, max_new_tokens, max_sequence_tokens });
        };
        // The last token is never computed.
        let num_required_blocks = self.layout(submission).num_required_blocks(max_tokens - 1) as u32;
        let num_blocks = self.limits.num_blocks;
        if num_required_blocks > num_blocks {
            return Err(SubmitError::TooManyBlocks { num_required_blocks, num_blocks });
        }
        let num_source_tokens = submission.num_source_tokens;
        let max_source_tokens = self.limits.max_step_tokens.min(num_prompt_tokens as u32);
        if num_source_tokens > max_source_tokens {
            return Err(SubmitError::SourceTooLong { num_source_tokens, max_source_tokens });
        }
        let max_step_tokens = self.limits.max_step_tokens;
        if self.limits.whole_prompts && num_prompt_tokens > max_step_tokens as usize {
            return Err(SubmitError::WholePrompt { num_prompt_tokens: num_prompt_tokens as u32, max_step_tokens });
        }
        let mut free_from = 0;
        for span in &*submission.whole_spans {
            let is_in_order = free_from <= span.start && span.start < span.end && span.end <= num_prompt_tokens as u32;
            if !is_in_order || span.end - span.start > max_step_tokens {
                return Err(SubmitError::WholeSpan { span: span.clone(), max_step_tokens });
            }
            free_from = span.end;
        }
        let num_bytes = submission.images.iter().map(|group| group.num_bytes).sum();
        let max_image_bytes = self.limits.max_image_bytes;
        if num_bytes > max_image_bytes {
            return Err(SubmitError::ImagesTooLarge { num_bytes, max_image_bytes });
        }
        if self.sequences.contains_key(&submission.id) {
            return Err(SubmitError::AlreadyKnown { id: submission.id });
        }
        Ok(())
    }

    /// Ends a sequence without an event. Returns false if the sequence is not known: it was never submitted, or has
    /// ended.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        self.end(id, true).is_some()
    }

    /// Ends a sequence without an event, so that another scheduler can continue it. Returns its tokens: the prompt, and the
    /// generated ones that have come back. `None`: the sequence is not known.
    pub fn withdraw(&mut self, id: SequenceId) -> Option<Vec<TokenId>> {
        self.end(id, true).map(Sequence::into_token_ids)
    }

    /// The current load.
    pub fn stats(&self) -> Stats {
        let pool = self.cache.pool();
        let (num_queried_tokens, num_hit_tokens) = self.cache.num_queried_and_hit_tokens();
        let [num_full_memory_slots, num_full_disk_slots] = self.cache.num_full_slots();
        Stats {
            num_queued: self.queue.len(),
            num_running: self.sequences.len() - self.queue.len(),
            num_blocks: pool.num_blocks() as usize,
            num_allocatable_blocks: pool.num_allocatable(),
            num_retiring_blocks: pool.num_retiring(),
            num_cached_blocks: pool.num_cached(),
            num_full_memory_slots,
            num_full_disk_slots,
            num_state_slots: self.limits.num_state_slots as usize,
            num_snapshots: self.limits.num_snapshots as usize,
            num_full_snapshots: self.cache.num_full_snapshots(),
            num_queried_tokens,
            num_hit_tokens,
            num_preemptions: self.num_preemptions,
            num_steps_in_flight: self.in_flight.len(),
            max_running_tokens: self.residents.max_tokens(),
            num_finished_steps: self.num_finished_steps,
        }
    }

    /// Forgets a sequence in any state. `None`: it is not known. `is_sound`: whether others may continue its states.
    fn end(&mut self, id: SequenceId, is_sound: bool) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&id)?;
        self.quarantined = self.quarantined.filter(|quarantined| *quarantined != id);
        if sequence.residency().is_some() {
            self.evict(&mut sequence, is_sound);
        } else {
            self.queue.remove(sequence.precedence(), id);
            self.wake_for_images();
        }
        Some(sequence)
    }

    /// Moves a sequence from the worker back to the queue. When it is admitted again, all tokens known by then are
    /// computed again, except what is cached. `is_sound`: whether its states may be continued.
    fn preempt(&mut self, id: SequenceId, is_sound: bool) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            self.num_preemptions += 1;
            self.evict(&mut sequence, is_sound);
            self.queue.insert(sequence.precedence(), id);
            self.sequences.insert(id, sequence);
        }
    }

    /// Ends a sequence's residency on the worker, and saves its states if they are sound.
    fn evict(&mut self, sequence: &mut Sequence, is_sound: bool) {
        let (id, is_finishing) = (sequence.id(), sequence.is_finishing());
        if let Some(residency) = sequence.residency().filter(|_| is_sound) {
            let (table, _, num_written_tokens) = sequence.states();
            self.cache.save_end((id, residency), table, num_written_tokens);
        }
        let table = sequence.end_residency();
        for node in self.cache.release(&table, id, is_finishing) {
            self.queue.unblock(node);
        }
        self.residents.evict(sequence.precedence(), id, sequence.max_tokens());
        if !sequence.images().is_empty() {
            self.image_room.release(sequence.images());
            self.wake_for_images();
        }
    }

    /// Makes the first sequence ready that waits for image room, if its images fit. Call it when room is returned, and when a
    /// sequence is no longer ready: it may be the one that the first waits behind. Those behind the first wait until it has
    /// started, so each call wakes one at most.
    fn wake_for_images(&mut self) {
        let first = self.queue.awaiting_image_room().values().next();
        if first.is_some_and(|id| self.image_room.fits(self.sequence(*id).images())) {
            self.queue.end_wait_for_images();
        }
    }

    fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).expect("invariant: a queued or resident sequence is known")
    }

    fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("invariant: a queued or resident sequence is known")
    }
}

fn hash_block(prefix_hash: u64, token_ids: &[TokenId]) -> u64 {
    let mut hasher = DefaultHasher::new();
    prefix_hash.hash(&mut hasher);
    token_ids.hash(&mut hasher);
    hasher.finish()
}
