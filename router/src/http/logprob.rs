//! Tokens with their logprobs, as OpenAI's routes write them.

use crate::api::openai::{ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob, TopTokens};
use crate::text::{PromptToken, TextModel, TextToken, TopText};

pub(super) fn of_chat(text_model: &TextModel, token: &TextToken) -> ChatLogprobs {
    let entry = |id, text: &str, logprob| TopLogprob {
        bytes: text_model.token_bytes(id).or_else(|| whole_bytes(text)),
        token: text.to_owned(),
        logprob,
    };
    let top_logprobs = token.top.iter().map(|top| entry(top.id, &top.text, top.logprob)).collect();
    ChatLogprobs { content: vec![TokenLogprob { token: entry(token.id, &token.text, token.logprob), top_logprobs }] }
}

/// Where tokens are not spelled byte by byte their texts are whole.
fn whole_bytes(text: &str) -> Option<Vec<u8>> {
    let is_whole = !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER);
    is_whole.then(|| text.as_bytes().to_owned())
}

/// Writes the logprobs of one text, token by token.
#[derive(Default)]
pub(super) struct CompletionLogprobWriter {
    num_characters: usize,
}

impl CompletionLogprobWriter {
    /// `pieces`: what each token adds to the text, and whether it is a special one, which adds nothing that is shown.
    pub(super) fn prompt(&mut self, tokens: Vec<PromptToken>, pieces: &[(String, bool)]) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        for (token, (text, special)) in tokens.into_iter().zip(pieces) {
            let num_characters = if *special { 0 } else { text.chars().count() };
            self.push(&mut logprobs, num_characters, text.clone(), token.logprob, token.top);
        }
        logprobs
    }

    pub(super) fn generated(&mut self, token: TextToken) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        let num_characters = if token.special { 0 } else { token.text.chars().count() };
        self.push(&mut logprobs, num_characters, token.text, Some(token.logprob), token.top);
        logprobs
    }

    fn push(
        &mut self,
        logprobs: &mut CompletionLogprobs,
        num_characters: usize,
        text: String,
        logprob: Option<f32>,
        top: Vec<TopText>,
    ) {
        let top_tokens = logprob.map(|logprob| {
            let mut tokens: Vec<_> = top.into_iter().map(|top| (top.text, top.logprob)).collect();
            // The token itself is always among them, as the last if it was not one of the best.
            tokens.push((text.clone(), logprob));
            TopTokens(tokens)
        });
        logprobs.tokens.push(text);
        logprobs.token_logprobs.push(logprob);
        logprobs.top_logprobs.push(top_tokens);
        logprobs.text_offset.push(self.num_characters);
        self.num_characters += num_characters;
    }
}
