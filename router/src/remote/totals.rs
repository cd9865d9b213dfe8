//! The totals of a server, which never fall: neither while it is lost, nor when it was restarted and counts from 0 again.

use penstock_scheduler::Stats;

#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Totals of the processes before the current one.
    before: Stats,
    /// Last reported.
    current: Stats,
}

impl Totals {
    /// The server has reported `stats`. Returns them with the totals of all its processes.
    pub(crate) fn observe(&mut self, stats: Stats) -> Stats {
        let totals = |stats: &Stats| {
            [stats.num_queried_tokens, stats.num_hit_tokens, stats.num_preemptions, stats.num_finished_steps]
        };
        let is_new_process = totals(&stats).iter().zip(totals(&self.current)).any(|(new, last)| *new < last);
        if is_new_process {
            self.before = self.get();
        }
        self.current = only_totals(stats);
        [self.before, stats].into_iter().sum()
    }

    /// The totals, with every other number 0.
    pub(crate) fn get(&self) -> Stats {
        [self.before, self.current].into_iter().sum()
    }
}

fn only_totals(stats: Stats) -> Stats {
    Stats {
        num_queried_tokens: stats.num_queried_tokens,
        num_hit_tokens: stats.num_hit_tokens,
        num_preemptions: stats.num_preemptions,
        num_finished_steps: stats.num_finished_steps,
        ..Stats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_never_fall() {
        let stats = |num_queried_tokens, num_running| Stats { num_queried_tokens, num_running, ..Stats::default() };
        let mut totals = Totals::default();
        assert_eq!(totals.observe(stats(5, 2)), stats(5, 2));
        assert_eq!(totals.observe(stats(9, 1)), stats(9, 1));
        assert_eq!(totals.get(), stats(9, 0), "the server is lost");
        assert_eq!(totals.observe(stats(11, 1)), stats(11, 1), "the same process again");
        assert_eq!(totals.observe(stats(3, 1)), stats(14, 1), "another process");
        assert_eq!(totals.observe(stats(4, 1)), stats(15, 1));
        assert_eq!(totals.observe(stats(0, 0)), stats(15, 0), "a third one");
        assert_eq!(totals.get(), stats(15, 0));
    }
}
