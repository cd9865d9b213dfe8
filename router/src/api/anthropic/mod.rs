//! Anthropic's Messages API: requests, answers, and the events of a stream.

mod answer;
mod block;
mod conversation;
mod known_tool;
mod part;
mod request;
mod tool;

pub(crate) use answer::{
    Caller, ContentBlock, ContentDelta, Message, MessageDelta, MessageEvent, OutputTokensDetails, StopReason,
    TokenCount, Usage,
};
pub(crate) use request::{CountTokensRequest, MessagesRequest};
