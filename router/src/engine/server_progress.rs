//! Whether a server takes steps, by what it reports and by what it finishes.

use std::time::Duration;

use tokio::time::Instant;

use crate::generator::Health;
use crate::remote::ServerState;

/// INVARIANT: outlives connections, so a server that hangs does not count as healthy after each new connection.
pub(super) struct ServerProgress {
    step_deadline: Duration,
    /// The finished steps, and since when there is work but no further one.
    stuck_since: Option<(u64, Instant)>,
}

impl ServerProgress {
    pub(super) fn new(step_deadline: Duration) -> Self {
        Self { step_deadline, stuck_since: None }
    }

    /// The server reported `state` at `now`.
    pub(super) fn judge(&mut self, state: &ServerState, now: Instant) -> Health {
        let num_finished = state.stats.num_finished_steps;
        self.stuck_since = match self.stuck_since {
            _ if state.stats.num_steps_in_flight == 0 => None,
            Some((num, since)) if num == num_finished => Some((num, since)),
            _ => Some((num_finished, now)),
        };
        let step = self.stuck_since.map_or(Duration::ZERO, |(_, since)| now - since);
        match &state.unhealthy {
            _ if state.is_draining => Health::Draining,
            Some(reason) => Health::Restarting(reason.clone()),
            None if step >= self.step_deadline => Health::Stalled { step },
            None => Health::Healthy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_scheduler::Stats;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn state(num_finished_steps: u64, num_steps_in_flight: usize) -> ServerState {
        let stats = Stats { num_finished_steps, num_steps_in_flight, ..Stats::default() };
        ServerState { unhealthy: None, is_draining: false, stats, adapters: None }
    }

    /// What the server is after each second with this many finished steps, all with a step in flight.
    fn judged(finished: impl IntoIterator<Item = u64>) -> Vec<bool> {
        let (mut progress, began) = (ServerProgress::new(DEADLINE), Instant::now());
        let judge = |(second, num): (u64, u64)| progress.judge(&state(num, 2), began + Duration::from_secs(second));
        (0..).zip(finished).map(judge).map(|health| health.is_healthy()).collect()
    }

    #[test]
    fn a_server_that_finishes_no_step_in_time_is_not_healthy_until_it_does() {
        let expected: Vec<_> = (0..14).map(|second| !(10..13).contains(&second)).collect();
        assert_eq!(judged((0..14).map(|second| if second < 13 { 5 } else { 6 })), expected);
    }

    #[test]
    fn slow_steps_and_an_idle_server_are_healthy() {
        assert!(judged((0..60).map(|second| second / 9)).into_iter().all(|is_healthy| is_healthy));
        let (mut progress, began) = (ServerProgress::new(DEADLINE), Instant::now());
        for second in 0..60 {
            let now = began + Duration::from_secs(second);
            assert_eq!(progress.judge(&state(7, 0), now), Health::Healthy);
        }
        // The first step after that has its whole time.
        assert_eq!(progress.judge(&state(7, 1), began + Duration::from_secs(69)), Health::Healthy);
        assert!(progress.judge(&state(7, 1), began + Duration::from_secs(79)).is_stuck());
    }

    #[test]
    fn what_the_server_says_of_itself_counts() {
        let (mut progress, now) = (ServerProgress::new(DEADLINE), Instant::now());
        let restarting = ServerState { unhealthy: Some("restarting".to_owned()), ..state(1, 0) };
        assert_eq!(progress.judge(&restarting, now), Health::Restarting("restarting".to_owned()));
        assert_eq!(progress.judge(&ServerState { is_draining: true, ..restarting }, now), Health::Draining);
    }
}
