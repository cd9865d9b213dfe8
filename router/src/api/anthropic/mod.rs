//! Anthropic's Messages API: requests, answers, and the events of a stream.

mod answer;
mod block;
mod conversation;
mod request;
mod tool;

pub(crate) use answer::{ContentBlock, ContentDelta, Message, MessageDelta, MessageEvent, StopReason, TokenCount, Usage};
pub(crate) use request::{CountTokensRequest, MessagesRequest};
