//! What the engine's handles ask of its thread.

use penstock_scheduler::SequenceId;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use crate::sequence::{SequenceEvent, SequenceRequest};

pub(super) enum Command {
    Submit {
        id: SequenceId,
        request: Box<SequenceRequest>,
        events: UnboundedSender<SequenceEvent>,
    },
    Abort {
        id: SequenceId,
    },
    /// Ends the thread; `done` is sent after the last terminal event.
    ShutDown {
        done: oneshot::Sender<()>,
    },
}
