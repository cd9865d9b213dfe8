//! Keeps its own books of every plan, from the plans alone, and checks each against the promises: ownership, run-ahead,
//! budgets, order, and that no decode is left out.

use std::collections::{HashMap, HashSet, VecDeque};

use penstock_scheduler::{Advance, BlockId, Limits, Plan, SequenceId, Start, Stats};

use crate::world::Submitted;

pub struct Ledger {
    limits: Limits,
    rows: HashMap<SequenceId, Row>,
    owners: HashMap<BlockId, SequenceId>,
    /// Blocks that each step in flight may write or read.
    touched: VecDeque<HashSet<BlockId>>,
    num_steps: u64,
    pub num_preemptions: usize,
}

/// What the worker will know of a sequence when all plans are executed.
struct Row {
    submission: usize,
    num_known_tokens: u32,
    num_computed_tokens: u32,
    max_tokens: u32,
    block_ids: Vec<BlockId>,
}

impl Row {
    fn is_planned_out(&self) -> bool {
        self.num_known_tokens == self.max_tokens
    }

    fn is_decoding(&self) -> bool {
        !self.is_planned_out() && self.num_known_tokens - self.num_computed_tokens == 1
    }
}

impl Ledger {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            rows: HashMap::new(),
            owners: HashMap::new(),
            touched: VecDeque::new(),
            num_steps: 0,
            num_preemptions: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.owners.is_empty() && self.touched.is_empty()
    }

    pub fn knows(&self, id: SequenceId) -> bool {
        self.rows.contains_key(&id)
    }

    pub fn retire(&mut self) {
        self.touched.pop_front().expect("a step in flight");
    }

    /// `live`: what has been submitted and has not ended, by id.
    pub fn enter(&mut self, plan: &Plan, live: &HashMap<SequenceId, Submitted>, stats: Stats) {
        self.num_steps += 1;
        assert_eq!(plan.step, self.num_steps, "steps are numbered without a gap");
        assert!(
            !(plan.freed.is_empty() && plan.advances.is_empty()),
            "step {} neither frees nor advances anything",
            plan.step
        );
        self.free(plan, live);
        let decodes = self.decodes();
        for start in &plan.started {
            self.start(start, live);
        }
        self.check_queue_order(plan, live);
        self.check_decodes(plan, &decodes);
        let mut touched = HashSet::new();
        for advance in &plan.advances {
            self.advance(advance);
            touched.extend(self.rows[&advance.id].block_ids.iter().copied());
        }
        self.touched.push_back(touched);
        self.check_budget(plan);
        self.check_stats(stats, live);
    }

    fn free(&mut self, plan: &Plan, live: &HashMap<SequenceId, Submitted>) {
        let mut preempted = Vec::new();
        for id in &plan.freed {
            let row = self.rows.remove(id).unwrap_or_else(|| panic!("{id:?} is freed, the worker does not know it"));
            for block_id in &row.block_ids {
                assert_eq!(self.owners.remove(block_id), Some(*id));
            }
            if live.get(id).is_some_and(|submitted| submitted.submission == row.submission) {
                preempted.push(row);
            }
        }
        self.num_preemptions += preempted.len();
        for (id, row) in &self.rows {
            let is_live = live.get(id).is_some_and(|submitted| submitted.submission == row.submission);
            assert!(is_live, "{id:?} has ended and is not freed with the next plan");
            for gone in &preempted {
                assert!(!gone.is_planned_out(), "a sequence whose last token is in flight was preempted");
                assert!(row.is_planned_out() || row.submission < gone.submission, "an older sequence was preempted");
            }
        }
    }

    /// By arrival.
    fn decodes(&self) -> Vec<SequenceId> {
        let mut decodes: Vec<_> =
            self.rows.iter().filter(|(_, row)| row.is_decoding()).map(|(id, row)| (row.submission, *id)).collect();
        decodes.sort_unstable();
        decodes.into_iter().map(|(_, id)| id).collect()
    }

    fn start(&mut self, start: &Start, live: &HashMap<SequenceId, Submitted>) {
        let submitted = &live[&start.id];
        let known: Vec<_> = submitted.prompt.iter().chain(&submitted.received).copied().collect();
        assert_eq!(start.token_ids, known, "a sequence starts with all that is known of it");
        assert_eq!(start.num_prompt_tokens as usize, submitted.prompt.len());
        assert_eq!((start.num_computed_tokens, start.block_ids.len()), (0, 0));
        let row = Row {
            submission: submitted.submission,
            num_known_tokens: start.token_ids.len() as u32,
            num_computed_tokens: 0,
            max_tokens: submitted.prompt.len() as u32 + submitted.max_new_tokens,
            block_ids: Vec::new(),
        };
        assert!(self.rows.insert(start.id, row).is_none(), "{:?} is started twice", start.id);
    }

    fn check_queue_order(&self, plan: &Plan, live: &HashMap<SequenceId, Submitted>) {
        let last_started = plan.started.iter().map(|start| self.rows[&start.id].submission).max();
        let first_queued =
            live.iter().filter(|(id, _)| !self.knows(**id)).map(|(_, submitted)| submitted.submission).min();
        if let (Some(started), Some(queued)) = (last_started, first_queued) {
            assert!(started < queued, "the queue was not served in order");
        }
    }

    fn check_decodes(&self, plan: &Plan, decodes: &[SequenceId]) {
        let first: Vec<_> = plan.advances.iter().take(decodes.len()).map(|advance| advance.id).collect();
        assert_eq!(first, decodes, "every running decode advances in every step, first, in order of arrival");
    }

    fn advance(&mut self, advance: &Advance) {
        let id = advance.id;
        for block_id in &advance.new_block_ids {
            assert!(*block_id < self.limits.num_blocks);
            assert_eq!(self.owners.insert(*block_id, id), None, "block {block_id} is owned twice");
            let in_flight = self.touched.iter().any(|touched| touched.contains(block_id));
            assert!(!in_flight, "block {block_id} is handed out while a step in flight may write it");
        }
        let row = self.rows.get_mut(&id).unwrap_or_else(|| panic!("{id:?} advances, the worker does not know it"));
        assert!(!row.is_planned_out(), "{id:?} is planned past its last token");
        assert!(advance.num_tokens >= 1);
        row.num_computed_tokens += advance.num_tokens;
        assert!(row.num_computed_tokens <= row.num_known_tokens, "{id:?} computes unknown tokens");
        assert_eq!(advance.sample, row.num_computed_tokens == row.num_known_tokens);
        row.num_known_tokens += u32::from(advance.sample);
        row.block_ids.extend_from_slice(&advance.new_block_ids);
        let needed = row.num_computed_tokens.div_ceil(self.limits.block_tokens);
        assert_eq!(row.block_ids.len() as u32, needed, "blocks are taken as needed, no earlier");
    }

    fn check_budget(&self, plan: &Plan) {
        let num_tokens: u32 = plan.advances.iter().map(|advance| advance.num_tokens).sum();
        assert!(num_tokens <= self.limits.max_step_tokens);
        assert!(plan.advances.len() <= self.limits.max_step_sequences as usize);
        let ids: HashSet<_> = plan.advances.iter().map(|advance| advance.id).collect();
        assert_eq!(ids.len(), plan.advances.len(), "a sequence advances twice in one step");
        assert!(self.touched.len() <= self.limits.max_steps_in_flight as usize);
        for start in &plan.started {
            assert!(ids.contains(&start.id), "{:?} is started and not advanced", start.id);
        }
    }

    /// No block leaks: each is free, retiring, or in the table of a sequence that will be advanced again.
    fn check_stats(&self, stats: Stats, live: &HashMap<SequenceId, Submitted>) {
        let num_owned: usize =
            self.rows.values().filter(|row| !row.is_planned_out()).map(|row| row.block_ids.len()).sum();
        assert_eq!(stats.num_free_blocks + stats.num_retiring_blocks + num_owned, self.limits.num_blocks as usize);
        assert_eq!(stats.num_running, self.rows.len());
        assert_eq!(stats.num_queued, live.len() - self.rows.len());
        assert_eq!(stats.num_steps_in_flight, self.touched.len());
        let max_running_tokens: u64 = self.rows.values().map(|row| u64::from(row.max_tokens)).sum();
        assert_eq!(stats.max_running_tokens, max_running_tokens);
    }
}
