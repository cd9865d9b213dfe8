//! What a user sets: flags, environment variables, the platforms' defaults, and the secrets that they name.

pub(crate) mod args;
pub(crate) mod attention;
pub(crate) mod command_line;
pub(crate) mod compat;
pub(crate) mod dtype;
pub(crate) mod engine_access;
pub(crate) mod isa;
pub(crate) mod keys;
pub(crate) mod platform;
pub(crate) mod priority;
pub(crate) mod reference;
pub(crate) mod variable;
