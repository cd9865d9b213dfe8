//! One choice of a completion: its deltas as chunks, and its chunks added up.

use std::sync::Arc;

use crate::api::openai::{CompletionChoice, CompletionLogprobs, FinishReason};
use crate::generation::GenerationDelta;
use crate::http::logprob::CompletionLogprobWriter;
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

pub(super) struct ChoiceReader {
    index: usize,
    /// Until the first chunk.
    echo: Option<Echo>,
    /// `None` without logprobs.
    logprobs: Option<CompletionLogprobWriter>,
    hides_generated: bool,
}

impl ChoiceReader {
    pub(super) fn new(
        index: usize,
        echo: Option<Echo>,
        logprobs: Option<CompletionLogprobWriter>,
        hides_generated: bool,
    ) -> Self {
        Self { index, echo, logprobs, hides_generated }
    }

    pub(super) fn read(&mut self, delta: GenerationDelta) -> CompletionChoice {
        let GenerationDelta { delta, prompt_tokens, .. } = delta;
        let mut text = String::new();
        let mut logprobs = self.logprobs.is_some().then(CompletionLogprobs::default);
        if let Some(echo) = self.echo.take() {
            text.push_str(&echo.text);
            if let (Some(all), Some(writer)) = (&mut logprobs, &mut self.logprobs) {
                all.extend(writer.prompt(prompt_tokens, &echo.pieces));
            }
        }
        if !self.hides_generated {
            text.push_str(&delta.text);
            if let (Some(all), Some(writer)) = (&mut logprobs, &mut self.logprobs) {
                all.extend(writer.generated(delta.token));
            }
        }
        let finish_reason = delta.finish.map(|finish| match finish.reason.into() {
            // Not the reason of the hidden token.
            _ if self.hides_generated => FinishReason::Length,
            reason => reason,
        });
        CompletionChoice { index: self.index, text, logprobs, finish_reason }
    }
}

/// The chunks of one choice, added up as clients do.
#[derive(Default)]
pub(super) struct ChoiceSum {
    choice: CompletionChoice,
    logprob: f64,
    num_tokens: u32,
}

impl ChoiceSum {
    /// `logprob`: the generated token's.
    pub(super) fn add(&mut self, logprob: f32, chunk: CompletionChoice) {
        self.logprob += f64::from(logprob);
        self.num_tokens += 1;
        self.choice.index = chunk.index;
        self.choice.text.push_str(&chunk.text);
        if let Some(logprobs) = chunk.logprobs {
            self.choice.logprobs.get_or_insert_default().extend(logprobs);
        }
        self.choice.finish_reason = chunk.finish_reason.or(self.choice.finish_reason);
    }

    fn mean_logprob(&self) -> f64 {
        self.logprob / f64::from(self.num_tokens.max(1))
    }
}

/// The `num_choices` choices of each prompt with the highest mean logprob; best first if any are left out.
pub(super) fn best(sums: Vec<ChoiceSum>, num_per_prompt: usize, num_choices: usize) -> Vec<CompletionChoice> {
    let mut sums = sums;
    let mut shown = Vec::with_capacity(sums.len());
    while !sums.is_empty() {
        let rest = sums.split_off(num_per_prompt.min(sums.len()));
        let mut of_prompt = std::mem::replace(&mut sums, rest);
        if num_choices < num_per_prompt {
            of_prompt.sort_by(|one, other| other.mean_logprob().total_cmp(&one.mean_logprob()));
        }
        shown.extend(of_prompt.into_iter().take(num_choices).map(|sum| sum.choice));
    }
    shown.iter_mut().enumerate().for_each(|(index, choice)| choice.index = index);
    shown
}
