//! Who runs in the next step, and in which KV blocks.
//!
//! A pure state machine: no clock, no I/O, no async runtime, no logging. Time, results and aborts are arguments.

mod plan;

pub use plan::{
    Advance, BlockId, Event, FinishReason, Limits, Output, Plan, SequenceId, Start, StepResult, Submission, TokenId,
};
