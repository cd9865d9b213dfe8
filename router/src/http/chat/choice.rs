//! One choice of a chat: its steps as chunks, and its chunks added up.

use crate::api::openai::{
    ChatChoice, ChatChunkChoice, ChatLogprobs, Delta, FinishReason, OutputMessage, ToolCallDelta,
};
use crate::http::logprob;
use crate::text::{Step, TextModel};

const ROLE: &str = "assistant";

pub(super) struct ChoiceReader {
    index: usize,
    /// Set if logprobs are to be told.
    text_model: Option<TextModel>,
    is_first: bool,
}

impl ChoiceReader {
    pub(super) fn new(index: usize, text_model: Option<TextModel>) -> Self {
        Self { index, text_model, is_first: true }
    }

    pub(super) fn read(&mut self, step: Step) -> Vec<ChatChunkChoice> {
        let logprobs = self.text_model.as_ref().map(|text_model| logprob::of_chat(text_model, &step.token));
        let role = std::mem::take(&mut self.is_first).then_some(ROLE);
        vec![ChatChunkChoice {
            index: self.index,
            delta: Delta { role, content: Some(step.text), ..Delta::default() },
            logprobs,
            finish_reason: step.finish.map(|finish| finish.ending.into()),
        }]
    }
}

/// Chunks of one choice, added up as clients do.
#[derive(Default)]
pub(super) struct ChoiceSum {
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Vec<ToolCallDelta>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
}

impl ChoiceSum {
    pub(super) fn add(&mut self, chunk: ChatChunkChoice) {
        append(&mut self.content, chunk.delta.content);
        append(&mut self.reasoning_content, chunk.delta.reasoning_content);
        for delta in chunk.delta.tool_calls.into_iter().flatten() {
            match self.tool_calls.get_mut(delta.index) {
                Some(call) => call.function.arguments.push_str(&delta.function.arguments),
                None => self.tool_calls.push(delta),
            }
        }
        if let Some(logprobs) = chunk.logprobs {
            self.logprobs.get_or_insert_default().content.extend(logprobs.content);
        }
        self.finish_reason = chunk.finish_reason.or(self.finish_reason);
    }

    pub(super) fn into_choice(self, index: usize) -> ChatChoice {
        let Self { content, reasoning_content, tool_calls, logprobs, finish_reason } = self;
        let message = OutputMessage { role: ROLE, content, reasoning_content, tool_calls };
        ChatChoice { index, message, logprobs, finish_reason }
    }
}

fn append(sum: &mut Option<String>, more: Option<String>) {
    match (sum, more) {
        (Some(text), Some(more)) => text.push_str(&more),
        (sum @ None, Some(more)) => *sum = Some(more),
        (_, None) => {}
    }
}
