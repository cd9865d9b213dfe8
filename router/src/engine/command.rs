//! What the engine's handles ask of its thread.

use std::sync::Arc;

use penstock_scheduler::SequenceId;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::moving::MovingSequence;
use super::owner::Owner;
use crate::sequence::{SequenceEvent, SequenceRequest};

pub(super) enum Command {
    Submit {
        id: SequenceId,
        request: Box<SequenceRequest>,
        events: UnboundedSender<SequenceEvent>,
        owner: Arc<Owner>,
    },
    /// Continues a sequence that another engine had.
    Adopt(Box<MovingSequence>),
    Abort {
        id: SequenceId,
    },
    /// Ends the thread; `done` is sent after the last terminal event.
    ShutDown {
        done: oneshot::Sender<()>,
    },
}
