//! Who may come in. A permit is owned by the request and moves with it: into its answer's body if that is a stream.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::api::error::ApiError;

/// The right to generate. Dropping it lets somebody else in.
#[derive(Debug)]
pub(super) struct Permit {
    _permits: OwnedSemaphorePermit,
}

pub(super) struct Admission {
    permits: Arc<Semaphore>,
    max_permits: usize,
    closed: CancellationToken,
}

impl Admission {
    /// Nobody is let in after `closed` is cancelled.
    pub(super) fn new(max_permits: usize, closed: CancellationToken) -> Self {
        let max_permits = max_permits.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(max_permits)), max_permits, closed }
    }

    /// For a request of so many generations; all or nothing, and never waits.
    pub(super) fn admit(&self, num_generations: usize) -> Result<Permit, ApiError> {
        if self.closed.is_cancelled() {
            return Err(ApiError::ShuttingDown);
        }
        let wanted = u32::try_from(num_generations).map_err(|_| ApiError::Overloaded)?;
        let permits = Arc::clone(&self.permits).try_acquire_many_owned(wanted).map_err(|_| ApiError::Overloaded)?;
        Ok(Permit { _permits: permits })
    }

    /// Returns when nobody is in any more; to be called when closed.
    pub(super) async fn drained(&self) {
        let mut outside = Vec::new();
        for _ in 0..self.max_permits {
            // Permits are collected one by one: u32 would not hold all of the largest limit.
            match self.permits.acquire().await {
                Ok(permit) => outside.push(permit),
                Err(_) => return,
            }
        }
    }
}
