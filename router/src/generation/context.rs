//! What the requests of a server are served with, from admission to submission.

use std::hash::RandomState;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::adapter::Adapters;
use super::adapter_download::AdapterDownload;
use super::admission::Admission;
use super::deadline::{Deadlines, reached};
use super::error::GenerationError;
use super::validation::ValidationError;
use crate::config::Config;
use crate::fetch::Fetcher;
use crate::generator::Generator;
use crate::sequence::ImageInput;
use crate::text::TextModel;

pub(super) struct Context {
    pub(super) config: Arc<Config>,
    pub(super) generator: Arc<dyn Generator>,
    pub(super) text: TextModel,
    pub(super) admission: Admission,
    pub(super) adapters: Adapters,
    pub(super) adapter_downloads: mpsc::Sender<AdapterDownload>,
    /// `None`: images come with their requests only.
    pub(super) fetcher: Option<Fetcher>,
    /// Cancelled when a shutdown begins.
    pub(super) draining: CancellationToken,
    /// Cancelled when the grace period of a shutdown is over.
    pub(super) abandoned: CancellationToken,
    /// Hashes salts with a secret of this process, so that no client can find two salts with one hash.
    pub(super) salts: RandomState,
}

impl Context {
    /// How images stand in prompts; `None`: the model reads none.
    pub(super) fn image_input(&self) -> Option<&ImageInput> {
        self.config.image_input.as_ref()
    }

    /// Refuses a text with a token that the model has no embedding for.
    pub(super) fn check_tokens_of_text(&self, token_ids: &[u32]) -> Result<(), ValidationError> {
        let vocabulary = self.text.num_embeddings();
        match token_ids.iter().find(|&&id| id >= vocabulary) {
            Some(&given) => {
                let token = self.text.spellings(&[given]).concat();
                Err(ValidationError::TokenOfText { token, vocabulary, given })
            }
            None => Ok(()),
        }
    }

    /// Awaits what precedes the queue, within the request's deadlines and until a shutdown's grace period is over.
    pub(super) async fn in_time<T>(
        &self,
        deadlines: Deadlines,
        future: impl Future<Output = Result<T, GenerationError>>,
    ) -> Result<T, GenerationError> {
        tokio::select! {
            biased;
            result = future => result,
            () = self.abandoned.cancelled() => Err(GenerationError::ShuttingDown),
            () = reached(deadlines.answer) => Err(GenerationError::Timeout),
            () = reached(deadlines.first_step) => Err(self.admission.queue_timeout()),
        }
    }
}
