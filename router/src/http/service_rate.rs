//! How fast the server works requests off, and so when it is worth coming back. Pure: time is an argument.

use std::time::Duration;

/// What is older counts for less than a third of what is new.
const WINDOW_S: f64 = 30.0;

/// What a client is told. OpenAI's clients take no longer wait than a minute seriously.
const MIN_RETRY_S: f64 = 1.0;
const MAX_RETRY_S: f64 = 60.0;

/// Tokens per second of the requests that ended lately, over the time in which there was anything to do: an idle hour
/// says nothing about the rate, and does not change it.
#[derive(Debug, Default)]
pub(super) struct ServiceRate {
    /// Both decay as busy time goes by, so their quotient is a mean of which the newest counts most.
    finished_tokens: f64,
    busy_s: f64,
    updated_at: Duration,
}

impl ServiceRate {
    /// Takes note of the time since the last call. `was_busy`: somebody was being served, or waited for it.
    pub(super) fn advance(&mut self, now: Duration, was_busy: bool) {
        let elapsed_s = now.saturating_sub(self.updated_at).as_secs_f64();
        self.updated_at = self.updated_at.max(now);
        if was_busy {
            let kept = (-elapsed_s / WINDOW_S).exp();
            self.finished_tokens *= kept;
            self.busy_s = self.busy_s * kept + WINDOW_S * (1.0 - kept);
        }
    }

    /// A request of so many tokens has ended, at the time that was last told.
    pub(super) fn finish(&mut self, tokens: u64) {
        self.finished_tokens += tokens as f64;
    }

    /// Whole seconds until so many tokens are worked off, within what is of use to a client.
    pub(super) fn retry_after_s(&self, tokens_ahead: f64) -> u64 {
        // Nothing has ended yet: nothing is known, and to ask again costs little.
        let seconds =
            if self.finished_tokens > 0.0 { tokens_ahead * self.busy_s / self.finished_tokens } else { MIN_RETRY_S };
        seconds.ceil().clamp(MIN_RETRY_S, MAX_RETRY_S) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// After so many seconds in each of which so many tokens were finished.
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
            // What was finished just now has not decayed yet: the rate seems two percent higher.
            assert_eq!(rate.retry_after_s(5_000.0), 10);
            assert_eq!(rate.retry_after_s(20_000.0), 40);
        }
    }

    #[test]
    fn a_young_server_knows_its_rate_already() {
        assert_eq!(busy(4, 500).retry_after_s(4_900.0), 10);
    }

    #[test]
    fn it_is_bounded_and_never_zero() {
        let rate = busy(100, 500);
        assert_eq!(rate.retry_after_s(0.0), 1);
        assert_eq!(rate.retry_after_s(1e18), 60);
        assert_eq!(ServiceRate::default().retry_after_s(1e9), 1);
    }

    #[test]
    fn idle_time_changes_nothing() {
        let mut rate = busy(100, 500);
        rate.advance(SECOND * 100_000, false);
        assert_eq!(rate.retry_after_s(5_000.0), 10);
    }

    #[test]
    fn the_newest_counts_most() {
        let mut rate = busy(100, 5_000);
        for second in 101..=200 {
            rate.advance(SECOND * second, true);
            rate.finish(500);
        }
        assert!((8..=10).contains(&rate.retry_after_s(5_000.0)), "{rate:?}");
    }

    #[test]
    fn when_nothing_ends_any_more_the_wait_grows() {
        let mut rate = busy(100, 500);
        rate.advance(SECOND * 160, true);
        assert!(rate.retry_after_s(5_000.0) > 40, "{rate:?}");
    }

    #[test]
    fn a_clock_that_goes_back_does_no_harm() {
        let mut rate = busy(100, 500);
        rate.advance(SECOND, true);
        assert_eq!(rate.retry_after_s(5_000.0), 10);
    }
}
