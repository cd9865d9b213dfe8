//! One sequence as text: the engine's tokens become text deltas until the model, a limit or a stop string ends it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::admission::QueueReservation;
use super::deadline::{Deadlines, reached};
use super::delta::{Draft, Finish, FinishReason, PromptToken, TextDelta, TextToken, Timings, TopToken};
use super::error::GenerationError;
use super::parameter::NumAlternatives;
use super::stop_buffer::StopBuffer;
use crate::generator::{Generator, SequenceStream};
use crate::sequence::{self, DraftCount, End, SequenceEvent, SequenceRequest, Timeline, Token};
use crate::telemetry::metrics;
use crate::text::{Detokenizer, Piece, StopMatcher, StopOutcome, TextModel};

/// Why a sequence ends before its first token, as the workers say it where there is a stop token.
const EMPTY_GRAMMAR: &str = "no token of the model can begin a text of this grammar";

/// What happens to the stop string that ended a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopText {
    /// The text ends with it. At the last allowed token, the limit counts as the reason (TGI).
    Kept,
    /// The text ends with it, also at the last allowed token.
    Included,
    /// The text ends before it (OpenAI). Text that may become part of a stop string is held back.
    Cut,
}

/// One sequence to generate, already checked against the limits.
#[derive(Debug)]
pub(super) struct SequenceOptions {
    /// With the client's prompt and stop tokens only: [`TextStream::start`] adds `decoder_prefix`, and the model's stop
    /// tokens unless `ignore_eos`.
    pub(super) request: SequenceRequest,
    /// First tokens of an encoder–decoder's decoder, which the answer continues; its prompt is the encoder's source. Otherwise empty.
    pub(super) decoder_prefix: Arc<[u32]>,
    pub(super) ignore_eos: bool,
    /// No string is empty. A chat has none here, because only its content may contain them.
    pub(super) stop_strings: Vec<String>,
    pub(super) stop_text: StopText,
    pub(super) shown: ShownTokens,
    pub(super) num_alternatives: NumAlternatives,
    pub(super) deadlines: Deadlines,
}

/// Special tokens that are part of the visible text.
#[derive(Clone, Debug)]
pub(super) enum ShownTokens {
    All,
    /// The marks of tool calls and reasoning.
    These(Arc<[u32]>),
}

impl ShownTokens {
    fn contains(&self, id: u32) -> bool {
        match self {
            Self::All => true,
            Self::These(ids) => ids.contains(&id),
        }
    }
}

/// A running sequence. Dropping it aborts the sequence and returns its reservation.
pub(super) struct TextStream {
    events: SequenceStream,
    reservation: QueueReservation,
    /// An event, or the failure instead of it, that was received but not consumed yet.
    pending: Option<Result<SequenceEvent, GenerationError>>,
    /// Resolves when the grace period of a shutdown is over. PERF: one for all events, because all streams register at the same token.
    abandoned: Pin<Box<WaitForCancellationFutureOwned>>,
    detokenizer: Detokenizer,
    stop_matcher: StopMatcher,
    stop_text: StopText,
    held: StopBuffer,
    /// The sequence ends with one of these; their text is not part of the answer.
    stop_token_ids: Vec<u32>,
    shown: ShownTokens,
    num_alternatives: NumAlternatives,
    /// Empty unless prompt logprobs were requested.
    prompt_tokens: Vec<PromptToken>,
    /// The request has a grammar and no stop token, so only the event after a token says whether it was the last one.
    may_end_unannounced: bool,
    max_new_tokens: u32,
    num_generated_tokens: u32,
    num_cached_tokens: usize,
    drafts: DraftCount,
    /// Until its first token.
    next_draft: Option<Draft>,
    deadlines: Deadlines,
    /// `None`: the request is not traced.
    timeline: Option<Timeline>,
    submitted: Instant,
    /// When the first step began.
    started: Option<Instant>,
}

impl TextStream {
    /// Submits the sequence. Cancelling `abandoned` fails it.
    pub(super) fn start(
        generator: &dyn Generator,
        model: &TextModel,
        options: SequenceOptions,
        reservation: QueueReservation,
        abandoned: CancellationToken,
    ) -> Self {
        let SequenceOptions { mut request, decoder_prefix, .. } = options;
        let SequenceRequest { prompt_token_ids, sampling, max_new_tokens, grammar, .. } = &mut request;
        if !options.ignore_eos {
            sampling.stop_token_ids = union(&model.eos_token_ids(), &sampling.stop_token_ids);
        }
        let stop_token_ids = sampling.stop_token_ids.clone();
        let may_end_unannounced = stop_token_ids.is_empty() && grammar.is_some();
        let has_source = !decoder_prefix.is_empty();
        let detokenizer = model.detokenizer(if has_source { &[] } else { prompt_token_ids });
        // COMPAT: for an encoder–decoder TGI reports the decoder's first tokens, without logprobs.
        let given = if has_source { &decoder_prefix[..] } else { &prompt_token_ids[..prompt_token_ids.len().min(1)] };
        let prompt_token = |&id| PromptToken { id, text: detokenizer.token_text(id), logprob: None, top: Vec::new() };
        let prompt_tokens = given.iter().filter(|_| sampling.prompt_logprobs).map(prompt_token).collect();
        sampling.prompt_logprobs &= !has_source;
        let max_new_tokens = *max_new_tokens;
        if has_source {
            request.num_source_tokens = prompt_token_ids.len() as u32;
            request.prompt_token_ids.extend_from_slice(&decoder_prefix);
        }
        let timeline = request.timeline.clone();
        let submitted = Instant::now();
        Self {
            events: generator.submit(request),
            reservation,
            pending: None,
            abandoned: Box::pin(abandoned.cancelled_owned()),
            detokenizer,
            stop_matcher: StopMatcher::new(options.stop_strings),
            stop_text: options.stop_text,
            held: StopBuffer::default(),
            stop_token_ids,
            shown: options.shown,
            num_alternatives: options.num_alternatives,
            prompt_tokens,
            may_end_unannounced,
            max_new_tokens,
            num_generated_tokens: 0,
            num_cached_tokens: 0,
            drafts: DraftCount::default(),
            next_draft: None,
            deadlines: options.deadlines,
            timeline,
            submitted,
            started: None,
        }
    }

    /// The prompt's tokens, complete once the first delta is here. Empty unless prompt logprobs were requested.
    pub(super) fn take_prompt_tokens(&mut self) -> Vec<PromptToken> {
        std::mem::take(&mut self.prompt_tokens)
    }

    /// Prompt tokens found in the prefix cache. Returns when the sequence has left the queue. Cancel safe.
    pub(super) async fn started(&mut self) -> Result<usize, GenerationError> {
        if self.started.is_none() && self.pending.is_none() {
            self.pending = Some(Ok(self.receive().await?));
        }
        match self.pending {
            Some(Ok(SequenceEvent::Started { num_cached_tokens })) => Ok(num_cached_tokens),
            _ => Ok(self.num_cached_tokens),
        }
    }

    /// The next delta. Must not be called after an error or a delta with `finish`.
    pub(super) async fn next(&mut self) -> Result<TextDelta, GenerationError> {
        loop {
            match self.next_event().await? {
                SequenceEvent::Started { num_cached_tokens } => {
                    self.started = Some(Instant::now());
                    self.num_cached_tokens = num_cached_tokens;
                }
                SequenceEvent::PromptTokens(tokens) => self.accept_prompt(tokens),
                SequenceEvent::Drafts(count) => {
                    self.drafts += count;
                    self.next_draft = Some(Draft { token_index: self.num_generated_tokens, count });
                }
                SequenceEvent::Token(token) => return self.accept(token).await,
                SequenceEvent::Finished(_) if self.num_generated_tokens == 0 && self.may_end_unannounced => {
                    return Err(GenerationError::Unservable(EMPTY_GRAMMAR.to_owned()));
                }
                SequenceEvent::Vector(_) | SequenceEvent::Finished(_) | SequenceEvent::Failed(_) => {
                    return Err(GenerationError::Incomplete);
                }
            }
        }
    }

    async fn next_event(&mut self) -> Result<SequenceEvent, GenerationError> {
        match self.pending.take() {
            Some(event) => event,
            None => self.receive().await,
        }
    }

    /// The next event; a failure is an error. The first event takes the sequence out of the queue.
    async fn receive(&mut self) -> Result<SequenceEvent, GenerationError> {
        let is_queued = self.reservation.is_queued();
        let event = tokio::select! {
            biased;
            event = self.events.next() => event.ok_or(GenerationError::Incomplete)?,
            () = &mut self.abandoned => return Err(GenerationError::ShuttingDown),
            () = reached(self.deadlines.answer) => return Err(GenerationError::Timeout),
            () = reached(self.deadlines.first_step), if is_queued => return Err(self.reservation.queue_timeout()),
        };
        match event {
            SequenceEvent::Failed(failure) => Err(failure.into()),
            event => {
                self.reservation.leave_queue();
                Ok(event)
            }
        }
    }

    fn accept_prompt(&mut self, tokens: Vec<Token>) {
        for token in tokens {
            let top = self.top_tokens(&token.top, self.num_alternatives.of_prompt);
            let text = self.detokenizer.token_text(token.id);
            self.prompt_tokens.push(PromptToken { id: token.id, text, logprob: Some(token.logprob), top });
        }
    }

    fn top_tokens(&self, top: &[sequence::TopToken], num_shown: usize) -> Vec<TopToken> {
        let decoded = |token: &sequence::TopToken| TopToken {
            id: token.id,
            text: self.detokenizer.token_text(token.id),
            logprob: token.logprob,
            special: self.detokenizer.is_special(token.id),
        };
        top.iter().take(num_shown).map(decoded).collect()
    }

    async fn accept(&mut self, token: Token) -> Result<TextDelta, GenerationError> {
        if self.num_generated_tokens == 0 {
            metrics::first_token(self.deadlines.received.elapsed());
        }
        self.num_generated_tokens += 1;
        let is_stop_token = self.stop_token_ids.contains(&token.id);
        let hides_stop = is_stop_token && self.stop_text != StopText::Included;
        let mut piece = if hides_stop {
            // Not part of the text, even where the tokenizer does not call it special.
            Piece { text: self.detokenizer.token_text(token.id), special: true }
        } else {
            self.detokenizer.push(token.id)
        };
        let special = piece.special;
        piece.special &= hides_stop || !self.shown.contains(token.id);
        let (mut text, stop_string) = self.match_stop_strings(&mut piece);

        let ends_in_engine = is_stop_token
            || self.num_generated_tokens >= self.max_new_tokens
            || self.may_end_unannounced && stop_string.is_none() && self.is_complete().await;
        let reason = match (ends_in_engine, stop_string, self.stop_text) {
            (false, None, _) => None,
            (false, Some(index), _) | (true, Some(index), StopText::Cut | StopText::Included) => {
                Some(FinishReason::StopString(index))
            }
            // COMPAT: at the last allowed token TGI answers "length", even if a stop string is complete.
            (true, _, _) => Some(self.reason_from_engine().await?),
        };
        if reason.is_some() && stop_string.is_none() {
            let rest = self.detokenizer.finish();
            if !piece.special {
                piece.text.push_str(&rest);
            }
            self.held.push(&rest, false);
            text.push_str(&self.held.release(usize::MAX));
        }
        let finish = reason.map(|reason| self.end(reason));
        let top = self.top_tokens(&token.top, self.num_alternatives.of_generated);
        let token = TextToken { id: token.id, text: piece.text, logprob: token.logprob, special, top };
        Ok(TextDelta { token, text, draft: self.next_draft.take(), finish })
    }

    /// The end of the sequence after the last token.
    pub(super) fn end(&self, reason: FinishReason) -> Finish {
        let finish = Finish {
            reason,
            num_generated_tokens: self.num_generated_tokens,
            num_cached_tokens: self.num_cached_tokens,
            drafts: self.drafts,
            timings: self.timings(),
        };
        if let Some(timeline) = &self.timeline {
            timeline.end(End {
                at: Instant::now(),
                finish_reason: Some(finish.reason.name()),
                num_generated_tokens: finish.num_generated_tokens,
                num_cached_tokens: finish.num_cached_tokens,
            });
        }
        finish
    }

    /// Returns the text that is final now, and the position of the stop string that is complete. With
    /// [`StopText::Kept`] and [`StopText::Included`] the piece is cut after the stop string.
    fn match_stop_strings(&mut self, piece: &mut Piece) -> (String, Option<usize>) {
        let outcome = self.stop_matcher.push(&piece.text);
        match (self.stop_text, outcome) {
            (StopText::Kept | StopText::Included, StopOutcome::Release(_)) => (visible(piece), None),
            (StopText::Kept | StopText::Included, StopOutcome::Match { index, end_in_piece, .. }) => {
                piece.text.truncate(end_in_piece);
                (visible(piece), Some(index))
            }
            (StopText::Cut, StopOutcome::Release(num_bytes)) => {
                self.held.push(&piece.text, piece.special);
                (self.held.release(num_bytes), None)
            }
            (StopText::Cut, StopOutcome::Match { index, start, .. }) => {
                self.held.push(&piece.text, piece.special);
                (self.held.release(start), Some(index))
            }
        }
    }

    /// Whether no token follows. Waits for the next event or failure, which is not consumed.
    async fn is_complete(&mut self) -> bool {
        let event = self.next_event().await;
        matches!(self.pending.insert(event), Ok(SequenceEvent::Finished(_)))
    }

    /// The engine ends the sequence with this token; the reason is its next event.
    async fn reason_from_engine(&mut self) -> Result<FinishReason, GenerationError> {
        match self.next_event().await? {
            SequenceEvent::Finished(reason) => Ok(reason.into()),
            _ => Err(GenerationError::Incomplete),
        }
    }

    fn timings(&self) -> Timings {
        let started = self.started.unwrap_or(self.submitted);
        Timings {
            validation: self.submitted - self.deadlines.received,
            queue: started - self.submitted,
            inference: started.elapsed(),
        }
    }
}

fn union(ours: &[u32], theirs: &[u32]) -> Vec<u32> {
    let new = theirs.iter().filter(|id| !ours.contains(id));
    ours.iter().chain(new).copied().collect()
}

fn visible(piece: &Piece) -> String {
    if piece.special { String::new() } else { piece.text.clone() }
}
