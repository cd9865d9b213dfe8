//! Runs one scenario to its end in virtual time: clients that come and leave, an engine that plans and applies, and the
//! simulated worker. Checks that every sequence gets exactly its tokens and exactly one end, and that all comes to rest.

use std::collections::{HashMap, VecDeque};
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;

use penstock_scheduler::{Event, Limits, Plan, Scheduler, SequenceId, StepResult, Submission, SubmitError, TokenId};

use crate::ledger::Ledger;
use crate::model::{self, End};
use crate::worker::Worker;

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
}

/// A sequence that has not ended, as its client sees it.
pub struct Submitted {
    /// Counts up; the order of arrival.
    pub submission: usize,
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: u32,
    pub received: Vec<TokenId>,
    expected: (Vec<TokenId>, End),
    abort_tick: Option<u64>,
    fail_position: Option<u32>,
}

struct InFlight {
    plan: Plan,
    fail_positions: Vec<Option<u32>>,
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
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.num_preemptions += other.num_preemptions;
        self.num_discarded_tokens += other.num_discarded_tokens;
        self.num_aborts_on_worker += other.num_aborts_on_worker;
        self.num_failures += other.num_failures;
        self.num_reused_ids += other.num_reused_ids;
    }
}

pub struct World {
    scenario: Scenario,
    scheduler: Scheduler,
    worker: Worker,
    ledger: Ledger,
    live: HashMap<SequenceId, Submitted>,
    flights: VecDeque<InFlight>,
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
            scheduler: Scheduler::new(limits),
            worker: Worker::new(limits.num_blocks, limits.block_tokens, scenario.reports_dead),
            ledger: Ledger::new(limits),
            live: HashMap::new(),
            flights: VecDeque::new(),
            tick: 0,
            num_steps: 0,
            num_submissions: 0,
            tally: Tally::default(),
            scenario,
        }
    }

    pub fn run(mut self) -> Tally {
        let mut arrivals: VecDeque<_> = std::mem::take(&mut self.scenario.arrivals).into();
        while !(arrivals.is_empty() && self.live.is_empty() && self.flights.is_empty()) || self.owes_frees() {
            self.receive();
            while arrivals.front().is_some_and(|arrival| arrival.tick <= self.tick) {
                self.submit(arrivals.pop_front().expect("just seen"));
            }
            self.abort();
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
        self.tally.num_preemptions = self.ledger.num_preemptions;
        self.tally
    }

    fn owes_frees(&self) -> bool {
        !self.ledger.is_empty()
    }

    fn submit(&mut self, arrival: Arrival) {
        let id = SequenceId(arrival.id);
        let prompt = model::prompt(self.num_submissions as u64 + 1, arrival.num_prompt_tokens);
        let stop_token_ids: Arc<[TokenId]> = if arrival.stops { [model::STOP_TOKEN].into() } else { [].into() };
        let expected = model::expected(&prompt, arrival.max_new_tokens, &stop_token_ids, arrival.fail_position);
        let submission =
            Submission { id, prompt_token_ids: prompt.clone(), max_new_tokens: arrival.max_new_tokens, stop_token_ids };
        let Limits { max_sequence_tokens, num_blocks, block_tokens, .. } = self.scenario.limits;
        let max_tokens = prompt.len() as u32 + arrival.max_new_tokens;
        match self.scheduler.submit(submission) {
            Ok(()) => assert!(!self.live.contains_key(&id), "an id was taken twice"),
            Err(SubmitError::AlreadyKnown { .. }) => return assert!(self.live.contains_key(&id)),
            Err(SubmitError::TooLong { .. }) => return assert!(max_tokens > max_sequence_tokens),
            Err(SubmitError::TooManyBlocks { .. }) => return assert!(max_tokens - 1 > num_blocks * block_tokens),
            Err(error) => panic!("a good submission was refused: {error}"),
        }
        self.tally.num_reused_ids += usize::from(self.ledger.knows(id));
        let submitted = Submitted {
            submission: self.num_submissions,
            prompt,
            max_new_tokens: arrival.max_new_tokens,
            received: Vec::new(),
            expected,
            abort_tick: arrival.abort_after_ticks.map(|ticks| self.tick + ticks),
            fail_position: arrival.fail_position,
        };
        self.num_submissions += 1;
        self.live.insert(id, submitted);
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
        while let Some(plan) = self.scheduler.plan(Duration::from_millis(self.tick)) {
            self.ledger.enter(&plan, &self.live, self.scheduler.stats());
            let fail_positions = plan.started.iter().map(|start| self.live[&start.id].fail_position).collect();
            let latencies = &self.scenario.latencies_ticks;
            let latency = latencies[self.num_steps as usize % latencies.len()];
            let begin = self.flights.back().map_or(self.tick, |flight| flight.done_tick);
            self.flights.push_back(InFlight { plan, fail_positions, done_tick: begin + latency });
            self.num_steps += 1;
            assert!(self.num_steps < MAX_STEPS, "no end in sight");
        }
        assert!(self.live.is_empty() || !self.flights.is_empty(), "deadlock: {:?}", self.scheduler.stats());
    }

    /// Executes and applies every step that is done by now.
    fn receive(&mut self) {
        while self.flights.front().is_some_and(|flight| flight.done_tick <= self.tick) {
            let flight = self.flights.pop_front().expect("just seen");
            let result = self.worker.execute(&flight.plan, &flight.fail_positions);
            let events = self.scheduler.apply(&result).expect("a good result");
            self.ledger.retire();
            let num_sampled = result.outputs.iter().filter(|output| output.token_ids.is_some()).count();
            let num_taken: usize = events.iter().map(|event| self.take(event, &result)).sum();
            self.tally.num_discarded_tokens += num_sampled - num_taken;
        }
    }

    /// Gives an event to its client. Returns the tokens taken.
    fn take(&mut self, event: &Event, result: &StepResult) -> usize {
        let (Event::Advanced { id, output_index, .. } | Event::Failed { id, output_index }) = *event;
        let output = &result.outputs[output_index];
        assert_eq!(output.id, id);
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
