//! Admission: at most `--max-concurrent-requests` generations, and at most `--max-queued-tokens` tokens of generations
//! that wait for their first step.
//!
//! A request owns its [`Permit`] until its answer has ended. A generation owns its [`QueueReservation`]: it counts as
//! queued, then as running, and dropping it in either state returns its tokens.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::error::{Bound, GenerationError, Refusal};
use super::service_rate::ServiceRate;

/// The right to use the server. Dropping it admits another request.
#[derive(Debug)]
pub(super) struct Permit {
    _permits: OwnedSemaphorePermit,
}

pub(super) struct Admission {
    permits: Arc<Semaphore>,
    max_permits: u32,
    closed: CancellationToken,
    ledger: Arc<Ledger>,
}

impl Admission {
    /// No request is admitted after `closed` is cancelled.
    pub(super) fn new(max_permits: usize, max_queued_tokens: u64, closed: CancellationToken) -> Self {
        let max_permits = u32::try_from(max_permits).unwrap_or(u32::MAX);
        let ledger = Arc::new(Ledger { max_queued_tokens, epoch: Instant::now(), entries: Mutex::default() });
        Self { permits: Arc::new(Semaphore::new(max_permits as usize)), max_permits, closed, ledger }
    }

    /// Admits a request of `num_generations` generations, all or nothing. Never waits. A full queue refuses the request
    /// before its prompt is tokenized.
    pub(super) fn admit(&self, num_generations: usize) -> Result<Permit, GenerationError> {
        let mut entries = self.ledger.entries();
        if !self.closed.is_cancelled() && entries.queued_tokens >= self.ledger.max_queued_tokens {
            return Err(self.ledger.refusal(&mut entries, Bound::QueuedTokens));
        }
        drop(entries);
        self.permit(num_generations)
    }

    /// Takes `num_permits`, all or nothing, without regard to the queue: for requests that generate nothing.
    pub(super) fn permit(&self, num_permits: usize) -> Result<Permit, GenerationError> {
        if self.closed.is_cancelled() {
            return Err(GenerationError::ShuttingDown);
        }
        let num_permits = u32::try_from(num_permits).unwrap_or(u32::MAX);
        match Arc::clone(&self.permits).try_acquire_many_owned(num_permits) {
            Ok(permits) => Ok(Permit { _permits: permits }),
            Err(_) => Err(self.ledger.refusal(&mut self.ledger.entries(), Bound::Requests)),
        }
    }

    /// Reserves queue space for each generation of one prompt, all or nothing. `num_tokens`: prompt and new tokens of
    /// one generation. An empty queue accepts a reservation of any size.
    pub(super) fn reserve(
        &self,
        num_generations: usize,
        num_tokens: u64,
    ) -> Result<Vec<QueueReservation>, GenerationError> {
        let mut entries = self.ledger.entries();
        let all_tokens = num_tokens.saturating_mul(num_generations as u64);
        if entries.queued_tokens > 0 && entries.queued_tokens + all_tokens > self.ledger.max_queued_tokens {
            return Err(self.ledger.refusal(&mut entries, Bound::QueuedTokens));
        }
        self.ledger.tick(&mut entries);
        entries.queued_tokens += all_tokens;
        entries.reserved_tokens += all_tokens;
        entries.num_reservations += num_generations;
        let reservation = || QueueReservation { ledger: Arc::clone(&self.ledger), num_tokens, is_queued: true };
        Ok(std::iter::repeat_with(reservation).take(num_generations).collect())
    }

    /// The refusal of a request that reached the queue timeout.
    pub(super) fn queue_timeout(&self) -> GenerationError {
        self.ledger.queue_timeout()
    }

    /// Tokens, prompt and new ones, of all generations that wait for their first step.
    pub(super) fn queued_tokens(&self) -> u64 {
        self.ledger.entries().queued_tokens
    }

    /// Returns when all permits are back. Call it after `closed` is cancelled.
    pub(super) async fn drained(&self) {
        // An error means that the semaphore is closed, which never happens.
        let _ = self.permits.acquire_many(self.max_permits).await;
    }
}

/// One generation's share of the queue, then of what runs.
pub(super) struct QueueReservation {
    ledger: Arc<Ledger>,
    num_tokens: u64,
    is_queued: bool,
}

impl QueueReservation {
    /// The generation waits for its first step.
    pub(super) fn is_queued(&self) -> bool {
        self.is_queued
    }

    /// The generation is in its first step.
    pub(super) fn leave_queue(&mut self) {
        if std::mem::take(&mut self.is_queued) {
            self.ledger.entries().queued_tokens -= self.num_tokens;
        }
    }

    /// The refusal of a generation that reached the queue timeout.
    pub(super) fn queue_timeout(&self) -> GenerationError {
        self.ledger.queue_timeout()
    }
}

impl Drop for QueueReservation {
    fn drop(&mut self) {
        let mut entries = self.ledger.entries();
        self.ledger.tick(&mut entries);
        entries.reserved_tokens -= self.num_tokens;
        entries.num_reservations -= 1;
        if self.is_queued {
            entries.queued_tokens -= self.num_tokens;
        } else {
            // Also when the client left early: the whole reservation is free again.
            entries.rate.finish(self.num_tokens);
        }
    }
}

/// All reservations, queued and running.
struct Ledger {
    max_queued_tokens: u64,
    epoch: Instant,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// Tokens reserved by generations that wait for their first step.
    queued_tokens: u64,
    /// Tokens of all reservations.
    reserved_tokens: u64,
    num_reservations: usize,
    rate: ServiceRate,
}

impl Ledger {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        // The counts are consistent between any two statements, so a panic cannot leave them half-written.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Advances the rate's clock. Call it before `num_reservations` changes.
    fn tick(&self, entries: &mut Entries) {
        let was_busy = entries.num_reservations > 0;
        entries.rate.advance(self.epoch.elapsed(), was_busy);
    }

    fn queue_timeout(&self) -> GenerationError {
        self.refusal(&mut self.entries(), Bound::QueueTime)
    }

    fn refusal(&self, entries: &mut Entries, bound: Bound) -> GenerationError {
        self.tick(entries);
        // A retry succeeds when the queue has been worked off and one generation of mean size has ended.
        let mean_tokens = entries.reserved_tokens as f64 / entries.num_reservations.max(1) as f64;
        let retry_after_s = entries.rate.retry_after_s(entries.queued_tokens as f64 + mean_tokens);
        GenerationError::Overloaded(Refusal { bound, retry_after_s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max_permits: usize, max_queued_tokens: u64) -> Admission {
        Admission::new(max_permits, max_queued_tokens, CancellationToken::new())
    }

    fn bound<T>(result: Result<T, GenerationError>) -> Bound {
        match result {
            Err(GenerationError::Overloaded(refusal)) => refusal.bound,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it was accepted"),
        }
    }

    #[test]
    fn the_queue_is_bounded_by_its_tokens() {
        let admission = admission(10, 100);
        let first = admission.reserve(1, 60).unwrap();
        assert_eq!(bound(admission.reserve(1, 41)), Bound::QueuedTokens);
        let second = admission.reserve(2, 20).unwrap();
        assert_eq!(admission.queued_tokens(), 100);
        assert_eq!(bound(admission.admit(1)), Bound::QueuedTokens);
        assert!(admission.permit(1).is_ok(), "a request that generates nothing needs no queue space");
        drop(second);
        assert!(admission.admit(1).is_ok() && admission.reserve(1, 40).is_ok());
        drop(first);
        assert_eq!(admission.queued_tokens(), 0);
    }

    #[test]
    fn a_started_generation_is_not_queued() {
        let admission = admission(10, 100);
        let mut reservations = admission.reserve(2, 50).unwrap();
        reservations[0].leave_queue();
        reservations[0].leave_queue();
        assert_eq!((reservations[0].is_queued(), admission.queued_tokens()), (false, 50));
        drop(reservations);
        assert_eq!(admission.queued_tokens(), 0);
    }

    #[test]
    fn an_empty_queue_accepts_any_size() {
        let admission = admission(10, 100);
        let mut large = admission.reserve(1, 1000).unwrap();
        assert_eq!(bound(admission.reserve(1, 1)), Bound::QueuedTokens);
        large[0].leave_queue();
        assert!(admission.reserve(1, 1000).is_ok());
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
    fn only_served_generations_make_a_rate() {
        let admission = admission(3, 100);
        drop(admission.reserve(1, 50).unwrap());
        assert_eq!(admission.ledger.entries().rate.retry_after_s(1e9), 1, "none was served");
        let mut served = admission.reserve(1, 50).unwrap();
        served[0].leave_queue();
        drop(served);
        assert_eq!(admission.ledger.entries().rate.retry_after_s(1e18), 60);
    }

    /// With one permit acquired at a time this would take minutes and all memory.
    #[tokio::test]
    async fn draining_costs_the_same_whatever_the_limit() {
        let admission = admission(usize::MAX, 100);
        let permit = admission.admit(3).unwrap();
        let drained = admission.drained();
        tokio::pin!(drained);
        assert!(futures::poll!(&mut drained).is_pending());
        drop(permit);
        assert!(futures::poll!(&mut drained).is_ready());
    }
}
