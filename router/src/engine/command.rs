//! What the engine's handles ask of its thread.

use std::sync::Arc;

use penstock_scheduler::SequenceId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use super::moving::MovingSequence;
use super::owner::{Abort, Owner};
use crate::generator::EventSender;
use crate::sequence::{SequenceEvent, SequenceFailure, SequenceRequest};

pub(super) enum Command {
    Submit {
        id: SequenceId,
        request: Box<SequenceRequest>,
        events: EventSender,
        owner: Arc<Owner>,
    },
    /// Continues a sequence that another engine had.
    Adopt(Box<MovingSequence>),
    Abort {
        id: SequenceId,
    },
    /// Gives all sequences to other engines, and ends without them.
    Leave,
    /// Ends the thread; `done` is sent after the last terminal event.
    ShutDown {
        done: oneshot::Sender<()>,
    },
}

impl Abort for UnboundedSender<Command> {
    fn abort(&self, id: SequenceId) {
        // An error means that the engine has ended.
        let _ = self.send(Command::Abort { id });
    }
}

/// Ends every sequence that is on its way. Nothing can be sent afterwards.
pub(super) fn refuse_all(commands: &mut UnboundedReceiver<Command>, failure: &SequenceFailure) {
    commands.close();
    while let Ok(command) = commands.try_recv() {
        match command {
            Command::Submit { events, .. } => refuse(&events, failure.clone()),
            Command::Adopt(moving) => moving.sequence.end(SequenceEvent::Failed(failure.clone())),
            Command::Abort { .. } | Command::Leave => {}
            Command::ShutDown { done } => drop(done.send(())),
        }
    }
}

pub(super) fn refuse(events: &EventSender, failure: SequenceFailure) {
    events.send(SequenceEvent::Failed(failure));
}
