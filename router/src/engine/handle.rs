//! The engine as the rest of the program holds it: a cheap handle on the task that runs the steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use penstock_scheduler::{Limits, SequenceId};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{oneshot, watch};

use super::grammar::{self, Compiler};
use super::step_loop::{Command, StepLoop};
use super::{Generator, Health, Load, RestartGroup, SequenceStream};
use crate::sequence::{Grammar, GrammarError, SequenceEvent, SequenceFailure, SequenceRequest};
use crate::worker::Group;

/// The running engine. Clones share it; it ends with `shut_down`, or when the last clone and stream are dropped.
#[derive(Clone)]
pub struct Engine {
    commands: UnboundedSender<Command>,
    next_id: Arc<AtomicU64>,
    state: watch::Receiver<State>,
    load: watch::Receiver<Load>,
    health: watch::Receiver<Health>,
    grammars: watch::Receiver<Compiler>,
}

#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    pub limits: Limits,
    /// A worker that says nothing for so long, or a step in which nobody computes for so long, hangs.
    pub step_deadline: Duration,
    /// The workers are given up when they were lost, or could not be restarted, so often without a finished step between.
    pub max_failures: u32,
}

impl EngineOptions {
    pub const DEFAULT_MAX_FAILURES: u32 = 5;
    /// The warm-up's worst step took its time on a machine that had nothing else to do; and a machine can halt for seconds.
    const DEADLINE_FACTOR: u32 = 20;
    const MIN_STEP_DEADLINE: Duration = Duration::from_secs(10);

    /// From how long the slowest step of the warm-up took.
    pub fn step_deadline(worst_step: Duration) -> Duration {
        worst_step.saturating_mul(Self::DEADLINE_FACTOR).max(Self::MIN_STEP_DEADLINE)
    }
}

/// What the engine is able to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    Serving,
    /// The workers are gone, for this reason, and others have not done a step yet.
    Restarting(String),
    /// The workers are gone for ever, for this reason.
    Failed(String),
    ShutDown,
}

impl Engine {
    /// Opens the stream of steps and starts the task that runs it. Needs a tokio runtime. `restart` is asked for another
    /// group each time that one is lost.
    pub fn start(group: Group, options: EngineOptions, restart: Arc<dyn RestartGroup>) -> Self {
        let (commands, receiver) = mpsc::unbounded_channel();
        let (state_sender, state) = watch::channel(State::Serving);
        let (load_sender, load) = watch::channel(Load::default());
        let (health_sender, health) = watch::channel(Health::Well);
        let (grammar_sender, grammars) = watch::channel(Compiler::Ready(group.grammars()));
        let step_loop =
            StepLoop::new(options, restart, receiver, state_sender, load_sender, health_sender, grammar_sender);
        tokio::spawn(step_loop.run(group));
        Self { commands, next_id: Arc::new(AtomicU64::new(1)), state, load, health, grammars }
    }

    /// Resolves with the reason when the workers are given up; never, when the engine was shut down before.
    pub async fn failure(&self) -> String {
        let mut state = self.state.clone();
        let failed = state.wait_for(|state| matches!(state, State::Failed(_))).await;
        match failed.as_deref() {
            Ok(State::Failed(reason)) => reason.clone(),
            _ => {
                drop(failed);
                std::future::pending().await
            }
        }
    }

    /// Ends what is still running with `ShuttingDown` and closes the stream of steps; returns when that is done.
    pub async fn shut_down(&self) {
        let (done, wait) = oneshot::channel();
        if self.commands.send(Command::ShutDown { done }).is_ok() {
            // An error means that the loop ended meanwhile, which is what was asked for.
            let _ = wait.await;
        }
    }
}

impl Generator for Engine {
    fn submit(&self, request: SequenceRequest) -> SequenceStream {
        let id = SequenceId(self.next_id.fetch_add(1, Ordering::Relaxed));
        // Unbounded, yet bounded: see `SequenceStream`.
        let (events, receiver) = mpsc::unbounded_channel();
        if let Err(refused) = self.commands.send(Command::Submit { id, request, events })
            && let Command::Submit { events, .. } = refused.0
        {
            let _ = events.send(SequenceEvent::Failed(SequenceFailure::ShuttingDown));
        }
        let commands = self.commands.clone();
        SequenceStream::new(receiver, move || {
            let _ = commands.send(Command::Abort { id });
        })
    }

    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        Box::pin(grammar::compile(self.grammars.clone(), grammar.clone()))
    }

    fn health(&self) -> Health {
        match &*self.state.borrow() {
            State::Serving => self.health.borrow().clone(),
            State::Restarting(reason) => Health::Restarting(reason.clone()),
            State::Failed(reason) => Health::Failed(reason.clone()),
            State::ShutDown => Health::ShutDown,
        }
    }

    fn load(&self) -> Load {
        *self.load.borrow()
    }
}
