//! Child processes that run Python: the interpreter, their output, and what they may use of this machine.

pub(crate) mod memory;
pub(crate) mod output;
pub(crate) mod python;
pub(crate) mod share;
