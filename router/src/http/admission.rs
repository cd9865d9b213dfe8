//! Who may come in: so many generations at once, and so many tokens of those that wait for their first step.
//!
//! A permit is owned by the request and moves with it: into its answer's body if that is a stream. A claim is owned by a
//! generation: first it counts as queued, then as running, and dropping it in either state counts it out.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::service_rate::ServiceRate;
use crate::api::error::{ApiError, Bound, Refusal};

/// The right to generate. Dropping it lets somebody else in.
#[derive(Debug)]
pub(super) struct Permit {
    _permits: OwnedSemaphorePermit,
}

pub(super) struct Admission {
    permits: Arc<Semaphore>,
    max_permits: usize,
    closed: CancellationToken,
    ledger: Arc<Ledger>,
}

impl Admission {
    /// Nobody is let in after `closed` is cancelled.
    pub(super) fn new(max_permits: usize, max_queued_tokens: u64, closed: CancellationToken) -> Self {
        let max_permits = max_permits.min(Semaphore::MAX_PERMITS);
        let ledger = Arc::new(Ledger { max_queued_tokens, epoch: Instant::now(), entries: Mutex::default() });
        Self { permits: Arc::new(Semaphore::new(max_permits)), max_permits, closed, ledger }
    }

    /// For a request of so many generations; all or nothing, and never waits.
    pub(super) fn admit(&self, num_generations: usize) -> Result<Permit, ApiError> {
        if self.closed.is_cancelled() {
            return Err(ApiError::ShuttingDown);
        }
        let mut entries = self.ledger.entries();
        // Before its prompt is tokenized: the queue has no room for it, however short it is.
        if entries.queued_tokens >= self.ledger.max_queued_tokens {
            return Err(self.ledger.refusal(&mut entries, Bound::QueuedTokens));
        }
        let wanted = u32::try_from(num_generations).unwrap_or(u32::MAX);
        match Arc::clone(&self.permits).try_acquire_many_owned(wanted) {
            Ok(permits) => Ok(Permit { _permits: permits }),
            Err(_) => Err(self.ledger.refusal(&mut entries, Bound::Requests)),
        }
    }

    /// A place in the queue for each generation of one prompt; all or nothing. `tokens`: the prompt's, and the most that
    /// it may generate. What comes while nobody waits is let in whatever its size.
    pub(super) fn claim(&self, num_generations: usize, tokens: u64) -> Result<Vec<Claim>, ApiError> {
        let mut entries = self.ledger.entries();
        let all_tokens = tokens.saturating_mul(num_generations as u64);
        if entries.queued_tokens > 0 && entries.queued_tokens + all_tokens > self.ledger.max_queued_tokens {
            return Err(self.ledger.refusal(&mut entries, Bound::QueuedTokens));
        }
        self.ledger.tick(&mut entries);
        entries.queued_tokens += all_tokens;
        entries.tokens += all_tokens;
        entries.num_claims += num_generations;
        let claim = || Claim { ledger: Arc::clone(&self.ledger), tokens, is_queued: true };
        Ok(std::iter::repeat_with(claim).take(num_generations).collect())
    }

    /// For who has waited for too long.
    pub(super) fn give_up(&self) -> ApiError {
        self.ledger.refusal(&mut self.ledger.entries(), Bound::QueueTime)
    }

    /// Tokens, prompt and most new ones, of those that wait for their first step.
    pub(super) fn queued_tokens(&self) -> u64 {
        self.ledger.entries().queued_tokens
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

/// A generation's place: in the queue, then among those that run.
pub(super) struct Claim {
    ledger: Arc<Ledger>,
    tokens: u64,
    is_queued: bool,
}

impl Claim {
    pub(super) fn is_queued(&self) -> bool {
        self.is_queued
    }

    /// It is in a step.
    pub(super) fn leave_queue(&mut self) {
        if std::mem::take(&mut self.is_queued) {
            self.ledger.entries().queued_tokens -= self.tokens;
        }
    }

    /// It has waited for too long.
    pub(super) fn give_up(&self) -> ApiError {
        self.ledger.refusal(&mut self.ledger.entries(), Bound::QueueTime)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut entries = self.ledger.entries();
        self.ledger.tick(&mut entries);
        entries.tokens -= self.tokens;
        entries.num_claims -= 1;
        if self.is_queued {
            entries.queued_tokens -= self.tokens;
        } else {
            // Also when its client left: what it had claimed is free for others.
            entries.rate.finish(self.tokens);
        }
    }
}

/// What all that are in have claimed.
struct Ledger {
    max_queued_tokens: u64,
    epoch: Instant,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// Of those that wait for their first step.
    queued_tokens: u64,
    /// Of all, and how many they are.
    tokens: u64,
    num_claims: usize,
    rate: ServiceRate,
}

impl Ledger {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        // Counts that are whole between any two statements: nothing can be half-written by a panic.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called before the number of claims changes.
    fn tick(&self, entries: &mut Entries) {
        let was_busy = entries.num_claims > 0;
        entries.rate.advance(self.epoch.elapsed(), was_busy);
    }

    fn refusal(&self, entries: &mut Entries, bound: Bound) -> ApiError {
        self.tick(entries);
        // There is room when the queue has gone on and one of those that are in, of mean size, has left.
        let mean_tokens = entries.tokens as f64 / entries.num_claims.max(1) as f64;
        let retry_after_s = entries.rate.retry_after_s(entries.queued_tokens as f64 + mean_tokens);
        ApiError::Overloaded(Refusal { bound, retry_after_s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max_permits: usize, max_queued_tokens: u64) -> Admission {
        Admission::new(max_permits, max_queued_tokens, CancellationToken::new())
    }

    fn bound<T>(result: Result<T, ApiError>) -> Bound {
        match result {
            Err(ApiError::Overloaded(refusal)) => refusal.bound,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it was let in"),
        }
    }

    #[test]
    fn the_queue_is_bounded_by_its_tokens() {
        let admission = admission(10, 100);
        let first = admission.claim(1, 60).unwrap();
        assert_eq!(bound(admission.claim(1, 41)), Bound::QueuedTokens);
        let second = admission.claim(2, 20).unwrap();
        assert_eq!(admission.queued_tokens(), 100);
        assert_eq!(bound(admission.admit(1)), Bound::QueuedTokens);
        drop(second);
        assert!(admission.admit(1).is_ok() && admission.claim(1, 40).is_ok());
        drop(first);
        assert_eq!(admission.queued_tokens(), 0);
    }

    #[test]
    fn who_is_in_a_step_is_not_queued_any_more() {
        let admission = admission(10, 100);
        let mut claims = admission.claim(2, 50).unwrap();
        claims[0].leave_queue();
        claims[0].leave_queue();
        assert_eq!((claims[0].is_queued(), admission.queued_tokens()), (false, 50));
        drop(claims);
        assert_eq!(admission.queued_tokens(), 0);
    }

    #[test]
    fn an_empty_queue_takes_whatever_comes() {
        let admission = admission(10, 100);
        let mut large = admission.claim(1, 1000).unwrap();
        assert_eq!(bound(admission.claim(1, 1)), Bound::QueuedTokens);
        large[0].leave_queue();
        assert!(admission.claim(1, 1000).is_ok());
    }

    #[test]
    fn permits_are_all_or_nothing() {
        let admission = admission(3, 100);
        let two = admission.admit(2).unwrap();
        assert_eq!(bound(admission.admit(2)), Bound::Requests);
        let one = admission.admit(1).unwrap();
        drop((one, two));
        assert!(admission.admit(3).is_ok());
    }

    #[test]
    fn only_who_was_served_makes_a_rate() {
        let admission = admission(3, 100);
        drop(admission.claim(1, 50).unwrap());
        assert!(admission.ledger.entries().rate.retry_after_s(1e9) == 1, "nobody was served");
        let mut served = admission.claim(1, 50).unwrap();
        served[0].leave_queue();
        drop(served);
        assert!(admission.ledger.entries().rate.retry_after_s(1e18) == 60);
    }
}
