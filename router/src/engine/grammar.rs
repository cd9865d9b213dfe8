//! Compiles grammars on the current worker group.
//!
//! A compilation waits while the group is restarted and while a sequence is in quarantine, so that a loss of the group during a
//! quarantine is never caused by a grammar.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::helper::{Answer, Helper};
use super::options::MAX_LOSSES;
use crate::sequence::{Grammar, GrammarError, SequenceFailure};

/// How long the engine takes at most to notice that its group is lost.
const LOSS_NOTICE: Duration = Duration::from_secs(2);

/// The compiler of grammars at this moment.
#[derive(Clone, Debug)]
pub(super) enum Compiler {
    /// The current worker group compiles.
    Ready(Arc<dyn Helper>),
    /// The group is restarted, or a sequence is in quarantine.
    Waiting,
    /// The engine failed for good, for this reason.
    Gone(String),
}

/// Gives handles the compiler of the current group, or makes them wait for it.
pub(super) struct CompilerGate {
    sender: watch::Sender<Compiler>,
    /// The current group's, until `open`.
    next: Option<Arc<dyn Helper>>,
}

impl CompilerGate {
    /// Closed.
    pub(super) fn new() -> Self {
        Self { sender: watch::Sender::new(Compiler::Waiting), next: None }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Compiler> {
        self.sender.subscribe()
    }

    /// The group was lost.
    pub(super) fn close(&mut self) {
        self.next = None;
        self.sender.send_replace(Compiler::Waiting);
    }

    /// There is a new group; its helper is handed out from the next `open` on.
    pub(super) fn set_next(&mut self, helper: Arc<dyn Helper>) {
        self.next = Some(helper);
    }

    /// No sequence is in quarantine.
    pub(super) fn open(&mut self) {
        if let Some(helper) = self.next.take() {
            self.sender.send_replace(Compiler::Ready(helper));
        }
    }

    /// No group will follow.
    pub(super) fn fail(&mut self, reason: String) {
        self.sender.send_replace(Compiler::Gone(reason));
    }
}

/// Asks the group; asks again when it is lost meanwhile, at most `MAX_LOSSES` times in all. The outer error says why no group answered.
pub(super) async fn ask<T, E, A: Future<Output = Answer<T, E>>>(
    mut compiler: watch::Receiver<Compiler>,
    ask: impl Fn(Arc<dyn Helper>) -> A,
) -> Result<Result<T, E>, String> {
    let mut num_attempts = 0;
    loop {
        let helper = ready(&mut compiler).await?;
        num_attempts += 1;
        match ask(helper).await {
            Ok(answer) => return Ok(answer),
            Err(error) if num_attempts < MAX_LOSSES && error.is_loss => {
                // The engine notices the loss as well, and closes the gate; but a server may report one on a connection that stays. An
                // error here means that the engine has ended.
                let _ = timeout(LOSS_NOTICE, compiler.changed()).await;
            }
            Err(error) => return Err(error.reason),
        }
    }
}

/// Waits for a group.
async fn ready(compiler: &mut watch::Receiver<Compiler>) -> Result<Arc<dyn Helper>, String> {
    let settled = compiler.wait_for(|compiler| !matches!(compiler, Compiler::Waiting)).await;
    match settled.as_deref() {
        Ok(Compiler::Ready(helper)) => Ok(Arc::clone(helper)),
        Ok(Compiler::Gone(reason)) => Err(reason.clone()),
        Ok(Compiler::Waiting) | Err(_) => Err(SequenceFailure::ShuttingDown.to_string()),
    }
}

pub(super) async fn compile(compiler: watch::Receiver<Compiler>, grammar: Grammar) -> Result<(), GrammarError> {
    let compiled = ask(compiler, |helper| helper.compile(grammar.clone())).await;
    compiled.map_err(GrammarError::Worker)?.map_err(GrammarError::Invalid)
}
