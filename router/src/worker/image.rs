//! Encodes images on all ranks while their steps go on.

use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;
use penstock_proto as proto;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::rank::Rank;
use super::{WorkerError, convert};
use crate::sequence::{EncodedImage, Image, ImageError};

/// Timeout of `EncodeImages`, queueing included: a worker encodes one image at a time, and calls take turns. Each image has a
/// limit of its own on the worker.
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

    /// What the workers make of each image. The inner error is for the client: what is wrong with an image, or that others keep the
    /// workers busy.
    pub(crate) async fn encode(self, images: &[Image]) -> Result<Result<Vec<EncodedImage>, ImageError>, WorkerError> {
        let request = proto::EncodeImagesRequest { images: images.iter().map(convert::image).collect() };
        let deadline = Instant::now() + TIMEOUT;
        let encode = |mut rank: Rank| {
            let request = request.clone();
            async move {
                let index = rank.index();
                let late = || WorkerError::Unresponsive { rank: index, about: "images", waited: TIMEOUT };
                timeout_at(deadline, rank.encode_images(request)).await.map_err(|_| late())?
            }
        };
        let answers = in_turn(&self.permits, deadline, try_join_all(self.ranks.into_iter().map(encode))).await?;
        let mut answers = match answers {
            Ok(answers) => answers,
            Err(error) => return Ok(Err(error)),
        };
        if let Some(answer) = answers.iter().find(|answer| !answer.error.is_empty()) {
            return Ok(Err(convert::image_error(answer)));
        }
        let first = answers.swap_remove(0);
        Ok(Ok(first.images.into_iter().map(convert::encoded_image).collect()))
    }
}

/// Awaits a call to the workers once fewer than `MAX_CONCURRENT` others are in flight. `call` is unresponsive at the deadline; it is an
/// overload if other calls were in flight when it came or ended, because the workers may have been busy with their images.
async fn in_turn<T>(
    permits: &Semaphore,
    deadline: Instant,
    call: impl Future<Output = Result<T, WorkerError>>,
) -> Result<Result<T, ImageError>, WorkerError> {
    let overload = || {
        let waited = TIMEOUT.as_secs();
        Ok(Err(ImageError::Overloaded(format!("the images were not encoded within {waited} s; try again later"))))
    };
    let came_alone = permits.available_permits() == MAX_CONCURRENT;
    let Ok(permit) = timeout_at(deadline, permits.acquire()).await else { return overload() };
    // An error means that the semaphore was closed, which never happens.
    let _permit = permit.ok();
    match call.await {
        Err(WorkerError::Unresponsive { .. }) if !came_alone || permits.available_permits() + 1 < MAX_CONCURRENT => {
            overload()
        }
        result => result.map(Ok),
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;

    use super::*;

    const LATE: WorkerError = WorkerError::Unresponsive { rank: 0, about: "images", waited: TIMEOUT };

    fn is_overload(result: &Result<Result<(), ImageError>, WorkerError>) -> bool {
        matches!(result, Ok(Err(ImageError::Overloaded(reason))) if reason.contains("not encoded within 300 s"))
    }

    /// Ends at the deadline, as a call to workers that do not answer.
    async fn unanswered(deadline: Instant) -> Result<(), WorkerError> {
        tokio::time::sleep_until(deadline).await;
        Err(LATE)
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_waits_for_others_for_too_long_is_an_overload() {
        let permits = Semaphore::new(MAX_CONCURRENT);
        let deadline = Instant::now() + TIMEOUT;
        // The last one reaches the workers when the others have ended, which is too late.
        let calls = (0..MAX_CONCURRENT + 1).map(|_| in_turn(&permits, deadline, unanswered(deadline)));
        let results = join_all(calls).await;
        assert!(results.iter().all(is_overload), "{results:?}");
        assert_eq!(permits.available_permits(), MAX_CONCURRENT);
    }

    #[tokio::test(start_paused = true)]
    async fn workers_that_do_not_answer_a_single_call_are_unresponsive() {
        let permits = Semaphore::new(MAX_CONCURRENT);
        let deadline = Instant::now() + TIMEOUT;
        assert_eq!(in_turn(&permits, deadline, unanswered(deadline)).await, Err(LATE));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_and_other_errors_are_those_of_the_call() {
        let permits = Semaphore::new(MAX_CONCURRENT);
        let _others = permits.acquire().await;
        let deadline = Instant::now() + TIMEOUT;
        assert_eq!(in_turn(&permits, deadline, async { Ok(7) }).await, Ok(Ok(7)));
        let lost = WorkerError::Lost { rank: 1, reason: "reset".to_owned() };
        assert_eq!(in_turn::<()>(&permits, deadline, async { Err(lost.clone()) }).await, Err(lost.clone()));
    }
}
