//! `/v1/rerank`, as Cohere and Jina have it.

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::field::{integer, is_given, or_default};
use super::openai::EmbeddingUsage;
use super::tei::pairs;
use crate::generation::{PoolingRequest, ValidationError};
use crate::limits::RequestLimits;
use crate::sequence::Task;
use crate::telemetry::RequestSummary;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"query": "What is deep learning?", "documents": ["A branch of machine learning.", "A fish."]}))]
pub(crate) struct DocumentsRequest {
    query: String,
    /// The documents to score. `/info` reports the maximum number.
    documents: Vec<DocumentField>,
    /// Any name is accepted unless the server runs with `--check-model-name`.
    pub(crate) model: Option<String>,
    /// Number of documents in the answer, the most relevant ones. By default all.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<usize>)]
    pub(crate) top_n: Option<usize>,
    /// Repeat the documents in the answer.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) return_documents: bool,
    /// Not supported unless empty: send shorter documents, or `truncate` to `/rerank`.
    max_tokens_per_doc: Option<Value>,
    /// Not supported unless empty: send shorter documents, or `truncate` to `/rerank`.
    max_chunks_per_doc: Option<Value>,
    /// Not supported unless empty: send the text to rank.
    rank_fields: Option<Value>,
    /// Not supported unless empty: send shorter documents, or `truncate` to `/rerank`.
    truncate_prompt_tokens: Option<Value>,
    /// Accepted without effect.
    #[serde(rename = "priority")]
    #[schema(value_type = Option<i32>)]
    _priority: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "user")]
    #[schema(value_type = Option<String>)]
    _user: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string, or an object with the string `text`")]
enum DocumentField {
    Text(String),
    Object { text: String },
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RankedDocuments {
    id: String,
    model: String,
    /// The most relevant document first.
    results: Vec<RankedDocument>,
    usage: EmbeddingUsage,
}

#[derive(Debug, Serialize, ToSchema)]
struct RankedDocument {
    /// Position in the request's `documents`.
    index: usize,
    relevance_score: f32,
    /// Only with `return_documents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Document {
    text: String,
}

impl DocumentsRequest {
    /// The documents, and the request.
    pub(crate) fn into_pooling(self, limits: &RequestLimits) -> Result<(Vec<String>, PoolingRequest), ValidationError> {
        const SHORTER: &str = "send shorter documents, or `truncate` to /rerank";
        let refused = [
            ("max_tokens_per_doc", &self.max_tokens_per_doc, SHORTER),
            ("max_chunks_per_doc", &self.max_chunks_per_doc, SHORTER),
            ("rank_fields", &self.rank_fields, "send the text to rank"),
            ("truncate_prompt_tokens", &self.truncate_prompt_tokens, SHORTER),
        ];
        if let Some((field, _, why)) = refused.into_iter().find(|(_, value, _)| is_given(value.as_ref())) {
            return Err(ValidationError::Unsupported { field, why });
        }
        let text = |document| match document {
            DocumentField::Text(text) | DocumentField::Object { text } => text,
        };
        let texts: Vec<_> = self.documents.into_iter().map(text).collect();
        let inputs = pairs(&self.query, &texts, limits)?;
        Ok((texts, PoolingRequest { task: Task::Rerank, inputs, truncation: None }))
    }
}

impl RankedDocuments {
    /// `scores`: of the documents, in their order. `texts`: None unless they are repeated.
    pub(crate) fn new(
        model: String,
        scores: Vec<f32>,
        texts: Option<Vec<String>>,
        top_n: Option<usize>,
        summary: &RequestSummary,
    ) -> Self {
        let mut texts = texts.map(Vec::into_iter);
        let ranked = |(index, relevance_score)| {
            let document = texts.as_mut().and_then(Iterator::next).map(|text| Document { text });
            RankedDocument { index, relevance_score, document }
        };
        let mut results: Vec<_> = scores.into_iter().enumerate().map(ranked).collect();
        results.sort_by(|one, other| other.relevance_score.total_cmp(&one.relevance_score));
        results.truncate(top_n.unwrap_or(usize::MAX));
        let id = format!("rerank-{:032x}", rand::random::<u128>());
        Self { id, model, results, usage: summary.into() }
    }
}
