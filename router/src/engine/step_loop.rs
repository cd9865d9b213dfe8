//! The loop of the engine's thread: commands and reports in, plans and events out; a new group when the current one is lost.
//!
//! INVARIANT: everything that is needed to continue a sequence is here and in the scheduler, never only in the workers.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::command::{self, Command, refuse};
use super::grammar::CompilerGate;
use super::helper::GroupHelper;
use super::in_flight::{InFlightStep, InFlightSteps};
use super::moving::Handover;
use super::open_sequences::OpenSequences;
use super::options::EngineOptions;
use super::recovery::{Outage, RestartBudget};
use super::restart::{RestartGroup, Restarted};
use super::status::Status;
use super::watchdog::{self, Progress};
use crate::generator::Health;
use crate::sequence::{SequenceEvent, SequenceFailure};
use crate::telemetry::metrics;
use crate::worker::{Group, StepReport, Steps, WorkerError};

pub(super) struct StepLoop {
    options: EngineOptions,
    restart: Arc<dyn RestartGroup>,
    /// `None`: there is no other engine.
    handover: Option<Arc<dyn Handover>>,
    commands: UnboundedReceiver<Command>,
    status: Status,
    compilers: CompilerGate,
    sequences: OpenSequences,
    in_flight: InFlightSteps,
    budget: RestartBudget,
    /// From the loss of a group until the first token of the next one.
    outage: Option<Outage>,
}

/// Why the loop takes no more steps.
enum Stop {
    GroupLost(String),
    ShutDown(Option<oneshot::Sender<()>>),
}

impl StepLoop {
    pub(super) fn new(
        options: EngineOptions,
        restart: Arc<dyn RestartGroup>,
        handover: Option<Arc<dyn Handover>>,
        commands: UnboundedReceiver<Command>,
    ) -> Self {
        let sequences = OpenSequences::new(options.limits);
        Self {
            options,
            restart,
            handover,
            commands,
            status: Status::new(sequences.stats()),
            compilers: CompilerGate::new(),
            sequences,
            in_flight: InFlightSteps::new(),
            budget: RestartBudget::new(options.max_failures),
            outage: None,
        }
    }

    pub(super) fn status(&self) -> &Status {
        &self.status
    }

    pub(super) fn compilers(&self) -> &CompilerGate {
        &self.compilers
    }

    /// Runs until it is told to shut down, or until the last handle and stream are dropped.
    pub(super) async fn run(mut self, group: Group) {
        let Err(stop) = self.run_groups(group).await;
        let done = match stop {
            Stop::ShutDown(done) => done,
            Stop::GroupLost(reason) => {
                tracing::error!("the model workers stopped and are not restarted: {reason}");
                self.fail(&reason);
                self.refuse_submissions(&reason).await
            }
        };
        self.status.set_health(Health::ShutDown);
        self.end_all(&SequenceFailure::ShuttingDown);
        if let Some(done) = done {
            let _ = done.send(());
        }
    }

    /// Takes steps on one group after the other, as long as the restart budget lasts.
    async fn run_groups(&mut self, mut group: Group) -> Result<Infallible, Stop> {
        loop {
            let Err(stop) = self.run_steps(&group).await;
            let Stop::GroupLost(reason) = stop else { return Err(stop) };
            group = self.recover(reason).await?;
        }
    }

    /// Takes steps on one group.
    async fn run_steps(&mut self, group: &Group) -> Result<Infallible, Stop> {
        // PERF: the group was connected on a runtime whose threads may be busy; this thread drives its own connections.
        let group = group.reconnect().await?;
        self.compilers.set_next(Arc::new(GroupHelper::new(&group)));
        let mut steps = group.steps();
        let progress = Progress::default();
        let hang = watchdog::watch(group.probe(), &progress, self.options.step_deadline, self.status.clone());
        let mut hang = pin!(hang);
        let mut woken_at = Instant::now();
        loop {
            self.send_plans(&steps, woken_at);
            self.publish_stats();
            if self.in_flight.is_empty() {
                self.status.speed().step(0, 0);
                self.end_outage();
            }
            progress.set_waiting(!self.in_flight.is_empty());
            tokio::select! {
                command = self.commands.recv() => {
                    woken_at = Instant::now();
                    self.take_commands(command)?;
                }
                report = steps.next() => {
                    woken_at = Instant::now();
                    progress.add_report();
                    self.apply(&report?, woken_at).map_err(Stop::GroupLost)?;
                }
                reason = &mut hang => return Err(Stop::GroupLost(reason)),
            }
        }
    }

    /// Takes a command and all others that have arrived, so that requests that arrive together are planned together.
    fn take_commands(&mut self, first: Option<Command>) -> Result<(), Stop> {
        self.take_command(first)?;
        while let Ok(command) = self.commands.try_recv() {
            self.take_command(Some(command))?;
        }
        Ok(())
    }

    /// `None`: every handle and stream was dropped.
    fn take_command(&mut self, command: Option<Command>) -> Result<(), Stop> {
        match command {
            None => return Err(Stop::ShutDown(None)),
            Some(Command::ShutDown { done }) => return Err(Stop::ShutDown(Some(done))),
            Some(Command::Submit { id, request, owner, events }) => self.sequences.submit(id, *request, owner, events),
            Some(Command::Adopt(moving)) => self.sequences.adopt(*moving),
            Some(Command::Abort { id }) => self.sequences.abort(id),
            // Only engines on other servers leave.
            Some(Command::Leave) => {}
        }
        Ok(())
    }

    fn send_plans(&mut self, steps: &Steps, woken_at: Instant) {
        loop {
            let planned_since = Instant::now();
            let Some(plan) = self.sequences.plan() else { break };
            let step = InFlightStep::new(&plan, self.sequences.traced(&plan), woken_at, planned_since);
            steps.send(plan, |id| self.sequences.constants(id));
            self.in_flight.push(step);
        }
        if !self.sequences.has_quarantine() {
            self.compilers.open();
        }
    }

    /// Hands a step's outputs to their sequences. An error means that the group cannot be trusted any more.
    fn apply(&mut self, report: &StepReport, arrived_at: Instant) -> Result<(), String> {
        let step = self.in_flight.pop(arrived_at).ok_or("it answered a step that was never sent")?;
        let forecast = self.sequences.observe(report, step.interval);
        // Before the events: a stream that reads its last token ends its timeline.
        step.trace(report);
        let events = self.sequences.apply(report).map_err(|error| error.to_string())?;
        metrics::tokens_accepted(report.outputs.iter().map(|output| output.tokens.as_ref().map_or(0, Vec::len)));
        metrics::drafts_verified(report.drafts());
        // Before the events: a reader of a terminal event finds the sequence's blocks free.
        self.publish_stats();
        let delivered = self.sequences.deliver(events, &report.outputs, arrived_at);
        self.status.speed().step(delivered.num_next_tokens, delivered.num_decoding);
        self.budget.replenish();
        if delivered.num_tokens > 0 {
            self.end_outage();
        }
        step.record(report.timing, forecast);
        Ok(())
    }

    /// Starts another group, in as many attempts as the restart budget allows. All sequences are queued again.
    async fn recover(&mut self, mut reason: String) -> Result<Group, Stop> {
        self.lose_group(&reason);
        loop {
            let backoff = self.budget.spend(&reason).map_err(Stop::GroupLost)?;
            let restart = self.restart.restart();
            let attempt = async move {
                tokio::time::sleep(backoff).await;
                (Instant::now(), restart.await)
            };
            match self.take_commands_until(attempt).await? {
                (since, Ok(restarted)) => return Ok(self.resume(restarted, since)),
                (_, Err(error)) => reason = error.to_string(),
            }
        }
    }

    fn lose_group(&mut self, reason: &str) {
        self.status.set_health(Health::Restarting(reason.to_owned()));
        self.compilers.close();
        let last_sign_of_life = self.in_flight.lose();
        if last_sign_of_life.is_none() {
            self.budget.lost_while_idle();
        }
        let last_sign_of_life = last_sign_of_life.unwrap_or_else(Instant::now);
        let num_running = self.sequences.stats().num_running;
        self.outage = Some(Outage::begin(self.outage.take(), last_sign_of_life, num_running));
        self.sequences.requeue(reason);
        self.hand_over();
    }

    /// Lets other engines continue the sequences, if there are any.
    fn hand_over(&mut self) {
        self.status.speed().step(0, 0);
        if let Some(handover) = &self.handover {
            self.sequences.hand_over(&**handover);
        }
    }

    /// Takes commands until the future is done: new sequences go to another engine or are queued, aborted ones are removed.
    async fn take_commands_until<T>(&mut self, future: impl Future<Output = T>) -> Result<T, Stop> {
        let mut future = pin!(future);
        loop {
            self.publish_stats();
            tokio::select! {
                done = &mut future => return Ok(done),
                command = self.commands.recv() => {
                    self.take_commands(command)?;
                    self.hand_over();
                }
            }
        }
    }

    fn resume(&mut self, restarted: Restarted, restart_began: Instant) -> Group {
        let Restarted { group, times } = restarted;
        let now = Instant::now();
        metrics::workers_restarted();
        self.in_flight.group_ready(now);
        self.budget.group_ready(now);
        if let Some(outage) = &mut self.outage {
            outage.resume(restart_began, times, now);
        }
        group
    }

    /// The new group has given a token, or there is no sequence to show that it works.
    fn end_outage(&mut self) {
        if let Some(outage) = self.outage.take() {
            self.status.set_health(Health::Healthy);
            outage.report();
        }
    }

    fn publish_stats(&self) {
        self.status.set_stats(self.sequences.stats());
    }

    /// No step will be taken any more, for this reason.
    fn fail(&mut self, reason: &str) {
        self.compilers.fail(reason.to_owned());
        self.status.set_health(Health::Failed(reason.to_owned()));
        self.hand_over();
        self.sequences.fail_all(&SequenceFailure::Worker(reason.to_owned()));
    }

    /// Fails every new sequence until told to shut down.
    async fn refuse_submissions(&mut self, reason: &str) -> Option<oneshot::Sender<()>> {
        while let Some(command) = self.commands.recv().await {
            match command {
                Command::Submit { events, .. } => refuse(&events, SequenceFailure::Worker(reason.to_owned())),
                Command::Adopt(moving) => {
                    moving.sequence.end(SequenceEvent::Failed(SequenceFailure::Worker(reason.to_owned())))
                }
                Command::Abort { .. } | Command::Leave => {}
                Command::ShutDown { done } => return Some(done),
            }
        }
        None
    }

    /// Ends every sequence that is open or on its way here. Nothing can be submitted afterwards.
    fn end_all(&mut self, failure: &SequenceFailure) {
        self.sequences.fail_all(failure);
        command::refuse_all(&mut self.commands, failure);
    }
}

impl Drop for StepLoop {
    /// After a panic, or when the thread could not be started, requests must fail instead of waiting for ever.
    fn drop(&mut self) {
        let reason = "the engine ended unexpectedly";
        if !self.status.is_permanent() {
            self.fail(reason);
        }
        self.end_all(&SequenceFailure::Worker(reason.to_owned()));
    }
}

impl From<WorkerError> for Stop {
    fn from(error: WorkerError) -> Self {
        Self::GroupLost(error.to_string())
    }
}
