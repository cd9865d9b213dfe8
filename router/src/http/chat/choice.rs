//! One choice of a chat: its deltas as chunks, and its chunks added up.

use crate::api::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatLogprobs, ChatPrompt, Delta, Envelope, FinishReason, FunctionDelta,
    OutputMessage, ToolCallDelta, Usage,
};
use crate::api::prediction::VerifiedDraft;
use crate::generation::{self, GenerationDelta, ToolCallIds};
use crate::http::logprob::{self, TokenNames, TokenSorter};
use crate::http::openai_answer::ChoiceReader;
use crate::http::sse::{self, Event};
use crate::text::Part;

const ROLE: &str = "assistant";

/// What the request asked to see in each choice.
#[derive(Clone, Default)]
pub(super) struct ChatShape {
    /// `None` without logprobs.
    pub(super) logprobs_of: Option<TokenNames>,
    /// `None` if the model cannot call tools.
    pub(super) call_ids: Option<ToolCallIds>,
    /// The beginning of the content: the message that the answer continues.
    pub(super) echo: Option<String>,
    /// Ids of the prompt's tokens, if token ids are to be shown.
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    pub(super) with_prompt_logprobs: bool,
    pub(super) hides_reasoning: bool,
    pub(super) shows_drafts: bool,
}

pub(super) struct ChatReader {
    index: usize,
    shape: ChatShape,
    /// Ids of tokens without a chunk so far.
    token_ids: Vec<u32>,
    /// Drafts of tokens without a chunk so far.
    drafts: Vec<VerifiedDraft>,
    is_first: bool,
    has_content: bool,
    num_calls: usize,
    /// Only with logprobs.
    tokens: TokenSorter,
}

impl ChatReader {
    pub(super) fn new(index: usize, shape: ChatShape) -> Self {
        Self {
            index,
            shape,
            token_ids: Vec::new(),
            drafts: Vec::new(),
            is_first: true,
            has_content: false,
            num_calls: 0,
            tokens: TokenSorter::default(),
        }
    }

    fn delta(&mut self, part: Part) -> Delta {
        match part {
            Part::Content(text) => {
                self.has_content = true;
                Delta { content: Some(text), ..Delta::default() }
            }
            Part::Reasoning(text) => {
                Delta { reasoning: Some(text.clone()), reasoning_content: Some(text), ..Delta::default() }
            }
            Part::ToolCallStart { index, name, id } => {
                self.num_calls += 1;
                let function = FunctionDelta { name: Some(name), arguments: String::new() };
                let id = Some(id.unwrap_or_else(|| self.shape.call_ids.unwrap_or_default().new_id("call_")));
                of_call(ToolCallDelta { index, id, kind: Some("function"), function })
            }
            Part::ToolCallArguments { index, fragment } => {
                let function = FunctionDelta { name: None, arguments: fragment };
                of_call(ToolCallDelta { index, id: None, kind: None, function })
            }
        }
    }

    /// Adds the delta that a chunk needs although the step added no text.
    fn complete(&mut self, deltas: &mut Vec<Delta>, is_last: bool, has_logprobs: bool) {
        let may_call = self.shape.call_ids.is_some();
        // COMPAT: as in TGI, a chat without tools has a chunk for each token. With tools a client would read an empty
        // `content` as the beginning of a text answer.
        if deltas.is_empty() && (!may_call || self.is_first || is_last || has_logprobs) {
            deltas.push(Delta { content: (!may_call).then(String::new), ..Delta::default() });
            self.has_content |= !may_call;
        }
        // An answer without calls is text, even if empty.
        if is_last
            && !self.has_content
            && self.num_calls == 0
            && let Some(last) = deltas.last_mut()
        {
            last.content = Some(String::new());
        }
    }
}

impl ChoiceReader for ChatReader {
    type Chunk = ChatChunkChoice;
    type Sum = ChatSum;

    /// At least one chunk for each token, unless the parser holds its text back.
    fn read(&mut self, delta: GenerationDelta) -> Vec<ChatChunkChoice> {
        let GenerationDelta { delta: text_delta, mut parts, ends_in_call, prompt_tokens, .. } = delta;
        let finish = text_delta.finish;
        self.token_ids.push(text_delta.token.id);
        self.drafts.extend(text_delta.draft.filter(|_| self.shape.shows_drafts).map(VerifiedDraft::from));
        let mut logprobs = self.shape.logprobs_of.as_ref().and_then(|names| {
            let mut tokens = self.tokens.sort(text_delta.token, &parts, finish.is_some());
            if self.shape.hides_reasoning {
                tokens.reasoning.clear();
            }
            logprob::of_chat(names, tokens)
        });
        let mut prompt = self.is_first.then(|| ChatPrompt {
            token_ids: self.shape.prompt_token_ids.clone(),
            logprobs: self.shape.with_prompt_logprobs.then(|| logprob::of_prompt(prompt_tokens)),
        });
        if self.shape.hides_reasoning {
            parts.retain(|part| !matches!(part, Part::Reasoning(_)));
        }
        let echo = self.shape.echo.take().map(Part::Content);
        let mut deltas: Vec<_> = echo.into_iter().chain(parts).map(|part| self.delta(part)).collect();
        self.complete(&mut deltas, finish.is_some(), logprobs.is_some());
        let num_deltas = deltas.len();
        let chunk = |(at, mut delta): (usize, Delta)| {
            delta.role = std::mem::take(&mut self.is_first).then_some(ROLE);
            let finish = finish.filter(|_| at + 1 == num_deltas);
            ChatChunkChoice {
                index: self.index,
                delta,
                logprobs: logprobs.take(),
                token_ids: self.shape.prompt_token_ids.is_some().then(|| std::mem::take(&mut self.token_ids)),
                drafts: std::mem::take(&mut self.drafts),
                prompt: prompt.take(),
                finish_reason: finish.map(|finish| reason(finish.reason, self.num_calls > 0 && !ends_in_call)),
            }
        };
        deltas.into_iter().enumerate().map(chunk).collect()
    }

    fn add(sum: &mut ChatSum, chunk: ChatChunkChoice) {
        append(&mut sum.content, chunk.delta.content);
        append(&mut sum.reasoning_content, chunk.delta.reasoning_content);
        if let Some(token_ids) = chunk.token_ids {
            sum.token_ids.get_or_insert_default().extend(token_ids);
        }
        sum.drafts.extend(chunk.drafts);
        sum.prompt = chunk.prompt.or(sum.prompt.take());
        for delta in chunk.delta.tool_calls.into_iter().flatten() {
            match sum.tool_calls.get_mut(delta.index) {
                Some(call) => call.function.arguments.push_str(&delta.function.arguments),
                None => sum.tool_calls.push(delta),
            }
        }
        if let Some(logprobs) = chunk.logprobs {
            let sum = sum.logprobs.get_or_insert_default();
            sum.content.extend(logprobs.content);
            sum.reasoning_content.extend(logprobs.reasoning_content);
        }
        sum.finish_reason = chunk.finish_reason.or(sum.finish_reason);
    }

    fn event(envelope: &Envelope, mut choices: Vec<ChatChunkChoice>, usage: Option<Option<Usage>>) -> Event {
        let prompt = choices.first_mut().and_then(|choice| choice.prompt.take()).unwrap_or_default();
        sse::event(&ChatChunk { envelope, choices, usage: usage.flatten(), prompt_token_ids: prompt.token_ids })
    }
}

fn of_call(call: ToolCallDelta) -> Delta {
    Delta { tool_calls: Some([call]), ..Delta::default() }
}

fn reason(reason: generation::FinishReason, has_called: bool) -> FinishReason {
    match reason.into() {
        FinishReason::Stop if has_called => FinishReason::ToolCalls,
        reason => reason,
    }
}

/// The chunks of one choice, added up as clients do.
#[derive(Default)]
pub(super) struct ChatSum {
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Vec<ToolCallDelta>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
    token_ids: Option<Vec<u32>>,
    drafts: Vec<VerifiedDraft>,
    prompt: Option<ChatPrompt>,
}

impl ChatSum {
    pub(super) fn take_prompt(&mut self) -> ChatPrompt {
        self.prompt.take().unwrap_or_default()
    }

    pub(super) fn into_choice(self, index: usize) -> ChatChoice {
        let Self { content, reasoning_content, tool_calls, logprobs, finish_reason, token_ids, drafts, prompt: _ } =
            self;
        let reasoning = reasoning_content.clone();
        let message = OutputMessage {
            role: ROLE,
            content,
            refusal: None,
            annotations: [],
            reasoning_content,
            reasoning,
            tool_calls,
        };
        ChatChoice { index, message, logprobs, finish_reason, token_ids, drafts }
    }
}

fn append(sum: &mut Option<String>, more: Option<String>) {
    match (sum, more) {
        (Some(text), Some(more)) => text.push_str(&more),
        (sum @ None, Some(more)) => *sum = Some(more),
        (_, None) => {}
    }
}
