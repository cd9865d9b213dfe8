//! A model's files on this machine, ready to be served: its folder, with the changes that flags make, and its tokenizer.

use std::path::Path;
use std::time::Instant;

use penstock_router::text::{LoadError, TextModel};

use crate::flag::args::Args;
use crate::model::adapter::AdapterFlags;
use crate::model::folder::{FolderError, ModelFolder};
use crate::model::prefetch;
use crate::model::prepare::{self, PrepareError, Prepared};
use crate::phase::Phases;

/// A model's files on this machine.
pub(crate) struct LocalModel {
    pub(crate) prepared: Prepared,
    pub(crate) folder: ModelFolder,
    pub(crate) text: TextModel,
}

/// Why a model's files cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LocalModelError {
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Tokenizer(LoadError),
    #[error("the thread that loads the tokenizer failed: {0}")]
    TokenizerThread(#[from] tokio::task::JoinError),
}

impl LocalModel {
    /// Downloads or converts the model if necessary, and loads its tokenizer.
    pub(crate) async fn prepare(
        args: &Args,
        adapters: &AdapterFlags,
        python: &Path,
        phases: &mut Phases,
    ) -> Result<Self, LocalModelError> {
        let start = Instant::now();
        let prepared = prepare::prepare(python, args, adapters).await?;
        phases.add_since("prepare model", start);
        tracing::info!("model {} is in {}", prepared.model_id, prepared.folder.display());
        prefetch::begin([&prepared.weights[..], &prepared.drafter_weights].concat());
        let folder = ModelFolder::new(&prepared.folder, args)?;
        let start = Instant::now();
        let (path, chat_template, num_threads) =
            (folder.path.clone(), folder.chat_template.clone(), args.validation_workers);
        let renderer = Path::new("/proc/self/exe");
        let load = move || TextModel::load(&path, num_threads, chat_template, renderer);
        let text = tokio::task::spawn_blocking(load).await?.map_err(LocalModelError::Tokenizer)?;
        phases.add_since("load tokenizer", start);
        Ok(Self { prepared, folder, text })
    }

    /// The same with a tokenizer that knows how many embeddings the model has.
    pub(crate) fn with_embeddings(self, vocab_size: u32) -> Self {
        Self { text: self.text.with_embeddings(vocab_size), ..self }
    }
}
