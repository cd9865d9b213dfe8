//! A second implementation of the scheduler, as plain as possible, for sequences that share no blocks: it searches
//! lists and recounts everything. It predicts every plan and every event; blocks are counts here, not ids.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_scheduler::{Event, FinishReason, ImageGroup, Limits, Plan, SequenceId, StepResult, TokenId};

use crate::model::num_image_bytes;
use crate::submitted::{Order, Visibility, max_depth};

/// What a plan must contain.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ExpectedPlan {
    pub step: u64,
    /// Sorted.
    pub freed: Vec<SequenceId>,
    pub started: Vec<SequenceId>,
    /// Id, tokens, new blocks, whether it samples.
    pub advances: Vec<(SequenceId, u32, usize, bool)>,
}

impl From<&Plan> for ExpectedPlan {
    fn from(plan: &Plan) -> Self {
        let mut freed = plan.freed_sequence_ids.clone();
        freed.sort_unstable();
        let started = plan.new_sequences.iter().map(|start| start.id).collect();
        let advances = plan.advances.iter();
        let advances = advances.map(|it| (it.id, it.num_tokens, it.new_block_ids.len(), it.sample)).collect();
        ExpectedPlan { step: plan.step, freed, started, advances }
    }
}

pub struct Sequence {
    pub id: SequenceId,
    pub order: Order,
    /// Tokens whose ids are known: the prompt, and the tokens that came back.
    pub num_tokens: u32,
    pub max_tokens: u32,
    pub num_source_tokens: u32,
    pub images: Vec<ImageGroup>,
    pub visibility: Visibility,
    pub stop_token_ids: Arc<[TokenId]>,
    /// `None`: queued.
    pub residency: Option<Residency>,
}

/// The state on the worker when the steps in flight are over.
pub struct Residency {
    number: u64,
    num_known: u32,
    num_computed: u32,
    /// Whether a step in flight samples.
    samples: bool,
    /// For each block, the last step that writes it.
    written: Vec<u64>,
    /// Leading blocks that are released.
    num_released: usize,
}

impl Sequence {
    /// Whether the worker knows it and it will be advanced further.
    fn is_running(&self) -> bool {
        self.residency.as_ref().is_some_and(|residency| residency.num_known < self.max_tokens)
    }

    fn num_pending(&self) -> u32 {
        self.residency.as_ref().map_or(self.num_tokens, |residency| residency.num_known - residency.num_computed)
    }

    fn num_computed(&self) -> u32 {
        self.residency.as_ref().map_or(0, |residency| residency.num_computed)
    }

    /// Blocks that it lacks to compute all known tokens, one by one.
    fn num_missing(&self) -> usize {
        let num_computed = self.num_computed();
        let most = self.visibility.max_blocks(num_computed, num_computed + self.num_pending());
        most.saturating_sub(self.num_blocks())
    }

    fn num_blocks(&self) -> usize {
        self.residency.as_ref().map_or(0, |residency| residency.written.len() - residency.num_released)
    }
}

pub struct Reference {
    limits: Limits,
    /// All known sequences, by precedence.
    sequences: Vec<Sequence>,
    /// For each step in flight, its sequences with the numbers of their residencies.
    in_flight: VecDeque<Vec<(SequenceId, u64)>>,
    freed: Vec<SequenceId>,
    /// For each block without a holder that a step in flight writes, that step.
    retiring: Vec<u64>,
    pub quarantined: Option<SequenceId>,
    num_steps: u64,
    num_residencies: u64,
}

impl Reference {
    pub fn new(limits: Limits) -> Self {
        let (sequences, in_flight, freed, retiring) = Default::default();
        Self { limits, sequences, in_flight, freed, retiring, quarantined: None, num_steps: 0, num_residencies: 0 }
    }

    pub fn submit(&mut self, sequence: Sequence) {
        self.sequences.push(sequence);
        self.sequences.sort_by_key(|sequence| sequence.order);
    }

    pub fn end(&mut self, id: SequenceId) {
        let index = self.index(id);
        self.evict(index);
        self.sequences.remove(index);
        self.quarantined = self.quarantined.filter(|quarantined| *quarantined != id);
    }

    pub fn restart(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.residency = None);
        self.in_flight.clear();
        self.freed.clear();
        self.retiring.clear();
        (self.quarantined, self.num_steps) = (None, 0);
    }

    pub fn quarantine(&mut self, id: Option<SequenceId>) {
        self.quarantined = id;
        for index in self.running().into_iter().filter(|_| id.is_some()) {
            if self.sequences[index].id != id.expect("a quarantined sequence") {
                self.evict(index);
            }
        }
    }

    pub fn plan(&mut self) -> Option<ExpectedPlan> {
        let depth = if self.quarantined.is_some() { 1 } else { max_depth(self.limits) };
        if self.in_flight.len() >= depth || !self.make_room() {
            return None;
        }
        let mut plan = ExpectedPlan { step: self.num_steps + 1, ..ExpectedPlan::default() };
        let is_decode = |index: &usize| self.sequences[*index].num_pending() == 1;
        let running = self.running();
        let num_decodes = running.iter().filter(|index| is_decode(index)).count();
        let advancing = running.into_iter().filter(|index| !self.awaits_token(*index));
        let (mut decodes, prefills): (Vec<_>, Vec<_>) = advancing.partition(is_decode);
        decodes.truncate(num_decodes.div_ceil(self.limits.num_stages as usize));
        for index in &decodes {
            self.advance(&mut plan, *index, 1);
        }
        self.advance_prompts(&mut plan, prefills, self.limits.max_step_tokens - decodes.len() as u32);
        if plan.advances.is_empty() && self.freed.is_empty() {
            return None;
        }
        for (id, ..) in &plan.advances {
            self.release_before_window(self.index(*id));
        }
        self.num_steps += 1;
        plan.freed = std::mem::take(&mut self.freed);
        plan.freed.sort_unstable();
        let number = |id| self.sequences[self.index(id)].residency.as_ref().map_or(0, |residency| residency.number);
        let step = plan.advances.iter().map(|(id, ..)| (*id, number(*id))).collect();
        self.in_flight.push_back(step);
        Some(plan)
    }

    /// Decodes and the first running sequence must advance: the last ones are preempted until the pool has blocks for
    /// them, now or when the steps in flight are over. In the latter case nothing is planned yet.
    fn make_room(&mut self) -> bool {
        let first = self.running().first().copied();
        loop {
            let running = self.running();
            let must =
                running.iter().filter(|index| Some(**index) == first || self.sequences[**index].num_pending() == 1);
            let must = must.filter(|index| !self.awaits_token(**index));
            let needed: usize = must.map(|index| self.num_new_blocks(*index, 1)).sum();
            let finishing =
                self.sequences.iter().filter(|sequence| sequence.residency.is_some() && !sequence.is_running());
            let num_finishing: usize = finishing.map(Sequence::num_blocks).sum();
            match running.last() {
                Some(last) if needed > self.num_free() + self.retiring.len() + num_finishing => self.evict(*last),
                _ => return needed <= self.num_free(),
            }
        }
    }

    /// Running and queued prompts, strictly by precedence. All blocks of a queued prompt must fit besides those of the
    /// running prompts, and leave one block for each running sequence. No sequence overtakes a source that does not fit
    /// into the step. One block is reserved for the first running sequence.
    fn advance_prompts(&mut self, plan: &mut ExpectedPlan, prefills: Vec<usize>, mut tokens_left: u32) {
        let num_missing: usize = prefills.iter().map(|index| self.sequences[*index].num_missing()).sum();
        let mut num_unreserved = self.num_free() as isize - num_missing as isize;
        let first = self.running().first().copied();
        let max_running = self.limits.max_step_sequences.min(self.limits.max_step_tokens) as usize;
        let mut prefills = VecDeque::from(prefills);
        let mut is_closed = false;
        while tokens_left > 0 && plan.advances.len() < self.limits.max_step_sequences as usize {
            let mut is_image_room_full = false;
            let next = |sequence: &Sequence| {
                if sequence.residency.is_some() || self.quarantined.is_some_and(|id| id != sequence.id) {
                    return false;
                }
                is_image_room_full |= !self.has_image_room(sequence);
                sequence.images.is_empty() || !is_image_room_full
            };
            // A prompt that ends in this step makes room for another sequence.
            let num_residents = self.sequences.iter().filter(|sequence| sequence.residency.is_some()).count();
            let num_slots = self.limits.num_state_slots as usize;
            let has_state_slot = num_slots == 0 || num_residents < num_slots;
            let may_start = !is_closed && self.running().len() < max_running && has_state_slot;
            let queued = self.sequences.iter().position(next).filter(|_| may_start);
            match (queued, prefills.front().copied()) {
                (Some(index), running) if running.is_none_or(|running| index < running) => {
                    let sequence = &self.sequences[index];
                    let num_missing = sequence.num_missing() as isize;
                    let num_free = num_unreserved - self.running().len() as isize;
                    let slots = num_free.max(0) as u32 * self.limits.block_tokens;
                    let num_tokens = sequence.num_pending().min(tokens_left).min(slots);
                    is_closed = num_missing > num_free;
                    if !is_closed && num_tokens < sequence.num_source_tokens {
                        return;
                    }
                    if !is_closed {
                        num_unreserved -= num_missing.max(self.num_new_blocks(index, num_tokens) as isize);
                        self.start(plan, index);
                        tokens_left -= self.advance(plan, index, num_tokens);
                    }
                }
                (_, Some(index)) => {
                    prefills.pop_front();
                    let reserved_for = first.filter(|first| *first != index && prefills.contains(first));
                    let num_free = self.num_free() - reserved_for.map_or(0, |first| self.num_new_blocks(first, 1));
                    let sequence = &self.sequences[index];
                    let num_blocks =
                        sequence.residency.as_ref().map_or(0, |residency| residency.written.len()) + num_free;
                    let slots = num_blocks as u32 * self.limits.block_tokens - sequence.num_computed();
                    let num_tokens = sequence.num_pending().min(slots).min(tokens_left);
                    let num_excess = self.num_new_blocks(index, num_tokens).saturating_sub(sequence.num_missing());
                    num_unreserved -= num_excess as isize;
                    tokens_left -= self.advance(plan, index, num_tokens);
                }
                (_, None) => return,
            }
        }
    }

    /// Whether its images fit beside those of the sequences on the worker.
    fn has_image_room(&self, sequence: &Sequence) -> bool {
        let resident = self.sequences.iter().filter(|sequence| sequence.residency.is_some());
        let images = resident.chain([sequence]).flat_map(|sequence| sequence.images.iter().copied());
        num_image_bytes(images) <= self.limits.max_image_bytes
    }

    fn start(&mut self, plan: &mut ExpectedPlan, index: usize) {
        self.num_residencies += 1;
        let (number, num_known) = (self.num_residencies, self.sequences[index].num_tokens);
        self.sequences[index].residency = Some(Residency {
            number,
            num_known,
            num_computed: 0,
            samples: false,
            written: Vec::new(),
            num_released: 0,
        });
        plan.started.push(self.sequences[index].id);
    }

    fn advance(&mut self, plan: &mut ExpectedPlan, index: usize, num_tokens: u32) -> u32 {
        if num_tokens > 0 {
            let num_new = self.num_new_blocks(index, num_tokens);
            let sequence = &mut self.sequences[index];
            let sample = num_tokens == sequence.num_pending();
            let residency = sequence.residency.as_mut().expect("a sequence that advances is on the worker");
            let first_written = residency.num_computed / self.limits.block_tokens;
            residency.num_computed += num_tokens;
            residency.num_known += u32::from(sample);
            residency.samples |= sample;
            residency.written.truncate(first_written as usize);
            residency.written.resize(residency.num_computed.div_ceil(self.limits.block_tokens) as usize, plan.step);
            plan.advances.push((sequence.id, num_tokens, num_new, sample));
        }
        num_tokens
    }

    /// Releases the blocks that will not be read again, unless the sequence is finishing.
    fn release_before_window(&mut self, index: usize) {
        let num_retired = self.num_steps - self.in_flight.len() as u64;
        let sequence = &mut self.sequences[index];
        if sequence.is_running()
            && let Some(residency) = &mut sequence.residency
        {
            let released = residency.num_released..sequence.visibility.first_block(residency.num_computed);
            residency.num_released = released.end;
            self.retiring.extend(residency.written[released].iter().filter(|step| **step > num_retired));
        }
    }

    pub fn apply(&mut self, result: &StepResult) -> Vec<Event> {
        let mut events = Vec::new();
        for (id, residency) in self.in_flight.pop_front().expect("a step in flight") {
            let Some(output_index) = result.outputs.iter().position(|output| output.id == id) else { continue };
            let is_this = |sequence: &&mut Sequence| {
                sequence.id == id && sequence.residency.as_ref().is_some_and(|current| current.number == residency)
            };
            let Some(sequence) = self.sequences.iter_mut().find(is_this) else { continue };
            let Some(token_ids) = &result.outputs[output_index].token_ids else {
                events.push(Event::Failed { id, output_index });
                self.end(id);
                continue;
            };
            sequence.num_tokens += token_ids.len() as u32;
            let residency = sequence.residency.as_mut().expect("it is this residency");
            residency.samples &= token_ids.is_empty();
            let stopped = token_ids.iter().any(|token_id| sequence.stop_token_ids.contains(token_id));
            let finish_reason = match sequence.num_tokens == sequence.max_tokens && !token_ids.is_empty() {
                _ if stopped => Some(FinishReason::StopToken),
                true => Some(FinishReason::Length),
                false => None,
            };
            events.push(Event::Advanced { id, output_index, num_tokens: token_ids.len(), finish_reason });
            if finish_reason.is_some() {
                self.end(id);
            }
        }
        self.retiring.retain(|step| *step > result.step);
        events
    }

    fn evict(&mut self, index: usize) {
        let num_retired = self.num_steps - self.in_flight.len() as u64;
        if let Some(residency) = self.sequences[index].residency.take() {
            self.retiring
                .extend(residency.written[residency.num_released..].iter().filter(|step| **step > num_retired));
            self.freed.push(self.sequences[index].id);
        }
    }

    fn num_free(&self) -> usize {
        let held: usize = self.sequences.iter().map(Sequence::num_blocks).sum();
        self.limits.num_blocks as usize - held - self.retiring.len()
    }

    fn num_new_blocks(&self, index: usize, num_tokens: u32) -> usize {
        let sequence = &self.sequences[index];
        let num_table_blocks = sequence.residency.as_ref().map_or(0, |residency| residency.written.len());
        ((sequence.num_computed() + num_tokens).div_ceil(self.limits.block_tokens) as usize)
            .saturating_sub(num_table_blocks)
    }

    /// Whether it cannot advance before a result is back.
    fn awaits_token(&self, index: usize) -> bool {
        let residency = self.sequences[index].residency.as_ref();
        self.limits.num_stages > 1 && residency.is_some_and(|residency| residency.samples)
    }

    fn running(&self) -> Vec<usize> {
        (0..self.sequences.len()).filter(|index| self.sequences[*index].is_running()).collect()
    }

    fn index(&self, id: SequenceId) -> usize {
        self.sequences.iter().position(|sequence| sequence.id == id).expect("a known sequence")
    }
}
