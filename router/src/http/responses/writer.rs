//! A response as its events.

use crate::api::conversation::Conversation;
use crate::api::error::ApiError;
use crate::api::responses::{
    ContentPart, Echo, IncompleteDetails, ItemStatus, Namespaces, OutputItem, Response, ResponseEvent, ResponseStatus,
    StreamEvent, Usage,
};
use crate::generation::{FinishReason, GenerationDelta, ToolCallIds};
use crate::http::envelope::unix_seconds;
use crate::http::message_answer::{EventWriter, ReasoningCount};
use crate::http::response_store::ResponseStore;
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
    namespaces: Namespaces,
    sequence_number: usize,
    reasoning: ReasoningCount,
    /// Where the response is stored, and the conversation before it.
    stored: Option<(ResponseStore, Conversation)>,
}

impl ResponseWriter {
    pub(super) fn new(
        model: String,
        echo: Echo,
        call_ids: Option<ToolCallIds>,
        namespaces: Namespaces,
        stored: Option<(ResponseStore, Conversation)>,
    ) -> Self {
        let response = Response {
            id: new_id("resp"),
            object: "response",
            created_at: unix_seconds(),
            model,
            echo,
            ..Response::default()
        };
        let reasoning = ReasoningCount::default();
        Self { response, open: false, call_ids, namespaces, sequence_number: 0, reasoning, stored }
    }

    fn number(&mut self, events: Vec<ResponseEvent>) -> Vec<StreamEvent> {
        let number = |event| {
            let sequence_number = self.sequence_number;
            self.sequence_number += 1;
            StreamEvent { event, sequence_number }
        };
        events.into_iter().map(number).collect()
    }

    fn part(&mut self, part: Part, events: &mut Vec<ResponseEvent>) {
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
                let (namespace, name) = self.namespaces.split(name);
                let item = OutputItem::FunctionCall {
                    id: new_id("fc"),
                    status: ItemStatus::InProgress,
                    call_id: id.clone().unwrap_or_else(|| self.call_ids.unwrap_or_default().new_id("call_")),
                    name,
                    namespace,
                    arguments: String::new(),
                };
                return self.start(item, None, events);
            }
            Part::ToolCallArguments { fragment, .. } => return self.add(fragment.clone(), events),
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
        self.add(text.clone(), events);
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

    /// Adds text to the open item.
    fn add(&mut self, delta: String, events: &mut Vec<ResponseEvent>) {
        let output_index = self.response.output.len().saturating_sub(1);
        let Some(item) = self.response.output.last_mut() else { return };
        item.push_str(&delta);
        let (item_id, content_index) = (item.id().to_owned(), CONTENT_INDEX);
        events.push(match item {
            OutputItem::Message { .. } => {
                ResponseEvent::TextDelta { item_id, output_index, content_index, delta, logprobs: [] }
            }
            OutputItem::Reasoning { .. } => {
                ResponseEvent::ReasoningDelta { item_id, output_index, content_index, delta }
            }
            OutputItem::FunctionCall { .. } => ResponseEvent::ArgumentsDelta { item_id, output_index, delta },
        });
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, status: ItemStatus, events: &mut Vec<ResponseEvent>) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let output_index = self.response.output.len().saturating_sub(1);
        let Some(item) = self.response.output.last_mut() else { return };
        item.set_status(status);
        let (item_id, content_index, text) = (item.id().to_owned(), CONTENT_INDEX, item.text().to_owned());
        let item = item.clone();
        let part = match &item {
            OutputItem::Message { .. } => {
                let item_id = item_id.clone();
                let text = text.clone();
                events.push(ResponseEvent::TextDone { item_id, output_index, content_index, text, logprobs: [] });
                Some(ContentPart::text(item.text().to_owned()))
            }
            OutputItem::Reasoning { .. } => {
                let (item_id, text) = (item_id.clone(), text.clone());
                events.push(ResponseEvent::ReasoningDone { item_id, output_index, content_index, text });
                Some(ContentPart::ReasoningText { text: item.text().to_owned() })
            }
            OutputItem::FunctionCall { name, .. } => {
                let (item_id, name) = (item_id.clone(), name.clone());
                events.push(ResponseEvent::ArgumentsDone { item_id, output_index, name, arguments: text });
                None
            }
        };
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
        if let Some((store, mut conversation)) = self.stored.take()
            && self.response.output.iter().try_for_each(|item| item.add_to(&mut conversation)).is_ok()
        {
            store.insert(self.response.id.clone(), conversation);
        }
        events.push(if is_cut {
            self.response.status = ResponseStatus::Incomplete;
            self.response.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens" });
            ResponseEvent::Incomplete { response: self.response.clone() }
        } else {
            self.response.status = ResponseStatus::Completed;
            ResponseEvent::Completed { response: self.response.clone() }
        });
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
        for part in delta.parts {
            self.part(part, &mut events);
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

fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}
