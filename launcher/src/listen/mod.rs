//! The port or unix socket of the server. It is bound first and opened last.

pub(crate) mod listener;
pub(crate) mod unix_socket;
