//! How fast an engine's sequences get their tokens.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// What happened this long ago counts half.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// Fewer tokens tell nothing, except while sequences have waited for this long.
const MIN_TOKENS: f64 = 16.0;
const MIN_SECONDS: f64 = 1.0;

/// A `SpeedMeter` of this moment. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Speed(Arc<Mutex<SpeedMeter>>);

/// Measures the mean time between two tokens of a sequence. While no token comes, the mean grows: an engine that hangs is slow at once.
#[derive(Debug)]
pub(crate) struct SpeedMeter {
    /// Sequences that have a token and wait for the next one.
    num_decoding: usize,
    /// The time that such sequences have waited, summed over them.
    seconds: f64,
    num_tokens: f64,
    at: Instant,
}

/// A sequence that waits for its next token, until it is dropped.
pub(super) struct Decoding(Speed);

impl SpeedMeter {
    pub(crate) fn new(at: Instant) -> Self {
        Self { num_decoding: 0, seconds: 0.0, num_tokens: 0.0, at }
    }

    /// Brings the measurement up to `now`.
    pub(crate) fn advance(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        let kept = (-elapsed / HALF_LIFE.as_secs_f64()).exp2();
        self.seconds = self.seconds * kept + elapsed * self.num_decoding as f64;
        self.num_tokens *= kept;
        self.at = now;
    }

    /// A step gave `num_tokens` tokens to sequences, without the first one of each. `num_decoding` sequences wait for their next ones.
    pub(crate) fn step(&mut self, num_tokens: usize, num_decoding: usize) {
        self.num_tokens += num_tokens as f64;
        self.num_decoding = num_decoding;
    }

    /// `None`: there were too few tokens lately.
    pub(crate) fn seconds_per_token(&self) -> Option<f64> {
        let is_known = self.num_tokens >= MIN_TOKENS || (self.num_decoding > 0 && self.seconds >= MIN_SECONDS);
        is_known.then(|| self.seconds / self.num_tokens.max(1.0))
    }
}

impl Speed {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(SpeedMeter::new(Instant::now()))))
    }

    /// A sequence has got its first token.
    pub(super) fn begin(&self) -> Decoding {
        self.now().num_decoding += 1;
        Decoding(self.clone())
    }

    /// As in `SpeedMeter`.
    pub(super) fn step(&self, num_tokens: usize, num_decoding: usize) {
        self.now().step(num_tokens, num_decoding);
    }

    /// The engine takes steps again. What it did before it was unhealthy says nothing.
    pub(super) fn forget(&self) {
        let mut meter = self.now();
        (meter.seconds, meter.num_tokens) = (0.0, 0.0);
    }

    /// As in `SpeedMeter`.
    pub(super) fn seconds_per_token(&self) -> Option<f64> {
        self.now().seconds_per_token()
    }

    fn now(&self) -> MutexGuard<'_, SpeedMeter> {
        // A panic leaves numbers that are a little off.
        let mut meter = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        meter.advance(Instant::now());
        meter
    }
}

impl Decoding {
    pub(super) fn token(&self) {
        self.0.now().num_tokens += 1.0;
    }
}

impl Drop for Decoding {
    fn drop(&mut self) {
        self.0.now().num_decoding -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn the_mean_is_that_of_recent_tokens_whatever_the_number_of_sequences() {
        let speed = Speed::new();
        assert_eq!(speed.seconds_per_token(), None);
        let sequences: Vec<_> = (0..8).map(|_| speed.begin()).collect();
        let run = async |milliseconds, num_tokens| {
            for _ in 0..num_tokens {
                advance(Duration::from_millis(milliseconds)).await;
                sequences.iter().for_each(Decoding::token);
            }
            speed.seconds_per_token().unwrap()
        };
        assert!((run(10, 100).await - 0.010).abs() < 1e-4);
        assert!((run(40, 2500).await - 0.040).abs() < 1e-3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_gives_no_token_gets_slower_and_an_idle_one_becomes_unknown() {
        let speed = Speed::new();
        let sequence = speed.begin();
        for _ in 0..100 {
            advance(Duration::from_millis(10)).await;
            sequence.token();
        }
        advance(Duration::from_secs(5)).await;
        assert!(speed.seconds_per_token().unwrap() > 0.05);
        drop(sequence);
        advance(Duration::from_secs(600)).await;
        assert_eq!(speed.seconds_per_token(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn steps_are_measured_as_single_tokens_are() {
        let speed = Speed::new();
        speed.step(0, 4);
        for _ in 0..50 {
            advance(Duration::from_millis(20)).await;
            speed.step(4, 4);
        }
        assert!((speed.seconds_per_token().unwrap() - 0.020).abs() < 1e-4);
        speed.step(4, 0);
        advance(Duration::from_secs(3)).await;
        assert!((speed.seconds_per_token().unwrap() - 0.020).abs() < 1e-3, "nothing waits");
    }
}
