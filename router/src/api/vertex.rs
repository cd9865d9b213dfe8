//! Vertex AI's request: several generations, each a prompt or a chat, and their texts.

use serde::{Deserialize, Serialize};

use super::openai::ChatRequest;
use super::tgi::{GenerateParameters, GenerateRequest};

#[derive(Debug, Deserialize)]
pub(crate) struct VertexRequest {
    pub(crate) instances: Vec<VertexInstance>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "an object with `inputs`, or with `messages`")]
pub(crate) enum VertexInstance {
    Generate(Box<PromptInstance>),
    Chat(Box<ChatRequest>),
}

#[derive(Debug, Deserialize)]
pub(crate) struct PromptInstance {
    inputs: String,
    parameters: Option<GenerateParameters>,
}

impl From<PromptInstance> for GenerateRequest {
    /// COMPAT: here TGI samples always; we do unless told otherwise.
    fn from(given: PromptInstance) -> Self {
        let mut parameters = given.parameters.unwrap_or_else(GenerateParameters::when_absent);
        parameters.do_sample.get_or_insert(true);
        Self { inputs: given.inputs, parameters, stream: false }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct VertexResponse {
    /// In the order of the instances.
    pub(crate) predictions: Vec<String>,
}
