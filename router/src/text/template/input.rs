//! What a template renders.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A conversation to render. Messages and tools have the shape in which OpenAI's clients send them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ChatInputs {
    pub(crate) messages: Vec<Value>,
    /// `None` where the request offers no tools, which some templates distinguish from an empty list.
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) documents: Option<Value>,
    /// Whether the prompt ends with the start of an assistant's turn. `None`: yes, unless the last message is continued.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Whether the prompt ends inside the last message, which the model continues. COMPAT: where this and
    /// `add_generation_prompt` are `None`, a last message of the assistant is continued, as in TGI.
    pub(crate) continue_final_message: Option<bool>,
    /// Further variables of the template (`chat_template_kwargs`). They override special tokens, but no other variable.
    pub(crate) kwargs: Map<String, Value>,
    /// Stands for an image in a template that supports only strings. `None`: the model reads no images.
    pub(crate) image_text: Option<String>,
}
