//! The engine that has a sequence. It changes when the sequence moves, while its stream may be dropped at any time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_scheduler::SequenceId;

/// An engine that can abort its sequences.
pub(super) trait Abort: Send + 'static {
    /// Aborts a sequence that the engine has, or that it is about to get. Does nothing after the engine has ended.
    fn abort(&self, id: SequenceId);
}

/// `None`: the sequence was aborted, and moves no more.
pub(super) struct Owner(Mutex<Option<Box<dyn Abort>>>);

impl Owner {
    pub(super) fn new(engine: impl Abort) -> Self {
        Self(Mutex::new(Some(Box::new(engine))))
    }

    /// Aborts the sequence in the engine that has it, or that is about to.
    pub(super) fn abort(&self, id: SequenceId) {
        if let Some(engine) = self.lock().take() {
            engine.abort(id);
        }
    }

    /// Makes `engine` the owner. Does nothing if the sequence was aborted. An abort after that comes after what `send` sends.
    pub(super) fn replace(&self, engine: impl Abort, send: impl FnOnce()) {
        let mut owner = self.lock();
        if owner.is_some() {
            *owner = Some(Box::new(engine));
            send();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<dyn Abort>>> {
        // One assignment: a panic cannot leave it half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
