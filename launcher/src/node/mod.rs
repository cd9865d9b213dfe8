//! Ranks on other machines: this server's connections to their agents (`penstock node`), which host a fork server for it and relay
//! the requests and reports of `protocol`.
//!
//! INVARIANT: the connection is the lease of the workers. When it ends, the agent kills them, and this side counts them as lost.

pub(crate) mod authority;
pub(crate) mod client;
pub(crate) mod ray;
pub(crate) mod secret;
