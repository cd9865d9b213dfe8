//! Ranks on other machines. An agent (`penstock node`) runs on each of them, hosts a fork server for this server, and relays the
//! requests and reports of `fork_protocol`.
//!
//! INVARIANT: the connection is the lease of the workers. When it ends, the agent kills them, and this side counts them as lost.

mod address;
mod agent;
mod authority;
mod client;
mod ray;
mod reservation;
mod secret;

pub(crate) use address::{NodeAddress, RanksOn};
pub(crate) use agent::{NodeArgs, run};
pub(crate) use authority::{Authority, LAUNCHER_NAME};
pub(crate) use client::{NodeConnection, NodeOptions, NodePlace};
pub(crate) use ray::{RayNodes, RayOptions};
pub(crate) use secret::{NodeSecret, SecretError};
