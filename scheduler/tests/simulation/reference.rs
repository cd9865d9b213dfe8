//! The scheduler's contract once more, as plainly as it can be said, for sequences that share no blocks: lists that are
//! searched, everything counted anew. Foretells every plan and every event; blocks are numbers here, not ids.

use std::collections::VecDeque;
use std::sync::Arc;

use penstock_scheduler::{Event, FinishReason, Limits, Plan, SequenceId, StepResult, TokenId};

use crate::submitted::{Order, Sight};

/// What a plan must say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Foretold {
    pub step: u64,
    /// In order of their ids.
    pub freed: Vec<SequenceId>,
    pub started: Vec<SequenceId>,
    /// Id, tokens, new blocks, whether it samples.
    pub advances: Vec<(SequenceId, u32, usize, bool)>,
}

impl From<&Plan> for Foretold {
    fn from(plan: &Plan) -> Self {
        let mut freed = plan.freed_sequence_ids.clone();
        freed.sort_unstable();
        let started = plan.new_sequences.iter().map(|start| start.id).collect();
        let advances = plan.advances.iter();
        let advances = advances.map(|it| (it.id, it.num_tokens, it.new_block_ids.len(), it.sample)).collect();
        Foretold { step: plan.step, freed, started, advances }
    }
}

pub struct Sequence {
    pub id: SequenceId,
    pub order: Order,
    /// Whose ids are here: the prompt's, and those that came back.
    pub num_tokens: u32,
    pub max_tokens: u32,
    pub num_source_tokens: u32,
    pub sight: Sight,
    pub stop_token_ids: Arc<[TokenId]>,
    /// `None`: in the queue.
    pub stay: Option<Stay>,
}

/// One time on the worker, as it will be when the steps in flight are over.
pub struct Stay {
    number: u64,
    num_known: u32,
    num_computed: u32,
    /// By block, the last step that writes it.
    written: Vec<u64>,
    /// How many of the first blocks are given up.
    num_passed: usize,
}

impl Sequence {
    /// Whether it runs: the worker knows it and it is to be advanced again.
    fn runs(&self) -> bool {
        self.stay.as_ref().is_some_and(|stay| stay.num_known < self.max_tokens)
    }

    fn num_pending(&self) -> u32 {
        self.stay.as_ref().map_or(self.num_tokens, |stay| stay.num_known - stay.num_computed)
    }

    fn num_computed(&self) -> u32 {
        self.stay.as_ref().map_or(0, |stay| stay.num_computed)
    }

    /// Blocks beside its own that it needs to compute all that is known, token by token.
    fn num_lacking(&self) -> usize {
        let num_computed = self.num_computed();
        let most = self.sight.max_blocks(num_computed, num_computed + self.num_pending());
        most.saturating_sub(self.num_blocks())
    }

    fn num_blocks(&self) -> usize {
        self.stay.as_ref().map_or(0, |stay| stay.written.len() - stay.num_passed)
    }
}

pub struct Reference {
    limits: Limits,
    /// All that are known, those ahead in line first.
    sequences: Vec<Sequence>,
    /// Of each step in flight: ids with the number of the stay.
    flights: VecDeque<Vec<(SequenceId, u64)>>,
    freed: Vec<SequenceId>,
    /// For each block that nobody has and that a step in flight writes: that step.
    retiring: Vec<u64>,
    pub alone: Option<SequenceId>,
    num_steps: u64,
    num_stays: u64,
}

impl Reference {
    pub fn new(limits: Limits) -> Self {
        let (sequences, flights, freed, retiring) = Default::default();
        Self { limits, sequences, flights, freed, retiring, alone: None, num_steps: 0, num_stays: 0 }
    }

    pub fn submit(&mut self, sequence: Sequence) {
        self.sequences.push(sequence);
        self.sequences.sort_by_key(|sequence| sequence.order);
    }

    pub fn end(&mut self, id: SequenceId) {
        let index = self.index(id);
        self.evict(index);
        self.sequences.remove(index);
        self.alone = self.alone.filter(|alone| *alone != id);
    }

    pub fn restart(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.stay = None);
        self.flights.clear();
        self.freed.clear();
        self.retiring.clear();
        (self.alone, self.num_steps) = (None, 0);
    }

    pub fn quarantine(&mut self, id: Option<SequenceId>) {
        self.alone = id;
        for index in self.running().into_iter().filter(|_| id.is_some()) {
            if self.sequences[index].id != id.expect("one to be alone") {
                self.evict(index);
            }
        }
    }

    pub fn plan(&mut self) -> Option<Foretold> {
        let depth = if self.alone.is_some() { 1 } else { self.limits.max_steps_in_flight as usize };
        if self.flights.len() >= depth || !self.make_room() {
            return None;
        }
        let mut plan = Foretold { step: self.num_steps + 1, ..Foretold::default() };
        let (decodes, prefills): (Vec<_>, Vec<_>) =
            self.running().into_iter().partition(|index| self.sequences[*index].num_pending() == 1);
        for index in &decodes {
            self.advance(&mut plan, *index, 1);
        }
        self.advance_prompts(&mut plan, prefills, self.limits.max_step_tokens - decodes.len() as u32);
        if plan.advances.is_empty() && self.freed.is_empty() {
            return None;
        }
        for (id, ..) in &plan.advances {
            self.pass(self.index(*id));
        }
        self.num_steps += 1;
        plan.freed = std::mem::take(&mut self.freed);
        plan.freed.sort_unstable();
        let number = |id| self.sequences[self.index(id)].stay.as_ref().map_or(0, |stay| stay.number);
        let flight = plan.advances.iter().map(|(id, ..)| (*id, number(*id))).collect();
        self.flights.push_back(flight);
        Some(plan)
    }

    /// Decodes and the first in line must advance: the last in line give way until the pool has what those need now or when
    /// the steps in flight are over. In the latter case nothing is planned yet.
    fn make_room(&mut self) -> bool {
        let first = self.running().first().copied();
        loop {
            let running = self.running();
            let must =
                running.iter().filter(|index| Some(**index) == first || self.sequences[**index].num_pending() == 1);
            let needed: usize = must.map(|index| self.num_missing(*index, 1)).sum();
            let planned_out = self.sequences.iter().filter(|sequence| sequence.stay.is_some() && !sequence.runs());
            let leaving: usize = planned_out.map(Sequence::num_blocks).sum();
            match running.last() {
                Some(last) if needed > self.num_free() + self.retiring.len() + leaving => self.evict(*last),
                _ => return needed <= self.num_free(),
            }
        }
    }

    /// Strictly in order, those who run and those who wait. A newcomer must fit whole beside the prompts under way, and
    /// leave a block for each that runs. Nobody passes a source that does not fit into the step. The first in line finds the block that it was promised.
    fn advance_prompts(&mut self, plan: &mut Foretold, prefills: Vec<usize>, mut tokens_left: u32) {
        let num_lacking: usize = prefills.iter().map(|index| self.sequences[*index].num_lacking()).sum();
        let mut num_spare = self.num_free() as isize - num_lacking as isize;
        let first = self.running().first().copied();
        let max_running = self.limits.max_step_sequences.min(self.limits.max_step_tokens) as usize;
        let mut prefills = VecDeque::from(prefills);
        let mut is_closed = false;
        while tokens_left > 0 && plan.advances.len() < self.limits.max_step_sequences as usize {
            let next = |sequence: &Sequence| sequence.stay.is_none() && self.alone.is_none_or(|id| id == sequence.id);
            is_closed |= self.running().len() >= max_running;
            let newcomer = self.sequences.iter().position(next).filter(|_| !is_closed);
            match (newcomer, prefills.front().copied()) {
                (Some(index), running) if running.is_none_or(|running| index < running) => {
                    let sequence = &self.sequences[index];
                    let num_lacking = sequence.num_lacking() as isize;
                    let num_free = num_spare - self.running().len() as isize;
                    let slots = num_free.max(0) as u32 * self.limits.block_tokens;
                    let num_tokens = sequence.num_pending().min(tokens_left).min(slots);
                    is_closed = num_lacking > num_free;
                    if !is_closed && num_tokens < sequence.num_source_tokens {
                        return;
                    }
                    if !is_closed {
                        num_spare -= num_lacking.max(self.num_missing(index, num_tokens) as isize);
                        self.start(plan, index);
                        tokens_left -= self.advance(plan, index, num_tokens);
                    }
                }
                (_, Some(index)) => {
                    prefills.pop_front();
                    let promised = first.filter(|first| *first != index && prefills.contains(first));
                    let num_free = self.num_free() - promised.map_or(0, |first| self.num_missing(first, 1));
                    let sequence = &self.sequences[index];
                    let num_blocks = sequence.stay.as_ref().map_or(0, |stay| stay.written.len()) + num_free;
                    let slots = num_blocks as u32 * self.limits.block_tokens - sequence.num_computed();
                    let num_tokens = sequence.num_pending().min(slots).min(tokens_left);
                    let num_borrowed = self.num_missing(index, num_tokens).saturating_sub(sequence.num_lacking());
                    num_spare -= num_borrowed as isize;
                    tokens_left -= self.advance(plan, index, num_tokens);
                }
                (_, None) => return,
            }
        }
    }

    fn start(&mut self, plan: &mut Foretold, index: usize) {
        self.num_stays += 1;
        let (number, num_known) = (self.num_stays, self.sequences[index].num_tokens);
        self.sequences[index].stay =
            Some(Stay { number, num_known, num_computed: 0, written: Vec::new(), num_passed: 0 });
        plan.started.push(self.sequences[index].id);
    }

    fn advance(&mut self, plan: &mut Foretold, index: usize, num_tokens: u32) -> u32 {
        if num_tokens > 0 {
            let num_new = self.num_missing(index, num_tokens);
            let sequence = &mut self.sequences[index];
            let sample = num_tokens == sequence.num_pending();
            let stay = sequence.stay.as_mut().expect("who advances is on the worker");
            let first_written = stay.num_computed / self.limits.block_tokens;
            stay.num_computed += num_tokens;
            stay.num_known += u32::from(sample);
            stay.written.truncate(first_written as usize);
            stay.written.resize(stay.num_computed.div_ceil(self.limits.block_tokens) as usize, plan.step);
            plan.advances.push((sequence.id, num_tokens, num_new, sample));
        }
        num_tokens
    }

    /// What it will not read again is given up, unless it only waits for its last token.
    fn pass(&mut self, index: usize) {
        let num_retired = self.num_steps - self.flights.len() as u64;
        let sequence = &mut self.sequences[index];
        if sequence.runs()
            && let Some(stay) = &mut sequence.stay
        {
            let passed = stay.num_passed..sequence.sight.first_block(stay.num_computed);
            stay.num_passed = passed.end;
            self.retiring.extend(stay.written[passed].iter().filter(|step| **step > num_retired));
        }
    }

    pub fn apply(&mut self, result: &StepResult) -> Vec<Event> {
        let mut events = Vec::new();
        for (id, stay) in self.flights.pop_front().expect("a step in flight") {
            let Some(output_index) = result.outputs.iter().position(|output| output.id == id) else { continue };
            let is_this = |sequence: &&mut Sequence| {
                sequence.id == id && sequence.stay.as_ref().is_some_and(|current| current.number == stay)
            };
            let Some(sequence) = self.sequences.iter_mut().find(is_this) else { continue };
            let Some(token_ids) = &result.outputs[output_index].token_ids else {
                events.push(Event::Failed { id, output_index });
                self.end(id);
                continue;
            };
            sequence.num_tokens += token_ids.len() as u32;
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
        let num_retired = self.num_steps - self.flights.len() as u64;
        if let Some(stay) = self.sequences[index].stay.take() {
            self.retiring.extend(stay.written[stay.num_passed..].iter().filter(|step| **step > num_retired));
            self.freed.push(self.sequences[index].id);
        }
    }

    fn num_free(&self) -> usize {
        let held: usize = self.sequences.iter().map(Sequence::num_blocks).sum();
        self.limits.num_blocks as usize - held - self.retiring.len()
    }

    fn num_missing(&self, index: usize, num_tokens: u32) -> usize {
        let sequence = &self.sequences[index];
        let num_placed = sequence.stay.as_ref().map_or(0, |stay| stay.written.len());
        ((sequence.num_computed() + num_tokens).div_ceil(self.limits.block_tokens) as usize).saturating_sub(num_placed)
    }

    fn running(&self) -> Vec<usize> {
        (0..self.sequences.len()).filter(|index| self.sequences[*index].runs()).collect()
    }

    fn index(&self, id: SequenceId) -> usize {
        self.sequences.iter().position(|sequence| sequence.id == id).expect("a known sequence")
    }
}
