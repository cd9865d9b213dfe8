//! Keeps account of every plan, from the plans alone, and checks each one: ownership and sharing of blocks, run-ahead,
//! budgets, order, and that no decode is left out. The contents of the blocks are checked by `worker.rs`.

mod queue;

use std::collections::{HashMap, HashSet, VecDeque};

use penstock_scheduler::{
    Advance, BlockId, Limits, NewSequence, Plan, Save, SequenceId, SlotId, SnapshotId, Stats, StepResult, TokenId,
    Transfer,
};

use crate::model::Images;
use crate::submitted::{self, Order, Scope, State, Submitted, Visibility, max_depth};
use crate::tally::Tally;

pub type Live = HashMap<SequenceId, Submitted>;

pub struct Ledger {
    limits: Limits,
    /// Whether prompts are computed strictly in order of precedence.
    is_in_order: bool,
    entries: HashMap<SequenceId, Entry>,
    num_owners: HashMap<BlockId, usize>,
    /// For each block, the scope of the sequence that wrote it last: only that scope may share it.
    scopes: HashMap<BlockId, Scope>,
    /// For each slot with content, the scope of the block that it came from.
    slot_scopes: HashMap<SlotId, Scope>,
    /// What each snapshot that was saved is of.
    snapshots: HashMap<SnapshotId, Snapshot>,
    /// Blocks that were filled. While none of them is allocated again, no cached content is lost.
    filled: HashSet<BlockId>,
    /// Whether every snapshot can still be continued.
    keeps_content: bool,
    has_poor_hash: bool,
    /// Blocks that each step in flight writes, oldest step first.
    written: VecDeque<HashSet<BlockId>>,
    num_steps: u64,
    /// The only sequence that may advance.
    pub quarantined: Option<SequenceId>,
    /// The oldest step since the last plan in which a sequence has failed.
    failed_step: Option<u64>,
    num_hit_tokens: u64,
    num_queried_tokens: u64,
    /// Sequences that were preempted because of another one's failure, with the step of their start.
    pub voided: Vec<(SequenceId, u64)>,
    num_cached_blocks: usize,
    pub tally: Tally,
}

/// The prefix that a snapshot is of.
#[derive(Debug)]
struct Snapshot {
    scope: Scope,
    token_ids: Vec<TokenId>,
    images: Images,
}

/// What the worker will know of a sequence when the steps in flight are executed.
struct Entry {
    submission: usize,
    scope: Scope,
    /// The prompt and the answer that it has at the end.
    text: Vec<TokenId>,
    images: Images,
    start_step: u64,
    order: Order,
    num_known_tokens: u32,
    num_computed_tokens: u32,
    /// The last step that samples, while it is in flight.
    sampling_step: Option<u64>,
    /// Draft tokens that each step in flight may verify, oldest first. The two counts before include them all.
    drafts: VecDeque<(u64, u32)>,
    /// The most tokens that any plan could have computed: what its blocks hold.
    num_allocated_tokens: u32,
    max_tokens: u32,
    num_source_tokens: u32,
    visibility: Visibility,
    block_ids: Vec<BlockId>,
    /// Leading blocks that it has released.
    num_released: usize,
}

impl Entry {
    fn held(&self) -> &[BlockId] {
        &self.block_ids[self.num_released..]
    }

    fn num_drafts(&self) -> u32 {
        self.drafts.iter().map(|(_, num_drafts)| num_drafts).sum()
    }

    fn is_finishing(&self) -> bool {
        self.is_at_limit() && self.num_drafts() == 0
    }

    /// Whether it may be finishing: that depends on drafts in flight.
    fn is_at_limit(&self) -> bool {
        self.num_known_tokens == self.max_tokens
    }

    fn is_decoding(&self) -> bool {
        !self.is_at_limit() && self.num_known_tokens - self.num_computed_tokens == 1
    }
}

impl Ledger {
    /// `has_poor_hash`: not every block can be cached.
    pub fn new(limits: Limits, is_in_order: bool, has_poor_hash: bool) -> Self {
        Self {
            limits,
            is_in_order,
            entries: HashMap::new(),
            num_owners: HashMap::new(),
            scopes: HashMap::new(),
            slot_scopes: HashMap::new(),
            snapshots: HashMap::new(),
            filled: HashSet::new(),
            keeps_content: !has_poor_hash,
            has_poor_hash,
            written: VecDeque::new(),
            num_steps: 0,
            quarantined: None,
            failed_step: None,
            num_hit_tokens: 0,
            num_queried_tokens: 0,
            voided: Vec::new(),
            num_cached_blocks: 0,
            tally: Tally::default(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.num_owners.is_empty() && self.written.is_empty()
    }

    /// Forgets everything: the worker is lost.
    pub fn restart(&mut self) {
        self.entries.clear();
        self.num_owners.clear();
        self.scopes.clear();
        self.slot_scopes.clear();
        self.snapshots.clear();
        self.filled.clear();
        self.keeps_content = !self.has_poor_hash;
        self.written.clear();
        self.num_steps = 0;
        self.quarantined = None;
        self.failed_step = None;
        self.num_cached_blocks = 0;
    }

    pub fn state(&self, id: SequenceId) -> State {
        match self.entries.get(&id) {
            None => State::Queued,
            Some(entry) if entry.is_finishing() => State::Finishing,
            Some(entry) if entry.is_decoding() => State::Decoding,
            Some(_) => State::Prefilling,
        }
    }

    pub fn knows(&self, id: SequenceId) -> bool {
        self.entries.contains_key(&id)
    }

    pub fn retire(&mut self, result: &StepResult, failed: bool) {
        self.written.pop_front().expect("a step in flight");
        if failed {
            self.failed_step.get_or_insert(result.step);
            self.keeps_content = false;
        }
        for (id, entry) in &mut self.entries {
            entry.sampling_step = entry.sampling_step.filter(|step| *step != result.step);
            if entry.drafts.front().is_none_or(|(step, _)| *step != result.step) {
                continue;
            }
            let (_, most) = entry.drafts.pop_front().expect("just seen");
            let output = result.outputs.iter().find(|output| output.id == *id);
            // A sequence that has failed is freed next.
            let Some(token_ids) = output.and_then(|output| output.token_ids.as_ref()) else { continue };
            let num_right = token_ids.len() as u32 - 1;
            let num_lost = most - num_right;
            entry.num_known_tokens -= num_lost;
            entry.num_computed_tokens -= num_lost;
            self.tally.add("right drafts", u64::from(num_right));
            self.tally.add("drafts that were not right", u64::from(num_lost));
            self.tally.add("results that show that a last step is in flight", u64::from(entry.is_finishing()));
        }
    }

    /// `live`: the sequences that have not ended.
    pub fn enter(&mut self, plan: &Plan, live: &Live, stats: Stats) {
        self.num_steps += 1;
        assert_eq!(plan.step, self.num_steps, "step numbers are consecutive");
        assert!(
            !(plan.freed_sequence_ids.is_empty() && plan.advances.is_empty() && plan.transfers.is_empty()),
            "step {} frees no sequence, advances none and moves nothing",
            plan.step
        );
        let saved: HashSet<_> = plan.saves.iter().map(|save| save.snapshot).collect();
        assert_eq!(saved.len(), plan.saves.len(), "two saves to one snapshot");
        for save in &plan.saves {
            self.save(*save);
        }
        self.free(plan, live);
        self.failed_step = None;
        let decodes = self.decodes();
        self.written.push_back(HashSet::new());
        for transfer in &plan.transfers {
            self.transfer(*transfer);
        }
        let expected: Vec<_> = plan.new_sequences.iter().map(|start| self.longest_hit(&live[&start.id])).collect();
        for start in &plan.new_sequences {
            self.start(start, live);
        }
        match self.quarantined {
            Some(id) => assert!(
                plan.advances.iter().all(|advance| advance.id == id),
                "{id:?} is in quarantine, and another sequence advances"
            ),
            None if self.is_in_order => self.check_queue_order(plan, live),
            None => {}
        }
        self.check_decodes(plan, &decodes);
        let running = self.entries.iter().filter(|(_, entry)| self.is_in_order && !entry.is_finishing());
        let first = running.min_by_key(|(_, entry)| entry.order);
        let first = first.filter(|(_, entry)| !entry.is_at_limit() && !self.awaits_token(entry)).map(|(id, _)| *id);
        let advances = |id| plan.advances.iter().any(|advance| advance.id == id);
        assert!(first.is_none_or(|id| advances(id) || self.yields_to_source(id, live)), "{first:?} does not advance");
        for advance in &plan.advances {
            self.advance(advance, live);
        }
        self.check_budget(plan);
        if self.limits.num_state_slots > 0 {
            self.check_states(plan, &expected);
        }
        self.tally_sources(plan, live);
        for advance in &plan.advances {
            self.release_before_window(advance.id);
        }
        self.check_stats(stats, live);
        self.check_free(stats, live);
        self.tally.add("blocks evicted", self.num_cached_blocks.saturating_sub(stats.num_cached_blocks) as u64);
        self.num_cached_blocks = stats.num_cached_blocks;
        self.tally
            .add("chunks without a sample", plan.advances.iter().filter(|advance| !advance.sample).count() as u64);
        match self.written.len() {
            1 => self.tally.add("steps at depth 1", 1),
            2 => self.tally.add("steps at depth 2", 1),
            _ => self.tally.add("steps at depth 3 and more", 1),
        }
    }

    /// G2: a block that no live sequence holds is allocatable, as soon as the steps that write it are over.
    pub fn check_free(&self, stats: Stats, live: &Live) {
        let is_live = |id: &SequenceId, entry: &Entry| live.get(id).is_some_and(|it| it.submission == entry.submission);
        let alive = self.entries.iter().filter(|(id, entry)| is_live(id, entry));
        let mut busy: HashSet<_> = alive.flat_map(|(_, entry)| entry.held()).collect();
        busy.extend(self.written.iter().flatten());
        let num_unused = self.limits.num_blocks as usize - busy.len();
        assert!(
            stats.num_allocatable_blocks >= num_unused,
            "{num_unused} blocks are not in use, but fewer are allocatable: {stats:?}"
        );
    }

    fn free(&mut self, plan: &Plan, live: &Live) {
        let mut gone = Vec::new();
        for id in &plan.freed_sequence_ids {
            let entry = self.entries.remove(id).unwrap_or_else(|| panic!("{id:?} is freed but unknown to the worker"));
            entry.held().iter().for_each(|block_id| self.remove_owner(*block_id));
            if live.get(id).is_some_and(|submitted| submitted.submission == entry.submission) {
                gone.push((*id, entry));
            }
        }
        for (id, entry) in &self.entries {
            let is_live = live.get(id).is_some_and(|submitted| submitted.submission == entry.submission);
            assert!(is_live, "{id:?} has ended and is not freed by the next plan");
        }
        for (id, entry) in gone {
            let is_last = self.entries.values().all(|other| other.is_finishing() || other.order < entry.order);
            if self.quarantined.is_some() {
                assert_ne!(self.quarantined, Some(id), "the quarantined sequence was preempted");
            } else if is_last && !entry.is_finishing() {
                self.tally.add("preemptions", 1);
            } else {
                let can_be_reader = self.failed_step.is_some_and(|step| step < entry.start_step);
                assert!(
                    can_be_reader,
                    "{id:?} was preempted, and it is neither the last one nor a reader of a failed block"
                );
                self.voided.push((id, entry.start_step));
            }
        }
    }

    /// Checks one transfer: no sequence holds its block, no step in flight writes it, and slots are between their tiers.
    fn transfer(&mut self, transfer: Transfer) {
        let Limits { num_memory_slots, num_disk_slots, .. } = self.limits;
        let num_slots = num_memory_slots + num_disk_slots;
        match transfer {
            Transfer::Store { block_id, slot } => {
                self.check_movable(block_id);
                assert!(slot < num_slots);
                self.slot_scopes.insert(slot, self.scopes[&block_id]);
                self.tally.add("blocks offloaded", 1);
            }
            Transfer::Load { slot, block_id } => {
                self.check_movable(block_id);
                let scope = self.slot_scopes.remove(&slot).expect("a slot with content");
                self.scopes.insert(block_id, scope);
                self.written.back_mut().expect("this step").insert(block_id);
                let from_memory = slot < num_memory_slots;
                self.tally.add("blocks brought back from memory", u64::from(from_memory));
                self.tally.add("blocks brought back from disk", u64::from(!from_memory));
            }
            Transfer::Demote { from, to } => {
                assert!(from < num_memory_slots && (num_memory_slots..num_slots).contains(&to));
                let scope = self.slot_scopes.remove(&from).expect("a slot with content");
                self.slot_scopes.insert(to, scope);
                self.tally.add("blocks moved from memory to disk", 1);
            }
        }
    }

    /// Notes what a snapshot is of. The worker checks that the states are still there.
    fn save(&mut self, save: Save) {
        assert!(save.snapshot < self.limits.num_snapshots);
        assert_eq!(save.num_tokens % self.limits.block_tokens, 0);
        let entry = self.entries.get(&save.id).expect("only a known sequence is saved");
        let num_tokens = save.num_tokens as usize;
        assert!(0 < num_tokens && save.num_tokens <= entry.num_computed_tokens);
        let token_ids = entry.text.iter().take(num_tokens).copied().collect();
        let snapshot = Snapshot { scope: entry.scope, token_ids, images: entry.images.within(num_tokens) };
        let before = self.snapshots.insert(save.snapshot, snapshot);
        self.tally.add("snapshots saved", 1);
        self.tally.add("snapshots saved in the place of others", u64::from(before.is_some()));
    }

    /// The most tokens that a sequence can have computed when it starts, while no content is lost: those of the longest snapshot of
    /// its prefix.
    fn longest_hit(&self, submitted: &Submitted) -> u32 {
        let known = submitted.known();
        let is_prefix = |snapshot: &&Snapshot| {
            let num_tokens = snapshot.token_ids.len();
            num_tokens < known.len()
                && snapshot.scope == submitted.scope
                && snapshot.token_ids == known[..num_tokens]
                && snapshot.images.salts() == submitted.traits.images.within(num_tokens).salts()
        };
        let prefixes = self.snapshots.values().filter(|_| submitted.may_look_up()).filter(is_prefix);
        prefixes.map(|snapshot| snapshot.token_ids.len() as u32).max().unwrap_or(0)
    }

    /// State slots are enough for the sequences, and each sequence starts with a snapshot of its prefix: with the longest, unless
    /// content was lost. `expected`: the tokens of the longest.
    fn check_states(&mut self, plan: &Plan, expected: &[u32]) {
        assert!(self.entries.len() <= self.limits.num_state_slots as usize, "a sequence has no state slot");
        self.tally.add(
            "steps with all state slots in use",
            u64::from(self.entries.len() == self.limits.num_state_slots as usize),
        );
        let is_kept = self.limits.prefix_caching && self.limits.window_tokens.is_none();
        for (start, expected) in plan.new_sequences.iter().zip(expected) {
            let hit = start.num_computed_tokens;
            assert_eq!(start.snapshot.is_some(), hit > 0, "{:?} starts without the states of its tokens", start.id);
            assert!(hit <= *expected);
            if let Some(snapshot) = start.snapshot {
                assert_eq!(self.snapshots[&snapshot].token_ids, start.token_ids[..hit as usize]);
                self.tally.add("snapshots restored", 1);
            }
            if is_kept && self.keeps_content {
                assert_eq!(hit, *expected, "{:?} does not continue the longest snapshot", start.id);
                self.tally.add("longest snapshots continued", u64::from(hit > 0));
            }
        }
    }

    fn check_movable(&self, block_id: BlockId) {
        assert!(block_id < self.limits.num_blocks);
        assert!(!self.num_owners.contains_key(&block_id), "block {block_id} is moved while it is held");
        let is_written = self.written.iter().any(|written| written.contains(&block_id));
        assert!(!is_written, "block {block_id} is moved while a step in flight writes it");
    }

    fn remove_owner(&mut self, block_id: BlockId) {
        let num_owners = self.num_owners.get_mut(&block_id).expect("an owner");
        *num_owners -= 1;
        if *num_owners == 0 {
            self.num_owners.remove(&block_id);
        }
    }

    /// A sequence releases the blocks that it will not read again, even if all drafts in flight are wrong, unless it is
    /// finishing.
    fn release_before_window(&mut self, id: SequenceId) {
        let entry = self.entries.get_mut(&id).expect("a sequence that advances is on the worker");
        if entry.is_finishing() {
            return;
        }
        let num_certain_tokens = entry.num_computed_tokens - entry.num_drafts();
        let released = entry.num_released..entry.visibility.first_block(num_certain_tokens);
        entry.num_released = released.end;
        let max_drafts = self.limits.max_draft_tokens * self.limits.max_steps_in_flight;
        let most = entry.visibility.max_blocks(0, entry.num_allocated_tokens + 1)
            + max_drafts.div_ceil(self.limits.block_tokens) as usize;
        assert!(entry.held().len() <= most, "{id:?} holds {:?}, at most {most} blocks are needed", entry.held());
        let released = entry.block_ids[released].to_vec();
        self.tally.add("blocks released before a window", released.len() as u64);
        released.into_iter().for_each(|block_id| self.remove_owner(block_id));
    }

    /// Whether a queued source of higher precedence than `id` waits for a step that has room for it.
    fn yields_to_source(&self, id: SequenceId, live: &Live) -> bool {
        let is_ahead = |it: &Submitted| it.num_source_tokens > 0 && it.order < self.entries[&id].order;
        live.iter().any(|(other, it)| !self.knows(*other) && is_ahead(it))
    }

    fn tally_sources(&mut self, plan: &Plan, live: &Live) {
        for start in plan.new_sequences.iter().filter(|start| start.num_source_tokens > 0) {
            self.tally.add("sources", 1);
            self.tally.add("sources in a step with others", u64::from(plan.advances.len() > 1));
            self.tally.add("sources recomputed", u64::from(start.token_ids.len() > start.num_prompt_tokens as usize));
        }
        let num_tokens: u32 = plan.advances.iter().map(|advance| advance.num_tokens).sum();
        let is_waiting = |(id, it): &(&SequenceId, &Submitted)| {
            !self.entries.contains_key(id) && it.num_source_tokens > self.limits.max_step_tokens - num_tokens
        };
        let num_waiting = live.iter().filter(is_waiting).count();
        self.tally.add("sources that did not fit into a step", num_waiting as u64);
    }

    fn decodes(&self) -> Vec<SequenceId> {
        let mut decodes: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_decoding() && !self.awaits_token(entry))
            .map(|(id, entry)| (entry.order, *id))
            .collect();
        decodes.sort_unstable();
        if self.limits.num_stages > 1 {
            let num_decodes = self.entries.values().filter(|entry| entry.is_decoding()).count();
            decodes.truncate(num_decodes.div_ceil(self.limits.num_stages as usize));
        }
        decodes.into_iter().map(|(_, id)| id).collect()
    }

    /// Whether the sequence cannot advance before a result is back: of several stages, only the last one samples.
    fn awaits_token(&self, entry: &Entry) -> bool {
        self.limits.num_stages > 1 && entry.sampling_step.is_some()
    }

    fn start(&mut self, start: &NewSequence, live: &Live) {
        let submitted = &live[&start.id];
        assert_eq!(start.token_ids, submitted.known(), "a sequence starts with all its known tokens");
        assert_eq!(start.num_prompt_tokens as usize, submitted.prompt.len());
        assert_eq!(start.num_source_tokens, submitted.num_source_tokens);
        let num_released = submitted.visibility.first_block(start.num_computed_tokens);
        self.check_hit(start, num_released, submitted);
        for block_id in &start.block_ids[num_released..] {
            *self.num_owners.entry(*block_id).or_default() += 1;
        }
        let entry = Entry {
            submission: submitted.submission,
            scope: submitted.scope,
            text: [&submitted.prompt[..], &submitted.expected.0].concat(),
            images: submitted.traits.images,
            start_step: self.num_steps,
            order: submitted.order,
            num_known_tokens: start.token_ids.len() as u32,
            num_computed_tokens: start.num_computed_tokens,
            drafts: VecDeque::new(),
            num_allocated_tokens: start.num_computed_tokens,
            sampling_step: None,
            max_tokens: submitted.prompt.len() as u32 + submitted.max_new_tokens,
            num_source_tokens: submitted.num_source_tokens,
            visibility: submitted.visibility,
            num_released,
            block_ids: start.block_ids.clone(),
        };
        assert!(self.entries.insert(start.id, entry).is_none(), "{:?} starts twice", start.id);
    }

    fn check_hit(&mut self, start: &NewSequence, num_released: usize, submitted: &Submitted) {
        let id = start.id;
        assert_eq!(start.num_computed_tokens, start.block_ids.len() as u32 * self.limits.block_tokens);
        assert!(start.num_computed_tokens < start.token_ids.len() as u32, "{id:?} has nothing to sample from");
        if submitted.may_look_up() {
            self.num_queried_tokens += start.token_ids.len() as u64 - 1;
        } else {
            assert_eq!(start.num_computed_tokens, 0, "{id:?} must compute all tokens");
        }
        let num_hit_tokens = u64::from(start.num_computed_tokens);
        self.num_hit_tokens += num_hit_tokens;
        self.tally.add("hit tokens", num_hit_tokens);
        let images = submitted.traits.images.within(start.num_computed_tokens as usize);
        self.tally.add("hits with an image", u64::from(images != Images::default()));
        self.tally.add("hits of a window", u64::from(num_released > 0));
        if matches!(submitted.scope, Scope::Group(..)) {
            self.tally.add("hit tokens in groups", num_hit_tokens);
        }
        for block_id in &start.block_ids[num_released..] {
            assert_eq!(self.scopes[block_id], submitted.scope, "block {block_id} must not be shared with {id:?}");
            if matches!(submitted.scope, Scope::Group(..)) {
                assert!(self.num_owners.contains_key(block_id), "{id:?} shares a block without a holder");
            }
            let unwritten = self.written.iter().any(|written| written.contains(block_id));
            self.tally.add("blocks shared before they were written", u64::from(unwritten));
        }
    }

    fn check_decodes(&mut self, plan: &Plan, decodes: &[SequenceId]) {
        let first: Vec<_> = plan.advances.iter().take(decodes.len()).map(|advance| advance.id).collect();
        assert_eq!(first, decodes, "every decode advances in every step, before the prompts and in order");
        let is_pipeline = self.limits.num_stages > 1;
        self.tally.add("steps of disjoint decodes", u64::from(is_pipeline && !first.is_empty() && self.is_sampling()));
    }

    /// Whether a step in flight samples.
    fn is_sampling(&self) -> bool {
        self.entries.values().any(|entry| entry.sampling_step.is_some())
    }

    fn advance(&mut self, advance: &Advance, live: &Live) {
        let id = advance.id;
        let last_token_id = live[&id].known().last().copied().filter(|_| self.limits.num_stages > 1);
        assert_eq!(advance.last_token_id, last_token_id, "{id:?}: the stages learn another token than the last one");
        let block_tokens = self.limits.block_tokens;
        for block_id in &advance.new_block_ids {
            assert!(*block_id < self.limits.num_blocks);
            assert_eq!(self.num_owners.insert(*block_id, 1), None, "block {block_id} is allocated while it is held");
            let in_flight = self.written.iter().any(|written| written.contains(block_id));
            assert!(!in_flight, "block {block_id} is allocated while a step in flight writes it");
            self.keeps_content &= !self.filled.contains(block_id);
            self.scopes.insert(*block_id, live[&id].scope);
        }
        let entry = self.entries.get_mut(&id).unwrap_or_else(|| panic!("{id:?} advances but is unknown to the worker"));
        assert!(!entry.is_at_limit(), "{id:?} advances past its last token");
        let awaits_token = self.limits.num_stages > 1 && entry.sampling_step.is_some();
        assert!(!awaits_token, "{id:?} advances before its last token is back");
        entry.sampling_step = entry.sampling_step.or(advance.sample.then_some(self.num_steps));
        assert!(advance.num_tokens >= 1);
        let is_whole = entry.num_computed_tokens > 0 || advance.num_tokens >= entry.num_source_tokens;
        assert!(is_whole, "{id:?}: its source is split");
        let first_written = (entry.num_computed_tokens - entry.num_drafts()) / block_tokens;
        entry.num_computed_tokens += advance.num_tokens;
        assert!(entry.num_computed_tokens <= entry.num_known_tokens, "{id:?} computes unknown tokens");
        assert_eq!(advance.sample, entry.num_computed_tokens == entry.num_known_tokens);
        entry.num_known_tokens += u32::from(advance.sample);
        let num_drafts = advance.num_draft_tokens;
        assert!(num_drafts == 0 || advance.sample && advance.num_tokens == 1, "{id:?} drafts without a sample");
        assert!(num_drafts <= self.limits.max_draft_tokens);
        if num_drafts > 0 && self.limits.drafts_only_forced {
            assert!(submitted::has_grammar(id), "nothing forces a token of {id:?}");
            self.tally.add("forced drafts", 1);
        }
        entry.num_computed_tokens += num_drafts;
        entry.num_known_tokens += num_drafts;
        assert!(entry.num_known_tokens <= entry.max_tokens, "{id:?} may draft past its last token");
        if num_drafts > 0 {
            entry.drafts.push_back((self.num_steps, num_drafts));
            self.tally.add("drafts before the result of earlier ones", u64::from(entry.drafts.len() > 1));
            self.tally.add("drafts with a window", u64::from(self.limits.window_tokens.is_some()));
        }
        entry.num_allocated_tokens = entry.num_allocated_tokens.max(entry.num_computed_tokens);
        // Wrong drafts leave blocks to the tokens after them.
        let needed = (entry.num_computed_tokens.div_ceil(block_tokens) as usize).max(entry.block_ids.len());
        entry.block_ids.extend_from_slice(&advance.new_block_ids);
        assert_eq!(entry.block_ids.len(), needed, "blocks are allocated as needed, no earlier");
        let end = entry.num_computed_tokens.div_ceil(block_tokens);
        let written = &entry.block_ids[first_written as usize..end as usize];
        for block_id in written {
            assert_eq!(self.num_owners[block_id], 1, "{id:?} writes the shared block {block_id}");
        }
        self.written.back_mut().expect("this step").extend(written.iter().copied());
        self.filled.extend(&entry.block_ids[..(entry.num_computed_tokens / block_tokens) as usize]);
    }

    fn check_budget(&self, plan: &Plan) {
        let num_drafts: u32 = plan.advances.iter().map(|advance| advance.num_draft_tokens).sum();
        let num_tokens: u32 = plan.advances.iter().map(|advance| advance.num_tokens).sum();
        assert!(num_tokens + num_drafts <= self.limits.max_step_tokens);
        assert!(plan.advances.len() + num_drafts as usize <= self.limits.max_step_sequences as usize);
        let ids: HashSet<_> = plan.advances.iter().map(|advance| advance.id).collect();
        assert_eq!(ids.len(), plan.advances.len(), "a sequence advances twice in one step");
        let depth = if self.quarantined.is_some() { 1 } else { max_depth(self.limits) };
        assert!(self.written.len() <= depth);
        for start in &plan.new_sequences {
            assert!(ids.contains(&start.id), "{:?} starts and does not advance", start.id);
        }
    }

    /// No block leaks: each is allocatable, retiring, or held by a running sequence. Each full slot was filled.
    fn check_stats(&self, stats: Stats, live: &Live) {
        let running = self.entries.values().filter(|entry| !entry.is_finishing());
        let owned: HashSet<_> = running.flat_map(|entry| entry.held()).collect();
        assert_eq!(
            stats.num_allocatable_blocks + stats.num_retiring_blocks + owned.len(),
            self.limits.num_blocks as usize
        );
        assert_eq!(stats.num_running, self.entries.len());
        assert_eq!(stats.num_queued, live.len() - self.entries.len());
        assert_eq!(stats.num_steps_in_flight, self.written.len());
        let max_running_tokens: u64 = self.entries.values().map(|entry| u64::from(entry.max_tokens)).sum();
        assert_eq!(stats.max_running_tokens, max_running_tokens);
        assert_eq!(stats.num_hit_tokens, self.num_hit_tokens);
        assert_eq!(stats.num_queried_tokens, self.num_queried_tokens);
        let in_memory = self.slot_scopes.keys().filter(|slot| **slot < self.limits.num_memory_slots).count();
        assert!(stats.num_full_memory_slots <= in_memory);
        assert!(stats.num_full_disk_slots <= self.slot_scopes.len() - in_memory);
    }
}
