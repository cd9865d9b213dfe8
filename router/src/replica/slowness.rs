//! How much slower than the others an engine is, so that it gets less work before it fails.

use crate::generator::MAX_ENGINES;

/// An engine is left at its factor while its speed changes by less than this: small differences are noise, and would scatter prefixes.
const HYSTERESIS: f64 = 1.25;
/// A slower engine still gets some work, which shows whether it has recovered.
const MAX_SLOWNESS: f64 = 8.0;

/// INVARIANT: factors are from 1 / `MAX_SLOWNESS` to `MAX_SLOWNESS`.
#[derive(Debug)]
pub(super) struct Slowness([f64; MAX_ENGINES]);

impl Default for Slowness {
    fn default() -> Self {
        Self([1.0; MAX_ENGINES])
    }
}

impl Slowness {
    /// What the engine's work is multiplied by. 1: it is as fast as the median engine, or nothing is known of it.
    pub(super) fn of(&self, engine: usize) -> f64 {
        self.0[engine]
    }

    /// For each engine, the mean seconds between two tokens of a sequence there, if known.
    pub(super) fn observe(&mut self, seconds_per_token: &[(usize, Option<f64>)]) {
        let mut known: Vec<_> = seconds_per_token.iter().filter_map(|(_, seconds)| *seconds).collect();
        known.sort_by(f64::total_cmp);
        let median = known.get(known.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
        for (engine, seconds) in seconds_per_token {
            let factor = &mut self.0[*engine];
            let Some(seconds) = seconds.filter(|_| median > 0.0) else {
                *factor = 1.0;
                continue;
            };
            let measured = (seconds / median).clamp(1.0 / MAX_SLOWNESS, MAX_SLOWNESS);
            if is_close(measured, *factor) {
                continue;
            }
            *factor = if is_close(measured, 1.0) { 1.0 } else { measured };
        }
    }

    /// Another engine will have this number.
    pub(super) fn forget(&mut self, engine: usize) {
        self.0[engine] = 1.0;
    }
}

fn is_close(one: f64, other: f64) -> bool {
    (1.0 / HYSTERESIS..=HYSTERESIS).contains(&(one / other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(slowness: &mut Slowness, seconds: &[Option<f64>]) -> Vec<f64> {
        slowness.observe(&seconds.iter().copied().enumerate().collect::<Vec<_>>());
        (0..seconds.len()).map(|engine| slowness.of(engine)).collect()
    }

    #[test]
    fn small_differences_and_unknown_speeds_count_as_equal() {
        let mut slowness = Slowness::default();
        assert_eq!(factors(&mut slowness, &[None, None]), [1.0, 1.0]);
        assert_eq!(factors(&mut slowness, &[Some(0.011), Some(0.010), Some(0.012), None]), [1.0; 4]);
    }

    #[test]
    fn a_factor_stays_while_the_speed_changes_little_and_ends_with_the_slowness() {
        let mut slowness = Slowness::default();
        let mut first = |seconds| factors(&mut slowness, &[Some(seconds), Some(0.01), Some(0.01)])[0];
        assert_eq!([first(0.04), first(0.045), first(0.035), first(0.06), first(0.01)], [4.0, 4.0, 4.0, 6.0, 1.0]);
    }

    #[test]
    fn a_factor_near_one_stays_too_until_the_speed_differs_from_it() {
        let mut slowness = Slowness::default();
        let mut first = |seconds| factors(&mut slowness, &[Some(seconds), Some(0.01), Some(0.01)])[0];
        let observed = [first(0.0124), first(0.013), first(0.0124), first(0.0105), first(0.01), first(0.0124)];
        assert_eq!(observed.map(|factor| (10.0 * factor).round()), [10.0, 13.0, 13.0, 13.0, 10.0, 10.0]);
    }

    #[test]
    fn factors_are_bounded() {
        let mut slowness = Slowness::default();
        assert_eq!(factors(&mut slowness, &[Some(100.0), Some(0.01), Some(0.01), Some(1e-9)]), [8.0, 1.0, 1.0, 0.125]);
        slowness.forget(0);
        assert_eq!(slowness.of(0), 1.0);
    }
}
