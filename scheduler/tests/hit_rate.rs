//! Prefixes that a model with states finds in its cache, against those of a model that attends in all layers and has as much
//! memory, on the loads that agents and chats make.
//!
//! The sizes are those of Qwen3.5 with 2 billion parameters: 24 layers, of which 6 attend, with 2 KV heads of 256, and 18 with 16
//! heads that have states of 128 by 128 numbers in float32.

use std::collections::HashMap;
use std::time::Duration;

use penstock_scheduler::{Event, Limits, Plan, Scheduler, SequenceId, SequenceOutput, StepResult, Submission, TokenId};

const BLOCK_TOKENS: u32 = 16;
const KV_BYTES: u64 = 2 * 2 * 256 * 2;
const SNAPSHOT_BYTES: u64 = 18 * (16 * 128 * 128 + 3 * 6144) * 4;
const ANSWER_TOKENS: u32 = 120;

/// A memory of this size, for a model that attends in all layers, and for one with states: half of it are snapshots, as without
/// `--state-snapshots`.
fn limits(bytes: u64, has_states: bool) -> Limits {
    let layers = if has_states { 6 } else { 24 };
    let of_cache = if has_states { bytes / 2 } else { bytes };
    Limits {
        max_step_tokens: 4096,
        max_step_sequences: 64,
        max_sequence_tokens: 1 << 16,
        num_blocks: (of_cache / (layers * KV_BYTES * u64::from(BLOCK_TOKENS))) as u32,
        block_tokens: BLOCK_TOKENS,
        max_steps_in_flight: 1,
        prefix_caching: true,
        num_state_slots: if has_states { 64 } else { 0 },
        num_snapshots: if has_states { ((bytes - of_cache) / SNAPSHOT_BYTES) as u32 } else { 0 },
        snapshot_reach_tokens: 16,
        ..Limits::PLAIN
    }
}

/// A server and the tokens of prompts that it has read and found.
struct Server {
    scheduler: Scheduler,
    next_id: u64,
    num_read: u64,
    num_found: u64,
    /// State of an xorshift generator.
    random: u64,
}

impl Server {
    fn new(limits: Limits) -> Server {
        Server {
            scheduler: Scheduler::new(limits),
            next_id: 0,
            num_read: 0,
            num_found: 0,
            random: 0x9E37_79B9_7F4A_7C15,
        }
    }

    fn number(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random as usize % below
    }

    fn token(&mut self) -> TokenId {
        self.number(100_000) as TokenId
    }

    fn text(&mut self, num_tokens: u32) -> Vec<TokenId> {
        (0..num_tokens).map(|_| self.token()).collect()
    }

    /// Answers prompts side by side. Returns the texts with their answers.
    fn answer(&mut self, prompts: &[Vec<TokenId>]) -> Vec<Vec<TokenId>> {
        let first = self.next_id;
        let mut texts: HashMap<SequenceId, Vec<TokenId>> = HashMap::new();
        for prompt in prompts {
            let id = SequenceId(self.next_id);
            self.next_id += 1;
            self.num_read += prompt.len() as u64;
            texts.insert(id, prompt.clone());
            self.scheduler.submit(submission(id, prompt.clone()), Duration::ZERO).expect("it fits");
        }
        while let Some(plan) = self.scheduler.plan(Duration::ZERO) {
            for new in &plan.new_sequences {
                self.num_found += u64::from(new.num_computed_tokens);
            }
            let result = self.result(&plan);
            for event in self.scheduler.apply(&result).expect("the result of the oldest step") {
                if let Event::Advanced { id, output_index, num_tokens, .. } = event {
                    let tokens = result.outputs[output_index].token_ids.as_ref().expect("the worker has no errors");
                    texts.get_mut(&id).expect("it was submitted").extend(&tokens[..num_tokens]);
                }
            }
        }
        (first..self.next_id).map(|id| texts.remove(&SequenceId(id)).expect("it was submitted")).collect()
    }

    fn result(&mut self, plan: &Plan) -> StepResult {
        let outputs = plan.advances.iter().filter(|advance| advance.sample).map(|advance| SequenceOutput {
            id: advance.id,
            token_ids: Some(vec![self.token()]),
            num_draft_tokens: 0,
            drafted_by_model: false,
        });
        StepResult { step: plan.step, outputs: outputs.collect() }
    }

    fn rate(&self) -> f64 {
        self.num_found as f64 / self.num_read as f64
    }
}

fn submission(id: SequenceId, prompt_token_ids: Vec<TokenId>) -> Submission {
    Submission {
        id,
        prompt_token_ids,
        generated_token_ids: Vec::new(),
        max_new_tokens: ANSWER_TOKENS,
        stop_token_ids: [].into(),
        priority: 0,
        group: None,
        cache_salt: None,
        content_salts: [].into(),
        needs_prompt_outputs: false,
        num_source_tokens: 0,
        whole_spans: [].into(),
        images: [].into(),
        has_grammar: false,
    }
}

/// Conversations that take turns, behind one system prompt.
fn conversations(server: &mut Server) {
    let system = server.text(700);
    let mut texts = vec![system; 24];
    for _ in 0..12 {
        for text in &mut texts {
            text.extend(server.text(60));
        }
        for group in texts.chunks_mut(6) {
            let answered = server.answer(group);
            group.clone_from_slice(&answered);
        }
    }
}

/// Agents of several kinds, each with tools in front of its task, whose calls add results to the text.
fn agents(server: &mut Server) {
    let kinds: Vec<Vec<TokenId>> = (0..5).map(|_| server.text(3000)).collect();
    for _ in 0..20 {
        let mut tasks: Vec<Vec<TokenId>> =
            kinds.iter().map(|tools| [tools.clone(), server.text(200)].concat()).collect();
        for _ in 0..5 {
            tasks = server.answer(&tasks);
            for task in &mut tasks {
                task.extend(server.text(300));
            }
        }
    }
}

/// Questions about long documents, each asked several times over the day, in no order.
fn documents(server: &mut Server) {
    let documents: Vec<Vec<TokenId>> = (0..30).map(|_| server.text(4000)).collect();
    for _ in 0..240 {
        let index = server.number(documents.len());
        let question = [documents[index].clone(), server.text(40)].concat();
        server.answer(&[question]);
    }
}

/// A conversation whose last message is edited and sent again, as in a chat's page.
fn edits(server: &mut Server) {
    let mut text = server.text(500);
    for _ in 0..40 {
        let before = text.clone();
        for _ in 0..3 {
            text = [before.clone(), server.text(80)].concat();
            text = server.answer(&[text]).remove(0);
        }
    }
}

/// The model with states finds nothing of a document that is read for the second time, because only then it is known where texts branch
/// off. So where documents are forgotten about as fast as they return, it finds less.
#[test]
fn prefixes_are_found_as_often_as_by_a_model_that_attends_in_all_layers() {
    const GIB: u64 = 1 << 30;
    for (name, load, least) in [
        ("conversations", conversations as fn(&mut Server), 0.9),
        ("agents", agents, 0.9),
        ("documents", documents, 0.8),
        ("edits", edits, 0.9),
    ] {
        for bytes in [GIB, 2 * GIB, 4 * GIB] {
            let [attention, states] = [false, true].map(|has_states| {
                let mut server = Server::new(limits(bytes, has_states));
                load(&mut server);
                server.rate()
            });
            println!("{name:14} {} GiB: attention {attention:.3}, states {states:.3}", bytes / GIB);
            assert!(states >= least * attention, "{name}, {bytes} bytes: {states} of {attention}");
        }
    }
}
