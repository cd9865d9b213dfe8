//! The scheduler's inputs and outputs: plain data, named as in proto/worker.proto.

use std::iter::Sum;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::layout::BlockLayout;

/// Identifies a sequence. Chosen by the caller and unique among the sequences that the scheduler knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A token of the model's vocabulary.
pub type TokenId = u32;
/// A block of the KV pool, in `0..num_blocks`.
pub type BlockId = u32;

/// A place for the content of one block beside the KV pool: `0..num_memory_slots` are in host memory, the next `num_disk_slots` on a disk.
pub type SlotId = u32;

/// A place for a snapshot of a sequence's states.
pub type SnapshotId = u32;

/// Hashes a full block of token ids together with the hash of the prefix before it. Must be deterministic. Collisions
/// only reduce sharing: every hit is verified token by token.
pub type BlockHash = fn(prefix_hash: u64, token_ids: &[TokenId]) -> u64;

/// The limits that every plan keeps.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens that one step advances at most, over all sequences (`--max-batch-prefill-tokens`).
    pub max_step_tokens: u32,
    /// Sequences that one step advances at most (`--max-batch-size`).
    pub max_step_sequences: u32,
    /// Longest sequence, prompt and generated tokens together (`--max-total-tokens`).
    pub max_sequence_tokens: u32,
    /// Size of the KV pool.
    pub num_blocks: u32,
    /// Slots in host memory, to which the content of evicted blocks moves (`--kv-offload-gib`).
    pub num_memory_slots: u32,
    /// Slots on a disk, for what has no room in those in memory (`--kv-offload-disk-gib`).
    pub num_disk_slots: u32,
    /// Tokens in one block.
    pub block_tokens: u32,
    /// Plans that can be waiting for their results at the same time (run-ahead depth), at least 1.
    pub max_steps_in_flight: u32,
    /// Whether blocks are cached and shared between all sequences. Otherwise only the sequences of one
    /// `Submission::group` share blocks.
    pub prefix_caching: bool,
    /// Waiting this long counts as one priority level, so that no sequence starves. Zero: only the arrival decides.
    pub priority_ageing: Duration,
    /// Target duration of a step while sequences decode, or with several stages, of the steps from one token to the next:
    /// prompts are added only as far as it allows. `None`: a small multiple of what the decodes take alone. Applies as soon as step durations are known (`Scheduler::observe`).
    pub max_inter_token: Option<Duration>,
    /// The prompt with the fewest tokens left goes first, but each token of a prompt can be overtaken by at most this
    /// many tokens of prompts of lower precedence (priority with ageing, then arrival). 0: prompts are computed in
    /// order of precedence.
    pub max_overtaking: u32,
    /// Sliding window: a token attends to this many last tokens, itself included. Blocks before the window are
    /// released. `None`: a token attends to all tokens before it.
    pub window_tokens: Option<u32>,
    /// All tokens of a prompt attend to each other: each prompt is a span as in [`Submission::whole_spans`].
    pub whole_prompts: bool,
    /// Draft tokens that a step verifies for one sequence at most. 0: none.
    pub max_draft_tokens: u32,
    /// Whether the worker can draft with a model or heads, which takes time, as well as by lookup, which takes none.
    pub drafts_with_model: bool,
    /// Whether they are heads that draft only where lookup finds nothing, and read no text before: a step that drafts with
    /// them looks up first, and a sequence without a draft in it is not catching up.
    pub drafts_extend_lookup: bool,
    /// Whether the only drafts are tokens that grammars force (without `--speculate`).
    pub drafts_only_forced: bool,
    /// Bytes that the images of the sequences that the worker knows may take.
    pub max_image_bytes: u64,
    /// For models that keep states between tokens: the most sequences that the worker knows at a time. 0: the model keeps none.
    pub num_state_slots: u32,
    /// Snapshots of a sequence's states. A sequence with states continues a cached prefix only at a snapshot, so 0 ends all sharing.
    pub num_snapshots: u32,
    /// Tokens behind a position that may have been computed before a snapshot of that position is saved; at least 1.
    pub snapshot_reach_tokens: u32,
    /// Stages of the worker's pipeline, at least 1. With several, the steps in flight decode disjoint sequences, so that
    /// every stage has a step, and one more step for each stage after the first may be in flight.
    pub num_stages: u32,
}

impl Limits {
    /// Limits of a scheduler that neither caches, drafts nor offloads, for `..Limits::PLAIN`. All sizes are 0, so every submission is
    /// rejected; priorities do not age.
    pub const PLAIN: Self = Self {
        max_step_tokens: 0,
        max_step_sequences: 0,
        max_sequence_tokens: 0,
        num_blocks: 0,
        num_memory_slots: 0,
        num_disk_slots: 0,
        block_tokens: 0,
        max_steps_in_flight: 1,
        prefix_caching: false,
        priority_ageing: Duration::MAX,
        max_inter_token: None,
        max_overtaking: 0,
        window_tokens: None,
        whole_prompts: false,
        max_draft_tokens: 0,
        drafts_with_model: false,
        drafts_extend_lookup: false,
        drafts_only_forced: false,
        max_image_bytes: 0,
        num_state_slots: 0,
        num_snapshots: 0,
        snapshot_reach_tokens: 1,
        num_stages: 1,
    };

    /// Slots beside the pool, wherever they are.
    pub fn num_slots(&self) -> usize {
        self.num_memory_slots as usize + self.num_disk_slots as usize
    }

    /// Whether a sequence that is alone in the pool can always advance, although it may verify `max_draft_tokens` in each
    /// step in flight.
    ///
    /// Only with a sliding window may the pool be too small. What lies before the window is then released for the case
    /// that all drafts in flight are wrong, and allocated for the case that all are right, so the sequence holds the
    /// blocks of a window that is longer by the drafts in flight.
    pub fn has_room_for_drafts(&self) -> bool {
        let Some(window) = self.window_tokens else { return true };
        let num_drafts = self.max_draft_tokens.saturating_mul(self.max_steps_in_flight.max(1));
        let window_tokens = Some(window.max(1).saturating_add(num_drafts));
        let layout = BlockLayout { block_tokens: self.block_tokens.max(1), window_tokens };
        layout.num_required_blocks(self.max_sequence_tokens) <= self.num_blocks as usize
    }
}

/// A sequence to generate.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Id of the new sequence.
    pub id: SequenceId,
    /// Prompt; not empty.
    pub prompt_token_ids: Vec<TokenId>,
    /// Tokens that another scheduler has generated for this sequence; fewer than `max_new_tokens`.
    pub generated_token_ids: Vec<TokenId>,
    /// Most tokens to generate; at least 1. Together with the prompt at most `Limits::max_sequence_tokens`.
    pub max_new_tokens: u32,
    /// The sequence ends when one of these is sampled; that token is still reported.
    pub stop_token_ids: Arc<[TokenId]>,
    /// A higher priority is admitted first and preempted last; the default is 0.
    pub priority: i32,
    /// Sequences of one group (`n`, `best_of`) share blocks with each other even without prefix caching. Must not be
    /// reused while a sequence of the group is known.
    pub group: Option<u64>,
    /// Cached prefixes are shared only among sequences with the same salt.
    pub cache_salt: Option<u64>,
    /// Content that the prompt's token ids do not show, in the order of the offsets. Sequences share the block in which it begins, and
    /// the blocks after it, only if all of it up to there is the same.
    pub content_salts: Arc<[ContentSalt]>,
    /// Compute the whole prompt, even cached tokens, until the first generated token has come back.
    pub needs_prompt_outputs: bool,
    /// The first `num_source_tokens` prompt tokens are an encoder's input: they are computed in one step and never
    /// shared. At most the length of the prompt; 0 for a decoder-only model.
    pub num_source_tokens: u32,
    /// Prompt tokens that attend to each other, as those of an image may: disjoint ranges in order. An advance does not
    /// end inside of one.
    pub whole_spans: Arc<[Range<u32>]>,
    /// The images of the prompt, each group once. Together at most `Limits::max_image_bytes`.
    pub images: Arc<[ImageGroup]>,
    /// Whether a grammar constrains the generated tokens, so that it can force some.
    pub has_grammar: bool,
}

/// Images next to each other in a prompt, which sequences share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageGroup {
    /// Differs from the key of any other group.
    pub key: u64,
    /// What they take of `Limits::max_image_bytes`.
    pub num_bytes: u64,
}

/// The beginning of content that token ids do not show, such as an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentSalt {
    /// Prompt tokens before it.
    pub offset: u32,
    /// Differs from the salt of any other content.
    pub salt: u64,
}

/// The work of one step, as a difference to what the worker already knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Step number: 1, 2, 3, …
    pub step: u64,
    /// Snapshots that the worker saves first, of sequences that it knows, each to another place.
    pub saves: Vec<Save>,
    /// Sequences that the worker forgets before this step.
    pub freed_sequence_ids: Vec<SequenceId>,
    /// What moves between the pool and the slots, and from slot to slot, before the advances. The order counts.
    pub transfers: Vec<Transfer>,
    /// Sequences that are new to the worker; each of them also advances in this step.
    pub new_sequences: Vec<NewSequence>,
    /// One for each sequence in the step's batch.
    pub advances: Vec<Advance>,
    /// Whether drafts come from the sequences' texts and grammars alone, although the worker can draft with a model.
    pub drafts_by_lookup: bool,
    /// Whether drafts are only tokens that grammars force.
    pub drafts_only_forced: bool,
}

/// A snapshot to save. The states are those of the steps before the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Save {
    /// The sequence whose states are saved.
    pub id: SequenceId,
    /// Tokens before the position whose states are saved: whole blocks.
    pub num_tokens: u32,
    /// The place of the snapshot.
    pub snapshot: SnapshotId,
}

/// The content of one block that moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Out of the pool.
    Store {
        /// The block to move.
        block_id: BlockId,
        /// Its new slot.
        slot: SlotId,
    },
    /// Back into the pool.
    Load {
        /// The slot with its content.
        slot: SlotId,
        /// Its new block.
        block_id: BlockId,
    },
    /// To a slower tier.
    Demote {
        /// The block's slot in memory.
        from: SlotId,
        /// Its new slot on disk.
        to: SlotId,
    },
}

/// A sequence that the worker does not know, or has been told to forget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSequence {
    /// Id of the sequence.
    pub id: SequenceId,
    /// All known tokens: the prompt, and what was generated before a preemption.
    pub token_ids: Vec<TokenId>,
    /// Length of the prompt at the beginning of `token_ids`.
    pub num_prompt_tokens: u32,
    /// Length of the encoder's input at the beginning of `token_ids`; the first advance covers all of it.
    pub num_source_tokens: u32,
    /// Tokens whose keys and values are already in `block_ids`: whole blocks, and never all tokens. When the sequence
    /// is admitted for the first time, these are its cached prompt tokens.
    pub num_computed_tokens: u32,
    /// Shared blocks that the sequence starts with.
    pub block_ids: Vec<BlockId>,
    /// The snapshot of its states after `num_computed_tokens`. `None`: it starts without a state.
    pub snapshot: Option<SnapshotId>,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    /// Id of the sequence.
    pub id: SequenceId,
    /// Known tokens to compute; at least 1.
    pub num_tokens: u32,
    /// Draft tokens that the worker may compute and verify after them, at most; 0 unless the advance samples.
    pub num_draft_tokens: u32,
    /// Blocks to append to the sequence's block table before the step.
    pub new_block_ids: Vec<BlockId>,
    /// Whether a token is sampled after the last known one, and after each draft token that turns out to be right.
    pub sample: bool,
    /// The last known token, with several stages: the stages that do not sample learn it here.
    pub last_token_id: Option<TokenId>,
}

/// The worker's result of one step.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Number of the step.
    pub step: u64,
    /// One output for each advance that sampled or failed. An advance that did not sample can have an output without
    /// tokens.
    pub outputs: Vec<SequenceOutput>,
}

/// The worker's output for one sequence of a step.
#[derive(Clone, Debug)]
pub struct SequenceOutput {
    /// Id of the sequence.
    pub id: SequenceId,
    /// Sampled tokens: 1, and 1 more for each right draft token. `None`: the worker cannot continue the sequence.
    pub token_ids: Option<Vec<TokenId>>,
    /// Draft tokens that the worker verified, right or not; at most `Advance::num_draft_tokens`.
    pub num_draft_tokens: u32,
    /// Whether these come from a model or heads.
    pub drafted_by_model: bool,
}

/// What a step spent on drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafted {
    /// Draft tokens that the step verified, over all sequences.
    pub num_tokens: u32,
    /// Whether any of them come from a model or heads.
    pub by_model: bool,
    /// On a GPU: the time in which it waited for drafts or made them. On a CPU: the time that a model took to make them.
    pub duration: Duration,
}

/// What a result means for one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The sequence takes the first `num_tokens` tokens of `StepResult::outputs[output_index]`.
    Advanced {
        /// Id of the sequence.
        id: SequenceId,
        /// Index of its output in the result.
        output_index: usize,
        /// Tokens that belong to the sequence; the rest of the output is discarded.
        num_tokens: usize,
        /// Set when the sequence has ended: the event is terminal.
        finish_reason: Option<FinishReason>,
    },
    /// The worker reported an error for the sequence: the event is terminal.
    Failed {
        /// Id of the sequence.
        id: SequenceId,
        /// Index of its output in the result.
        output_index: usize,
    },
}

/// Why a sequence has finished without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_new_tokens` were generated.
    Length,
    /// One of `stop_token_ids` was sampled.
    StopToken,
}

/// What the scheduler expected of a step when it planned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Expected duration; `None` when no step had been observed yet.
    pub duration: Option<Duration>,
    /// Duration that prompts were allowed to extend the step to; `None` when nothing limited them. The step can take
    /// longer because of its decodes, or because one prompt always advances by at least a block.
    pub target: Option<Duration>,
}

/// Load of the scheduler and its KV pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences waiting for admission, preempted ones included.
    pub num_queued: usize,
    /// Sequences that the worker knows.
    pub num_running: usize,
    /// Size of the KV pool.
    pub num_blocks: usize,
    /// Blocks that can be allocated now: free ones and evictable ones.
    pub num_allocatable_blocks: usize,
    /// Blocks that become allocatable when the steps in flight have retired.
    pub num_retiring_blocks: usize,
    /// Blocks in the prefix cache, in use or not.
    pub num_cached_blocks: usize,
    /// Slots in host memory that have the content of a block.
    pub num_full_memory_slots: usize,
    /// Slots on disk that have the content of a block.
    pub num_full_disk_slots: usize,
    /// Slots for the states of running sequences; 0: the model keeps none.
    pub num_state_slots: usize,
    /// Snapshots of states.
    pub num_snapshots: usize,
    /// Snapshots that are in use.
    pub num_full_snapshots: usize,
    /// Tokens looked up in the prefix cache by all admissions so far.
    pub num_queried_tokens: u64,
    /// Looked-up tokens that were found in the prefix cache.
    pub num_hit_tokens: u64,
    /// Preemptions so far. The loss of the worker is not one.
    pub num_preemptions: u64,
    /// Plans that wait for their results.
    pub num_steps_in_flight: usize,
    /// Tokens, prompt and generated, that the running sequences can grow to together.
    pub max_running_tokens: u64,
    /// Plans whose results were applied so far.
    pub num_finished_steps: u64,
}

impl Sum for Stats {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            num_queued: sum.num_queued + one.num_queued,
            num_running: sum.num_running + one.num_running,
            num_blocks: sum.num_blocks + one.num_blocks,
            num_allocatable_blocks: sum.num_allocatable_blocks + one.num_allocatable_blocks,
            num_retiring_blocks: sum.num_retiring_blocks + one.num_retiring_blocks,
            num_cached_blocks: sum.num_cached_blocks + one.num_cached_blocks,
            num_full_memory_slots: sum.num_full_memory_slots + one.num_full_memory_slots,
            num_full_disk_slots: sum.num_full_disk_slots + one.num_full_disk_slots,
            num_state_slots: sum.num_state_slots + one.num_state_slots,
            num_snapshots: sum.num_snapshots + one.num_snapshots,
            num_full_snapshots: sum.num_full_snapshots + one.num_full_snapshots,
            num_queried_tokens: sum.num_queried_tokens + one.num_queried_tokens,
            num_hit_tokens: sum.num_hit_tokens + one.num_hit_tokens,
            num_preemptions: sum.num_preemptions + one.num_preemptions,
            num_steps_in_flight: sum.num_steps_in_flight + one.num_steps_in_flight,
            max_running_tokens: sum.max_running_tokens + one.max_running_tokens,
            num_finished_steps: sum.num_finished_steps + one.num_finished_steps,
        })
    }
}
