//! Tokens with their logprobs, as OpenAI's routes render them.

use crate::api::openai::{
    ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob, TopTokens,
};
use crate::generation::{PromptToken, TextToken, TopToken};
use crate::text::{Part, TextModel};

/// How tokens are named.
#[derive(Clone)]
pub(super) struct TokenNames {
    pub(super) text_model: TextModel,
    /// vLLM's `token_id:7` instead of the text.
    pub(super) are_ids: bool,
}

impl TokenNames {
    fn name(&self, id: u32, text: impl FnOnce() -> String) -> String {
        if self.are_ids { format!("token_id:{id}") } else { text() }
    }
}

/// A generated token with its alternatives.
pub(super) fn of_token(names: &TokenNames, token: TextToken) -> TokenLogprob {
    let text_model = &names.text_model;
    let entry = |id, text: String, logprob| TopLogprob {
        bytes: text_model.token_bytes(id).or_else(|| whole_bytes(&text)),
        token: names.name(id, || text),
        logprob,
    };
    let top = |top: TopToken| entry(top.id, top_text(text_model, &top, token.id, &token.text), top.logprob);
    let top_logprobs = token.top.into_iter().map(top).collect();
    TokenLogprob { token: entry(token.id, token.text, token.logprob), top_logprobs }
}

/// Tells the tokens of an answer's content from those of its reasoning. A token counts with the text that it becomes, so one
/// whose text the parser holds back waits for the next part.
#[derive(Default)]
pub(super) struct TokenSorter {
    waiting: Vec<TextToken>,
    /// Kind of the last part.
    last: Option<PartKind>,
}

/// Tokens whose place is known.
#[derive(Default)]
pub(super) struct SortedTokens {
    /// Also of calls, and the token that ends the answer.
    pub(super) content: Vec<TextToken>,
    /// Also those that mark the reasoning.
    pub(super) reasoning: Vec<TextToken>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PartKind {
    Content,
    Reasoning,
}

impl TokenSorter {
    /// Adds a token and the parts that it completes. `is_last`: it ends the answer.
    pub(super) fn sort(&mut self, token: TextToken, parts: &[Part], is_last: bool) -> SortedTokens {
        self.waiting.push(token);
        let mut sorted = SortedTokens::default();
        // From the last part backwards: a marker stands before the text that it introduces.
        for (index, part) in parts.iter().enumerate().rev() {
            let (kind, text) = match part {
                Part::Reasoning(text) => (PartKind::Reasoning, Some(text)),
                Part::Content(text) => (PartKind::Content, Some(text)),
                Part::ToolCallStart { .. } | Part::ToolCallArguments { .. } => (PartKind::Content, None),
            };
            let continues = index == 0 && (kind == PartKind::Reasoning || self.last == Some(kind));
            let start = match text {
                Some(text) if !continues => self.start_of(text.len()),
                _ if index == 0 => 0,
                _ => self.waiting.len(),
            };
            let tokens = self.waiting.split_off(start);
            sorted.list(kind).splice(0..0, tokens);
        }
        if !parts.is_empty() {
            // Markers of the reasoning before the content.
            sorted.reasoning.splice(0..0, self.waiting.drain(..));
            self.last = parts.last().map(|part| match part {
                Part::Reasoning(_) => PartKind::Reasoning,
                _ => PartKind::Content,
            });
        } else if is_last {
            let kind = self.last.unwrap_or(PartKind::Content);
            sorted.list(kind).append(&mut self.waiting);
        }
        sorted
    }

    /// The first of the last waiting tokens whose texts are together at least this long.
    fn start_of(&self, num_bytes: usize) -> usize {
        let mut start = self.waiting.len();
        let mut num_missing = num_bytes;
        while start > 0 && num_missing > 0 {
            start -= 1;
            let token = &self.waiting[start];
            num_missing = num_missing.saturating_sub(if token.special { 0 } else { token.text.len() });
        }
        // Tokens that only begin a character have no text.
        while start > 0 && self.waiting[start - 1].text.is_empty() && !self.waiting[start - 1].special {
            start -= 1;
        }
        start
    }
}

impl SortedTokens {
    fn list(&mut self, kind: PartKind) -> &mut Vec<TextToken> {
        match kind {
            PartKind::Content => &mut self.content,
            PartKind::Reasoning => &mut self.reasoning,
        }
    }
}

/// The logprobs of a chat's tokens; `None` if there are none.
pub(super) fn of_chat(names: &TokenNames, tokens: SortedTokens) -> Option<ChatLogprobs> {
    let written = |tokens: Vec<TextToken>| tokens.into_iter().map(|token| of_token(names, token)).collect::<Vec<_>>();
    let (content, reasoning_content) = (written(tokens.content), written(tokens.reasoning));
    let is_empty = content.is_empty() && reasoning_content.is_empty();
    (!is_empty).then_some(ChatLogprobs { content, reasoning_content, refusal: () })
}

/// The tokens of a prompt with their alternatives, as vLLM writes them.
pub(super) fn of_prompt(tokens: Vec<PromptToken>) -> PromptLogprobs {
    let written = |token: PromptToken| {
        let PromptToken { id, text, logprob, top } = token;
        let own = PromptLogprob { logprob: logprob?, rank: None, decoded_token: text };
        let ranked = top.into_iter().zip(1..).map(|(top, rank)| {
            (top.id, PromptLogprob { logprob: top.logprob, rank: Some(rank), decoded_token: top.text })
        });
        Some(std::iter::once((id, own)).chain(ranked).collect())
    };
    tokens.into_iter().map(written).collect()
}

/// The bytes of a token whose text contains only complete characters.
fn whole_bytes(text: &str) -> Option<Vec<u8>> {
    let is_whole = !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER);
    is_whole.then(|| text.as_bytes().to_owned())
}

/// The text of an alternative. The chosen token has its text in context; others keep the leading space that the first
/// token of a text loses.
fn top_text(text_model: &TextModel, top: &TopToken, chosen_id: u32, chosen_text: &str) -> String {
    if top.id == chosen_id {
        return chosen_text.to_owned();
    }
    let spelled = text_model.token_bytes(top.id).and_then(|bytes| String::from_utf8(bytes).ok());
    spelled.unwrap_or_else(|| top.text.clone())
}

/// The key of a token that is a part of a character, as OpenAI writes it: its text would be that of other such tokens.
fn partial_character(text_model: &TextModel, id: u32) -> Option<String> {
    let bytes = text_model.token_bytes(id).filter(|bytes| std::str::from_utf8(bytes).is_err())?;
    Some(bytes.iter().fold("bytes:".to_owned(), |key, byte| format!("{key}\\x{byte:02x}")))
}

/// Writes the logprobs of one text, token by token.
pub(super) struct CompletionLogprobWriter {
    names: TokenNames,
    num_characters: usize,
}

impl CompletionLogprobWriter {
    pub(super) fn new(names: TokenNames) -> Self {
        Self { names, num_characters: 0 }
    }

    /// `pieces`: the text that each token adds, and whether it is special and therefore not shown.
    pub(super) fn prompt(&mut self, tokens: Vec<PromptToken>, pieces: &[(String, bool)]) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        for (token, (text, special)) in tokens.into_iter().zip(pieces) {
            let PromptToken { id, logprob, top, .. } = token;
            self.push(&mut logprobs, Entry { id, text: text.clone(), special: *special, logprob, top });
        }
        logprobs
    }

    pub(super) fn generated(&mut self, token: TextToken) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        let TextToken { id, text, logprob, special, top } = token;
        self.push(&mut logprobs, Entry { id, text, special, logprob: Some(logprob), top });
        logprobs
    }

    fn push(&mut self, logprobs: &mut CompletionLogprobs, entry: Entry) {
        let Entry { id, text, special, logprob, top } = entry;
        let TokenNames { text_model, .. } = &self.names;
        let top_tokens = logprob.map(|logprob| {
            let key = |id, text| self.names.name(id, || partial_character(text_model, id).unwrap_or(text));
            let written = |top: &TopToken| (key(top.id, top_text(text_model, top, id, &text)), top.logprob);
            let mut tokens: Vec<_> = top.iter().map(written).collect();
            // OpenAI always includes the chosen token: last, if it is not among the most probable.
            if !top.iter().any(|top| top.id == id) {
                tokens.push((key(id, text.clone()), logprob));
            }
            TopTokens(tokens)
        });
        let num_characters = if special { 0 } else { text.chars().count() };
        logprobs.tokens.push(self.names.name(id, || text));
        logprobs.token_logprobs.push(logprob);
        logprobs.top_logprobs.push(top_tokens);
        logprobs.text_offset.push(self.num_characters);
        self.num_characters += num_characters;
    }
}

struct Entry {
    id: u32,
    text: String,
    special: bool,
    logprob: Option<f32>,
    top: Vec<TopToken>,
}
