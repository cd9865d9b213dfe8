//! How many tokens per second the server finishes, and so when a retry can succeed. Pure: time is an argument.

use std::time::Duration;

/// Time constant of the exponential decay: a sample this old counts e⁻¹ as much as a new one.
const WINDOW_S: f64 = 30.0;

/// Bounds of `Retry-After`. OpenAI's clients ignore values above a minute.
const MIN_RETRY_S: f64 = 1.0;
const MAX_RETRY_S: f64 = 60.0;

/// Tokens per second of recently ended requests, over busy time only: idle time does not change the rate.
#[derive(Debug, Default)]
pub(super) struct ServiceRate {
    /// Both decay with busy time, so their quotient is a mean that weights recent requests most.
    finished_tokens: f64,
    busy_s: f64,
    updated_at: Duration,
}

impl ServiceRate {
    /// Accounts for the time since the last call. `was_busy`: at least one generation was running or queued.
    pub(super) fn advance(&mut self, now: Duration, was_busy: bool) {
        let elapsed_s = now.saturating_sub(self.updated_at).as_secs_f64();
        self.updated_at = self.updated_at.max(now);
        if was_busy {
            let kept = (-elapsed_s / WINDOW_S).exp();
            self.finished_tokens *= kept;
            self.busy_s = self.busy_s * kept + WINDOW_S * (1.0 - kept);
        }
    }

    /// A generation of `num_tokens` has ended, at the time of the last `advance`.
    pub(super) fn finish(&mut self, num_tokens: u64) {
        self.finished_tokens += num_tokens as f64;
    }

    /// Whole seconds until `tokens_ahead` are finished, clamped to the bounds of `Retry-After`.
    pub(super) fn retry_after_s(&self, tokens_ahead: f64) -> u64 {
        // Before the first generation ends the rate is unknown, and a retry is cheap.
        let seconds =
            if self.finished_tokens > 0.0 { tokens_ahead * self.busy_s / self.finished_tokens } else { MIN_RETRY_S };
        seconds.ceil().clamp(MIN_RETRY_S, MAX_RETRY_S) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A rate after `num_seconds` busy seconds at `tokens_per_s`.
    fn busy(num_seconds: u32, tokens_per_s: u64) -> ServiceRate {
        let mut rate = ServiceRate::default();
        for second in 1..=num_seconds {
            rate.advance(SECOND * second, true);
            rate.finish(tokens_per_s);
        }
        rate
    }

    #[test]
    fn the_wait_is_what_is_ahead_over_the_rate() {
        for num_seconds in [100, 10_000] {
            let rate = busy(num_seconds, 500);
            // The last second's tokens have not decayed yet, so the rate reads two percent high.
            assert_eq!(rate.retry_after_s(5_000.0), 10);
            assert_eq!(rate.retry_after_s(20_000.0), 40);
        }
    }

    #[test]
    fn the_rate_is_right_from_the_first_seconds() {
        assert_eq!(busy(4, 500).retry_after_s(4_900.0), 10);
    }

    #[test]
    fn the_wait_is_bounded_and_never_zero() {
        let rate = busy(100, 500);
        assert_eq!(rate.retry_after_s(0.0), 1);
        assert_eq!(rate.retry_after_s(1e18), 60);
        assert_eq!(ServiceRate::default().retry_after_s(1e9), 1);
    }

    #[test]
    fn idle_time_does_not_change_the_rate() {
        let mut rate = busy(100, 500);
        rate.advance(SECOND * 100_000, false);
        assert_eq!(rate.retry_after_s(5_000.0), 10);
    }

    #[test]
    fn recent_requests_count_most() {
        let mut rate = busy(100, 5_000);
        for second in 101..=200 {
            rate.advance(SECOND * second, true);
            rate.finish(500);
        }
        assert!((8..=10).contains(&rate.retry_after_s(5_000.0)), "{rate:?}");
    }

    #[test]
    fn the_wait_grows_while_no_request_ends() {
        let mut rate = busy(100, 500);
        rate.advance(SECOND * 160, true);
        assert!(rate.retry_after_s(5_000.0) > 40, "{rate:?}");
    }

    #[test]
    fn a_clock_that_steps_back_is_ignored() {
        let mut rate = busy(100, 500);
        rate.advance(SECOND, true);
        assert_eq!(rate.retry_after_s(5_000.0), 10);
    }
}
