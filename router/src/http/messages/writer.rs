//! An answer as Anthropic's events.

use crate::api::anthropic::{
    Caller, ContentBlock, ContentDelta, Message, MessageDelta, MessageEvent, MessagesRequest, OutputTokensDetails,
    StopReason, Usage,
};
use crate::api::error::ApiError;
use crate::generation::{FinishReason, GenerationDelta, StartedPrompt, ToolCallIds};
use crate::http::message_answer::{EventWriter, ReasoningCount};
use crate::http::sse::{self, Event};
use crate::sequence::DraftCount;
use crate::text::Part;

/// Reasoning is not signed, and signatures that come back are not verified. Clients expect a text.
const SIGNATURE: &str = "unsigned";

pub(super) struct MessageWriter {
    /// Without its content.
    message: Message,
    max_tokens: u32,
    stop_sequences: Vec<String>,
    shows_thinking: bool,
    /// `None` if the model cannot call tools.
    call_ids: Option<ToolCallIds>,
    num_prompt_tokens: usize,
    num_calls: usize,
    thinking: ReasoningCount,
    num_blocks: usize,
    open_block: Option<BlockKind>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Text,
    Thinking,
    ToolUse,
}

impl MessageWriter {
    /// `model`: as the answer names it.
    pub(super) fn new(request: &MessagesRequest, model: String) -> Self {
        let id = format!("msg_{:032x}", rand::random::<u128>());
        Self {
            message: Message { id, kind: "message", role: "assistant", model, ..Message::default() },
            max_tokens: request.max_tokens,
            stop_sequences: request.stop_sequences.clone().unwrap_or_default(),
            shows_thinking: request.conversation.shows_thinking(),
            call_ids: None,
            num_prompt_tokens: 0,
            num_calls: 0,
            thinking: ReasoningCount::default(),
            num_blocks: 0,
            open_block: None,
        }
    }

    pub(super) fn read_prompt(&mut self, prompts: &[StartedPrompt]) {
        self.num_prompt_tokens = prompts.iter().map(|prompt| prompt.token_ids.len()).sum();
        self.call_ids = prompts.first().and_then(|prompt| prompt.tool_call_ids);
    }

    fn usage(&self, num_cached_tokens: usize, output_tokens: usize, drafts: DraftCount) -> Usage {
        Usage {
            input_tokens: self.num_prompt_tokens.saturating_sub(num_cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: num_cached_tokens,
            output_tokens,
            output_tokens_details: OutputTokensDetails {
                thinking_tokens: self.thinking.num_tokens,
                predictions: drafts.into(),
            },
            service_tier: "standard",
            ..Usage::default()
        }
    }

    fn part(&mut self, part: Part, events: &mut Vec<MessageEvent>) {
        let (kind, delta) = match part {
            Part::Content(text) => (BlockKind::Text, ContentDelta::Text { text }),
            Part::Reasoning(thinking) => (BlockKind::Thinking, ContentDelta::Thinking { thinking }),
            Part::ToolCallStart { name, id, .. } => {
                let id = id.unwrap_or_else(|| self.call_ids.unwrap_or_default().new_id("toolu_"));
                self.num_calls += 1;
                self.close(events);
                let block = ContentBlock::ToolUse { id, name, caller: Caller::Direct, input: String::new() };
                return self.start(BlockKind::ToolUse, block, events);
            }
            Part::ToolCallArguments { fragment, .. } => {
                (BlockKind::ToolUse, ContentDelta::InputJson { partial_json: fragment })
            }
        };
        if self.open_block != Some(kind) {
            self.close(events);
            let block = match kind {
                BlockKind::Thinking => ContentBlock::Thinking { thinking: String::new(), signature: String::new() },
                _ => ContentBlock::Text { text: String::new() },
            };
            self.start(kind, block, events);
        }
        if kind != BlockKind::Thinking || self.shows_thinking {
            events.push(MessageEvent::ContentBlockDelta { index: self.num_blocks - 1, delta });
        }
    }

    fn start(&mut self, kind: BlockKind, content_block: ContentBlock, events: &mut Vec<MessageEvent>) {
        events.push(MessageEvent::ContentBlockStart { index: self.num_blocks, content_block });
        self.open_block = Some(kind);
        self.num_blocks += 1;
    }

    fn close(&mut self, events: &mut Vec<MessageEvent>) {
        let Some(kind) = self.open_block.take() else { return };
        let index = self.num_blocks - 1;
        if kind == BlockKind::Thinking {
            let delta = ContentDelta::Signature { signature: SIGNATURE.to_owned() };
            events.push(MessageEvent::ContentBlockDelta { index, delta });
        }
        events.push(MessageEvent::ContentBlockStop { index });
    }

    fn stop(&self, reason: FinishReason, num_generated_tokens: u32, ends_in_call: bool) -> MessageDelta {
        let (stop_reason, stop_sequence) = match reason {
            FinishReason::StopString(index) => (StopReason::StopSequence, self.stop_sequences.get(index).cloned()),
            FinishReason::Length if num_generated_tokens < self.max_tokens => {
                (StopReason::ModelContextWindowExceeded, None)
            }
            FinishReason::Length => (StopReason::MaxTokens, None),
            FinishReason::StopToken if self.num_calls > 0 && !ends_in_call => (StopReason::ToolUse, None),
            FinishReason::StopToken => (StopReason::EndTurn, None),
        };
        MessageDelta { stop_reason, stop_sequence }
    }
}

impl EventWriter for MessageWriter {
    type Event = MessageEvent;
    type Answer = Message;

    fn open(&mut self, num_cached_tokens: usize) -> Vec<MessageEvent> {
        self.message.usage = self.usage(num_cached_tokens, 0, DraftCount::default());
        vec![MessageEvent::MessageStart { message: self.message.clone() }]
    }

    fn write(&mut self, delta: GenerationDelta) -> Vec<MessageEvent> {
        let mut events = Vec::new();
        self.thinking.add(&delta);
        for part in delta.parts {
            self.part(part, &mut events);
        }
        if let Some(finish) = delta.delta.finish {
            self.close(&mut events);
            let usage = self.usage(finish.num_cached_tokens, finish.num_generated_tokens as usize, finish.drafts);
            let delta = self.stop(finish.reason, finish.num_generated_tokens, delta.ends_in_call);
            events.extend([MessageEvent::MessageDelta { delta, usage }, MessageEvent::MessageStop]);
        }
        events
    }

    fn fail(&mut self, error: &ApiError) -> Vec<Event> {
        vec![sse::typed_event(&error.anthropic_body())]
    }

    fn keep_alive() -> Event {
        sse::typed_event(&MessageEvent::Ping)
    }

    fn add(answer: &mut Message, event: MessageEvent) {
        answer.add(event);
    }
}
