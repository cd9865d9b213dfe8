//! Keeps its own books of every plan, from the plans alone, and checks each against the promises: ownership, who may share
//! with whom, run-ahead, budgets, order, and that no decode is left out. What stands in the blocks is the worker's to check.

use std::collections::{HashMap, HashSet, VecDeque};

use penstock_scheduler::{Advance, BlockId, Limits, NewSequence, Plan, SequenceId, Stats, TokenId};

use crate::submitted::{Circle, Order, Sight, State, Submitted};
use crate::tally::Tally;

pub type Live = HashMap<SequenceId, Submitted>;

pub struct Ledger {
    limits: Limits,
    /// Whether prompts are served strictly in line.
    is_in_line: bool,
    rows: HashMap<SequenceId, Row>,
    num_owners: HashMap<BlockId, usize>,
    /// Among whom a block may be shared: the circle of the one who wrote it last.
    circles: HashMap<BlockId, Circle>,
    /// Blocks that each step in flight writes.
    written: VecDeque<HashSet<BlockId>>,
    num_steps: u64,
    /// The only one that may advance.
    pub alone: Option<SequenceId>,
    /// The oldest step that was found to have failed for somebody since the last plan.
    failed_step: Option<u64>,
    num_hit_tokens: u64,
    num_queried_tokens: u64,
    /// Who had to start again because of another one's failure, by the step of its start.
    pub voided: Vec<(SequenceId, u64)>,
    num_cached_blocks: usize,
    pub tally: Tally,
}

/// What the worker will know of a sequence when all plans are executed.
struct Row {
    submission: usize,
    start_step: u64,
    order: Order,
    num_known_tokens: u32,
    num_computed_tokens: u32,
    max_tokens: u32,
    num_source_tokens: u32,
    sight: Sight,
    block_ids: Vec<BlockId>,
    /// How many of the first it has given up.
    num_passed: usize,
}

impl Row {
    fn held(&self) -> &[BlockId] {
        &self.block_ids[self.num_passed..]
    }

    fn is_planned_out(&self) -> bool {
        self.num_known_tokens == self.max_tokens
    }

    fn is_decoding(&self) -> bool {
        !self.is_planned_out() && self.num_known_tokens - self.num_computed_tokens == 1
    }
}

impl Ledger {
    pub fn new(limits: Limits, is_in_line: bool) -> Self {
        Self {
            limits,
            is_in_line,
            rows: HashMap::new(),
            num_owners: HashMap::new(),
            circles: HashMap::new(),
            written: VecDeque::new(),
            num_steps: 0,
            alone: None,
            failed_step: None,
            num_hit_tokens: 0,
            num_queried_tokens: 0,
            voided: Vec::new(),
            num_cached_blocks: 0,
            tally: Tally::default(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.num_owners.is_empty() && self.written.is_empty()
    }

    /// The worker is gone, with all that it knew.
    pub fn restart(&mut self) {
        self.rows.clear();
        self.num_owners.clear();
        self.circles.clear();
        self.written.clear();
        self.num_steps = 0;
        self.alone = None;
        self.failed_step = None;
        self.num_cached_blocks = 0;
    }

    pub fn state(&self, id: SequenceId) -> State {
        match self.rows.get(&id) {
            None => State::Queued,
            Some(row) if row.is_planned_out() => State::PlannedOut,
            Some(row) if row.is_decoding() => State::Decoding,
            Some(_) => State::Prefilling,
        }
    }

    pub fn knows(&self, id: SequenceId) -> bool {
        self.rows.contains_key(&id)
    }

    pub fn retire(&mut self, step: u64, failed: bool) {
        self.written.pop_front().expect("a step in flight");
        if failed {
            self.failed_step.get_or_insert(step);
        }
    }

    /// `live`: what has been submitted and has not ended, by id.
    pub fn enter(&mut self, plan: &Plan, live: &Live, stats: Stats) {
        self.num_steps += 1;
        assert_eq!(plan.step, self.num_steps, "steps are numbered without a gap");
        assert!(
            !(plan.freed_sequence_ids.is_empty() && plan.advances.is_empty()),
            "step {} neither frees nor advances anything",
            plan.step
        );
        self.free(plan, live);
        self.failed_step = None;
        let decodes = self.decodes();
        for start in &plan.new_sequences {
            self.start(start, live);
        }
        match self.alone {
            Some(id) => assert!(plan.advances.iter().all(|advance| advance.id == id), "{id:?} is not alone"),
            None if self.is_in_line => self.check_queue_order(plan, live),
            None => {}
        }
        self.check_decodes(plan, &decodes);
        let running = self.rows.iter().filter(|(_, row)| self.is_in_line && !row.is_planned_out());
        let first = running.min_by_key(|(_, row)| row.order).map(|(id, _)| *id);
        let advances = |id| plan.advances.iter().any(|advance| advance.id == id);
        assert!(first.is_none_or(|id| advances(id) || self.lets_pass(id, live)), "{first:?} does not advance");
        self.written.push_back(HashSet::new());
        for advance in &plan.advances {
            self.advance(advance, live);
        }
        self.check_budget(plan);
        self.tally_sources(plan, live);
        for advance in &plan.advances {
            self.pass(advance.id);
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

    /// G2: what nobody has who is alive is free, as soon as those steps are over that were planned to write it before its
    /// last owner went.
    pub fn check_free(&self, stats: Stats, live: &Live) {
        let is_live = |id: &SequenceId, row: &Row| live.get(id).is_some_and(|it| it.submission == row.submission);
        let alive = self.rows.iter().filter(|(id, row)| is_live(id, row));
        let mut busy: HashSet<_> = alive.flat_map(|(_, row)| row.held()).collect();
        busy.extend(self.written.iter().flatten());
        let num_unused = self.limits.num_blocks as usize - busy.len();
        assert!(stats.num_allocatable_blocks >= num_unused, "{num_unused} blocks are not in use: {stats:?}");
    }

    fn free(&mut self, plan: &Plan, live: &Live) {
        let mut gone = Vec::new();
        for id in &plan.freed_sequence_ids {
            let row = self.rows.remove(id).unwrap_or_else(|| panic!("{id:?} is freed, the worker does not know it"));
            row.held().iter().for_each(|block_id| self.disown(*block_id));
            if live.get(id).is_some_and(|submitted| submitted.submission == row.submission) {
                gone.push((*id, row));
            }
        }
        for (id, row) in &self.rows {
            let is_live = live.get(id).is_some_and(|submitted| submitted.submission == row.submission);
            assert!(is_live, "{id:?} has ended and is not freed with the next plan");
        }
        for (id, row) in gone {
            let is_last = self.rows.values().all(|other| other.is_planned_out() || other.order < row.order);
            if self.alone.is_some() {
                assert_ne!(self.alone, Some(id), "who is alone has nobody to give way to");
            } else if is_last && !row.is_planned_out() {
                self.tally.add("preemptions", 1);
            } else {
                let relied = self.failed_step.is_some_and(|step| step < row.start_step);
                assert!(relied, "{id:?} was taken out of turn");
                self.voided.push((id, row.start_step));
            }
        }
    }

    fn disown(&mut self, block_id: BlockId) {
        let num_owners = self.num_owners.get_mut(&block_id).expect("an owner");
        *num_owners -= 1;
        if *num_owners == 0 {
            self.num_owners.remove(&block_id);
        }
    }

    /// What a sequence will not read again it does not keep, unless it is only waiting for its last token.
    fn pass(&mut self, id: SequenceId) {
        let row = self.rows.get_mut(&id).expect("who advances is on the worker");
        if row.is_planned_out() {
            return;
        }
        let passed = row.num_passed..row.sight.first_block(row.num_computed_tokens);
        row.num_passed = passed.end;
        let most = row.sight.max_blocks(0, row.num_computed_tokens + 1);
        assert!(row.held().len() <= most, "{id:?} holds {:?}, it needs {most} at most", row.held());
        let passed = row.block_ids[passed].to_vec();
        self.tally.add("blocks passed", passed.len() as u64);
        passed.into_iter().for_each(|block_id| self.disown(block_id));
    }

    /// Whether somebody in the queue and ahead of `id` waits for a step of its own.
    fn lets_pass(&self, id: SequenceId, live: &Live) -> bool {
        let is_ahead = |it: &Submitted| it.num_source_tokens > 0 && it.order < self.rows[&id].order;
        live.iter().any(|(other, it)| !self.knows(*other) && is_ahead(it))
    }

    fn tally_sources(&mut self, plan: &Plan, live: &Live) {
        for start in plan.new_sequences.iter().filter(|start| start.num_source_tokens > 0) {
            self.tally.add("sources", 1);
            self.tally.add("sources beside others", u64::from(plan.advances.len() > 1));
            self.tally
                .add("sources computed again", u64::from(start.token_ids.len() > start.num_prompt_tokens as usize));
        }
        let num_tokens: u32 = plan.advances.iter().map(|advance| advance.num_tokens).sum();
        let is_waiting = |(id, it): &(&SequenceId, &Submitted)| {
            !self.rows.contains_key(id) && it.num_source_tokens > self.limits.max_step_tokens - num_tokens
        };
        let num_waiting = live.iter().filter(is_waiting).count();
        self.tally.add("sources that did not fit into a step", num_waiting as u64);
    }

    fn decodes(&self) -> Vec<SequenceId> {
        let mut decodes: Vec<_> =
            self.rows.iter().filter(|(_, row)| row.is_decoding()).map(|(id, row)| (row.order, *id)).collect();
        decodes.sort_unstable();
        decodes.into_iter().map(|(_, id)| id).collect()
    }

    fn start(&mut self, start: &NewSequence, live: &Live) {
        let submitted = &live[&start.id];
        assert_eq!(start.token_ids, submitted.known(), "a sequence starts with all that is known of it");
        assert_eq!(start.num_prompt_tokens as usize, submitted.prompt.len());
        assert_eq!(start.num_source_tokens, submitted.num_source_tokens);
        let num_passed = submitted.sight.first_block(start.num_computed_tokens);
        self.check_hit(start, num_passed, submitted);
        for block_id in &start.block_ids[num_passed..] {
            *self.num_owners.entry(*block_id).or_default() += 1;
        }
        let row = Row {
            submission: submitted.submission,
            start_step: self.num_steps,
            order: submitted.order,
            num_known_tokens: start.token_ids.len() as u32,
            num_computed_tokens: start.num_computed_tokens,
            max_tokens: submitted.prompt.len() as u32 + submitted.max_new_tokens,
            num_source_tokens: submitted.num_source_tokens,
            sight: submitted.sight,
            num_passed,
            block_ids: start.block_ids.clone(),
        };
        assert!(self.rows.insert(start.id, row).is_none(), "{:?} is started twice", start.id);
    }

    fn check_hit(&mut self, start: &NewSequence, num_passed: usize, submitted: &Submitted) {
        let id = start.id;
        assert_eq!(start.num_computed_tokens, start.block_ids.len() as u32 * self.limits.block_tokens);
        assert!(start.num_computed_tokens < start.token_ids.len() as u32, "{id:?} has nothing to sample from");
        if submitted.may_look_up() {
            self.num_queried_tokens += start.token_ids.len() as u64 - 1;
        } else {
            assert_eq!(start.num_computed_tokens, 0, "{id:?} must compute all");
        }
        let num_hit_tokens = u64::from(start.num_computed_tokens);
        self.num_hit_tokens += num_hit_tokens;
        self.tally.add("hit tokens", num_hit_tokens);
        self.tally.add("hits of a window", u64::from(num_passed > 0));
        if matches!(submitted.circle, Circle::Group(..)) {
            self.tally.add("hit tokens in groups", num_hit_tokens);
        }
        for block_id in &start.block_ids[num_passed..] {
            assert_eq!(self.circles[block_id], submitted.circle, "block {block_id} is not shared with {id:?}");
            if matches!(submitted.circle, Circle::Group(..)) {
                assert!(self.num_owners.contains_key(block_id), "{id:?} finds a block that nobody has");
            }
            let unwritten = self.written.iter().any(|written| written.contains(block_id));
            self.tally.add("blocks shared before they were written", u64::from(unwritten));
        }
    }

    fn check_queue_order(&mut self, plan: &Plan, live: &Live) {
        let Some(last_started) = plan.new_sequences.iter().map(|start| self.rows[&start.id].order).max() else {
            return;
        };
        let is_overtaken = |id: &SequenceId, queued: &Submitted| !self.knows(*id) && queued.order < last_started;
        let overtaken: Vec<_> = live.iter().filter(|(id, queued)| is_overtaken(id, queued)).collect();
        for (id, queued) in &overtaken {
            assert!(self.may_wait(queued, live), "{id:?} was not served in its turn");
        }
        self.tally.add("overtaken while waiting for another's blocks", overtaken.len() as u64);
    }

    /// Whether somebody in the queue may be waiting for blocks that only `id` is computing.
    pub fn is_awaited(&self, id: SequenceId, live: &Live) -> bool {
        let others: Live = live.iter().filter(|(other, _)| **other != id).map(|(id, it)| (*id, it.clone())).collect();
        let is_queued = |other: &SequenceId| !self.knows(*other);
        let waits = |it: &Submitted| self.may_wait(it, live) && !self.may_wait(it, &others);
        self.knows(id) && others.iter().any(|(other, it)| is_queued(other) && waits(it))
    }

    /// Whether one ahead in line is computing what it needs.
    fn may_wait(&self, queued: &Submitted, live: &Live) -> bool {
        let block_tokens = self.limits.block_tokens as usize;
        let known = queued.known();
        let is_common = |other: &[TokenId]| {
            let num_common = known[..known.len() - 1].iter().zip(other).take_while(|(a, b)| a == b).count();
            num_common / block_tokens
        };
        queued.may_look_up()
            && self.rows.iter().any(|(id, row)| {
                let num_full = row.num_computed_tokens as usize / block_tokens;
                let Some(computing) = live.get(id) else { return false };
                computing.circle == queued.circle
                    && row.order < queued.order
                    && is_common(&computing.known()) > num_full
            })
    }

    fn check_decodes(&self, plan: &Plan, decodes: &[SequenceId]) {
        let first: Vec<_> = plan.advances.iter().take(decodes.len()).map(|advance| advance.id).collect();
        assert_eq!(first, decodes, "every running decode advances in every step, first, in order");
    }

    fn advance(&mut self, advance: &Advance, live: &Live) {
        let id = advance.id;
        let block_tokens = self.limits.block_tokens;
        for block_id in &advance.new_block_ids {
            assert!(*block_id < self.limits.num_blocks);
            assert_eq!(self.num_owners.insert(*block_id, 1), None, "block {block_id} is taken from its owners");
            let in_flight = self.written.iter().any(|written| written.contains(block_id));
            assert!(!in_flight, "block {block_id} is handed out while a step in flight writes it");
            self.circles.insert(*block_id, live[&id].circle);
        }
        let row = self.rows.get_mut(&id).unwrap_or_else(|| panic!("{id:?} advances, the worker does not know it"));
        assert!(!row.is_planned_out(), "{id:?} is planned past its last token");
        assert!(advance.num_tokens >= 1);
        let is_whole = row.num_computed_tokens > 0 || advance.num_tokens >= row.num_source_tokens;
        assert!(is_whole, "{id:?}: its source is cut");
        let first_written = row.num_computed_tokens / block_tokens;
        row.num_computed_tokens += advance.num_tokens;
        assert!(row.num_computed_tokens <= row.num_known_tokens, "{id:?} computes unknown tokens");
        assert_eq!(advance.sample, row.num_computed_tokens == row.num_known_tokens);
        row.num_known_tokens += u32::from(advance.sample);
        row.block_ids.extend_from_slice(&advance.new_block_ids);
        let needed = row.num_computed_tokens.div_ceil(block_tokens);
        assert_eq!(row.block_ids.len() as u32, needed, "blocks are taken as needed, no earlier");
        let written = &row.block_ids[first_written as usize..];
        for block_id in written {
            assert_eq!(self.num_owners[block_id], 1, "{id:?} writes block {block_id}, which it shares");
        }
        self.written.back_mut().expect("this step").extend(written.iter().copied());
    }

    fn check_budget(&self, plan: &Plan) {
        let num_tokens: u32 = plan.advances.iter().map(|advance| advance.num_tokens).sum();
        assert!(num_tokens <= self.limits.max_step_tokens);
        assert!(plan.advances.len() <= self.limits.max_step_sequences as usize);
        let ids: HashSet<_> = plan.advances.iter().map(|advance| advance.id).collect();
        assert_eq!(ids.len(), plan.advances.len(), "a sequence advances twice in one step");
        let depth = if self.alone.is_some() { 1 } else { self.limits.max_steps_in_flight as usize };
        assert!(self.written.len() <= depth);
        for start in &plan.new_sequences {
            assert!(ids.contains(&start.id), "{:?} is started and not advanced", start.id);
        }
    }

    /// No block leaks: each is free, retiring, or in the table of a sequence that will be advanced again.
    fn check_stats(&self, stats: Stats, live: &Live) {
        let running = self.rows.values().filter(|row| !row.is_planned_out());
        let owned: HashSet<_> = running.flat_map(|row| row.held()).collect();
        assert_eq!(
            stats.num_allocatable_blocks + stats.num_retiring_blocks + owned.len(),
            self.limits.num_blocks as usize
        );
        assert_eq!(stats.num_running, self.rows.len());
        assert_eq!(stats.num_queued, live.len() - self.rows.len());
        assert_eq!(stats.num_steps_in_flight, self.written.len());
        let max_running_tokens: u64 = self.rows.values().map(|row| u64::from(row.max_tokens)).sum();
        assert_eq!(stats.max_running_tokens, max_running_tokens);
        assert_eq!(stats.num_hit_tokens, self.num_hit_tokens);
        assert_eq!(stats.num_queried_tokens, self.num_queried_tokens);
    }
}
