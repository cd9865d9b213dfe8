//! Encodes images in one engine, where the sequence that has them then runs.

use std::sync::Arc;

use super::Shared;
use crate::engine::Generator;
use crate::sequence::{Image, ImageError};

/// Images that one engine is encoding: work that its other requests wait for.
struct Encoding {
    shared: Arc<Shared>,
    engine: usize,
    num_tokens: u64,
}

impl Encoding {
    fn begin(shared: &Arc<Shared>, images: &[Image], is_allowed: impl Fn(usize) -> bool) -> Self {
        let is_open = |engine| is_allowed(engine) && shared.takes_steps(engine);
        let (engine, num_tokens) = shared.routing().begin_encoding(images, is_open);
        Self { shared: Arc::clone(shared), engine, num_tokens }
    }
}

impl Drop for Encoding {
    fn drop(&mut self) {
        self.shared.routing().end_encoding(self.engine, self.num_tokens);
    }
}

/// The tokens that stand for each image. A second engine encodes them when the first one is lost, and none after it: images that bring
/// workers down cost at most two engines their groups.
pub(super) async fn encode(shared: Arc<Shared>, images: Vec<Image>) -> Result<Vec<Vec<u32>>, ImageError> {
    let first = Encoding::begin(&shared, &images, |_| true);
    let encode = shared.engines[first.engine].encode_images(images.clone());
    if !shared.takes_steps(first.engine) {
        // No engine takes steps. The call waits until this engine does, or fails with its reason.
        return encode.await;
    }
    tokio::select! {
        biased;
        encoded = encode => if !matches!(encoded, Err(ImageError::Worker(_))) {
            return encoded;
        },
        () = shared.engines[first.engine].paused() => {}
    }
    let second = Encoding::begin(&shared, &images, |engine| engine != first.engine);
    shared.engines[second.engine].encode_images(images).await
}
