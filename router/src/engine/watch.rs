//! Tells workers that hang from workers that are busy, by what they say beside their steps.
//!
//! Three signs, each with its patience: a process that does not answer at all, a step during which no rank computes, and a
//! step that takes many times what the worst one took. INVARIANT: time counts only as far as this process saw it pass, so
//! neither a suspended machine nor a stopped container is taken for a hang when it goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Health;
use crate::worker::{HealthProbe, RankHealth};

/// How often the workers are asked.
const TICK: Duration = Duration::from_secs(1);
/// A step in which processors work may take so many times longer than one in which nobody does: a machine without memory
/// or processors to spare is slow, and starting again would make it slower.
const BUSY_FACTOR: u32 = 6;
/// Of one processor, that a rank which computes uses at least. Answering here takes a tenth of it.
const BUSY_SHARE: f64 = 0.02;
/// Part of its patience after which a sign is told: whoever asks before a restart finds that one is near.
const TOLD_FRACTION: u32 = 2;

/// What the loop tells its watch.
#[derive(Debug, Default)]
pub(super) struct Progress {
    num_reports: AtomicU64,
    has_steps: AtomicBool,
}

impl Progress {
    pub fn reported(&self) {
        self.num_reports.fetch_add(1, Ordering::Relaxed);
    }

    pub fn has_steps(&self, has_steps: bool) {
        self.has_steps.store(has_steps, Ordering::Relaxed);
    }
}

/// Resolves with the reason when the workers hang; `health` has the signs before.
pub(super) async fn hang(
    mut probe: HealthProbe,
    progress: Arc<Progress>,
    deadline: Duration,
    health: &watch::Sender<Health>,
) -> String {
    let tick = TICK.min(deadline / 4);
    let mut signs = Signs::new(deadline);
    loop {
        let since = Instant::now();
        tokio::time::sleep(tick).await;
        let answers = probe.ask(tick).await;
        // Asleep and asking, a tick each; whatever is more, this process was not there.
        let passed = since.elapsed().min(2 * tick);
        let num_reports =
            progress.has_steps.load(Ordering::Relaxed).then(|| progress.num_reports.load(Ordering::Relaxed));
        let sign = signs.add(passed, num_reports, &answers);
        if let Some(sign) = &sign
            && sign.is_believed()
        {
            return sign.reason.clone();
        }
        let seen = sign.map_or(Health::Well, |sign| sign.health);
        health.send_if_modified(|health| std::mem::replace(health, seen.clone()) != seen);
    }
}

/// That they may hang.
#[derive(Debug)]
struct Sign {
    age: Duration,
    patience: Duration,
    health: Health,
    reason: String,
}

impl Sign {
    fn is_told(&self) -> bool {
        self.age >= self.patience / TOLD_FRACTION
    }

    fn is_believed(&self) -> bool {
        self.age >= self.patience
    }

    /// Of its patience, how much is over.
    fn clarity(&self) -> f64 {
        self.age.div_duration_f64(self.patience)
    }
}

/// What was seen since the last sign of progress.
#[derive(Debug)]
struct Signs {
    deadline: Duration,
    /// By rank: for how long it has not answered; its processor time.
    silent: Vec<Duration>,
    processor: Vec<Duration>,
    num_reports: Option<u64>,
    waited: Duration,
    idle: Duration,
}

impl Signs {
    fn new(deadline: Duration) -> Self {
        let (silent, processor) = (Vec::new(), Vec::new());
        Self { deadline, silent, processor, num_reports: None, waited: Duration::ZERO, idle: Duration::ZERO }
    }

    /// `num_reports` until now, `None` when no step is wanted; what each rank answered. Of several signs the clearest.
    fn add(&mut self, passed: Duration, num_reports: Option<u64>, health: &[Option<RankHealth>]) -> Option<Sign> {
        self.silent.resize(health.len(), Duration::ZERO);
        self.processor.resize(health.len(), Duration::ZERO);
        let mut computes = false;
        for (rank, health) in health.iter().enumerate() {
            match health {
                Some(health) => {
                    let used = health.processor.saturating_sub(self.processor[rank]);
                    computes |= used >= passed.mul_f64(BUSY_SHARE);
                    self.processor[rank] = health.processor;
                    self.silent[rank] = Duration::ZERO;
                }
                None => self.silent[rank] += passed,
            }
        }
        if num_reports.is_none() || num_reports != self.num_reports {
            (self.num_reports, self.waited, self.idle) = (num_reports, Duration::ZERO, Duration::ZERO);
        } else {
            self.waited += passed;
            self.idle = if computes { Duration::ZERO } else { self.idle + passed };
        }
        let signs = [self.silence(), self.idleness(), self.slowness()].into_iter().flatten().filter(Sign::is_told);
        signs.max_by(|one, other| one.clarity().total_cmp(&other.clarity()))
    }

    fn silence(&self) -> Option<Sign> {
        let (rank, age) = self.silent.iter().copied().enumerate().max_by_key(|(_, silent)| *silent)?;
        let reason = format!("rank {rank} has not answered for {:.1} s", age.as_secs_f64());
        Some(Sign { age, patience: self.deadline, health: Health::Silent { rank }, reason })
    }

    fn idleness(&self) -> Option<Sign> {
        let waited = self.waited.as_secs_f64();
        let reason = format!("a step was not done after {waited:.1} s, and no rank computes");
        let health = Health::Stalled { step: self.waited };
        Some(Sign { age: self.idle, patience: self.deadline, health, reason })
    }

    fn slowness(&self) -> Option<Sign> {
        let reason = format!("a step was not done after {:.1} s", self.waited.as_secs_f64());
        let health = Health::Stalled { step: self.waited };
        Some(Sign { age: self.waited, patience: self.deadline * BUSY_FACTOR, health, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn says(processor_s: f64) -> Option<RankHealth> {
        let processor = Duration::from_secs_f64(processor_s);
        Some(RankHealth { last_step: 0, stepping: None, processor })
    }

    /// After how many ticks of a second they are taken to hang, and why.
    fn hangs(
        mut num_reports: impl FnMut(u32) -> Option<u64>,
        mut health: impl FnMut(u32) -> Vec<Option<RankHealth>>,
    ) -> Option<(u32, String)> {
        let mut signs = Signs::new(DEADLINE);
        (1..=200).find_map(|tick| {
            let sign = signs.add(TICK, num_reports(tick), &health(tick)).filter(Sign::is_believed);
            sign.map(|sign| (tick, sign.reason))
        })
    }

    #[test]
    fn a_process_that_does_not_answer_hangs_whether_or_not_there_is_a_step() {
        for num_reports in [None, Some(3)] {
            let (tick, reason) = hangs(|_| num_reports, |tick| vec![says(f64::from(tick)), None]).unwrap();
            assert_eq!((tick, reason.as_str()), (10, "rank 1 has not answered for 10.0 s"));
        }
    }

    #[test]
    fn a_step_in_which_nobody_computes_hangs() {
        let (tick, reason) = hangs(|_| Some(3), |tick| vec![says(f64::from(tick) * 0.002); 2]).unwrap();
        assert_eq!((tick, reason.as_str()), (11, "a step was not done after 10.0 s, and no rank computes"));
    }

    #[test]
    fn a_step_in_which_one_rank_computes_has_more_time() {
        let (tick, reason) = hangs(|_| Some(3), |tick| vec![says(f64::from(tick) * 0.05), says(1.0)]).unwrap();
        assert_eq!((tick, reason.as_str()), (61, "a step was not done after 60.0 s"));
    }

    #[test]
    fn a_weaker_sign_does_not_hide_one_that_is_believed() {
        // Nobody computes from the first tick on; from the fourth on a rank is silent as well.
        let silent_later = |tick: u32| if tick < 4 { vec![says(0.0)] } else { vec![None] };
        let (tick, reason) = hangs(|_| Some(3), silent_later).unwrap();
        assert_eq!((tick, reason.as_str()), (11, "a step was not done after 10.0 s, and no rank computes"));
    }

    #[test]
    fn neither_steps_that_are_done_nor_having_none_are_a_hang() {
        assert_eq!(hangs(|tick| Some(u64::from(tick) / 9), |_| vec![says(0.0)]), None);
        assert_eq!(hangs(|_| None, |_| vec![says(0.0)]), None);
        let late = |tick: u32| if tick.is_multiple_of(8) { vec![says(0.0)] } else { vec![None] };
        assert_eq!(hangs(|tick| Some(u64::from(tick)), late), None);
    }
}
