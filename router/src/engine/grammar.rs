//! Compiles grammars on the current worker group.
//!
//! A compilation waits while the group is restarted and while a sequence is in quarantine, so that a loss of the group during a
//! quarantine is never caused by a grammar.

use std::sync::Arc;

use tokio::sync::watch;

use super::helper::Helper;
use super::options::MAX_LOSSES;
use crate::sequence::{Grammar, GrammarError, SequenceFailure};

/// Where grammars are compiled at this moment.
#[derive(Clone, Debug)]
pub(super) enum Compiler {
    /// Of the group.
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

/// Compiles a grammar; tries again when the group is lost meanwhile, at most `MAX_LOSSES` times in all.
pub(super) async fn compile(mut compiler: watch::Receiver<Compiler>, grammar: Grammar) -> Result<(), GrammarError> {
    let mut num_attempts = 0;
    loop {
        let helper = ready(&mut compiler).await?;
        num_attempts += 1;
        match helper.compile(grammar.clone()).await {
            Ok(compiled) => return compiled.map_err(GrammarError::Invalid),
            Err(error) if num_attempts < MAX_LOSSES && error.is_loss => {
                // The engine notices the loss as well, and closes the gate. An error here means that the engine has ended.
                let _ = compiler.changed().await;
            }
            Err(error) => return Err(GrammarError::Worker(error.reason)),
        }
    }
}

/// Waits for a group.
pub(super) async fn ready(compiler: &mut watch::Receiver<Compiler>) -> Result<Arc<dyn Helper>, GrammarError> {
    let settled = compiler.wait_for(|compiler| !matches!(compiler, Compiler::Waiting)).await;
    match settled.as_deref() {
        Ok(Compiler::Ready(helper)) => Ok(Arc::clone(helper)),
        Ok(Compiler::Gone(reason)) => Err(GrammarError::Worker(reason.clone())),
        Ok(Compiler::Waiting) | Err(_) => Err(GrammarError::Worker(SequenceFailure::ShuttingDown.to_string())),
    }
}
