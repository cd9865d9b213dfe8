//! Decides which sequences run in the next step, and in which KV blocks.
//!
//! A pure state machine: no clock, no I/O, no async runtime, no logging. Time, results and aborts are arguments. The
//! life of a sequence: `submit` queues it, `plan` admits it and then advances it step by step, `apply` takes each
//! step's tokens and reports when the sequence has ended. `submit`, `abort` and `apply` can each make a new plan
//! possible: after any of them, call `plan` until it returns `None`.

#![warn(clippy::too_many_lines)]

mod cache;
mod cost;
mod error;
mod image;
mod in_flight;
mod layout;
mod offload;
mod plan;
mod pool;
mod precedence;
mod prefix;
mod queue;
mod resident;
mod scheduler;
mod sequence;
mod snapshot;
mod speculation;

pub use error::{ApplyError, SubmitError};
pub use layout::BlockLayout;
pub use plan::{
    Advance, BlockHash, BlockId, ContentSalt, Drafted, Event, FinishReason, Forecast, ImageGroup, Limits, NewSequence,
    Plan, Save, SequenceId, SequenceOutput, SlotId, SnapshotId, Stats, StepResult, Submission, TokenId, Transfer,
};
pub use scheduler::Scheduler;
