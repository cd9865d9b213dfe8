//! Encodes images in one engine, where the sequence that has them then runs.

use std::sync::Arc;

use super::Shared;
use crate::engine::Engine;
use crate::generator::Generator;
use crate::sequence::{EncodedImage, Image, ImageError};

/// Images that one engine is encoding: work that its other requests wait for.
struct Encoding {
    shared: Arc<Shared>,
    number: usize,
    engine: Engine,
    num_tokens: u64,
}

impl Encoding {
    /// `None`: there is no engine.
    fn begin(shared: &Arc<Shared>, images: &[Image], is_allowed: impl Fn(usize) -> bool) -> Option<Self> {
        let list = shared.list.borrow();
        let candidates = list.candidates(None);
        let allowed: Vec<_> = candidates.iter().copied().filter(|number| is_allowed(*number)).collect();
        let open = if allowed.is_empty() { &candidates } else { &allowed };
        let engine = |number: usize| list.get(number).map(|replica| replica.engine.clone());
        open.first()?;
        let (number, num_tokens) = shared.routing().begin_encoding(images, open);
        Some(Self { shared: Arc::clone(shared), number, engine: engine(number)?, num_tokens })
    }
}

impl Drop for Encoding {
    fn drop(&mut self) {
        self.shared.routing().end_encoding(self.number, self.num_tokens);
    }
}

/// What the workers make of each image. A second engine encodes them when the first one is lost, and none after it: images that bring
/// workers down cost at most two engines their groups.
pub(super) async fn encode(shared: Arc<Shared>, images: Vec<Image>) -> Result<Vec<EncodedImage>, ImageError> {
    let none = || ImageError::Worker("there is no replica".to_owned());
    let first = Encoding::begin(&shared, &images, |_| true).ok_or_else(none)?;
    let encode = first.engine.encode_images(images.clone());
    if !first.engine.health().is_healthy() {
        // No engine takes steps. The call waits until this engine does, or fails with its reason.
        return encode.await;
    }
    tokio::select! {
        biased;
        encoded = encode => if !matches!(encoded, Err(ImageError::Worker(_))) {
            return encoded;
        },
        () = first.engine.paused() => {}
    }
    let second = Encoding::begin(&shared, &images, |number| number != first.number).ok_or_else(none)?;
    second.engine.encode_images(images).await
}
