//! What a traced request's spans are made of, besides its record: its parameters and its sequences' timelines.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::sequence::{Task, Timeline};

/// Parameters and timelines of one traced request.
#[derive(Debug, Default)]
pub(crate) struct RequestTrace {
    parameters: OnceLock<RequestParameters>,
    sequences: Mutex<Vec<TracedSequence>>,
}

/// What a request asks for. None of it is the client's text.
#[derive(Clone, Debug)]
pub(crate) struct RequestParameters {
    pub(crate) operation: Operation,
    pub(crate) streams: bool,
    /// Sequences per prompt.
    pub(crate) num_choices: usize,
    pub(crate) max_new_tokens: Option<u32>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<i32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) seed: Option<u64>,
    /// COMPAT: all parameters, in the form of TGI's field `parameters`.
    pub(crate) tgi: String,
}

/// The kind of a request. The names are those of OpenTelemetry's conventions, which lack one for rerankers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Chat,
    TextCompletion,
    Embeddings,
    Rerank,
}

/// A sequence of a traced request.
#[derive(Clone, Debug)]
pub(super) struct TracedSequence {
    pub(super) submitted: Instant,
    pub(super) num_prompt_tokens: usize,
    /// `None`: nothing is sampled.
    pub(super) seed: Option<u64>,
    pub(super) timeline: Timeline,
}

impl RequestTrace {
    /// Sets the parameters. A request of several parts has those of the first.
    pub(crate) fn set_parameters(&self, parameters: RequestParameters) {
        let _ = self.parameters.set(parameters);
    }

    /// A sequence is about to be submitted. Returns the timeline that it is to write.
    pub(crate) fn add_sequence(&self, num_prompt_tokens: usize, seed: Option<u64>) -> Timeline {
        let timeline = Timeline::default();
        let submitted = Instant::now();
        self.locked().push(TracedSequence { submitted, num_prompt_tokens, seed, timeline: timeline.clone() });
        timeline
    }

    pub(super) fn parameters(&self) -> Option<&RequestParameters> {
        self.parameters.get()
    }

    /// In the order of their submission.
    pub(super) fn sequences(&self) -> Vec<TracedSequence> {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, Vec<TracedSequence>> {
        // A panic cannot leave a pushed element half-written.
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Operation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::TextCompletion => "text_completion",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
        }
    }
}

impl From<Task> for Operation {
    fn from(task: Task) -> Self {
        match task {
            Task::Generate => Self::TextCompletion,
            Task::Embed => Self::Embeddings,
            Task::Rerank => Self::Rerank,
        }
    }
}
