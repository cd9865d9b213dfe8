//! The watchdog: tells a worker group that hangs from one that is busy, by what its ranks answer to health checks.
//!
//! There are three symptoms, each with a deadline: a rank that does not answer, a step during which no rank computes, and a step
//! that takes many times longer than the slowest one of the warm-up. A rank computes when its processor time grows, or, while
//! its GPU has work, when the GPU finishes some of it. INVARIANT: only time counts during which this process was
//! running itself, so a suspended machine or a stopped container is not taken for a hang.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

use super::status::Status;
use crate::generator::Health;
use crate::worker::{HealthProbe, RankProgress};

/// Time between two health checks, and for the answers.
const TICK: Duration = Duration::from_secs(1);
/// A step in which a rank computes may take this many deadlines: a machine that is short of memory or processors is slow, and
/// a restart would make it slower.
const BUSY_FACTOR: u32 = 6;
/// Share of one processor that a rank uses at least while it computes. Answering health checks uses a tenth of that.
const BUSY_SHARE: f64 = 0.02;
/// A symptom is published after its deadline divided by this, so that operators see that a restart is near.
const PUBLISH_FRACTION: u32 = 2;

/// What the step loop tells the watchdog. Both run on the same thread.
#[derive(Debug, Default)]
pub(super) struct Progress {
    num_reports: Cell<u64>,
    is_waiting: Cell<bool>,
}

impl Progress {
    /// A step was reported.
    pub(super) fn add_report(&self) {
        self.num_reports.set(self.num_reports.get() + 1);
    }

    /// Whether a step is in flight.
    pub(super) fn set_waiting(&self, is_waiting: bool) {
        self.is_waiting.set(is_waiting);
    }
}

/// Resolves with the reason when the group hangs; publishes the symptoms before.
pub(super) async fn watch(
    mut probe: HealthProbe,
    progress: &Progress,
    step_deadline: Duration,
    status: Status,
) -> String {
    let tick = TICK.min(step_deadline / 4);
    let mut observations = Observations::new(step_deadline);
    loop {
        let since = Instant::now();
        tokio::time::sleep(tick).await;
        let ranks = probe.progress(tick).await;
        // One tick of sleep and at most one of health checks: this process was not running for the rest.
        let elapsed = since.elapsed().min(2 * tick);
        let num_reports = progress.is_waiting.get().then(|| progress.num_reports.get());
        let symptom = observations.add(elapsed, num_reports, &ranks);
        if let Some(symptom) = &symptom
            && symptom.is_conclusive()
        {
            return symptom.reason.clone();
        }
        status.set_group_health(symptom.map_or(Health::Healthy, |symptom| symptom.health));
    }
}

/// A reason to believe that the group hangs.
#[derive(Debug)]
struct Symptom {
    duration: Duration,
    deadline: Duration,
    health: Health,
    reason: String,
}

impl Symptom {
    fn is_published(&self) -> bool {
        self.duration >= self.deadline / PUBLISH_FRACTION
    }

    fn is_conclusive(&self) -> bool {
        self.duration >= self.deadline
    }

    /// How much of the deadline has passed.
    fn severity(&self) -> f64 {
        self.duration.div_duration_f64(self.deadline)
    }
}

/// What the health checks have shown since the last progress.
#[derive(Debug)]
struct Observations {
    step_deadline: Duration,
    /// By rank: how long it has not answered.
    unanswered: Vec<Duration>,
    /// By rank: its last answer.
    ranks: Vec<RankProgress>,
    num_reports: Option<u64>,
    /// How long the oldest step has been in flight, and how much of that since a rank was last seen computing.
    waiting: Duration,
    idle: Duration,
}

impl Observations {
    fn new(step_deadline: Duration) -> Self {
        Self {
            step_deadline,
            unanswered: Vec::new(),
            ranks: Vec::new(),
            num_reports: None,
            waiting: Duration::ZERO,
            idle: Duration::ZERO,
        }
    }

    /// Adds one health check, `elapsed` after the one before: the number of reports so far (`None`: no step is in flight), and
    /// what each rank answered, if it did. Returns the most severe symptom.
    fn add(&mut self, elapsed: Duration, num_reports: Option<u64>, ranks: &[Option<RankProgress>]) -> Option<Symptom> {
        self.unanswered.resize(ranks.len(), Duration::ZERO);
        self.ranks.resize(ranks.len(), RankProgress::default());
        let mut computes = false;
        for (rank, now) in ranks.iter().enumerate() {
            match now {
                Some(now) => {
                    computes |= has_computed(self.ranks[rank], *now, elapsed);
                    self.ranks[rank] = *now;
                    self.unanswered[rank] = Duration::ZERO;
                }
                None => self.unanswered[rank] += elapsed,
            }
        }
        if num_reports.is_none() || num_reports != self.num_reports {
            (self.num_reports, self.waiting, self.idle) = (num_reports, Duration::ZERO, Duration::ZERO);
        } else {
            self.waiting += elapsed;
            self.idle = if computes { Duration::ZERO } else { self.idle + elapsed };
        }
        let symptoms = [self.unresponsive_rank(), Some(self.idle_step()), Some(self.slow_step())];
        let published = symptoms.into_iter().flatten().filter(Symptom::is_published);
        published.max_by(|one, other| one.severity().total_cmp(&other.severity()))
    }

    fn unresponsive_rank(&self) -> Option<Symptom> {
        let (rank, duration) = self.unanswered.iter().copied().enumerate().max_by_key(|(_, unanswered)| *unanswered)?;
        let reason = format!("rank {rank} has not answered for {:.1} s", duration.as_secs_f64());
        Some(Symptom { duration, deadline: self.step_deadline, health: Health::Unresponsive { rank }, reason })
    }

    fn idle_step(&self) -> Symptom {
        let waiting = self.waiting.as_secs_f64();
        let reason = format!("a step was not finished after {waiting:.1} s, and no rank computes");
        let health = Health::Stalled { step: self.waiting };
        Symptom { duration: self.idle, deadline: self.step_deadline, health, reason }
    }

    fn slow_step(&self) -> Symptom {
        let reason = format!("a step was not finished after {:.1} s", self.waiting.as_secs_f64());
        let health = Health::Stalled { step: self.waiting };
        Symptom { duration: self.waiting, deadline: self.step_deadline * BUSY_FACTOR, health, reason }
    }
}

/// Whether a rank has computed between two answers. The processor time of a rank that waits for its GPU may grow though the
/// GPU hangs, or stay the same though it computes.
fn has_computed(before: RankProgress, now: RankProgress, elapsed: Duration) -> bool {
    if let Some(device) = now.device {
        let has_finished = before.device.is_none_or(|before| device.num_finished > before.num_finished);
        if has_finished || device.is_busy {
            return has_finished;
        }
    }
    now.processor_time.saturating_sub(before.processor_time) >= elapsed.mul_f64(BUSY_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::DeviceProgress;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn answer(processor_s: f64) -> Option<RankProgress> {
        Some(RankProgress { processor_time: Duration::from_secs_f64(processor_s), ..RankProgress::default() })
    }

    /// The answer of a rank that uses all of a core, as it does when it waits for its GPU.
    fn answer_with_gpu(tick: u32, num_finished: u64, is_busy: bool) -> Option<RankProgress> {
        let processor_time = Duration::from_secs(tick.into());
        Some(RankProgress {
            processor_time,
            device: Some(DeviceProgress { num_finished, is_busy }),
            ..RankProgress::default()
        })
    }

    /// The tick (of one second each) at which the group is taken to hang, and the reason.
    fn hangs(
        mut num_reports: impl FnMut(u32) -> Option<u64>,
        mut answers: impl FnMut(u32) -> Vec<Option<RankProgress>>,
    ) -> Option<(u32, String)> {
        let mut observations = Observations::new(DEADLINE);
        (1..=200).find_map(|tick| {
            let symptom = observations.add(TICK, num_reports(tick), &answers(tick)).filter(Symptom::is_conclusive);
            symptom.map(|symptom| (tick, symptom.reason))
        })
    }

    #[test]
    fn a_rank_that_does_not_answer_hangs_with_or_without_a_step_in_flight() {
        for num_reports in [None, Some(3)] {
            let (tick, reason) = hangs(|_| num_reports, |tick| vec![answer(f64::from(tick)), None]).unwrap();
            assert_eq!((tick, reason.as_str()), (10, "rank 1 has not answered for 10.0 s"));
        }
    }

    #[test]
    fn a_step_in_which_no_rank_computes_hangs() {
        let (tick, reason) = hangs(|_| Some(3), |tick| vec![answer(f64::from(tick) * 0.002); 2]).unwrap();
        assert_eq!((tick, reason.as_str()), (11, "a step was not finished after 10.0 s, and no rank computes"));
    }

    #[test]
    fn a_step_in_which_one_rank_computes_has_more_time() {
        let (tick, reason) = hangs(|_| Some(3), |tick| vec![answer(f64::from(tick) * 0.05), answer(1.0)]).unwrap();
        assert_eq!((tick, reason.as_str()), (61, "a step was not finished after 60.0 s"));
    }

    #[test]
    fn a_gpu_that_finishes_nothing_hangs_although_its_process_uses_the_processor() {
        let (tick, reason) = hangs(|_| Some(3), |tick| vec![answer_with_gpu(tick, 7, true); 2]).unwrap();
        assert_eq!((tick, reason.as_str()), (11, "a step was not finished after 10.0 s, and no rank computes"));
    }

    #[test]
    fn a_gpu_that_finishes_parts_of_a_step_has_more_time() {
        let finishing = |tick: u32| vec![answer_with_gpu(1, u64::from(tick / 8), true), answer_with_gpu(1, 0, true)];
        let (tick, reason) = hangs(|_| Some(3), finishing).unwrap();
        assert_eq!((tick, reason.as_str()), (61, "a step was not finished after 60.0 s"));
    }

    #[test]
    fn a_process_that_still_prepares_work_for_its_gpu_has_more_time() {
        let (tick, reason) = hangs(|_| Some(3), |tick| vec![answer_with_gpu(tick, 7, false)]).unwrap();
        assert_eq!((tick, reason.as_str()), (61, "a step was not finished after 60.0 s"));
    }

    #[test]
    fn a_weaker_symptom_does_not_hide_a_conclusive_one() {
        // No rank computes from the first tick on; from the fourth on the rank does not answer either.
        let silent_later = |tick: u32| if tick < 4 { vec![answer(0.0)] } else { vec![None] };
        let (tick, reason) = hangs(|_| Some(3), silent_later).unwrap();
        assert_eq!((tick, reason.as_str()), (11, "a step was not finished after 10.0 s, and no rank computes"));
    }

    #[test]
    fn neither_finished_steps_nor_an_idle_group_are_a_hang() {
        assert_eq!(hangs(|tick| Some(u64::from(tick) / 9), |_| vec![answer(0.0)]), None);
        assert_eq!(hangs(|_| None, |_| vec![answer(0.0)]), None);
        let late = |tick: u32| if tick.is_multiple_of(8) { vec![answer(0.0)] } else { vec![None] };
        assert_eq!(hangs(|tick| Some(u64::from(tick)), late), None);
    }
}
