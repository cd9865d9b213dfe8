//! One choice of a chat: its steps as chunks, and its chunks added up.

use crate::api::openai::{
    ChatChoice, ChatChunkChoice, ChatLogprobs, Delta, FinishReason, FunctionDelta, OutputMessage, ToolCallDelta,
};
use crate::http::logprob;
use crate::text::{AnswerParser, Ending, Finish, Part, Step, TextModel};

const ROLE: &str = "assistant";

/// How ids of tool calls are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallIds {
    /// `call_` and so on.
    OpenAi,
    /// Nine letters and digits: what Mistral's templates insist on when a call comes back in a conversation.
    Mistral,
}

/// What all choices of a request have in common.
#[derive(Clone)]
pub(super) struct ChoiceOptions {
    /// Set if logprobs are to be told.
    pub(super) logprobs_of: Option<TextModel>,
    /// Set if the model may call tools.
    pub(super) call_ids: Option<CallIds>,
}

pub(super) struct ChoiceReader {
    index: usize,
    options: ChoiceOptions,
    /// Until the end.
    parser: Option<AnswerParser>,
    is_first: bool,
    has_content: bool,
    num_calls: usize,
}

impl ChoiceReader {
    pub(super) fn new(index: usize, options: ChoiceOptions, parser: AnswerParser) -> Self {
        Self { index, options, parser: Some(parser), is_first: true, has_content: false, num_calls: 0 }
    }

    pub(super) fn read(&mut self, step: Step) -> Vec<ChatChunkChoice> {
        let (parts, is_cut) = self.parts(&step);
        let mut logprobs = self.options.logprobs_of.as_ref().map(|model| logprob::of_chat(model, step.token));
        let mut deltas: Vec<_> = parts.into_iter().map(|part| self.delta(part)).collect();
        self.complete(&mut deltas, step.finish.is_some(), logprobs.is_some());
        let num_deltas = deltas.len();
        let chunk = |(at, mut delta): (usize, Delta)| {
            delta.role = std::mem::take(&mut self.is_first).then_some(ROLE);
            let finish = step.finish.filter(|_| at + 1 == num_deltas);
            ChatChunkChoice {
                index: self.index,
                delta,
                logprobs: logprobs.take(),
                finish_reason: finish.map(|finish| reason(&finish, self.num_calls > 0 && !is_cut)),
            }
        };
        deltas.into_iter().enumerate().map(chunk).collect()
    }

    /// Also whether the answer ends within a call.
    fn parts(&mut self, step: &Step) -> (Vec<Part>, bool) {
        let mut parts = self.parser.as_mut().map(|parser| parser.push(&step.text, false)).unwrap_or_default();
        if step.finish.is_some()
            && let Some(rest) = self.parser.take().map(AnswerParser::finish)
        {
            parts.extend(rest.parts);
            return (parts, rest.is_cut);
        }
        (parts, false)
    }

    fn delta(&mut self, part: Part) -> Delta {
        match part {
            Part::Content(text) => {
                self.has_content = true;
                Delta { content: Some(text), ..Delta::default() }
            }
            Part::Reasoning(text) => Delta { reasoning_content: Some(text), ..Delta::default() },
            Part::ToolCallStart { index, name } => {
                self.num_calls += 1;
                let function = FunctionDelta { name: Some(name), arguments: String::new() };
                let id = Some(self.options.call_ids.unwrap_or(CallIds::OpenAi).new_id());
                of_call(ToolCallDelta { index, id, kind: Some("function"), function })
            }
            Part::ToolCallArguments { index, fragment } => {
                let function = FunctionDelta { name: None, arguments: fragment };
                of_call(ToolCallDelta { index, id: None, kind: None, function })
            }
        }
    }

    /// Adds what must be said although the step says nothing.
    fn complete(&mut self, deltas: &mut Vec<Delta>, is_last: bool, has_logprobs: bool) {
        let may_call = self.options.call_ids.is_some();
        // COMPAT: a plain chat has a chunk for each token, as in TGI. A client that may get calls would take an empty
        // content for one.
        if deltas.is_empty() && (!may_call || self.is_first || is_last || has_logprobs) {
            deltas.push(Delta { content: (!may_call).then(String::new), ..Delta::default() });
            self.has_content |= !may_call;
        }
        // An answer without calls is a text, even if an empty one.
        if is_last
            && !self.has_content
            && self.num_calls == 0
            && let Some(last) = deltas.last_mut()
        {
            last.content = Some(String::new());
        }
    }
}

fn of_call(call: ToolCallDelta) -> Delta {
    Delta { tool_calls: Some([call]), ..Delta::default() }
}

fn reason(finish: &Finish, has_called: bool) -> FinishReason {
    match finish.ending {
        Ending::EosToken | Ending::StopString if has_called => FinishReason::ToolCalls,
        ending => ending.into(),
    }
}

impl CallIds {
    fn new_id(self) -> String {
        let id = format!("{:032x}", rand::random::<u128>());
        match self {
            Self::OpenAi => format!("call_{}", &id[..24]),
            Self::Mistral => id[..9].to_owned(),
        }
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
