//! One sequence as text: the engine's tokens become pieces of text until the model, a limit or a stop string ends it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio_util::sync::CancellationToken;

use super::TextModel;
use super::detokenize::{Detokenizer, Piece};
use super::stop::{Outcome, StopMatcher};
use crate::engine::{Generator, SequenceStream};
use crate::sequence::{FinishReason, Sampling, SequenceEvent, SequenceFailure, SequenceRequest, Token, TopToken};

/// What happens to the stop string that ended a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopText {
    /// The text ends with it (TGI).
    Kept,
    /// The text ends before it (OpenAI); what may turn out to be part of it is held back.
    Cut,
}

/// One sequence to generate, already validated against the limits.
#[derive(Clone, Debug)]
pub(crate) struct GenerationOptions {
    pub(crate) prompt_token_ids: Vec<u32>,
    /// Not empty: the prompt is an encoder's source, and the answer is a text of its own that follows these.
    pub(crate) decoder_prefix: Arc<[u32]>,
    pub(crate) max_new_tokens: u32,
    /// Its stop tokens are the client's; the model's own join them here, unless they are to be ignored.
    pub(crate) sampling: Sampling,
    pub(crate) ignore_eos: bool,
    /// No empty one.
    pub(crate) stops: Vec<String>,
    pub(crate) stop_text: StopText,
    /// Special tokens that are part of the visible text all the same: the marks of tool calls and thoughts.
    pub(crate) shown_token_ids: Arc<[u32]>,
    pub(crate) priority: i32,
    pub(crate) group: Option<u64>,
    /// The generation fails then.
    pub(crate) deadline: Option<Instant>,
    /// The generation fails if it has not started then.
    pub(crate) queue_deadline: Option<Instant>,
}

/// A token and what it settled.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) token: TextToken,
    /// What can be shown now; the texts of all steps, put together, are the generation's text.
    pub(crate) text: String,
    /// Set on the last step.
    pub(crate) finish: Option<Finish>,
}

#[derive(Clone, Debug)]
pub(crate) struct TextToken {
    pub(crate) id: u32,
    /// Special tokens included; empty while a character is unfinished.
    pub(crate) text: String,
    pub(crate) logprob: f32,
    pub(crate) special: bool,
    /// The most probable instead of it, best first.
    pub(crate) top: Vec<TopText>,
}

#[derive(Clone, Debug)]
pub(crate) struct TopText {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) logprob: f32,
    pub(crate) special: bool,
}

/// A token of the prompt.
#[derive(Clone, Debug)]
pub(crate) struct PromptToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    /// `None`: nothing precedes it, or it was not chosen but given by the model.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<TopText>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Finish {
    pub(crate) ending: Ending,
    pub(crate) num_generated_tokens: u32,
    /// Prompt tokens that did not have to be computed.
    pub(crate) num_cached_tokens: usize,
    pub(crate) timings: Timings,
}

/// What ended a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Length,
    EosToken,
    StopString,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timings {
    /// From the request's arrival to its submission.
    pub(crate) validation: Duration,
    /// From there to its first step.
    pub(crate) queue: Duration,
    /// From there to its last token.
    pub(crate) inference: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GenerationError {
    #[error("{0}")]
    Failed(SequenceFailure),
    /// The engine's stream ended before the sequence did.
    #[error("incomplete generation")]
    Incomplete,
    /// The time that the client gave is over.
    #[error("the request's timeout is over")]
    Timeout,
    /// It waited for its first step for longer than the server lets anybody wait.
    #[error("the request waited for too long")]
    QueueTimeout,
}

/// A running generation. Dropping it aborts the sequence.
pub(crate) struct Generation {
    events: SequenceStream,
    /// Read, and not yet made anything of.
    ahead: Option<SequenceEvent>,
    /// The server has waited long enough.
    abandoned: CancellationToken,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    stop_text: StopText,
    held: HeldText,
    /// A sequence ends with one of these; their text is nobody's.
    stop_token_ids: Arc<[u32]>,
    shown_token_ids: Arc<[u32]>,
    /// Empty unless their logprobs were asked for.
    prompt_tokens: Vec<PromptToken>,
    max_new_tokens: u32,
    num_generated_tokens: u32,
    num_cached_tokens: usize,
    deadline: Option<Instant>,
    /// `None` when it has started.
    queue_deadline: Option<Instant>,
    received: Instant,
    submitted: Instant,
    started: Option<Instant>,
}

impl Generation {
    /// `received`: when the request arrived. `abandoned`: fails the generation when cancelled.
    pub(crate) fn start(
        generator: &dyn Generator,
        model: &TextModel,
        options: GenerationOptions,
        received: Instant,
        abandoned: CancellationToken,
    ) -> Self {
        let GenerationOptions { mut prompt_token_ids, decoder_prefix, mut sampling, .. } = options;
        if !options.ignore_eos {
            sampling.stop_token_ids = union(&model.eos_token_ids(), &sampling.stop_token_ids);
        }
        let stop_token_ids = Arc::clone(&sampling.stop_token_ids);
        let has_source = !decoder_prefix.is_empty();
        let detokenizer = model.detokenizer(if has_source { &[] } else { &prompt_token_ids });
        // COMPAT: of an encoder–decoder TGI tells the tokens that its decoder starts with, and no logprobs.
        let given = if has_source { &decoder_prefix[..] } else { &prompt_token_ids[..prompt_token_ids.len().min(1)] };
        let prompt_token = |&id| PromptToken { id, text: detokenizer.token_text(id), logprob: None, top: Vec::new() };
        let prompt_tokens = given.iter().filter(|_| sampling.prompt_logprobs).map(prompt_token).collect();
        sampling.prompt_logprobs &= !has_source;
        let num_source_tokens = if has_source { prompt_token_ids.len() as u32 } else { 0 };
        prompt_token_ids.extend_from_slice(&decoder_prefix);
        let submitted = Instant::now();
        let events = generator.submit(SequenceRequest {
            prompt_token_ids,
            num_source_tokens,
            max_new_tokens: options.max_new_tokens,
            sampling,
            priority: options.priority,
            group: options.group,
        });
        Self {
            events,
            ahead: None,
            abandoned,
            detokenizer,
            stops: StopMatcher::new(options.stops),
            stop_text: options.stop_text,
            held: HeldText::default(),
            stop_token_ids,
            shown_token_ids: options.shown_token_ids,
            prompt_tokens,
            max_new_tokens: options.max_new_tokens,
            num_generated_tokens: 0,
            num_cached_tokens: 0,
            deadline: options.deadline,
            queue_deadline: options.queue_deadline,
            received,
            submitted,
            started: None,
        }
    }

    /// The prompt's tokens; complete when the first generated token is here, empty when they were not asked for.
    pub(crate) fn take_prompt_tokens(&mut self) -> Vec<PromptToken> {
        std::mem::take(&mut self.prompt_tokens)
    }

    /// Returns when the sequence has left the queue. Cancel safe.
    pub(crate) async fn started(&mut self) -> Result<(), GenerationError> {
        if self.ahead.is_none() && self.started.is_none() {
            self.ahead = Some(self.receive().await?);
            self.queue_deadline = None;
        }
        match self.ahead.take_if(|event| matches!(event, SequenceEvent::Failed(_))) {
            Some(SequenceEvent::Failed(failure)) => Err(GenerationError::Failed(failure)),
            _ => Ok(()),
        }
    }

    /// The next token. Not to be called after a step with `finish`, or an error.
    pub(crate) async fn next(&mut self) -> Result<Step, GenerationError> {
        loop {
            match self.next_event().await? {
                SequenceEvent::Started { num_cached_tokens } => {
                    self.started = Some(Instant::now());
                    self.num_cached_tokens = num_cached_tokens;
                }
                SequenceEvent::PromptTokens(tokens) => self.accept_prompt(tokens),
                SequenceEvent::Token(token) => return self.accept(token).await,
                SequenceEvent::Finished(_) => return Err(GenerationError::Incomplete),
                SequenceEvent::Failed(failure) => return Err(GenerationError::Failed(failure)),
            }
        }
    }

    async fn next_event(&mut self) -> Result<SequenceEvent, GenerationError> {
        match self.ahead.take() {
            Some(event) => Ok(event),
            None => self.receive().await,
        }
    }

    async fn receive(&mut self) -> Result<SequenceEvent, GenerationError> {
        tokio::select! {
            biased;
            event = self.events.next() => event.ok_or(GenerationError::Incomplete),
            () = self.abandoned.cancelled() => Err(GenerationError::Failed(SequenceFailure::ShuttingDown)),
            () = until(self.deadline), if self.deadline.is_some() => Err(GenerationError::Timeout),
            () = until(self.queue_deadline), if self.queue_deadline.is_some() => Err(GenerationError::QueueTimeout),
        }
    }

    fn accept_prompt(&mut self, tokens: Vec<Token>) {
        for token in tokens {
            let (text, top) = (self.detokenizer.token_text(token.id), self.top_texts(&token.top));
            self.prompt_tokens.push(PromptToken { id: token.id, text, logprob: Some(token.logprob), top });
        }
    }

    fn top_texts(&self, top: &[TopToken]) -> Vec<TopText> {
        let text = |token: &TopToken| TopText {
            id: token.id,
            text: self.detokenizer.token_text(token.id),
            logprob: token.logprob,
            special: self.detokenizer.is_special(token.id),
        };
        top.iter().map(text).collect()
    }

    async fn accept(&mut self, token: Token) -> Result<Step, GenerationError> {
        self.num_generated_tokens += 1;
        let ends_it = self.stop_token_ids.contains(&token.id);
        let mut piece = if ends_it {
            // Whatever the tokenizer thinks of it, it is not part of the text.
            Piece { text: self.detokenizer.token_text(token.id), special: true }
        } else {
            self.detokenizer.push(token.id)
        };
        let special = piece.special;
        piece.special &= ends_it || !self.shown_token_ids.contains(&token.id);
        let (mut text, stopped) = self.find_stop(&mut piece);

        let ends_in_engine = ends_it || self.num_generated_tokens >= self.max_new_tokens;
        let ending = match (ends_in_engine, stopped, self.stop_text) {
            (false, false, _) => None,
            (false, true, _) | (true, true, StopText::Cut) => Some(Ending::StopString),
            // COMPAT: at the last allowed token TGI says "length", whatever else is true.
            (true, _, _) => Some(self.ending_from_engine().await?),
        };
        if ending.is_some() && !stopped {
            let rest = self.detokenizer.finish();
            if !piece.special {
                piece.text.push_str(&rest);
            }
            self.held.push(&rest, false);
            text.push_str(&self.held.release_all());
        }
        let finish = ending.map(|ending| Finish {
            ending,
            num_generated_tokens: self.num_generated_tokens,
            num_cached_tokens: self.num_cached_tokens,
            timings: self.timings(),
        });
        let top = self.top_texts(&token.top);
        let token = TextToken { id: token.id, text: piece.text, logprob: token.logprob, special, top };
        Ok(Step { token, text, finish })
    }

    /// Puts the piece through the stop strings: what can be shown, and whether one was completed. A piece that goes on
    /// after a stop string that is kept is cut there.
    fn find_stop(&mut self, piece: &mut Piece) -> (String, bool) {
        let outcome = self.stops.push(&piece.text);
        match (self.stop_text, outcome) {
            (StopText::Kept, Outcome::Release(_)) => (visible(piece), false),
            (StopText::Kept, Outcome::Match { end_in_piece, .. }) => {
                piece.text.truncate(end_in_piece);
                (visible(piece), true)
            }
            (StopText::Cut, Outcome::Release(bytes)) => {
                self.held.push(&piece.text, piece.special);
                (self.held.release(bytes), false)
            }
            (StopText::Cut, Outcome::Match { start, .. }) => {
                self.held.push(&piece.text, piece.special);
                (self.held.release(start), true)
            }
        }
    }

    /// The engine ends the sequence with this token: it says so right after it.
    async fn ending_from_engine(&mut self) -> Result<Ending, GenerationError> {
        match self.next_event().await? {
            SequenceEvent::Finished(FinishReason::Length) => Ok(Ending::Length),
            SequenceEvent::Finished(FinishReason::StopToken) => Ok(Ending::EosToken),
            SequenceEvent::Failed(failure) => Err(GenerationError::Failed(failure)),
            SequenceEvent::Started { .. } | SequenceEvent::PromptTokens(_) | SequenceEvent::Token(_) => {
                Err(GenerationError::Incomplete)
            }
        }
    }

    fn timings(&self) -> Timings {
        let started = self.started.unwrap_or(self.submitted);
        Timings {
            validation: self.submitted - self.received,
            queue: started - self.submitted,
            inference: started.elapsed(),
        }
    }
}

async fn until(deadline: Option<Instant>) {
    if let Some(deadline) = deadline {
        tokio::time::sleep_until(deadline.into()).await;
    }
}

fn union(ours: &Arc<[u32]>, theirs: &[u32]) -> Arc<[u32]> {
    if theirs.is_empty() {
        return Arc::clone(ours);
    }
    let new = theirs.iter().filter(|id| !ours.contains(id));
    ours.iter().chain(new).copied().collect()
}

fn visible(piece: &Piece) -> String {
    if piece.special { String::new() } else { piece.text.clone() }
}

/// Text that is not shown yet because it may be part of a stop string. Stop strings may be spelled with special tokens,
/// so those are in it too, without ever being shown.
#[derive(Default)]
struct HeldText {
    parts: VecDeque<(String, bool)>,
}

impl HeldText {
    fn push(&mut self, text: &str, special: bool) {
        if !text.is_empty() {
            self.parts.push_back((text.to_owned(), special));
        }
    }

    /// Takes `bytes` from the front, and returns what is visible of them.
    fn release(&mut self, mut bytes: usize) -> String {
        let mut text = String::new();
        while bytes > 0 {
            let Some((mut part, special)) = self.parts.pop_front() else { break };
            if part.len() > bytes {
                self.parts.push_front((part.split_off(bytes), special));
            }
            bytes -= part.len();
            if !special {
                text.push_str(&part);
            }
        }
        text
    }

    fn release_all(&mut self) -> String {
        self.release(usize::MAX)
    }
}
