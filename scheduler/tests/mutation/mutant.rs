//! The bugs: each a passage of the code, what takes its place, and the suites that have to notice.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// `scheduler/src/**/tests.rs`: rule by rule.
    Unit,
    /// `scheduler/tests/simulation`.
    Simulation,
    /// `kernels/src/pool/interleavings.rs`.
    Loom,
    /// `router/tests/http`.
    Http,
}

pub struct Mutant {
    pub name: &'static str,
    pub file: &'static str,
    /// Occurs once in the file.
    pub from: &'static str,
    pub to: &'static str,
    pub caught_by: &'static [Suite],
}

use Suite::{Http, Loom, Simulation, Unit};

const BOTH: &[Suite] = &[Unit, Simulation];

const fn mutant(
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    caught_by: &'static [Suite],
) -> Mutant {
    Mutant { name, file, from, to, caught_by }
}

pub const MUTANTS: [Mutant; 37] = [
    mutant(
        "a block is free while a step in flight writes it",
        "scheduler/src/pool.rs",
        "if block.last_write_step > self.retired_step {",
        "if false {",
        BOTH,
    ),
    mutant(
        "a shared block does not count its second holder",
        "scheduler/src/pool.rs",
        "self.change(block_id, |block| block.num_holders += 1);",
        "self.change(block_id, |_| ());",
        BOTH,
    ),
    mutant(
        "a block that has retired is never given back",
        "scheduler/src/pool.rs",
        "self.retiring.pop_first();\n            self.place(block_id);",
        "self.retiring.pop_first();",
        BOTH,
    ),
    mutant(
        "the most recently used block is evicted",
        "scheduler/src/pool.rs",
        "self.idle.pop_first()?.1",
        "self.idle.pop_last()?.1",
        &[Unit],
    ),
    mutant(
        "an evicted block is still found in the cache",
        "scheduler/src/cache.rs",
        "if let Some(node) = evicted {\n            self.tree.clear_block_id(node);\n        }",
        "let _ = evicted;",
        BOTH,
    ),
    mutant(
        "links with one hash are taken for equal",
        "scheduler/src/prefix.rs",
        "(node.parent == parent && *node.token_ids == *token_ids).then_some(id)",
        "(node.parent == parent).then_some(id)",
        BOTH,
    ),
    mutant(
        "groups share with each other",
        "scheduler/src/scheduler.rs",
        "submission.group.map(Root::Group)",
        "submission.group.map(|_| Root::Group(0))",
        BOTH,
    ),
    mutant(
        "the last known token comes from the cache too",
        "scheduler/src/sequence.rs",
        "let (_, token_ids) = self.token_ids.split_last()?;",
        "let token_ids = &self.token_ids[..];",
        BOTH,
    ),
    mutant(
        "prompt logprobs skip what is cached",
        "scheduler/src/sequence.rs",
        "self.root.filter(|_| !needs_all)",
        "self.root.filter(|_| !needs_all || true)",
        BOTH,
    ),
    mutant(
        "a block can be found before the step that writes it is planned",
        "scheduler/src/step.rs",
        "draft.plan.advances.push(advance);",
        "draft.plan.advances.push(advance);\n        self.share(id);",
        &[Simulation],
    ),
    mutant(
        "hits are counted in blocks",
        "scheduler/src/admission.rs",
        "lookup.block_ids.len() as u64 * u64::from(block_tokens);",
        "lookup.block_ids.len() as u64;",
        BOTH,
    ),
    mutant(
        "who leaves the worker does not end its promises",
        "scheduler/src/scheduler.rs",
        "self.end_promises(sequence.id(), &table);",
        "",
        BOTH,
    ),
    mutant(
        "the last, half full block is forgotten",
        "scheduler/src/layout.rs",
        "num_tokens.div_ceil(self.block_tokens) as usize",
        "(num_tokens / self.block_tokens) as usize",
        BOTH,
    ),
    mutant(
        "the last token asks for a slot",
        "scheduler/src/scheduler.rs",
        "num_required_blocks(max_tokens - 1)",
        "num_required_blocks(max_tokens)",
        BOTH,
    ),
    mutant(
        "the eldest is preempted",
        "scheduler/src/step.rs",
        "&& let Some(last) = self.running.last()",
        "&& let Some(last) = self.running.first()",
        BOTH,
    ),
    mutant(
        "blocks about to retire do not count: somebody is preempted at once",
        "scheduler/src/step.rs",
        "while needed > self.cache.pool.num_available() + self.cache.pool.num_retiring()",
        "while needed > self.cache.pool.num_available()",
        BOTH,
    ),
    mutant(
        "more sequences than a step may have",
        "scheduler/src/step.rs",
        "self.plan.advances.len() < limits.max_step_sequences as usize",
        "!self.plan.advances.is_empty() | true",
        BOTH,
    ),
    mutant(
        "nobody ages",
        "scheduler/src/order.rs",
        "arrived_at.as_nanos() as i128 - ageing.as_nanos() as i128 * i128::from(priority)",
        "ageing.as_nanos() as i128 * 0 - i128::from(priority)",
        BOTH,
    ),
    mutant(
        "a stop token in the last place is lost",
        "scheduler/src/sequence.rs",
        "if self.stop_token_ids.contains(&token_id) {",
        "if self.stop_token_ids.contains(&token_id) && (self.token_ids.len() as u32) < self.max_tokens {",
        BOTH,
    ),
    mutant(
        "a token sampled before a preemption is taken for the next one",
        "scheduler/src/apply.rs",
        "sequence.stay() == Some(in_flight.stay)",
        "sequence.stay().is_some()",
        BOTH,
    ),
    mutant(
        "tokens in flight at a preemption count as known",
        "scheduler/src/sequence.rs",
        "self.stay = None;\n        self.num_unseen_tokens = 0;",
        "self.stay = None;",
        BOTH,
    ),
    mutant(
        "a cancelled sequence is freed twice",
        "scheduler/src/scheduler.rs",
        "self.freed.push(sequence.id());",
        "self.freed.extend([sequence.id(), sequence.id()]);",
        BOTH,
    ),
    mutant(
        "a cancelled sequence stays on the worker",
        "scheduler/src/scheduler.rs",
        "self.freed.push(sequence.id());",
        "",
        BOTH,
    ),
    mutant(
        "who read the blocks of a failed sequence goes on",
        "scheduler/src/apply.rs",
        "self.void_what_relied_on(self.failed_stays(result));",
        "let _ = self.failed_stays(result);",
        BOTH,
    ),
    mutant("the cache outlives the worker", "scheduler/src/restart.rs", "self.cache = self.cache.emptied();", "", BOTH),
    mutant(
        "a suspect is not run alone",
        "scheduler/src/restart.rs",
        "self.quarantined = id.filter(|id| self.sequences.contains_key(id));",
        "self.quarantined = id.filter(|_| false);",
        BOTH,
    ),
    mutant(
        "a window's block is passed one token too early",
        "scheduler/src/layout.rs",
        "(num_computed_tokens + 1).saturating_sub(window)",
        "(num_computed_tokens + 2).saturating_sub(window)",
        &[Simulation],
    ),
    mutant(
        "a block that a window has passed is given away in the step that reads it",
        "scheduler/src/step.rs",
        "draft.plan.advances.push(advance);",
        "draft.plan.advances.push(advance);\n        self.pass(id);",
        BOTH,
    ),
    mutant("what a window has passed is kept", "scheduler/src/step.rs", "self.pass(in_flight.id);", "", BOTH),
    mutant(
        "a hit needs only the last block of its window",
        "scheduler/src/cache.rs",
        "if num_blocks - self.num_passed_blocks(num_blocks) <= num_in_row {",
        "if num_in_row > 0 {",
        &[Simulation],
    ),
    mutant(
        "a window passes the source",
        "scheduler/src/scheduler.rs",
        "layout.window_tokens.filter(|_| submission.num_source_tokens == 0)",
        "layout.window_tokens",
        BOTH,
    ),
    mutant("a source is cut", "scheduler/src/timing.rs", "if possible < indivisible {", "if possible == 0 {", BOTH),
    mutant(
        "a source that was overtaken enough is overtaken",
        "scheduler/src/admission.rs",
        "draft.is_full |= self.sequence(id).turn(now, &self.limits).effort == 0;",
        "",
        &[Unit],
    ),
    mutant(
        "what begins with a source is shared",
        "scheduler/src/scheduler.rs",
        "if submission.num_source_tokens > 0 {",
        "if submission.num_source_tokens == u32::MAX {",
        BOTH,
    ),
    mutant(
        "a thread goes on before it sees what the others wrote",
        "kernels/src/pool.rs",
        "phase.done.0.fetch_add(count, Ordering::AcqRel)",
        "phase.done.0.fetch_add(count, Ordering::Relaxed)",
        &[Loom],
    ),
    mutant(
        "the queue has no bound of requests",
        "router/src/http/admission.rs",
        "Arc::new(Semaphore::new(max_permits))",
        "Arc::new(Semaphore::new(Semaphore::MAX_PERMITS))",
        &[Http],
    ),
    mutant(
        "the queue has no bound of tokens",
        "router/src/http/admission.rs",
        "entries.queued_tokens > 0 && entries.queued_tokens + all_tokens > self.ledger.max_queued_tokens",
        "entries.queued_tokens == u64::MAX",
        &[Http],
    ),
];
