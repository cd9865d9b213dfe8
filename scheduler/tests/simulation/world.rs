//! Runs one scenario in virtual time until it is idle: clients that submit and cancel, an engine that plans and
//! applies, and the simulated worker. Checks that every sequence gets exactly its tokens and exactly one end, and that
//! no block leaks.

mod death;

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use penstock_scheduler::{
    Drafted, Event, Limits, Plan, Scheduler, SequenceId, StepResult, Submission, SubmitError, TokenId,
};

use crate::ledger::{Ledger, Live};
use crate::model::{self, End, num_image_bytes};
use crate::reference::{ExpectedPlan, Reference, Sequence};
use crate::scenario::{Arrival, Scenario};
use crate::submitted::{self, Submitted, Visibility, max_depth};
use crate::tally::Tally;
use crate::worker::{Traits, Worker};

/// More ticks than any scenario needs until all sequences are freed.
const MAX_TICKS: u64 = 200_000;

struct InFlight {
    plan: Plan,
    traits: Vec<Traits>,
    done_tick: u64,
}

pub struct World {
    scenario: Scenario,
    scheduler: Scheduler,
    worker: Worker,
    ledger: Ledger,
    /// Set if the scenario is predictable.
    reference: Option<Reference>,
    live: Live,
    /// All prompts so far, each followed by its answer.
    texts: Vec<Vec<TokenId>>,
    in_flight: VecDeque<InFlight>,
    /// Sequences to quarantine: id, submission, number of tokens received.
    suspects: VecDeque<(SequenceId, usize, usize)>,
    tick: u64,
    num_steps: u64,
    /// Steps that can still be planned before the next submission, cancel, failure or death.
    max_steps_left: u64,
    num_submissions: usize,
    tally: Tally,
    /// Hash of every plan and event, in order.
    trace: DefaultHasher,
}

impl World {
    pub fn new(mut scenario: Scenario) -> Self {
        scenario.arrivals.sort_by_key(|arrival| arrival.tick);
        let limits = scenario.limits;
        Self {
            scheduler: if scenario.has_poor_hash {
                Scheduler::with_hash(limits, poor_hash)
            } else {
                Scheduler::new(limits)
            },
            worker: Worker::new(&limits, scenario.repeats_failures),
            ledger: Ledger::new(limits, scenario.is_in_order(), scenario.has_poor_hash),
            reference: scenario.is_predictable().then(|| Reference::new(limits)),
            live: HashMap::new(),
            texts: Vec::new(),
            in_flight: VecDeque::new(),
            suspects: VecDeque::new(),
            tick: 0,
            num_steps: 0,
            max_steps_left: 0,
            num_submissions: 0,
            tally: Tally::default(),
            trace: DefaultHasher::new(),
            scenario,
        }
    }

    /// Returns the events by name, and a digest of all plans and events.
    pub fn run(mut self) -> (Tally, u64) {
        let mut arrivals: VecDeque<_> = std::mem::take(&mut self.scenario.arrivals).into();
        let mut deaths: VecDeque<_> = std::mem::take(&mut self.scenario.deaths).into();
        while !(arrivals.is_empty() && self.live.is_empty() && self.in_flight.is_empty()) || self.owes_frees() {
            self.receive();
            while arrivals.front().is_some_and(|arrival| arrival.tick <= self.tick) {
                self.submit(arrivals.pop_front().expect("just seen"));
            }
            self.abort();
            if deaths.front().is_some_and(|tick| *tick <= self.tick) {
                deaths.pop_front();
                self.die();
            }
            if self.tick.is_multiple_of(self.scenario.ticks_per_plan) {
                self.plan();
            }
            self.tick += 1;
            assert!(self.tick < MAX_TICKS, "a sequence is never freed");
        }
        assert!(self.ledger.is_empty(), "a sequence has ended and was not freed");
        let stats = self.scheduler.stats();
        assert_eq!(stats.num_allocatable_blocks, stats.num_blocks, "a block leaked");
        assert!(stats.num_full_snapshots <= self.scenario.limits.num_snapshots as usize);
        assert_eq!((stats.num_queued, stats.num_running, stats.max_running_tokens), (0, 0, 0));
        self.check_voided();
        self.tally += &self.ledger.tally;
        self.tally.add("steps", self.num_steps);
        self.tally.add("ticks", self.tick);
        (self.tally, self.trace.finish())
    }

    fn owes_frees(&self) -> bool {
        !self.ledger.is_empty()
    }

    fn submit(&mut self, arrival: Arrival) {
        let id = SequenceId(arrival.id);
        let submission = self.submission(&arrival);
        let prompt = submission.prompt_token_ids.clone();
        let limits = self.scenario.limits;
        let Limits { max_sequence_tokens, max_step_tokens, num_blocks, .. } = limits;
        let num_source_tokens = submission.num_source_tokens;
        let visibility = Visibility::new(&limits, num_source_tokens);
        let max_tokens = prompt.len() as u32 + arrival.max_new_tokens;
        match self.scheduler.submit(submission.clone(), Duration::from_millis(self.tick)) {
            Ok(()) => assert!(!self.live.contains_key(&id), "a known id was accepted"),
            Err(SubmitError::AlreadyKnown { .. }) => return assert!(self.live.contains_key(&id)),
            Err(SubmitError::TooLong { .. }) => {
                self.tally.add("rejected", 1);
                return assert!(max_tokens > max_sequence_tokens);
            }
            Err(SubmitError::TooManyBlocks { .. }) => {
                self.tally.add("rejected", 1);
                return assert!(visibility.max_blocks(0, max_tokens - 1) > num_blocks as usize);
            }
            Err(SubmitError::SourceTooLong { .. }) => {
                self.tally.add("sources rejected", 1);
                return assert!(num_source_tokens > max_step_tokens);
            }
            Err(SubmitError::ImagesTooLarge { .. }) => {
                self.tally.add("images rejected", 1);
                return assert!(num_image_bytes(submission.images.iter().copied()) > limits.max_image_bytes);
            }
            Err(error) => panic!("a valid submission was rejected: {error}"),
        }
        self.tally.add("sequences", 1);
        self.tally.add("ids reused while the worker knows them", u64::from(self.ledger.knows(id)));
        self.tally.add("sequences of one token", u64::from(arrival.max_new_tokens == 1));
        self.tally.add("all of a sequence is source", u64::from(num_source_tokens as usize == prompt.len()));
        self.tally.add("prompt logprobs asked for", u64::from(arrival.needs_prompt_outputs));
        let Arrival { max_new_tokens, fail_position, .. } = arrival;
        let images = arrival.images.within(prompt.len());
        let expected = model::expected(&prompt, images, max_new_tokens, &submission.stop_token_ids, fail_position);
        self.texts.push(prompt.iter().chain(&expected.0).copied().collect());
        let number = self.num_submissions;
        let submitted = Submitted {
            submission: number,
            order: submitted::order(&limits, arrival.priority, self.tick, number),
            scope: submitted::scope(&limits, &submission, number),
            prompt,
            max_new_tokens,
            needs_prompt_outputs: arrival.needs_prompt_outputs,
            num_source_tokens,
            visibility,
            received: Vec::new(),
            expected,
            abort_tick: arrival.abort_after_ticks.map(|ticks| self.tick + ticks),
            traits: Traits { fail_position, visibility, images },
        };
        self.num_submissions += 1;
        if let Some(reference) = &mut self.reference {
            let (order, num_tokens) = (submitted.order, submitted.prompt.len() as u32);
            let stop_token_ids = submission.stop_token_ids;
            reference.submit(Sequence {
                id,
                order,
                num_tokens,
                max_tokens,
                num_source_tokens,
                images: images.groups(),
                visibility,
                stop_token_ids,
                residency: None,
            });
        }
        self.live.insert(id, submitted);
        self.reset_max_steps_left();
    }

    /// Bounds the steps until the next disturbance: the sequence of highest precedence advances in every step
    /// and is never preempted.
    fn reset_max_steps_left(&mut self) {
        let tokens = |submitted: &Submitted| submitted.prompt.len() as u64 + u64::from(submitted.max_new_tokens) + 2;
        self.max_steps_left = (self.live.len() as u64 + 1) * self.live.values().map(tokens).sum::<u64>() + 8;
    }

    fn submission(&self, arrival: &Arrival) -> Submission {
        let stop_token_ids: Arc<[TokenId]> = if arrival.stops { [model::STOP_TOKEN].into() } else { [].into() };
        Submission {
            id: SequenceId(arrival.id),
            prompt_token_ids: self.prompt(arrival),
            generated_token_ids: Vec::new(),
            max_new_tokens: arrival.max_new_tokens,
            stop_token_ids,
            priority: arrival.priority,
            group: arrival.group,
            cache_salt: None,
            content_salts: arrival.images.within(arrival.num_prompt_tokens).salts().into(),
            needs_prompt_outputs: arrival.needs_prompt_outputs,
            num_source_tokens: arrival.num_source_tokens.min(arrival.num_prompt_tokens) as u32,
            whole_spans: Arc::default(),
            images: arrival.images.within(arrival.num_prompt_tokens).groups().into(),
            has_grammar: submitted::has_grammar(SequenceId(arrival.id)),
        }
    }

    fn prompt(&self, arrival: &Arrival) -> Vec<TokenId> {
        let own = model::text(1000 + self.num_submissions as u64, arrival.num_prompt_tokens);
        let continued = arrival.continues.and_then(|num_back| self.texts.iter().rev().nth(num_back));
        let common: Vec<_> = match continued {
            Some(text) => text.clone(),
            None => model::text(arrival.text, arrival.num_text_tokens).collect(),
        };
        common.into_iter().chain(own).take(arrival.num_prompt_tokens).collect()
    }

    fn abort(&mut self) {
        let due = |submitted: &Submitted| submitted.abort_tick.is_some_and(|tick| tick <= self.tick);
        let mut ids: Vec<_> = self.live.iter().filter(|(_, submitted)| due(submitted)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        for id in ids {
            self.tally.add("cancelled while others waited for it", u64::from(self.ledger.is_awaited(id, &self.live)));
            self.live.remove(&id);
            self.tally.add(self.ledger.state(id).cancelled_name(), 1);
            assert!(self.scheduler.abort(id), "{id:?} is known");
            assert!(!self.scheduler.abort(id), "{id:?} was aborted twice");
            self.scheduler.audit();
            self.ledger.check_free(self.scheduler.stats(), &self.live);
            if let Some(reference) = &mut self.reference {
                reference.end(id);
            }
            self.reset_max_steps_left();
        }
    }

    fn plan(&mut self) {
        self.quarantine();
        while let Some(plan) = self.next_plan() {
            self.scheduler.audit();
            self.ledger.enter(&plan, &self.live, self.scheduler.stats());
            let traits = plan.new_sequences.iter().map(|start| self.live[&start.id].traits).collect();
            let latencies = &self.scenario.latencies_ticks;
            let latency = latencies[self.num_steps as usize % latencies.len()];
            let begin = self.in_flight.back().map_or(self.tick, |step| step.done_tick);
            self.in_flight.push_back(InFlight { plan, traits, done_tick: begin + latency });
            self.num_steps += 1;
            assert!(self.max_steps_left > 0, "livelock: {:?}", self.scheduler.stats());
            self.max_steps_left -= 1;
        }
        let stats = self.scheduler.stats();
        assert!(self.live.is_empty() || !self.in_flight.is_empty(), "deadlock: {stats:?}");
        let has_room = self.ledger.quarantined.is_none() && self.in_flight.len() < max_depth(self.scenario.limits);
        self.tally.add("waited for blocks to retire", u64::from(has_room && stats.num_retiring_blocks > 0));
    }

    fn next_plan(&mut self) -> Option<Plan> {
        let plan = self.scheduler.plan(Duration::from_millis(self.tick));
        if let Some(reference) = &mut self.reference {
            assert_eq!(plan.as_ref().map(ExpectedPlan::from), reference.plan(), "the plan differs from the reference");
            self.tally.add("steps predicted by the reference", u64::from(plan.is_some()));
        }
        self.trace.write(format!("{plan:?}").as_bytes());
        plan
    }

    /// Executes and applies every step that is done.
    fn receive(&mut self) {
        while self.in_flight.front().is_some_and(|step| step.done_tick <= self.tick) {
            let step = self.in_flight.pop_front().expect("just seen");
            let (result, poisoned) = self.worker.execute(&step.plan, &step.traits);
            if self.scenario.observes_durations {
                let num_drafts = result.outputs.iter().map(|output| output.num_draft_tokens).sum();
                let latencies = &self.scenario.latencies_ticks;
                let duration = Duration::from_millis(latencies[result.step as usize % latencies.len()]);
                let by_model = result.outputs.iter().any(|output| output.drafted_by_model);
                let drafted = Drafted { num_tokens: num_drafts, by_model, duration: duration / 3 };
                self.scheduler.observe(result.step, duration, drafted).expect("a step in flight");
            }
            let events = self.scheduler.apply(&result).expect("a valid result");
            self.scheduler.audit();
            if let Some(reference) = &mut self.reference {
                assert_eq!(events, reference.apply(&result), "the events differ from the reference");
            }
            self.trace.write(format!("{events:?}").as_bytes());
            let failed = result.outputs.iter().any(|output| output.token_ids.is_none());
            self.ledger.retire(&result, failed);
            if failed {
                self.reset_max_steps_left();
            }
            let num_sampled = result.outputs.iter().flat_map(|output| &output.token_ids).flatten().count();
            let num_taken: usize = events.iter().map(|event| self.take(event, &result, &poisoned)).sum();
            self.tally.add("tokens discarded", (num_sampled - num_taken) as u64);
            self.ledger.check_free(self.scheduler.stats(), &self.live);
        }
    }

    /// Delivers an event to its client. Returns the number of tokens.
    fn take(&mut self, event: &Event, result: &StepResult, poisoned: &HashSet<SequenceId>) -> usize {
        let (Event::Advanced { id, output_index, .. } | Event::Failed { id, output_index }) = *event;
        let output = &result.outputs[output_index];
        assert_eq!(output.id, id);
        assert!(!poisoned.contains(&id), "{id:?} gets a token that was computed from an unwritten block");
        let submitted = self.live.get_mut(&id).unwrap_or_else(|| panic!("{id:?} gets an event after its end"));
        let (num_tokens, end) = match *event {
            Event::Advanced { num_tokens, finish_reason, .. } => {
                let token_ids = output.token_ids.as_ref().expect("tokens");
                submitted.received.extend_from_slice(&token_ids[..num_tokens]);
                (num_tokens, finish_reason.map(End::Finished))
            }
            Event::Failed { .. } => (0, Some(End::Failed)),
        };
        let (expected, expected_end) = &submitted.expected;
        match end {
            Some(end) => {
                assert_eq!((&submitted.received, &end), (expected, expected_end), "{id:?}");
                self.tally.add(end.name(), 1);
                self.live.remove(&id);
            }
            None => assert!(expected.starts_with(&submitted.received), "{id:?} has lost or repeated a token"),
        }
        num_tokens
    }
}

fn poor_hash(parent: u64, token_ids: &[TokenId]) -> u64 {
    token_ids.iter().fold(parent, |hash, token_id| model::extend(hash, *token_id)) % 16
}
