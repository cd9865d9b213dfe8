//! Command line and environment: each flag and subcommand, its values, the platforms' defaults, and the secrets that they name.

pub(crate) mod args;
pub(crate) mod attention;
pub(crate) mod command_line;
pub(crate) mod compat;
pub(crate) mod dtype;
pub(crate) mod engine_access;
pub(crate) mod generation_config;
pub(crate) mod group;
pub(crate) mod help;
pub(crate) mod isa;
pub(crate) mod keys;
pub(crate) mod node;
pub(crate) mod platform;
pub(crate) mod priority;
pub(crate) mod quantize;
pub(crate) mod ranks_on;
pub(crate) mod reference;
pub(crate) mod standby;
pub(crate) mod tool;
pub(crate) mod variable;
