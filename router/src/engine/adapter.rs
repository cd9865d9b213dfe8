//! Loads adapters on the current worker group.

use tokio::sync::watch;

use super::grammar::{Compiler, ask};
use crate::sequence::{Adapter, AdapterError};

/// Frees the adapters `unloaded_ids` and loads one. A later group loads it with the first sequence that has it.
pub(super) async fn load(
    compiler: watch::Receiver<Compiler>,
    adapter: Adapter,
    unloaded_ids: Vec<u64>,
) -> Result<(), AdapterError> {
    let loaded = ask(compiler, |helper| helper.load(adapter.clone(), unloaded_ids.clone())).await;
    loaded.map_err(AdapterError::Worker)?
}
