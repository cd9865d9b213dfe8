//! The phases of a start, with their durations.

use std::time::{Duration, Instant};

use penstock_router::worker::Phase;

/// The phases so far, in the order in which they ended.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    /// Consecutive, except that the first ones overlap.
    phases: Vec<Phase>,
    /// Parts of these phases, which the workers measured.
    parts: Vec<Phase>,
}

impl Phases {
    pub(crate) fn add(&mut self, name: &str, duration: Duration) {
        self.phases.push(Phase { name: name.to_owned(), duration });
    }

    /// Adds a phase that ends now.
    pub(crate) fn add_since(&mut self, name: &str, start: Instant) {
        self.add(name, start.elapsed());
    }

    /// Adds parts of the phase `whole`.
    pub(crate) fn add_parts(&mut self, whole: &str, parts: &[Phase]) {
        let part = |part: &Phase| Phase { name: format!("{whole}: {}", part.name), duration: part.duration };
        self.parts.extend(parts.iter().map(part));
    }

    /// Logs one line with all phases, and at the level debug one line for each phase and part.
    pub(crate) fn log(&self) {
        for Phase { name, duration } in self.phases.iter().chain(&self.parts) {
            tracing::debug!(seconds = (duration.as_secs_f64() * 1000.0).round() / 1000.0, "phase {name}");
        }
        tracing::info!("phases of the start: {}", self.summary());
    }

    fn summary(&self) -> String {
        let text = |phase: &Phase| format!("{} {:.2} s", phase.name, phase.duration.as_secs_f64());
        self.phases.iter().map(text).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_phases_without_their_parts_in_hundredths_of_seconds() {
        let mut phases = Phases::default();
        phases.add("import", Duration::from_micros(6_324_900));
        phases.add("load", Duration::from_micros(4_600));
        phases.add_parts("load", &[Phase { name: "meet ranks".to_owned(), duration: Duration::from_secs(1) }]);
        assert_eq!(phases.summary(), "import 6.32 s, load 0.00 s");
    }
}
