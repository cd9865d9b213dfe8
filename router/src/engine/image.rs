//! Encodes images on the current worker group.

use tokio::sync::watch;

use super::grammar::{Compiler, ask};
use crate::sequence::{Image, ImageError};

/// The tokens that stand for each image. A later group encodes them with the first sequence that has them.
pub(super) async fn encode(
    compiler: watch::Receiver<Compiler>,
    images: Vec<Image>,
) -> Result<Vec<Vec<u32>>, ImageError> {
    let encoded = ask(compiler, |helper| helper.encode(images.clone())).await;
    encoded.map_err(ImageError::Worker)?.map_err(ImageError::Unusable)
}
