//! The engine: owns the scheduler and the stream of steps, on a thread of its own, and gives every sequence its own stream of
//! events.
//!
//! INVARIANT: every submitted sequence's stream ends in exactly one terminal event (`Finished` or `Failed`), unless its
//! receiver was dropped before; dropping the stream aborts the sequence. The loss of a worker group fails no sequence as long as
//! another group can be started.

mod adapter;
mod command;
mod grammar;
mod handle;
mod helper;
mod image;
mod in_flight;
mod moving;
mod open_sequence;
mod open_sequences;
mod options;
mod owner;
mod recovery;
mod remote_loop;
mod restart;
mod server_progress;
mod speed;
mod status;
mod step_loop;
mod timelines;
mod watchdog;

pub use handle::Engine;
pub use moving::{Handover, MovingSequence};
pub use options::{EngineOptions, RemoteOptions};
pub use restart::{RestartError, RestartGroup, RestartTimes, Restarted};
#[cfg(test)]
pub(crate) use speed::SpeedMeter;
