//! The task that owns the scheduler and the stream of steps: commands and results in, plans and events out.
//!
//! INVARIANT: a sequence is in `open` from its submission until its terminal event was sent or it was aborted; whoever
//! takes it out sends that event. All state lives here and in the scheduler, none only in the workers.

use std::collections::{HashMap, VecDeque};
use std::pin::{Pin, pin};
use std::sync::Arc;

use penstock_scheduler::{self as scheduler, Event, Plan, Scheduler, SequenceId, Submission};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::grammar::Compiler;
use super::handle::{EngineOptions, State};
use super::open_sequence::OpenSequence;
use super::record::{StepInFlight, StepRecord};
use super::recovery::Outage;
use super::restart::RestartGroup;
use super::watch::{Progress, hang};
use super::{Health, Load};
use crate::sequence::{FinishReason, SequenceEvent, SequenceFailure, SequenceRequest};
use crate::telemetry::metrics;
use crate::worker::{Fault, GrammarCompiler, Group, Output, OutputError, StepReport, Steps};

pub(super) enum Command {
    Submit { id: SequenceId, request: SequenceRequest, events: UnboundedSender<SequenceEvent> },
    Abort { id: SequenceId },
    ShutDown { done: oneshot::Sender<()> },
}

pub(super) struct StepLoop {
    pub(super) options: EngineOptions,
    pub(super) restart: Arc<dyn RestartGroup>,
    pub(super) scheduler: Scheduler,
    pub(super) open: HashMap<SequenceId, OpenSequence>,
    pub(super) in_flight: VecDeque<StepInFlight>,
    pub(super) commands: UnboundedReceiver<Command>,
    pub(super) state: watch::Sender<State>,
    load: watch::Sender<Load>,
    /// Of the present workers, while there are any.
    health: watch::Sender<Health>,
    pub(super) grammars: watch::Sender<Compiler>,
    /// That of restarted workers, while suspects are tried.
    pub(super) next_compiler: Option<GrammarCompiler>,
    epoch: Instant,
    /// When the newest report arrived.
    pub(super) last_report_at: Instant,
    /// When the present workers were ready.
    pub(super) group_since: Instant,
    /// Workers lost and restarts failed since a step was finished.
    pub(super) num_failures: u32,
    /// Until the first token of new workers.
    pub(super) outage: Option<Outage>,
    /// Sequences to be tried alone, the last one first.
    pub(super) suspects: Vec<SequenceId>,
}

/// Why the loop stopped taking steps.
pub(super) enum Stop {
    WorkerFailed(String),
    ShutDown(Option<oneshot::Sender<()>>),
}

impl StepLoop {
    pub fn new(
        options: EngineOptions,
        restart: Arc<dyn RestartGroup>,
        commands: UnboundedReceiver<Command>,
        state: watch::Sender<State>,
        load: watch::Sender<Load>,
        health: watch::Sender<Health>,
        grammars: watch::Sender<Compiler>,
    ) -> Self {
        let now = Instant::now();
        Self {
            options,
            restart,
            scheduler: Scheduler::new(options.limits),
            open: HashMap::new(),
            in_flight: VecDeque::new(),
            commands,
            state,
            load,
            health,
            grammars,
            epoch: now,
            last_report_at: now,
            group_since: now,
            num_failures: 0,
            outage: None,
            suspects: Vec::new(),
            next_compiler: None,
        }
    }

    pub async fn run(mut self, mut group: Group) {
        let mut stop = loop {
            match self.take_steps(&group).await {
                Stop::WorkerFailed(reason) => match self.recover(reason).await {
                    Ok(restarted) => group = restarted,
                    Err(stop) => break stop,
                },
                stop => break stop,
            }
        };
        if let Stop::WorkerFailed(reason) = stop {
            tracing::error!("the model workers stopped: {reason}");
            self.grammars.send_replace(Compiler::Gone(reason.clone()));
            self.state.send_replace(State::Failed(reason.clone()));
            self.fail_all(&SequenceFailure::Worker(reason.clone()));
            stop = Stop::ShutDown(self.refuse(&reason).await);
        }
        if let Stop::ShutDown(done) = stop {
            self.state.send_if_modified(|state| {
                let failed = matches!(state, State::Failed(_));
                if !failed {
                    *state = State::ShutDown;
                }
                !failed
            });
            self.end(&SequenceFailure::ShuttingDown);
            if let Some(done) = done {
                let _ = done.send(());
            }
        }
    }

    async fn take_steps(&mut self, group: &Group) -> Stop {
        let mut steps = group.steps();
        let progress = Arc::new(Progress::default());
        let health = self.health.clone();
        let mut hang = pin!(hang(group.probe(), progress.clone(), self.options.step_deadline, &health));
        let stop = self.take_steps_until(&mut steps, &progress, hang.as_mut()).await;
        health.send_replace(Health::Well);
        stop
    }

    async fn take_steps_until(
        &mut self,
        steps: &mut Steps,
        progress: &Progress,
        mut hang: Pin<&mut impl Future<Output = String>>,
    ) -> Stop {
        let mut woken_at = Instant::now();
        loop {
            self.send_plans(steps, woken_at);
            self.publish_load();
            if self.in_flight.is_empty() {
                self.end_outage();
            }
            progress.has_steps(!self.in_flight.is_empty());
            tokio::select! {
                command = self.commands.recv() => {
                    woken_at = Instant::now();
                    // What arrived together is planned together.
                    let mut next = command;
                    loop {
                        if let Err(stop) = self.take_command(next) {
                            return stop;
                        }
                        match self.commands.try_recv() {
                            Ok(command) => next = Some(command),
                            Err(_) => break,
                        }
                    }
                }
                report = steps.next() => {
                    woken_at = Instant::now();
                    progress.reported();
                    let applied = report.map_err(|error| error.to_string());
                    if let Err(reason) = applied.and_then(|report| self.apply(report, woken_at)) {
                        return Stop::WorkerFailed(reason);
                    }
                }
                reason = hang.as_mut() => return Stop::WorkerFailed(reason),
            }
        }
    }

    pub(super) fn take_command(&mut self, command: Option<Command>) -> Result<(), Stop> {
        match command {
            None => return Err(Stop::ShutDown(None)),
            Some(Command::ShutDown { done }) => return Err(Stop::ShutDown(Some(done))),
            Some(Command::Submit { id, request, events }) => self.submit(id, request, events),
            Some(Command::Abort { id }) => self.abort(id),
        }
        Ok(())
    }

    fn submit(&mut self, id: SequenceId, request: SequenceRequest, events: UnboundedSender<SequenceEvent>) {
        let submission = Submission {
            id,
            prompt_token_ids: request.prompt_token_ids,
            max_new_tokens: request.max_new_tokens,
            stop_token_ids: Arc::clone(&request.sampling.stop_token_ids),
            priority: request.priority,
            group: request.group,
            needs_prompt_logprobs: request.sampling.prompt_logprobs,
            num_source_tokens: request.num_source_tokens,
        };
        match self.scheduler.submit(submission, self.epoch.elapsed()) {
            Ok(()) => {
                self.open.insert(id, OpenSequence::new(request.sampling, events));
            }
            Err(error) => {
                let _ = events.send(SequenceEvent::Failed(SequenceFailure::Sequence(error.to_string())));
            }
        }
    }

    fn abort(&mut self, id: SequenceId) {
        if self.open.remove(&id).is_some() {
            self.scheduler.abort(id);
        }
    }

    fn send_plans(&mut self, steps: &Steps, woken_at: Instant) {
        self.try_suspects();
        loop {
            let planning_since = Instant::now();
            let Some(plan) = self.scheduler.plan(self.epoch.elapsed()) else { return };
            let mut in_flight = StepInFlight::new(&plan, woken_at);
            self.announce_starts(&plan);
            let open = &self.open;
            steps.send(plan, |id| &open.get(&id).expect("invariant: what is planned is open").sampling);
            in_flight.sent(planning_since, Instant::now());
            self.in_flight.push_back(in_flight);
        }
    }

    fn announce_starts(&mut self, plan: &Plan) {
        for start in &plan.new_sequences {
            if let Some(sequence) = self.open.get_mut(&start.id) {
                sequence.start(start.num_computed_tokens as usize);
            }
        }
    }

    /// Hands a step's outputs to their sequences. An error means that the workers cannot be trusted any more.
    fn apply(&mut self, report: StepReport, arrived_at: Instant) -> Result<(), String> {
        let in_flight = self.in_flight.pop_front().ok_or("it answered a step that was never planned")?;
        let output = |output: &Output| scheduler::SequenceOutput {
            id: output.id,
            token_ids: output.tokens.as_ref().ok().map(|tokens| tokens.iter().map(|token| token.id).collect()),
        };
        let interval = in_flight.interval(self.last_report_at, arrived_at);
        let forecast = self.scheduler.observe(report.step, interval);
        let result = scheduler::StepResult { step: report.step, outputs: report.outputs.iter().map(output).collect() };
        let events = self.scheduler.apply(&result).map_err(|error| error.to_string())?;
        metrics::tokens_accepted(report.outputs.iter().map(|output| output.tokens.as_ref().map_or(0, Vec::len)));
        // Before the events: whoever reads that its sequence has ended finds its blocks free.
        self.publish_load();
        let mut has_tokens = false;
        for event in events {
            match event {
                Event::Advanced { id, output_index, num_tokens, finish_reason } => {
                    has_tokens |= num_tokens > 0;
                    self.advance(id, &report.outputs[output_index], num_tokens, finish_reason);
                }
                Event::Failed { id, output_index } => {
                    let failure = match report.outputs[output_index].tokens.clone().err() {
                        Some(OutputError { reason, fault: Fault::Request }) => SequenceFailure::Request(reason),
                        error => SequenceFailure::Sequence(error.map(|error| error.reason).unwrap_or_default()),
                    };
                    self.finish(id, SequenceEvent::Failed(failure));
                }
            }
        }
        self.num_failures = 0;
        if has_tokens {
            self.end_outage();
        }
        self.last_report_at = arrived_at;
        StepRecord::new(&in_flight, report.timing, interval, arrived_at, forecast).export();
        Ok(())
    }

    fn advance(&mut self, id: SequenceId, output: &Output, num_tokens: usize, end: Option<FinishReason>) {
        let Some(sequence) = self.open.get_mut(&id) else { return };
        sequence.hand_on_prompt(&output.prompt_tokens);
        let tokens = output.tokens.as_deref().unwrap_or_default();
        sequence.hand_on(&tokens[..num_tokens]);
        if let Some(reason) = end {
            self.finish(id, SequenceEvent::Finished(reason));
        }
    }

    pub(super) fn finish(&mut self, id: SequenceId, terminal: SequenceEvent) {
        if let Some(sequence) = self.open.remove(&id) {
            sequence.end(terminal);
        }
    }

    pub(super) fn publish_load(&self) {
        let stats = self.scheduler.stats();
        let load = Load {
            queued_sequences: stats.num_queued,
            running_sequences: stats.num_running,
            free_blocks: stats.num_allocatable_blocks,
            cached_blocks: stats.num_cached_blocks,
            prefix_queried_tokens: stats.num_queried_tokens,
            prefix_hit_tokens: stats.num_hit_tokens,
            num_blocks: stats.num_blocks,
            max_running_tokens: stats.max_running_tokens,
        };
        self.load.send_replace(load);
    }
}
