//! Who runs in the next step, and in which KV blocks.
//!
//! A pure state machine: no clock, no I/O, no async runtime, no logging. Time, results and aborts are arguments.
//! The life of a sequence: `submit` → queue → `plan` starts it → every step advances it → `apply` reports its tokens, and
//! its end. `apply`, `submit` and `abort` may each make a new plan possible, so call `plan` until it answers `None` after
//! any of them.

mod admission;
mod apply;
mod audit;
mod cache;
mod cost;
mod error;
mod fault;
mod flight;
mod layout;
mod number;
mod order;
mod plan;
mod pool;
mod prefill;
mod prefix;
mod restart;
mod scheduler;
mod sequence;
mod sharing;
mod step;
#[cfg(test)]
mod tests;
mod timing;

pub use error::{ApplyError, SubmitError};
pub use layout::BlockLayout;
pub use plan::{
    Advance, BlockHash, BlockId, Event, FinishReason, Limits, NewSequence, Plan, SequenceId, SequenceOutput,
    StepResult, Submission, TokenId,
};
pub use scheduler::{Scheduler, Stats};
pub use timing::Forecast;
