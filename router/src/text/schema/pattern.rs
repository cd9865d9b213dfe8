//! The patterns that the engine reads: regular expressions with anchors at their ends only.

use regex_syntax::hir::literal::Extractor;
use regex_syntax::hir::{Hir, HirKind, Look};

/// PERF: the masks of a part that is repeated 100,000 times take 20 ms each, those of 10,000 times 2 ms (EPYC).
const MAX_REPETITIONS: u32 = 10_000;

/// Why a pattern cannot be enforced.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    let hir = regex_syntax::parse(pattern).map_err(|error| match error {
        regex_syntax::Error::Parse(error) => format!("has an error: {}", error.kind()),
        regex_syntax::Error::Translate(error) => format!("has an error: {}", error.kind()),
        _ => "has an error".to_owned(),
    })?;
    if !has_outer_anchors(&hir, true, true) {
        return Err("has anchors or word boundaries within".to_owned());
    }
    match repetitions(&hir) {
        given if given > MAX_REPETITIONS => {
            Err(format!("repeats a part {given} times, at most {MAX_REPETITIONS} are allowed"))
        }
        _ => Ok(()),
    }
}

/// Whether it is certain that no text matches both patterns: both are anchored, and begin with different characters.
pub(super) fn are_disjoint(one: &str, other: &str) -> bool {
    let beginnings = |pattern: &str| {
        let hir = regex_syntax::parse(pattern).ok()?;
        let is_anchored = hir.properties().look_set_prefix().contains(Look::Start);
        let sequence = Extractor::new().extract(&hir);
        let literals = sequence.literals()?.iter().map(|literal| literal.as_bytes().to_vec());
        is_anchored.then(|| literals.collect::<Vec<_>>())
    };
    let (Some(one), Some(other)) = (beginnings(one), beginnings(other)) else { return false };
    one.iter().all(|one| other.iter().all(|other| !one.starts_with(other) && !other.starts_with(one)))
}

/// Whether all anchors are where a text may start or end.
fn has_outer_anchors(hir: &Hir, at_start: bool, at_end: bool) -> bool {
    match hir.kind() {
        HirKind::Look(Look::Start) => at_start,
        HirKind::Look(Look::End) => at_end,
        HirKind::Look(_) => false,
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) => true,
        HirKind::Repetition(repetition) => has_outer_anchors(&repetition.sub, false, false),
        HirKind::Capture(capture) => has_outer_anchors(&capture.sub, at_start, at_end),
        HirKind::Alternation(parts) => parts.iter().all(|part| has_outer_anchors(part, at_start, at_end)),
        HirKind::Concat(parts) => parts.iter().enumerate().all(|(index, part)| {
            let is_first = parts[..index].iter().all(|part| matches!(part.kind(), HirKind::Look(Look::Start)));
            let is_last = parts[index + 1..].iter().all(|part| matches!(part.kind(), HirKind::Look(Look::End)));
            has_outer_anchors(part, at_start && is_first, at_end && is_last)
        }),
    }
}

/// The largest number of repetitions.
fn repetitions(hir: &Hir) -> u32 {
    match hir.kind() {
        HirKind::Repetition(repetition) => repetition.max.unwrap_or(repetition.min).max(repetitions(&repetition.sub)),
        HirKind::Capture(capture) => repetitions(&capture.sub),
        HirKind::Alternation(parts) | HirKind::Concat(parts) => parts.iter().map(repetitions).max().unwrap_or(0),
        _ => 0,
    }
}
