//! Loads adapters on the current worker group.

use tokio::sync::watch;

use super::grammar::{Compiler, ready};
use super::options::MAX_LOSSES;
use crate::sequence::{Adapter, AdapterError, GrammarError};

/// Frees the adapters `unloaded_ids` and loads one; tries again when the group is lost meanwhile, at most `MAX_LOSSES` times in all. A
/// later group loads it with the first sequence that has it.
pub(super) async fn load(
    mut compiler: watch::Receiver<Compiler>,
    adapter: Adapter,
    unloaded_ids: Vec<u64>,
) -> Result<(), AdapterError> {
    let mut num_attempts = 0;
    loop {
        let helper = ready(&mut compiler).await.map_err(|error| match error {
            GrammarError::Invalid(reason) | GrammarError::Worker(reason) => AdapterError::Worker(reason),
        })?;
        num_attempts += 1;
        match helper.load(adapter.clone(), unloaded_ids.clone()).await {
            Ok(loaded) => return loaded.map_err(AdapterError::Unusable),
            Err(error) if num_attempts < MAX_LOSSES && error.is_loss => {
                // The engine notices the loss as well, and closes the gate. An error here means that the engine has ended.
                let _ = compiler.changed().await;
            }
            Err(error) => return Err(AdapterError::Worker(error.reason)),
        }
    }
}
