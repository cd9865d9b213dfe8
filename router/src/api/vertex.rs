//! Vertex AI's request: several instances, each a prompt or a chat, and the answer with their texts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::openai::ChatRequest;
use super::tgi::{GenerateParameters, GenerateRequest};

/// Several instances, each a prompt or a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"instances": [{"inputs": "What is deep learning?", "parameters": {"max_new_tokens": 20}}]}))]
pub(crate) struct VertexRequest {
    #[schema(min_items = 1)]
    pub(crate) instances: Vec<VertexInstance>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "an object with `inputs`, or with `messages`")]
pub(crate) enum VertexInstance {
    Generate(Box<PromptInstance>),
    Chat(Box<ChatRequest>),
}

#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct PromptInstance {
    #[schema(min_length = 1)]
    inputs: String,
    /// On this route a missing `do_sample` means sampling.
    parameters: Option<GenerateParameters>,
}

impl From<PromptInstance> for GenerateRequest {
    /// COMPAT: TGI always samples on this route; we do unless `do_sample` is false.
    fn from(given: PromptInstance) -> Self {
        let mut parameters = given.parameters.unwrap_or_else(GenerateParameters::when_absent);
        parameters.do_sample.get_or_insert(true);
        Self { inputs: given.inputs, parameters, stream: false }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct VertexResponse {
    /// In the order of the instances.
    pub(crate) predictions: Vec<String>,
}
