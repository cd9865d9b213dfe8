//! A response as its events.

use serde_json::Value;

use crate::api::conversation::Conversation;
use crate::api::error::ApiError;
use crate::api::openai::TokenLogprob;
use crate::api::responses::{
    CalledTool, CalledTools, ContentPart, Echo, IncompleteDetails, InputReader, ItemStatus, OutputItem, Response,
    ResponseEvent, ResponseStatus, StreamEvent, Usage,
};
use crate::generation::{FinishReason, GenerationDelta, ToolCallIds};
use crate::http::envelope::unix_seconds;
use crate::http::key_hash::KeyHash;
use crate::http::logprob::{self, TokenNames, TokenSorter};
use crate::http::message_answer::{EventWriter, ReasoningCount};
use crate::http::response_store::{ResponseStore, StoredResponse};
use crate::http::sse::{self, Event};
use crate::telemetry::RequestSummary;
use crate::text::Part;

/// Every item has one part, at this position.
const CONTENT_INDEX: usize = 0;

pub(super) struct ResponseWriter {
    /// As it is so far. Its last item is being written if `open`.
    response: Response,
    open: bool,
    /// `None` if the model cannot call tools.
    call_ids: Option<ToolCallIds>,
    called: CalledTools,
    /// Reads the input of the custom tool's call that is open.
    input: InputReader,
    sequence_number: usize,
    reasoning: ReasoningCount,
    logprobs: Option<LogprobWriter>,
    place: Option<ResponseSlot>,
}

/// The place of a response in the store, and what it answers.
pub(super) struct ResponseSlot {
    pub(super) store: ResponseStore,
    pub(super) owner: KeyHash,
    /// With the items of the responses that it continues.
    pub(super) input: Vec<Value>,
    pub(super) conversation: Conversation,
}

/// Writes the logprobs of messages.
pub(super) struct LogprobWriter {
    names: TokenNames,
    tokens: TokenSorter,
}

impl LogprobWriter {
    pub(super) fn new(names: TokenNames) -> Self {
        Self { names, tokens: TokenSorter::default() }
    }

    /// The tokens of content that a delta completes.
    fn read(&mut self, delta: &GenerationDelta) -> Vec<TokenLogprob> {
        let is_last = delta.delta.finish.is_some();
        let tokens = self.tokens.sort(delta.delta.token.clone(), &delta.parts, is_last).content;
        // The token that ends the answer is not part of its text.
        let of_text = tokens.into_iter().filter(|token| !token.special);
        of_text.map(|token| logprob::of_token(&self.names, token)).collect()
    }
}

impl ResponseWriter {
    pub(super) fn new(
        model: String,
        echo: Echo,
        call_ids: Option<ToolCallIds>,
        called: CalledTools,
        logprobs: Option<LogprobWriter>,
        place: Option<ResponseSlot>,
    ) -> Self {
        let response = Response {
            id: new_id("resp"),
            object: "response",
            created_at: unix_seconds(),
            model,
            echo,
            ..Response::default()
        };
        Self {
            response,
            open: false,
            call_ids,
            called,
            input: InputReader::default(),
            sequence_number: 0,
            reasoning: ReasoningCount::default(),
            logprobs,
            place,
        }
    }

    fn number(&mut self, events: Vec<ResponseEvent>) -> Vec<StreamEvent> {
        let number = |event| {
            let sequence_number = self.sequence_number;
            self.sequence_number += 1;
            StreamEvent { event, sequence_number }
        };
        events.into_iter().map(number).collect()
    }

    /// `logprobs`: of the tokens that the part's delta completes.
    fn part(&mut self, part: Part, logprobs: &mut Vec<TokenLogprob>, events: &mut Vec<ResponseEvent>) {
        let item = match &part {
            Part::Content(_) => OutputItem::Message {
                id: new_id("msg"),
                status: ItemStatus::InProgress,
                role: "assistant",
                content: Vec::new(),
            },
            Part::Reasoning(_) => OutputItem::Reasoning {
                id: new_id("rs"),
                status: ItemStatus::InProgress,
                summary: [],
                content: Vec::new(),
            },
            Part::ToolCallStart { name, id, .. } => {
                self.close(ItemStatus::Completed, events);
                let CalledTool { namespace, name, is_custom } = self.called.called(name);
                let call_id = id.clone().unwrap_or_else(|| self.call_ids.unwrap_or_default().new_id("call_"));
                let status = ItemStatus::InProgress;
                let item = if is_custom {
                    OutputItem::CustomToolCall {
                        id: new_id("ctc"),
                        status,
                        call_id,
                        name,
                        namespace,
                        input: String::new(),
                    }
                } else {
                    let arguments = String::new();
                    OutputItem::FunctionCall { id: new_id("fc"), status, call_id, name, namespace, arguments }
                };
                self.input = InputReader::default();
                return self.start(item, None, events);
            }
            Part::ToolCallArguments { fragment, .. } => {
                let is_custom = matches!(self.response.output.last(), Some(OutputItem::CustomToolCall { .. }));
                let delta = if is_custom { self.input.push(fragment) } else { fragment.clone() };
                if !delta.is_empty() {
                    self.add(delta, Vec::new(), events);
                }
                return;
            }
        };
        let continues = self.open
            && self
                .response
                .output
                .last()
                .is_some_and(|last| std::mem::discriminant(last) == std::mem::discriminant(&item));
        let (Part::Content(text) | Part::Reasoning(text)) = &part else { return };
        if !continues {
            self.close(ItemStatus::Completed, events);
            let empty = match part {
                Part::Reasoning(_) => ContentPart::ReasoningText { text: String::new() },
                _ => ContentPart::text(String::new()),
            };
            self.start(item, Some(empty), events);
        }
        let logprobs = if matches!(part, Part::Content(_)) { std::mem::take(logprobs) } else { Vec::new() };
        self.add(text.clone(), logprobs, events);
    }

    /// Starts an item, and its part if it has one.
    fn start(&mut self, mut item: OutputItem, part: Option<ContentPart>, events: &mut Vec<ResponseEvent>) {
        let output_index = self.response.output.len();
        events.push(ResponseEvent::ItemAdded { output_index, item: item.clone() });
        if let Some(part) = part {
            let item_id = item.id().to_owned();
            events.push(ResponseEvent::PartAdded {
                item_id,
                output_index,
                content_index: CONTENT_INDEX,
                part: part.clone(),
            });
            item.push_part(part);
        }
        self.response.output.push(item);
        self.open = true;
    }

    /// Adds text to the open item. `logprobs`: of its tokens.
    fn add(&mut self, delta: String, logprobs: Vec<TokenLogprob>, events: &mut Vec<ResponseEvent>) {
        let output_index = self.response.output.len().saturating_sub(1);
        let Some(item) = self.response.output.last_mut() else { return };
        item.push_str(&delta);
        item.push_logprobs(&logprobs);
        let (item_id, content_index) = (item.id().to_owned(), CONTENT_INDEX);
        events.push(match item {
            OutputItem::Message { .. } => {
                ResponseEvent::TextDelta { item_id, output_index, content_index, delta, logprobs }
            }
            OutputItem::Reasoning { .. } => {
                ResponseEvent::ReasoningDelta { item_id, output_index, content_index, delta }
            }
            OutputItem::FunctionCall { .. } => ResponseEvent::ArgumentsDelta { item_id, output_index, delta },
            OutputItem::CustomToolCall { .. } => ResponseEvent::CustomInputDelta { item_id, output_index, delta },
        });
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, status: ItemStatus, events: &mut Vec<ResponseEvent>) {
        if !self.open {
            return;
        }
        if matches!(self.response.output.last(), Some(OutputItem::CustomToolCall { .. })) {
            let rest = self.input.finish();
            if !rest.is_empty() {
                self.add(rest, Vec::new(), events);
            }
        }
        self.open = false;
        let output_index = self.response.output.len().saturating_sub(1);
        let Some(item) = self.response.output.last_mut() else { return };
        item.set_status(status);
        let (item_id, content_index, text) = (item.id().to_owned(), CONTENT_INDEX, item.text().to_owned());
        let item = item.clone();
        let part = item.part().cloned();
        events.push(match &item {
            OutputItem::Message { .. } => {
                let logprobs = match &part {
                    Some(ContentPart::OutputText { logprobs, .. }) => logprobs.clone(),
                    _ => Vec::new(),
                };
                ResponseEvent::TextDone { item_id: item_id.clone(), output_index, content_index, text, logprobs }
            }
            OutputItem::Reasoning { .. } => {
                ResponseEvent::ReasoningDone { item_id: item_id.clone(), output_index, content_index, text }
            }
            OutputItem::FunctionCall { name, .. } => {
                let name = name.clone();
                ResponseEvent::ArgumentsDone { item_id: item_id.clone(), output_index, name, arguments: text }
            }
            OutputItem::CustomToolCall { .. } => {
                ResponseEvent::CustomInputDone { item_id: item_id.clone(), output_index, input: text }
            }
        });
        if let Some(part) = part {
            events.push(ResponseEvent::PartDone { item_id, output_index, content_index, part });
        }
        events.push(ResponseEvent::ItemDone { output_index, item });
    }

    /// Ends the response.
    fn finish(&mut self, reason: FinishReason, ends_in_call: bool, summary: &RequestSummary) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        let is_cut = reason == FinishReason::Length;
        self.close(if is_cut || ends_in_call { ItemStatus::Incomplete } else { ItemStatus::Completed }, &mut events);
        self.response.usage = Some(Usage::new(summary, self.reasoning.num_tokens));
        self.response.completed_at = Some(unix_seconds());
        if is_cut {
            self.response.status = ResponseStatus::Incomplete;
            self.response.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens" });
        } else {
            self.response.status = ResponseStatus::Completed;
        }
        let response = self.response.clone();
        if let Some(ResponseSlot { store, owner, input, mut conversation }) = self.place.take()
            && response.output.iter().try_for_each(|item| item.add_to(&mut conversation)).is_ok()
        {
            store.insert(owner, StoredResponse { response: response.clone(), input, conversation });
        }
        let ended = if is_cut { ResponseEvent::Incomplete { response } } else { ResponseEvent::Completed { response } };
        events.push(ended);
        events
    }
}

impl EventWriter for ResponseWriter {
    type Event = StreamEvent;
    type Answer = Response;

    fn open(&mut self, _num_cached_tokens: usize) -> Vec<StreamEvent> {
        let response = self.response.clone();
        self.number(vec![ResponseEvent::Created { response: response.clone() }, ResponseEvent::InProgress { response }])
    }

    fn write(&mut self, delta: GenerationDelta) -> Vec<StreamEvent> {
        let mut events = Vec::new();
        self.reasoning.add(&delta);
        let mut logprobs = self.logprobs.as_mut().map(|writer| writer.read(&delta)).unwrap_or_default();
        for part in delta.parts {
            self.part(part, &mut logprobs, &mut events);
        }
        if let (Some(finish), Some(summary)) = (delta.delta.finish, delta.summary) {
            events.extend(self.finish(finish.reason, delta.ends_in_call, &summary));
        }
        self.number(events)
    }

    fn fail(&mut self, error: &ApiError) -> Vec<Event> {
        let mut events = if self.sequence_number == 0 { self.open(0) } else { Vec::new() };
        self.response.status = ResponseStatus::Failed;
        self.response.error = Some(error.response_error());
        let failed = ResponseEvent::Failed { response: self.response.clone() };
        events.extend(self.number(vec![failed]));
        events.iter().map(sse::typed_event).collect()
    }

    fn keep_alive() -> Event {
        sse::comment()
    }

    fn add(answer: &mut Response, event: StreamEvent) {
        if let ResponseEvent::Completed { response } | ResponseEvent::Incomplete { response } = event.event {
            *answer = response;
        }
    }
}

/// A new id with this prefix.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}
