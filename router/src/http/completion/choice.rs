//! One choice of a completion: its steps as chunks, and its chunks added up.

use std::sync::Arc;

use crate::api::openai::{CompletionChoice, CompletionLogprobs, FinishReason};
use crate::http::logprob::CompletionLogprobWriter;
use crate::text::{PromptToken, Step, TextModel};

/// The prompt, to be told before what follows it.
#[derive(Clone)]
pub(super) struct Echo {
    text: Arc<str>,
    /// What each token adds to it, and whether it is a special one; empty where nobody asks for tokens.
    pieces: Arc<[(String, bool)]>,
}

impl Echo {
    /// `text`: as the client wrote it, unless in tokens.
    pub(super) fn new(model: &TextModel, text: Option<Arc<str>>, token_ids: &[u32], with_tokens: bool) -> Self {
        let pieces = if with_tokens || text.is_none() { model.decode_pieces(token_ids) } else { Vec::new() };
        let visible = || pieces.iter().filter(|(_, special)| !special).map(|(text, _)| text.as_str()).collect();
        Self { text: text.unwrap_or_else(|| String::into(visible())), pieces: pieces.into() }
    }
}

pub(super) struct ChoiceReader {
    index: usize,
    /// Until it is told.
    echo: Option<Echo>,
    /// Set if logprobs are to be told.
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

    pub(super) fn read(&mut self, step: Step, prompt_tokens: Vec<PromptToken>) -> CompletionChoice {
        let mut text = String::new();
        let mut logprobs = self.logprobs.is_some().then(CompletionLogprobs::default);
        if let Some(echo) = self.echo.take() {
            text.push_str(&echo.text);
            if let (Some(all), Some(writer)) = (&mut logprobs, &mut self.logprobs) {
                all.extend(writer.prompt(prompt_tokens, &echo.pieces));
            }
        }
        if !self.hides_generated {
            text.push_str(&step.text);
            if let (Some(all), Some(writer)) = (&mut logprobs, &mut self.logprobs) {
                all.extend(writer.generated(step.token));
            }
        }
        let finish_reason = step.finish.map(|finish| match finish.ending.into() {
            // Whatever the token was that nobody asked for.
            _ if self.hides_generated => FinishReason::Length,
            reason => reason,
        });
        CompletionChoice { index: self.index, text, logprobs, finish_reason }
    }
}

/// Chunks of one choice, added up as clients do.
#[derive(Default)]
pub(super) struct ChoiceSum {
    choice: CompletionChoice,
    logprob: f64,
    num_tokens: u32,
}

impl ChoiceSum {
    /// `logprob`: of the generated token.
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

/// Of each prompt's `num_per_prompt` the `num_choices` most probable per token, best first if some are left out.
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
