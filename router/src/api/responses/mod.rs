//! OpenAI's Responses API, as Open Responses specifies it: requests, responses, and the events of a stream.

mod answer;
mod event;
mod item;
mod problem;
mod request;
mod tool;

pub(crate) use answer::{
    ContentPart, Echo, IncompleteDetails, ItemStatus, OutputItem, Response, ResponseError, ResponseStatus, Usage,
};
pub(crate) use event::{ResponseEvent, StreamEvent};
pub(crate) use request::{ReadRequest, ResponsesRequest};
pub(crate) use tool::Namespaces;
