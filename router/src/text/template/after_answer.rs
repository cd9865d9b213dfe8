//! What a template writes after the assistant's text, and which token of it ends the turn.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// The texts after an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AfterAnswer {
    /// At the end of the conversation.
    pub(super) last: String,
    /// Before a message of the user.
    pub(super) before_user: String,
}

impl AfterAnswer {
    /// The token that a model writes at the end of its turn; `None` if an EOS token is among them, or there is none.
    ///
    /// `control_tokens`: ids of the special tokens.
    pub(in crate::text) fn turn_end(
        &self,
        control_tokens: &HashMap<String, u32>,
        eos_token_ids: &[u32],
    ) -> Option<u32> {
        let (last, before_user) = (leading(&self.last, control_tokens), leading(&self.before_user, control_tokens));
        // Another token may end the conversation, or begin the next message.
        let shared: Vec<_> = last.iter().zip(&before_user).take_while(|(a, b)| a == b).map(|(&id, _)| id).collect();
        // Templates that end the last turn in a way of its own, or write nothing but the head of the next message.
        let ends = [shared, last, before_user].into_iter().find(|ids| !ids.is_empty())?;
        (!ends.iter().any(|id| eos_token_ids.contains(id))).then_some(ends[0])
    }
}

/// The control tokens at the beginning of a text, with whitespace around them.
fn leading(mut text: &str, control_tokens: &HashMap<String, u32>) -> Vec<u32> {
    let mut ids = Vec::new();
    loop {
        text = text.trim_start();
        let candidates =
            control_tokens.iter().filter(|(token, _)| !token.is_empty() && text.starts_with(token.as_str()));
        let Some((token, &id)) = candidates.max_by_key(|(token, _)| token.len()) else { return ids };
        text = &text[token.len()..];
        ids.push(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: [&str; 6] = ["</s>", "<|im_end|>", "<|im_start|>", "<|return|>", "<|end|>", "<|user|>"];

    fn turn_end(last: &str, before_user: &str, eos: &[&str]) -> Option<&'static str> {
        let id = |text: &str| TOKENS.iter().position(|token| *token == text).unwrap() as u32;
        let tokens = TOKENS.iter().map(|token| ((*token).to_owned(), id(token))).collect();
        let eos: Vec<_> = eos.iter().map(|text| id(text)).collect();
        let texts = AfterAnswer { last: last.to_owned(), before_user: before_user.to_owned() };
        texts.turn_end(&tokens, &eos).map(|id| TOKENS[id as usize])
    }

    #[test]
    fn a_turn_ends_with_what_the_template_writes_after_an_answer() {
        let next = "<|im_end|>\n<|im_start|>user\n?";
        assert_eq!(turn_end("<|im_end|>\n", next, &["</s>"]), Some("<|im_end|>"));
        assert_eq!(turn_end("<|im_end|>\n<|im_start|>assistant\n", next, &["</s>"]), Some("<|im_end|>"));
        // The end of a conversation is no end of a turn.
        assert_eq!(turn_end("<|end|>\n</s>", "<|end|>\n<|user|>\n?", &["</s>"]), Some("<|end|>"));
        // The head of the next message is all that the model can write.
        assert_eq!(turn_end("", "<|user|>\n?", &["</s>"]), Some("<|user|>"));
    }

    #[test]
    fn eos_tokens_and_plain_texts_add_no_end() {
        assert_eq!(turn_end("</s>", "</s><|user|>", &["</s>"]), None);
        assert_eq!(turn_end("<|end|></s>", "<|end|></s><|user|>", &["</s>"]), None);
        // Between messages of one turn there is another end than after it.
        assert_eq!(turn_end("<|return|>", "<|end|><|user|>", &["<|return|>"]), None);
        assert_eq!(turn_end("\n### Instruction", "\n### Instruction", &["</s>"]), None);
        assert_eq!(turn_end("", "", &[]), None);
    }
}
