//! Runs one scenario to its end in virtual time: clients that come and leave, an engine that plans and applies, and the
//! simulated worker. Checks that every sequence gets exactly its tokens and exactly one end, and that all comes to rest.

mod death;

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;

use penstock_scheduler::{Event, Limits, Plan, Scheduler, SequenceId, StepResult, Submission, SubmitError, TokenId};

use crate::ledger::{Ledger, Live};
use crate::model::{self, End};
use crate::submitted::{self, Submitted};
use crate::worker::{Nature, Worker};

/// Far beyond what any scenario needs; reached only by one that makes no progress.
const MAX_STEPS: u64 = 20_000;
const MAX_TICKS: u64 = 200_000;

#[derive(Clone, Debug)]
pub struct Scenario {
    pub limits: Limits,
    pub arrivals: Vec<Arrival>,
    /// How long the steps take, in turn.
    pub latencies_ticks: Vec<u64>,
    /// The engine gets to planning only so often.
    pub ticks_per_plan: u64,
    /// See `Worker::reports_dead`.
    pub reports_dead: bool,
    /// Whether links of prefixes often have the same hash.
    pub has_poor_hash: bool,
    /// Ticks at which the worker dies, rising.
    pub deaths: Vec<u64>,
    /// Whether those who were in a step when it died are each run alone until they got a token.
    pub isolates: bool,
}

#[derive(Clone, Debug)]
pub struct Arrival {
    pub tick: u64,
    pub id: u64,
    pub num_prompt_tokens: usize,
    pub max_new_tokens: u32,
    /// Whether the model's stop token ends it.
    pub stops: bool,
    pub abort_after_ticks: Option<u64>,
    /// Computing this position fails.
    pub fail_position: Option<u32>,
    /// The prompt begins like one of so many texts, and then goes on alone.
    pub text: u64,
    pub num_text_tokens: usize,
    /// It begins with an earlier sequence's prompt and answer instead: the last one, the one before, …
    pub continues: Option<usize>,
    pub priority: i32,
    pub salt: u64,
    pub group: Option<u64>,
    pub prefix_caching: bool,
    pub needs_prompt_logprobs: bool,
}

struct InFlight {
    plan: Plan,
    natures: Vec<Nature>,
    done_tick: u64,
}

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub num_preemptions: usize,
    pub num_discarded_tokens: usize,
    pub num_aborts_on_worker: usize,
    pub num_failures: usize,
    /// Submissions under an id that the worker still knew from an earlier one.
    pub num_reused_ids: usize,
    pub num_hit_tokens: usize,
    /// Shared blocks that a step in flight was still to write.
    pub num_shared_unwritten: usize,
    /// Times that one who waited was overtaken.
    pub num_overtaken: usize,
    /// Sequences that had relied on one that failed.
    pub num_voided: usize,
    /// Sequences that were on the worker when it died, and those of them that had got tokens.
    pub num_lost: usize,
    pub num_replayed: usize,
    /// Sequences that were run alone until they got a token.
    pub num_cleared: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.num_preemptions += other.num_preemptions;
        self.num_discarded_tokens += other.num_discarded_tokens;
        self.num_aborts_on_worker += other.num_aborts_on_worker;
        self.num_failures += other.num_failures;
        self.num_reused_ids += other.num_reused_ids;
        self.num_hit_tokens += other.num_hit_tokens;
        self.num_shared_unwritten += other.num_shared_unwritten;
        self.num_overtaken += other.num_overtaken;
        self.num_voided += other.num_voided;
        self.num_lost += other.num_lost;
        self.num_replayed += other.num_replayed;
        self.num_cleared += other.num_cleared;
    }
}

pub struct World {
    scenario: Scenario,
    scheduler: Scheduler,
    worker: Worker,
    ledger: Ledger,
    live: Live,
    /// Every prompt so far with its answer.
    texts: Vec<Vec<TokenId>>,
    flights: VecDeque<InFlight>,
    /// Who is to be run alone: id, submission, tokens it had.
    trials: VecDeque<(SequenceId, usize, usize)>,
    tick: u64,
    num_steps: u64,
    num_submissions: usize,
    tally: Tally,
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
            worker: Worker::new(limits.num_blocks, limits.block_tokens, scenario.reports_dead),
            ledger: Ledger::new(limits),
            live: HashMap::new(),
            texts: Vec::new(),
            flights: VecDeque::new(),
            trials: VecDeque::new(),
            tick: 0,
            num_steps: 0,
            num_submissions: 0,
            tally: Tally::default(),
            scenario,
        }
    }

    pub fn run(mut self) -> Tally {
        let mut arrivals: VecDeque<_> = std::mem::take(&mut self.scenario.arrivals).into();
        let mut deaths: VecDeque<_> = std::mem::take(&mut self.scenario.deaths).into();
        while !(arrivals.is_empty() && self.live.is_empty() && self.flights.is_empty()) || self.owes_frees() {
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
            assert!(self.tick < MAX_TICKS, "the worker is never told what to free");
        }
        assert!(self.ledger.is_empty(), "the worker keeps a sequence that has ended");
        let stats = self.scheduler.stats();
        assert_eq!(stats.num_free_blocks, stats.num_blocks, "a block leaked");
        assert_eq!((stats.num_queued, stats.num_running, stats.max_running_tokens), (0, 0, 0));
        self.check_voided();
        self.tally.num_preemptions = self.ledger.num_preemptions;
        self.tally.num_hit_tokens = stats.num_hit_tokens as usize;
        self.tally.num_shared_unwritten = self.ledger.num_shared_unwritten;
        self.tally.num_overtaken = self.ledger.num_overtaken;
        self.tally
    }

    fn owes_frees(&self) -> bool {
        !self.ledger.is_empty()
    }

    fn submit(&mut self, arrival: Arrival) {
        let id = SequenceId(arrival.id);
        let submission = self.submission(&arrival);
        let prompt = submission.prompt_token_ids.clone();
        let limits = self.scenario.limits;
        let Limits { max_sequence_tokens, num_blocks, block_tokens, .. } = limits;
        let max_tokens = prompt.len() as u32 + arrival.max_new_tokens;
        match self.scheduler.submit(submission.clone(), Duration::from_millis(self.tick)) {
            Ok(()) => assert!(!self.live.contains_key(&id), "an id was taken twice"),
            Err(SubmitError::AlreadyKnown { .. }) => return assert!(self.live.contains_key(&id)),
            Err(SubmitError::TooLong { .. }) => return assert!(max_tokens > max_sequence_tokens),
            Err(SubmitError::TooManyBlocks { .. }) => return assert!(max_tokens - 1 > num_blocks * block_tokens),
            Err(error) => panic!("a good submission was refused: {error}"),
        }
        self.tally.num_reused_ids += usize::from(self.ledger.knows(id));
        let Arrival { salt, max_new_tokens, fail_position, .. } = arrival;
        let expected = model::expected(salt, &prompt, max_new_tokens, &submission.stop_token_ids, fail_position);
        self.texts.push(prompt.iter().chain(&expected.0).copied().collect());
        let number = self.num_submissions;
        let submitted = Submitted {
            submission: number,
            order: submitted::order(&limits, arrival.priority, self.tick, number),
            circle: submitted::circle(&limits, &submission, number),
            prompt,
            max_new_tokens,
            needs_prompt_logprobs: arrival.needs_prompt_logprobs,
            received: Vec::new(),
            expected,
            abort_tick: arrival.abort_after_ticks.map(|ticks| self.tick + ticks),
            nature: Nature { salt, fail_position },
        };
        self.num_submissions += 1;
        self.live.insert(id, submitted);
    }

    fn submission(&self, arrival: &Arrival) -> Submission {
        let stop_token_ids: Arc<[TokenId]> = if arrival.stops { [model::STOP_TOKEN].into() } else { [].into() };
        Submission {
            id: SequenceId(arrival.id),
            prompt_token_ids: self.prompt(arrival),
            max_new_tokens: arrival.max_new_tokens,
            stop_token_ids,
            priority: arrival.priority,
            salt: arrival.salt,
            group: arrival.group,
            prefix_caching: arrival.prefix_caching,
            needs_prompt_logprobs: arrival.needs_prompt_logprobs,
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
            self.live.remove(&id);
            self.tally.num_aborts_on_worker += usize::from(self.ledger.knows(id));
            assert!(self.scheduler.abort(id), "{id:?} had not ended");
            assert!(!self.scheduler.abort(id), "{id:?} was aborted twice");
        }
    }

    fn plan(&mut self) {
        self.isolate();
        while let Some(plan) = self.scheduler.plan(Duration::from_millis(self.tick)) {
            self.scheduler.audit();
            self.ledger.enter(&plan, &self.live, self.scheduler.stats());
            let natures = plan.started.iter().map(|start| self.live[&start.id].nature).collect();
            let latencies = &self.scenario.latencies_ticks;
            let latency = latencies[self.num_steps as usize % latencies.len()];
            let begin = self.flights.back().map_or(self.tick, |flight| flight.done_tick);
            self.flights.push_back(InFlight { plan, natures, done_tick: begin + latency });
            self.num_steps += 1;
            assert!(self.num_steps < MAX_STEPS, "no end in sight");
        }
        assert!(self.live.is_empty() || !self.flights.is_empty(), "deadlock: {:?}", self.scheduler.stats());
    }

    /// Executes and applies every step that is done by now.
    fn receive(&mut self) {
        while self.flights.front().is_some_and(|flight| flight.done_tick <= self.tick) {
            let flight = self.flights.pop_front().expect("just seen");
            let (result, poisoned) = self.worker.execute(&flight.plan, &flight.natures);
            let events = self.scheduler.apply(&result).expect("a good result");
            self.scheduler.audit();
            self.ledger.retire(result.step, result.outputs.iter().any(|output| output.token_ids.is_none()));
            let num_sampled = result.outputs.iter().flat_map(|output| &output.token_ids).flatten().count();
            let num_taken: usize = events.iter().map(|event| self.take(event, &result, &poisoned)).sum();
            self.tally.num_discarded_tokens += num_sampled - num_taken;
        }
    }

    /// Gives an event to its client. Returns the tokens taken.
    fn take(&mut self, event: &Event, result: &StepResult, poisoned: &HashSet<SequenceId>) -> usize {
        let (Event::Advanced { id, output_index, .. } | Event::Failed { id, output_index }) = *event;
        let output = &result.outputs[output_index];
        assert_eq!(output.id, id);
        assert!(!poisoned.contains(&id), "{id:?} gets what was computed from a block that was never written");
        let submitted = self.live.get_mut(&id).unwrap_or_else(|| panic!("an event for {id:?}, which has ended"));
        let (num_tokens, end) = match *event {
            Event::Advanced { num_tokens, finished, .. } => {
                let token_ids = output.token_ids.as_ref().expect("tokens");
                submitted.received.extend_from_slice(&token_ids[..num_tokens]);
                (num_tokens, finished.map(End::Finished))
            }
            Event::Failed { .. } => {
                self.tally.num_failures += 1;
                (0, Some(End::Failed))
            }
        };
        let (expected, expected_end) = &submitted.expected;
        match end {
            Some(end) => {
                assert_eq!((&submitted.received, &end), (expected, expected_end), "{id:?}");
                self.live.remove(&id);
            }
            None => assert!(expected.starts_with(&submitted.received), "{id:?} lost or repeated a token"),
        }
        num_tokens
    }
}

fn poor_hash(parent: u64, token_ids: &[TokenId]) -> u64 {
    token_ids.iter().fold(parent, |hash, token_id| model::extend(hash, *token_id)) % 16
}
