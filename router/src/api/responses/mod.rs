//! OpenAI's Responses API, as Open Responses specifies it: requests, responses, and the events of a stream.

mod answer;
mod compaction;
mod custom;
mod event;
mod item;
mod lark;
mod problem;
mod request;
mod stored;
mod tool;

pub(crate) use answer::{
    ContentPart, Echo, IncompleteDetails, ItemStatus, OutputItem, Response, ResponseError, ResponseStatus, Usage,
};
pub(crate) use compaction::{Compaction, item as compaction_item};
pub(crate) use custom::InputReader;
pub(crate) use event::{ResponseEvent, StreamEvent};
pub(crate) use request::{ReadRequest, ResponsesRequest};
pub(crate) use stored::{DeletedResponse, InputTokens, ItemList, ItemPage, Retrieval};
pub(crate) use tool::{CalledTool, CalledTools};
