//! Encodes images on the current worker group.

use tokio::sync::watch;

use super::grammar::{Compiler, ready};
use super::options::MAX_LOSSES;
use crate::sequence::{GrammarError, Image, ImageError};

/// The tokens that stand for each image; tries again when the group is lost meanwhile, at most `MAX_LOSSES` times in all. A later group
/// encodes them with the first sequence that has them.
pub(super) async fn encode(
    mut compiler: watch::Receiver<Compiler>,
    images: Vec<Image>,
) -> Result<Vec<Vec<u32>>, ImageError> {
    let mut num_attempts = 0;
    loop {
        let helper = ready(&mut compiler).await.map_err(|error| match error {
            GrammarError::Invalid(reason) | GrammarError::Worker(reason) => ImageError::Worker(reason),
        })?;
        num_attempts += 1;
        match helper.encode(images.clone()).await {
            Ok(encoded) => return encoded.map_err(ImageError::Unusable),
            Err(error) if num_attempts < MAX_LOSSES && error.is_loss => {
                // The engine notices the loss as well, and closes the gate. An error here means that the engine has ended.
                let _ = compiler.changed().await;
            }
            Err(error) => return Err(ImageError::Worker(error.reason)),
        }
    }
}
