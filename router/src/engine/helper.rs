//! What an engine does alongside its steps, on its worker group or on the server that it is on.

use std::fmt;

use futures::future::BoxFuture;

use crate::remote::{Client, RemoteError};
use crate::sequence::{Adapter, AdapterError, EncodedImage, Grammar, Image, ImageError};
use crate::worker::{AdapterLoader, GrammarCompiler, Group, ImageEncoder, WorkerError};

/// The inner error says what is wrong with what was given.
pub(super) type Answer<T, E = String> = Result<Result<T, E>, HelperError>;

/// Prepares what sequences have besides tokens, so that these delay no step.
pub(super) trait Helper: fmt::Debug + Send + Sync {
    fn compile(&self, grammar: Grammar) -> BoxFuture<'static, Answer<()>>;
    /// Frees the adapters `unloaded_ids` before.
    fn load(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Answer<(), AdapterError>>;
    /// What the workers make of each image.
    fn encode(&self, images: Vec<Image>) -> BoxFuture<'static, Answer<Vec<EncodedImage>, ImageError>>;
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct HelperError {
    /// The group, or the connection, was lost: another one may answer.
    pub(super) is_loss: bool,
    pub(super) reason: String,
}

/// The calls to a worker group outside its steps.
#[derive(Clone, Debug)]
pub(super) struct GroupHelper {
    compiler: GrammarCompiler,
    loader: AdapterLoader,
    encoder: ImageEncoder,
}

impl GroupHelper {
    pub(super) fn new(group: &Group) -> Self {
        Self { compiler: group.grammars(), loader: group.adapters(), encoder: group.images() }
    }
}

impl Helper for GroupHelper {
    fn compile(&self, grammar: Grammar) -> BoxFuture<'static, Answer<()>> {
        let compiler = self.compiler.clone();
        Box::pin(async move { Ok(compiler.compile(&grammar).await?) })
    }

    fn load(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Answer<(), AdapterError>> {
        let loader = self.loader.clone();
        Box::pin(async move { Ok(loader.load(&adapter, &unloaded_ids).await?) })
    }

    fn encode(&self, images: Vec<Image>) -> BoxFuture<'static, Answer<Vec<EncodedImage>, ImageError>> {
        let encoder = self.encoder.clone();
        Box::pin(async move { Ok(encoder.encode(&images).await?) })
    }
}

impl Helper for Client {
    fn compile(&self, grammar: Grammar) -> BoxFuture<'static, Answer<()>> {
        let client = self.clone();
        Box::pin(async move { Ok(client.compile(&grammar).await?) })
    }

    fn load(&self, _: Adapter, _: Vec<u64>) -> BoxFuture<'static, Answer<(), AdapterError>> {
        let refusal = AdapterError::Unusable("a server elsewhere has its own adapters".to_owned());
        Box::pin(async { Ok(Err(refusal)) })
    }

    fn encode(&self, images: Vec<Image>) -> BoxFuture<'static, Answer<Vec<EncodedImage>, ImageError>> {
        let client = self.clone();
        Box::pin(async move { Ok(client.encode(images).await?) })
    }
}

impl From<WorkerError> for HelperError {
    fn from(error: WorkerError) -> Self {
        Self { is_loss: error.is_loss(), reason: error.to_string() }
    }
}

impl From<RemoteError> for HelperError {
    fn from(error: RemoteError) -> Self {
        Self { is_loss: error.is_loss(), reason: error.to_string() }
    }
}
