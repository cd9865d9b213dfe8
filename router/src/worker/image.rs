//! Encodes images on all ranks while their steps go on.

use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;
use penstock_proto as proto;
use tokio::sync::Semaphore;

use super::rank::Rank;
use super::{WorkerError, convert};
use crate::sequence::{EncodedImage, Image, ImageError};

/// Each image has a limit of its own on the worker, which encodes one at a time.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Further calls wait here, because the worker refuses those that it cannot begin soon.
const MAX_CONCURRENT: usize = 16;

/// A handle on all ranks of a group. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ImageEncoder {
    ranks: Vec<Rank>,
    permits: Arc<Semaphore>,
}

impl ImageEncoder {
    pub(super) fn new(ranks: Vec<Rank>) -> Self {
        Self { ranks, permits: Arc::new(Semaphore::new(MAX_CONCURRENT)) }
    }

    /// What the workers make of each image. The inner error says what is wrong with one of them, for the client.
    pub(crate) async fn encode(self, images: &[Image]) -> Result<Result<Vec<EncodedImage>, ImageError>, WorkerError> {
        let request = proto::EncodeImagesRequest { images: images.iter().map(convert::image).collect() };
        // An error means that the semaphore was closed, which never happens.
        let _permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        let encode = |mut rank: Rank| {
            let request = request.clone();
            async move {
                let index = rank.index();
                let late = || WorkerError::Unresponsive { rank: index, about: "images", waited: TIMEOUT };
                tokio::time::timeout(TIMEOUT, rank.encode_images(request)).await.map_err(|_| late())?
            }
        };
        let mut answers = try_join_all(self.ranks.into_iter().map(encode)).await?;
        if let Some(answer) = answers.iter().find(|answer| !answer.error.is_empty()) {
            return Ok(Err(convert::image_error(answer)));
        }
        let first = answers.swap_remove(0);
        Ok(Ok(first.images.into_iter().map(convert::encoded_image).collect()))
    }
}
