//! How the loop ends: whoever is open, or on the way here, gets a terminal event.

use tokio::sync::oneshot;

use super::handle::State;
use super::step_loop::{Command, StepLoop};
use crate::sequence::{SequenceEvent, SequenceFailure};

impl StepLoop {
    pub(super) fn fail_all(&mut self, failure: &SequenceFailure) {
        for (_, sequence) in self.open.drain() {
            sequence.end(SequenceEvent::Failed(failure.clone()));
        }
    }

    /// With the workers gone: refuses every submission until told to shut down.
    pub(super) async fn refuse(&mut self, reason: &str) -> Option<oneshot::Sender<()>> {
        while let Some(command) = self.commands.recv().await {
            match command {
                Command::Submit { events, .. } => {
                    let failure = SequenceFailure::Worker(reason.to_owned());
                    let _ = events.send(SequenceEvent::Failed(failure));
                }
                Command::Abort { .. } => {}
                Command::ShutDown { done } => return Some(done),
            }
        }
        None
    }

    /// Ends every sequence that is open, or on its way here. Nothing can be submitted afterwards.
    pub(super) fn end(&mut self, failure: &SequenceFailure) {
        self.commands.close();
        self.fail_all(failure);
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Submit { events, .. } => {
                    let _ = events.send(SequenceEvent::Failed(failure.clone()));
                }
                Command::Abort { .. } => {}
                Command::ShutDown { done } => {
                    let _ = done.send(());
                }
            }
        }
    }
}

impl Drop for StepLoop {
    /// A panic in the loop must not leave requests waiting for ever.
    fn drop(&mut self) {
        let reason = "the engine ended unexpectedly".to_owned();
        if matches!(*self.state.borrow(), State::Serving | State::Restarting(_)) {
            self.state.send_replace(State::Failed(reason.clone()));
        }
        self.end(&SequenceFailure::Worker(reason));
    }
}
