//! `/v1/responses/compact`: a summary in place of a conversation.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::answer::Usage;

/// The most tokens of a summary.
pub(super) const MAX_TOKENS: u32 = 1024;
/// What the model is asked at the end of the conversation.
pub(super) const TASK: &str = "Summarize our conversation so far, so that you could go on with it from your summary alone. \
    Include what I asked for, what has been done and found out, decisions, names and values that still matter, and what is left \
    to do. Answer with the summary only.";
/// Begins the content of compactions that this server wrote.
const MARK: &str = "penstock:";

/// The answer of `/v1/responses/compact`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ResponseCompaction)]
pub(crate) struct Compaction {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// Unix time in seconds.
    pub(crate) created_at: u64,
    /// The user's messages, and last a `compaction` item. They are the `input` of the next request.
    #[schema(value_type = Vec<Object>)]
    pub(crate) output: Vec<Value>,
    pub(crate) usage: Usage,
}

/// The item that stands for a conversation with this summary.
pub(crate) fn item(summary: &str) -> Value {
    let id = format!("cmp_{:032x}", rand::random::<u128>());
    json!({"type": "compaction", "id": id, "encrypted_content": STANDARD.encode(format!("{MARK}{summary}"))})
}

/// The summary in an item's content; `None` if another server wrote it.
pub(super) fn summary_of(content: &str) -> Option<String> {
    let text = String::from_utf8(STANDARD.decode(content).ok()?).ok()?;
    text.strip_prefix(MARK).map(str::to_owned)
}

/// The summary as the model reads it.
pub(super) fn told(summary: &str) -> String {
    format!("<conversation-summary>\n{summary}\n</conversation-summary>")
}
