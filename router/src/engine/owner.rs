//! The engine that has a sequence. It changes when the sequence moves, while its stream may be dropped at any time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_scheduler::SequenceId;
use tokio::sync::mpsc::UnboundedSender;

use super::command::Command;

/// `None`: the sequence was aborted, and moves no more.
pub(super) struct Owner(Mutex<Option<UnboundedSender<Command>>>);

impl Owner {
    pub(super) fn new(commands: UnboundedSender<Command>) -> Self {
        Self(Mutex::new(Some(commands)))
    }

    /// Aborts the sequence in the engine that has it, or that is about to.
    pub(super) fn abort(&self, id: SequenceId) {
        if let Some(commands) = self.lock().take() {
            // An error means that the engine has ended.
            let _ = commands.send(Command::Abort { id });
        }
    }

    /// Makes the engine of `commands` the owner. Returns false if the sequence was aborted. An abort after that comes after
    /// what `send` sends.
    pub(super) fn replace(&self, commands: &UnboundedSender<Command>, send: impl FnOnce()) -> bool {
        let mut owner = self.lock();
        if owner.is_some() {
            *owner = Some(commands.clone());
            send();
        }
        owner.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Option<UnboundedSender<Command>>> {
        // One assignment: a panic cannot leave it half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
