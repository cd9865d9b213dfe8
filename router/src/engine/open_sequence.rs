//! A sequence that has not ended, as its stream knows it: what has been sent, and what comes a second time.

use tokio::sync::mpsc::UnboundedSender;

use crate::sequence::{Sampling, SequenceEvent, Token};

pub(super) struct OpenSequence {
    pub sampling: Sampling,
    events: UnboundedSender<SequenceEvent>,
    started: bool,
    /// Prompt logprobs handed on, and how many of them came in the present stay in the worker: after a preemption, or
    /// from another worker, they come again from the first.
    num_prompt_tokens_sent: usize,
    num_prompt_tokens_seen: usize,
    num_tokens_sent: usize,
    /// Losses of the workers with it in a step in flight, until it has as many tokens as those steps would have given.
    num_losses: u32,
    num_tokens_of_loss: usize,
}

impl OpenSequence {
    pub fn new(sampling: Sampling, events: UnboundedSender<SequenceEvent>) -> Self {
        Self {
            sampling,
            events,
            started: false,
            num_prompt_tokens_sent: 0,
            num_prompt_tokens_seen: 0,
            num_tokens_sent: 0,
            num_losses: 0,
            num_tokens_of_loss: 0,
        }
    }

    /// It begins a stay in the worker; only the first is announced.
    pub fn start(&mut self, num_cached_tokens: usize) {
        self.num_prompt_tokens_seen = 0;
        if !std::mem::replace(&mut self.started, true) {
            self.send(SequenceEvent::Started { num_cached_tokens });
        }
    }

    pub fn hand_on_prompt(&mut self, tokens: &[Token]) {
        let num_known = self.num_prompt_tokens_sent.saturating_sub(self.num_prompt_tokens_seen);
        self.num_prompt_tokens_seen += tokens.len();
        if let Some(new) = tokens.get(num_known..).filter(|new| !new.is_empty()) {
            self.num_prompt_tokens_sent = self.num_prompt_tokens_seen;
            self.send(SequenceEvent::PromptTokens(new.to_vec()));
        }
    }

    pub fn hand_on(&mut self, tokens: &[Token]) {
        for token in tokens {
            self.num_tokens_sent += 1;
            self.send(SequenceEvent::Token(token.clone()));
        }
        if self.num_tokens_sent >= self.num_tokens_of_loss {
            self.num_losses = 0;
        }
    }

    /// The workers were lost with it in one of the steps in flight.
    pub fn lose(&mut self, num_steps_in_flight: usize) {
        self.num_losses += 1;
        // A step gives one token at most.
        self.num_tokens_of_loss = self.num_tokens_of_loss.max(self.num_tokens_sent + num_steps_in_flight);
    }

    /// Losses of the workers in a row that it may be to blame for.
    pub fn num_losses(&self) -> u32 {
        self.num_losses
    }

    pub fn end(self, terminal: SequenceEvent) {
        self.send(terminal);
    }

    fn send(&self, event: SequenceEvent) {
        // A receiver that is gone has its abort on the way.
        let _ = self.events.send(event);
    }
}
