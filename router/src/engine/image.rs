//! Encodes images on the current worker group.

use tokio::sync::watch;

use super::grammar::{Compiler, ask};
use crate::sequence::{EncodedImage, Image, ImageError};

/// What the workers make of each image. A later group encodes them with the first sequence that has them.
pub(super) async fn encode(
    compiler: watch::Receiver<Compiler>,
    images: Vec<Image>,
) -> Result<Vec<EncodedImage>, ImageError> {
    let encoded = ask(compiler, |helper| helper.encode(images.clone())).await;
    encoded.map_err(ImageError::Worker)?
}
