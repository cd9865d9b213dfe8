//! One choice of a completion: its deltas as chunks, and its chunks added up.

use std::sync::Arc;

use crate::api::openai::{CompletionChoice, CompletionChunk, CompletionLogprobs, Envelope, FinishReason, Usage};
use crate::generation::GenerationDelta;
use crate::http::logprob::{self, CompletionLogprobWriter};
use crate::http::openai_answer::ChoiceReader;
use crate::http::sse::{self, Event};
use crate::text::TextModel;

/// The prompt, which the answer repeats before the generated text.
#[derive(Clone)]
pub(super) struct Echo {
    text: Arc<str>,
    /// The text that each token adds, and whether it is special. Empty without logprobs.
    pieces: Arc<[(String, bool)]>,
}

impl Echo {
    /// `text`: as given; `None` for a prompt of token ids, which are decoded.
    pub(super) fn new(model: &TextModel, text: Option<Arc<str>>, token_ids: &[u32], with_tokens: bool) -> Self {
        let pieces = if with_tokens || text.is_none() { model.decode_pieces(token_ids) } else { Vec::new() };
        let visible = || pieces.iter().filter(|(_, special)| !special).map(|(text, _)| text.as_str()).collect();
        Self { text: text.unwrap_or_else(|| String::into(visible())), pieces: pieces.into() }
    }
}

/// What the request asked to see in each choice of one prompt.
pub(super) struct CompletionShape {
    /// Until the first chunk.
    pub(super) echo: Option<Echo>,
    /// If token ids are to be shown; until the first chunk.
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    /// Until the first chunk.
    pub(super) with_prompt_logprobs: bool,
    pub(super) hides_generated: bool,
    pub(super) shows_drafts: bool,
}

pub(super) struct CompletionReader {
    index: usize,
    shape: CompletionShape,
    shows_token_ids: bool,
    /// `None` without logprobs.
    logprobs: Option<CompletionLogprobWriter>,
    /// Sum over the generated tokens.
    logprob: f64,
    num_tokens: u32,
}

impl CompletionReader {
    pub(super) fn new(index: usize, shape: CompletionShape, logprobs: Option<CompletionLogprobWriter>) -> Self {
        let shows_token_ids = shape.prompt_token_ids.is_some();
        Self { index, shape, shows_token_ids, logprobs, logprob: 0.0, num_tokens: 0 }
    }

    fn mean_logprob(&self) -> f64 {
        self.logprob / f64::from(self.num_tokens.max(1))
    }
}

impl ChoiceReader for CompletionReader {
    type Chunk = CompletionChoice;
    type Sum = CompletionChoice;

    /// One chunk for each token.
    fn read(&mut self, delta: GenerationDelta) -> Vec<CompletionChoice> {
        let GenerationDelta { delta, prompt_tokens, .. } = delta;
        self.logprob += f64::from(delta.token.logprob);
        self.num_tokens += 1;
        let mut text = String::new();
        let mut logprobs = self.logprobs.is_some().then(CompletionLogprobs::default);
        let hides_generated = self.shape.hides_generated;
        let token_ids = if hides_generated { Vec::new() } else { vec![delta.token.id] };
        let prompt_logprobs =
            std::mem::take(&mut self.shape.with_prompt_logprobs).then(|| logprob::of_prompt(prompt_tokens.clone()));
        if let Some(echo) = self.shape.echo.take() {
            text.push_str(&echo.text);
            if let (Some(all), Some(writer)) = (&mut logprobs, &mut self.logprobs) {
                all.extend(writer.prompt(prompt_tokens, &echo.pieces));
            }
        }
        if !hides_generated {
            text.push_str(&delta.text);
            if let (Some(all), Some(writer)) = (&mut logprobs, &mut self.logprobs) {
                all.extend(writer.generated(delta.token));
            }
        }
        let finish_reason = delta.finish.map(|finish| match finish.reason.into() {
            // Not the reason of the hidden token.
            _ if hides_generated => FinishReason::Length,
            reason => reason,
        });
        vec![CompletionChoice {
            index: self.index,
            text,
            logprobs,
            finish_reason,
            token_ids: self.shows_token_ids.then_some(token_ids),
            drafts: delta.draft.filter(|_| self.shape.shows_drafts).map(Into::into).into_iter().collect(),
            prompt_token_ids: self.shape.prompt_token_ids.take(),
            prompt_logprobs,
        }]
    }

    fn add(sum: &mut CompletionChoice, chunk: CompletionChoice) {
        sum.text.push_str(&chunk.text);
        if let Some(logprobs) = chunk.logprobs {
            sum.logprobs.get_or_insert_default().extend(logprobs);
        }
        sum.finish_reason = chunk.finish_reason.or(sum.finish_reason);
        if let Some(token_ids) = chunk.token_ids {
            sum.token_ids.get_or_insert_default().extend(token_ids);
        }
        sum.drafts.extend(chunk.drafts);
        sum.prompt_token_ids = chunk.prompt_token_ids.or(sum.prompt_token_ids.take());
        sum.prompt_logprobs = chunk.prompt_logprobs.or(sum.prompt_logprobs.take());
    }

    fn event(envelope: &Envelope, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Event {
        sse::event(&CompletionChunk { envelope, choices, usage })
    }
}

/// The `num_choices` choices of each prompt with the highest mean logprob; best first if any are left out.
pub(super) fn best(
    mut sums: Vec<(CompletionReader, CompletionChoice)>,
    num_per_prompt: usize,
    num_choices: usize,
) -> Vec<CompletionChoice> {
    if num_choices < num_per_prompt {
        for of_prompt in sums.chunks_mut(num_per_prompt) {
            of_prompt.sort_by(|(one, _), (other, _)| other.mean_logprob().total_cmp(&one.mean_logprob()));
        }
    }
    let is_shown = |position: &usize| position % num_per_prompt < num_choices;
    let shown = sums.into_iter().enumerate().filter(|(position, _)| is_shown(position));
    shown.enumerate().map(|(index, (_, (_, choice)))| CompletionChoice { index, ..choice }).collect()
}
