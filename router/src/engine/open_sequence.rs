//! A sequence that has no terminal event yet: what was sent to its stream, and which group losses it was part of.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use penstock_scheduler::ContentSalt;
use tokio::time::Instant;

use super::options::MAX_LOSSES;
use super::owner::Owner;
use crate::generator::EventSender;
use crate::sequence::{Constants, DraftCount, SequenceEvent, Token};

/// A sequence that was being computed in this many group losses in a row runs alone next time.
const QUARANTINE_LOSSES: u32 = 2;

/// What decides when and where a sequence runs: the same in every engine.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) num_prompt_tokens: usize,
    pub(super) num_source_tokens: u32,
    pub(super) max_new_tokens: u32,
    pub(super) needs_prompt_outputs: bool,
    pub(super) priority: i32,
    pub(super) group: Option<u64>,
    pub(super) content_salts: Arc<[ContentSalt]>,
    pub(super) arrived_at: Instant,
}

pub(super) struct OpenSequence {
    terms: Terms,
    constants: Constants,
    owner: Arc<Owner>,
    events: EventSender,
    is_started: bool,
    /// Prompt tokens sent to the stream, and those that arrived in the current residency. After a preemption, and from a new
    /// worker group, they arrive again from the first one on; each is sent once.
    num_prompt_tokens_sent: usize,
    num_prompt_tokens_arrived: usize,
    num_tokens_sent: usize,
    last_token_at: Option<Instant>,
    /// Group losses in a row with this sequence in a step in flight. Back to 0 once `cleared_at_tokens` tokens were sent.
    num_losses: u32,
    cleared_at_tokens: usize,
}

impl OpenSequence {
    pub(super) fn new(terms: Terms, constants: Constants, owner: Arc<Owner>, events: EventSender) -> Self {
        Self {
            terms,
            constants,
            owner,
            events,
            is_started: false,
            num_prompt_tokens_sent: 0,
            num_prompt_tokens_arrived: 0,
            num_tokens_sent: 0,
            last_token_at: None,
            num_losses: 0,
            cleared_at_tokens: 0,
        }
    }

    pub(super) fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(super) fn constants(&self) -> &Constants {
        &self.constants
    }

    pub(super) fn owner(&self) -> Arc<Owner> {
        Arc::clone(&self.owner)
    }

    /// Begins a residency. Only the first one is announced.
    pub(super) fn start(&mut self, num_cached_tokens: usize) {
        self.num_prompt_tokens_arrived = 0;
        if !std::mem::replace(&mut self.is_started, true) {
            self.send(SequenceEvent::Started { num_cached_tokens });
            self.wake();
        }
    }

    pub(super) fn send_prompt_tokens(&mut self, tokens: &[Token]) {
        let num_repeated = self.num_prompt_tokens_sent.saturating_sub(self.num_prompt_tokens_arrived);
        self.num_prompt_tokens_arrived += tokens.len();
        if let Some(new) = tokens.get(num_repeated..).filter(|new| !new.is_empty()) {
            self.num_prompt_tokens_sent = self.num_prompt_tokens_arrived;
            self.send(SequenceEvent::PromptTokens(new.to_vec()));
        }
    }

    /// The step verified `num_verified` draft tokens, and the next `num_right` tokens are drafts.
    pub(super) fn send_drafts(&mut self, num_verified: u32, num_right: usize) {
        if num_verified > 0 {
            let num_right = num_right as u32;
            self.send(SequenceEvent::Drafts(DraftCount { num_verified, num_right }));
        }
    }

    /// Returns how long the sequence has waited for these tokens, unless they are its first.
    pub(super) fn send_tokens(&mut self, tokens: &[Token], reported_at: Instant) -> Option<Duration> {
        for token in tokens {
            self.num_tokens_sent += 1;
            self.send(SequenceEvent::Token(token.clone()));
        }
        if self.num_tokens_sent >= self.cleared_at_tokens {
            self.num_losses = 0;
        }
        if tokens.is_empty() {
            return None;
        }
        self.last_token_at.replace(reported_at).map(|last| reported_at - last)
    }

    pub(super) fn send_vector(&mut self, vector: &[f32]) {
        self.send(SequenceEvent::Vector(vector.to_vec()));
    }

    /// The group was lost with this sequence in a step in flight. These steps give it at most `max_tokens_in_flight` tokens.
    pub(super) fn record_loss(&mut self, max_tokens_in_flight: u32) {
        self.num_losses += 1;
        // With this many more tokens, the sequence is past the step that failed; past a step of its prompt with the first.
        let num_tokens = max_tokens_in_flight.max(1) as usize;
        self.cleared_at_tokens = self.cleared_at_tokens.max(self.num_tokens_sent + num_tokens);
    }

    /// Whether a step had the sequence, in any engine.
    pub(super) fn is_started(&self) -> bool {
        self.is_started
    }

    /// Sends an event of the server that computes the sequence.
    pub(super) fn relay(&mut self, event: SequenceEvent) {
        match event {
            SequenceEvent::Started { num_cached_tokens } => self.start(num_cached_tokens),
            SequenceEvent::PromptTokens(tokens) => self.send_prompt_tokens(&tokens),
            SequenceEvent::Token(token) => drop(self.send_tokens(&[token], Instant::now())),
            event => self.send(event),
        }
        self.wake();
    }

    pub(super) fn needs_quarantine(&self) -> bool {
        self.num_losses >= QUARANTINE_LOSSES
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.num_losses >= MAX_LOSSES
    }

    /// The reader of the stream, if it waits and has to be woken after `send_…`.
    pub(super) fn take_reader(&mut self) -> Option<Waker> {
        self.events.take_reader()
    }

    pub(super) fn end(self, terminal: SequenceEvent) {
        self.events.send(terminal);
    }

    fn send(&mut self, event: SequenceEvent) {
        self.events.push(event);
    }

    fn wake(&mut self) {
        self.take_reader().into_iter().for_each(Waker::wake);
    }
}
