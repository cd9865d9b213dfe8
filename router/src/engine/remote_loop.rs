//! The loop of an engine that is on another server: commands in, that server's events out. Its sequences go to other engines when the
//! server is lost, drains or takes no steps.
//!
//! INVARIANT: everything that is needed to continue a sequence is here, never only on the server.

use std::collections::HashMap;
use std::convert::Infallible;
use std::mem;
use std::pin::pin;
use std::sync::Arc;

use futures::StreamExt;
use futures::stream::BoxStream;
use penstock_scheduler::{FinishReason, SequenceId, Stats};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::command::{self, Command};
use super::grammar::CompilerGate;
use super::moving::{Handover, MovingSequence};
use super::options::{MAX_LOSSES, RemoteOptions};
use super::recovery::backoff;
use super::server_progress::ServerProgress;
use super::speed::{Decoding, Speed};
use super::status::Status;
use crate::generator::Health;
use crate::remote::{Client, RemoteError, SequenceUpdate, ServerState, Totals};
use crate::sequence::{InterruptionCause, SequenceEvent, SequenceFailure};

pub(super) struct RemoteLoop {
    options: RemoteOptions,
    /// `None`: there is no other engine.
    handover: Option<Arc<dyn Handover>>,
    commands: UnboundedReceiver<Command>,
    status: Status,
    compilers: CompilerGate,
    open: HashMap<SequenceId, Open>,
    progress: ServerProgress,
    totals: Totals,
    /// `None`: not connected.
    client: Option<Client>,
    sender: UnboundedSender<Update>,
    updates: UnboundedReceiver<Update>,
    num_runs: u64,
    /// Whether the server takes steps, also while this engine leaves.
    takes_steps: bool,
    /// The engine gets no new sequences, and the loop ends when no sequence is left.
    is_leaving: bool,
}

/// A sequence, the number of its run, and what the run sent.
type Update = (SequenceId, u64, SequenceUpdate);

/// Why the loop ends.
type ShutDown = Option<oneshot::Sender<()>>;

struct Open {
    moving: MovingSequence,
    /// The result of a pooled sequence, until its end.
    vector: Option<SequenceEvent>,
    /// `None`: it waits for a server.
    run: Option<Run>,
}

/// The call in which the server computes a sequence. Dropping it aborts the sequence there.
struct Run {
    number: u64,
    task: AbortHandle,
    /// From the first token on.
    decoding: Option<Decoding>,
    /// Whether the loss of this server is counted for the sequence. A token makes the next loss another one.
    is_loss_counted: bool,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RemoteLoop {
    pub(super) fn new(
        options: RemoteOptions,
        handover: Option<Arc<dyn Handover>>,
        commands: UnboundedReceiver<Command>,
    ) -> Self {
        let status = Status::new(Stats::default());
        status.set_health(Health::Unreachable("it was not asked yet".to_owned()));
        // Bounded in effect: each run reads from its connection, whose window is bounded, and the loop only passes events on.
        let (sender, updates) = mpsc::unbounded_channel();
        Self {
            progress: ServerProgress::new(options.step_deadline),
            options,
            handover,
            commands,
            status,
            compilers: CompilerGate::new(),
            open: HashMap::new(),
            totals: Totals::default(),
            client: None,
            sender,
            updates,
            num_runs: 0,
            takes_steps: false,
            is_leaving: false,
        }
    }

    pub(super) fn status(&self) -> &Status {
        &self.status
    }

    pub(super) fn compilers(&self) -> &CompilerGate {
        &self.compilers
    }

    /// Runs until it is told to shut down, or until the last handle and stream are dropped.
    pub(super) async fn run(mut self) {
        let Err(done) = self.run_connections().await;
        self.status.set_health(Health::ShutDown);
        self.end_all(&SequenceFailure::ShuttingDown);
        if let Some(done) = done {
            let _ = done.send(());
        }
    }

    /// Uses one connection after the other.
    async fn run_connections(&mut self) -> Result<Infallible, ShutDown> {
        let mut num_failures = 0;
        loop {
            self.end_if_left()?;
            let options = self.options.clone();
            let attempt = async move {
                if num_failures > 0 {
                    tokio::time::sleep(backoff(num_failures)).await;
                }
                connect(&options).await
            };
            let reason = match self.take_commands_until(attempt).await? {
                Ok((client, states)) => {
                    num_failures = 0;
                    self.use_connection(client, states).await?
                }
                Err(error) => error.to_string(),
            };
            num_failures += 1;
            self.lose_server(&reason);
        }
    }

    /// Returns the reason when the connection is lost.
    async fn use_connection(
        &mut self,
        client: Client,
        mut states: BoxStream<'static, ServerState>,
    ) -> Result<String, ShutDown> {
        self.compilers.set_next(Arc::new(client.clone()));
        self.client = Some(client);
        let timeout = self.options.timeout;
        let mut heard_at = Instant::now();
        loop {
            self.end_if_left()?;
            tokio::select! {
                biased; // What has arrived counts before the deadline, also after this process was suspended.
                state = states.next() => match state {
                    Some(state) => {
                        heard_at = Instant::now();
                        self.observe(state);
                    }
                    None => return Ok("the connection was closed".to_owned()),
                },
                Some((id, number, update)) = self.updates.recv() => self.apply(id, number, update),
                command = self.commands.recv() => self.take_commands(command)?,
                () = tokio::time::sleep_until(heard_at + timeout) => {
                    return Ok(format!("it has sent nothing for {} s", timeout.as_secs_f64()));
                }
            }
        }
    }

    fn end_if_left(&self) -> Result<(), ShutDown> {
        if self.is_leaving && self.open.is_empty() { Err(None) } else { Ok(()) }
    }

    /// The server has reported its state.
    fn observe(&mut self, state: ServerState) {
        let before = self.status.health();
        let judged = self.progress.judge(&state, Instant::now());
        self.takes_steps = judged.is_healthy();
        let health = if self.takes_steps && self.is_leaving { Health::Leaving } else { judged };
        self.status.set_stats(self.totals.observe(state.stats));
        if let Some(adapters) = state.adapters {
            self.status.set_adapters(adapters);
        }
        self.set_health(health.clone());
        if health.is_healthy() {
            self.compilers.open();
            return self.start_waiting();
        }
        // Only once: the server repeats its state each second.
        let has_failed = before.is_healthy() && !matches!(health, Health::Draining | Health::Leaving);
        if let Some(reason) = health.public_reason().filter(|_| has_failed) {
            self.apply_arrived();
            self.ids().into_iter().for_each(|id| self.note_loss(id, &reason));
        }
        let has_lost_workers = |health: &Health| matches!(health, Health::Restarting(_));
        self.offer_all(has_lost_workers(&health) && !has_lost_workers(&before));
        if self.takes_steps {
            self.start_waiting(); // Those that no other engine took.
        }
    }

    /// Logs what is new.
    fn set_health(&mut self, health: Health) {
        let (url, before) = (self.options.remote.url(), self.status.health());
        let is_new = match (&health, &before) {
            (Health::Unreachable(reason), Health::Unreachable(before)) => reason != before,
            _ => mem::discriminant(&health) != mem::discriminant(&before),
        };
        match (&health, health.public_reason()) {
            // That a server was removed from the list is logged where the list is.
            _ if !is_new || health == Health::Leaving => {}
            (Health::Unreachable(reason), _) => tracing::warn!("replica {url} is not used: {reason}"),
            (_, Some(reason)) => tracing::warn!("replica {url} gets no sequences: {reason}"),
            (_, None) => tracing::info!("replica {url} takes steps"),
        }
        self.status.set_health(health);
    }

    /// Takes a command and all others that have arrived.
    fn take_commands(&mut self, first: Option<Command>) -> Result<(), ShutDown> {
        let mut next = first;
        // Whether sequences have no server yet, or have to leave theirs.
        let mut must_place = false;
        loop {
            match next {
                None => return Err(None),
                Some(Command::ShutDown { done }) => return Err(Some(done)),
                Some(Command::Submit { id, request, owner, events }) => {
                    self.insert(MovingSequence::new(id, *request, owner, events));
                    must_place = true;
                }
                Some(Command::Adopt(moving)) => {
                    self.insert(*moving);
                    must_place = true;
                }
                Some(Command::Abort { id }) => drop(self.open.remove(&id)),
                Some(Command::Leave) => {
                    self.is_leaving = true;
                    if self.takes_steps {
                        self.set_health(Health::Leaving);
                    }
                    must_place = true;
                }
            }
            match self.commands.try_recv() {
                Ok(command) => next = Some(command),
                Err(_) => break,
            }
        }
        if must_place && !self.status.health().is_healthy() {
            self.offer_all(false);
        }
        if must_place && self.takes_steps {
            self.start_waiting();
        }
        Ok(())
    }

    /// Takes commands until the future is done: new sequences go to another engine or wait, aborted ones are removed.
    async fn take_commands_until<T>(&mut self, future: impl Future<Output = T>) -> Result<T, ShutDown> {
        let mut future = pin!(future);
        loop {
            self.end_if_left()?;
            tokio::select! {
                done = &mut future => return Ok(done),
                command = self.commands.recv() => self.take_commands(command)?,
            }
        }
    }

    fn insert(&mut self, moving: MovingSequence) {
        self.open.insert(moving.id, Open { moving, vector: None, run: None });
    }

    /// Ids of the open sequences, the oldest one first.
    fn ids(&self) -> Vec<SequenceId> {
        let mut ids: Vec<_> = self.open.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Lets the server compute the sequences that wait, the oldest ones first.
    fn start_waiting(&mut self) {
        for id in self.ids() {
            let (Some(client), Some(open)) = (&self.client, self.open.get_mut(&id)) else { return };
            if open.run.is_some() {
                continue;
            }
            self.num_runs += 1;
            let (number, sender) = (self.num_runs, self.sender.clone());
            let stream = client.generate(&open.moving.request());
            let forward = async move {
                let mut stream = pin!(stream);
                while let Some(update) = stream.next().await {
                    if sender.send((id, number, update)).is_err() {
                        return;
                    }
                }
            };
            open.run = Some(Run {
                number,
                task: tokio::spawn(forward).abort_handle(),
                decoding: None,
                is_loss_counted: false,
            });
        }
    }

    /// An update of a run that was left is ignored: its sequence is elsewhere, or began again.
    fn apply(&mut self, id: SequenceId, number: u64, update: SequenceUpdate) {
        let is_current = |open: &&mut Open| open.run.as_ref().is_some_and(|run| run.number == number);
        let Some(open) = self.open.get_mut(&id).filter(is_current) else { return };
        let events = match update {
            Ok(events) => events,
            Err(RemoteError::Refused(reason)) => {
                return self.end(id, SequenceEvent::Failed(SequenceFailure::Sequence(reason)));
            }
            Err(error) => return self.lose_run(id, &error.to_string()),
        };
        for event in events {
            match event {
                SequenceEvent::Failed(SequenceFailure::Worker(reason)) => return self.lose_run(id, &reason),
                SequenceEvent::Finished(_) | SequenceEvent::Failed(_) => return self.end(id, event),
                event => open.relay(event, self.status.speed()),
            }
        }
    }

    /// Applies the updates that have arrived.
    fn apply_arrived(&mut self) {
        while let Ok((id, number, update)) = self.updates.try_recv() {
            self.apply(id, number, update);
        }
    }

    /// The server does not continue a sequence, though it may be all right.
    fn lose_run(&mut self, id: SequenceId, reason: &str) {
        self.end_run(id, reason);
        self.offer(&[id], false);
    }

    fn lose_server(&mut self, reason: &str) {
        self.apply_arrived();
        self.client = None;
        self.takes_steps = false;
        self.compilers.close();
        self.status.set_stats(self.totals.get());
        self.set_health(Health::Unreachable(reason.to_owned()));
        self.ids().into_iter().for_each(|id| self.end_run(id, reason));
        self.offer_all(true);
    }

    /// Counts the loss of the sequence's run, and takes the run away.
    fn end_run(&mut self, id: SequenceId, reason: &str) {
        self.note_loss(id, reason);
        if let Some(open) = self.open.get_mut(&id) {
            open.run = None;
        }
    }

    /// Counts that the server was lost while it computed the sequence, once for each run. A sequence that is complete ends; so does one
    /// that may be the cause, because it was lost with too many servers in a row.
    fn note_loss(&mut self, id: SequenceId, reason: &str) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let finish_reason = open.finish_reason();
        let Some(run) = &mut open.run else { return };
        if let Some(reason) = finish_reason {
            return self.end(id, SequenceEvent::Finished(reason));
        }
        if !open.moving.sequence.is_started() || mem::replace(&mut run.is_loss_counted, true) {
            return;
        }
        if let Some(timeline) = &open.moving.timeline {
            timeline.interrupt(InterruptionCause::WorkerFailure(reason.into()), std::time::Instant::now());
        }
        open.moving.sequence.record_loss(1);
        if open.moving.sequence.is_given_up() {
            let reason = format!(
                "{MAX_LOSSES} servers in a row were lost while they computed this sequence; it is not tried again"
            );
            tracing::error!("{reason}");
            self.end(id, SequenceEvent::Failed(SequenceFailure::Sequence(reason)));
        }
    }

    /// Gives every sequence to other engines, except those that are complete: they end.
    fn offer_all(&mut self, has_lost_cache: bool) {
        self.apply_arrived();
        let ended = |(id, open): (&_, &Open)| open.run.as_ref().and(open.finish_reason()).map(|reason| (*id, reason));
        let complete: Vec<_> = self.open.iter().filter_map(ended).collect();
        for (id, reason) in complete {
            self.end(id, SequenceEvent::Finished(reason));
        }
        self.offer(&self.ids(), has_lost_cache);
    }

    /// Gives the sequences, none of which is complete, to other engines. Those that none takes go on as before.
    fn offer(&mut self, ids: &[SequenceId], has_lost_cache: bool) {
        let Some(handover) = &self.handover else { return };
        let (mut offered, mut runs) = (Vec::new(), HashMap::new());
        for id in ids {
            if let Some(Open { moving, run, .. }) = self.open.remove(id) {
                runs.insert(*id, run);
                offered.push(moving);
            }
        }
        for moving in handover.hand_over(offered, has_lost_cache) {
            let run = runs.remove(&moving.id).flatten();
            self.open.insert(moving.id, Open { moving, vector: None, run });
        }
    }

    fn end(&mut self, id: SequenceId, terminal: SequenceEvent) {
        if let Some(Open { moving: MovingSequence { mut sequence, .. }, vector, .. }) = self.open.remove(&id) {
            vector.into_iter().for_each(|vector| sequence.relay(vector));
            sequence.end(terminal);
        }
    }

    /// Ends every sequence that is open or on its way here. Nothing can be submitted afterwards.
    fn end_all(&mut self, failure: &SequenceFailure) {
        command::refuse_all(&mut self.commands, failure);
        for (_, open) in self.open.drain() {
            open.moving.sequence.end(SequenceEvent::Failed(failure.clone()));
        }
    }
}

impl Drop for RemoteLoop {
    /// After a panic, requests must fail instead of waiting for ever.
    fn drop(&mut self) {
        let reason = "the replica's connection ended unexpectedly";
        self.compilers.fail(reason.to_owned());
        self.status.set_health(Health::Failed(reason.to_owned()));
        self.end_all(&SequenceFailure::Worker(reason.to_owned()));
    }
}

impl Open {
    fn relay(&mut self, event: SequenceEvent, speed: &Speed) {
        match event {
            SequenceEvent::Vector(_) => self.vector = Some(event),
            event => {
                match &event {
                    SequenceEvent::Token(token) => {
                        self.moving.token_ids.push(token.id);
                        if let Some(run) = &mut self.run {
                            run.is_loss_counted = false;
                            match &run.decoding {
                                Some(decoding) => decoding.token(),
                                None => run.decoding = Some(speed.begin()),
                            }
                        }
                    }
                    SequenceEvent::Started { .. } => {
                        if let Some(timeline) = &self.moving.timeline {
                            timeline.start(std::time::Instant::now());
                        }
                    }
                    _ => {}
                }
                self.moving.sequence.relay(event);
            }
        }
    }

    /// Why the sequence is complete, although no terminal event arrived. `None`: it is not complete.
    fn finish_reason(&self) -> Option<FinishReason> {
        let terms = self.moving.sequence.terms();
        let generated = &self.moving.token_ids[terms.num_prompt_tokens..];
        let stop_token_ids = &self.moving.sequence.constants().sampling.stop_token_ids;
        if generated.last().is_some_and(|last| stop_token_ids.contains(last)) {
            return Some(FinishReason::StopToken);
        }
        let is_full = generated.len() >= terms.max_new_tokens as usize || self.vector.is_some();
        is_full.then_some(FinishReason::Length)
    }
}

/// Connects. Refuses a server that would give other tokens, or that accepts less than the router.
async fn connect(options: &RemoteOptions) -> Result<(Client, BoxStream<'static, ServerState>), RemoteError> {
    let (client, description) = options.remote.connect().await?;
    options.properties.check(&description.properties)?;
    options.limits.check(&description)?;
    let late = |_| RemoteError::Lost(format!("it has sent no state within {} s", options.timeout.as_secs_f64()));
    let states = tokio::time::timeout(options.timeout, client.watch()).await.map_err(late)??;
    Ok((client, states))
}
