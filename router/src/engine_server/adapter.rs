//! The adapters of this server, as routers name them: by the hash of their files, because servers may have different files of one name.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::mem;
use std::path::Path;
use std::sync::Arc;

use async_stream::stream;
use futures::StreamExt;
use futures::stream::BoxStream;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::generation::Adapters;
use crate::generator::Generator;
use crate::sequence::{Adapter, AdapterError, AdapterHash, SequenceEvent, SequenceFailure, SequenceRequest};

/// What the workers read of an adapter.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Read at a time.
const READ_BYTES: usize = 1 << 20;

/// An adapter that routers may name.
#[derive(Clone, Debug)]
pub(super) struct ServedAdapter {
    pub(super) name: Arc<str>,
    pub(super) hash: AdapterHash,
    adapter: Adapter,
}

/// `None`: their files are being read for the first time.
pub(super) type ServedAdapters = Option<Arc<[ServedAdapter]>>;

/// Publishes the adapters at each change of their names, after reading the files of new ones.
pub(super) async fn follow(adapters: Adapters, served: watch::Sender<ServedAdapters>) -> Infallible {
    let mut changes = adapters.name_changes();
    // By the ids of adapters. `None`: the files cannot be read.
    let mut hashes: HashMap<u64, Option<AdapterHash>> = HashMap::new();
    loop {
        changes.changed().await.expect("invariant: the sender is in `adapters`");
        let known = mem::take(&mut hashes);
        let mut list = Vec::new();
        for (name, adapter) in adapters.named() {
            let hash = match known.get(&adapter.id) {
                Some(hash) => *hash,
                None => hash(&name, Arc::clone(&adapter.path)).await,
            };
            hashes.insert(adapter.id, hash);
            list.extend(hash.map(|hash| ServedAdapter { name, hash, adapter }));
        }
        served.send_replace(Some(list.into()));
    }
}

/// Computes a sequence, with this adapter if there is one, which stays loaded as long.
pub(super) fn submit(
    generator: Arc<dyn Generator>,
    adapters: Adapters,
    served: Option<ServedAdapter>,
    mut request: SequenceRequest,
) -> BoxStream<'static, SequenceEvent> {
    let Some(ServedAdapter { name, adapter, .. }) = served else { return generator.submit(request).boxed() };
    let events = stream! {
        let _lease = match adapters.lease_of(adapter.clone()).await {
            Ok(lease) => lease,
            Err(AdapterError::Worker(reason)) => {
                yield SequenceEvent::Failed(SequenceFailure::Worker(reason));
                return;
            }
            Err(error) => {
                let reason = format!("the adapter `{name}` cannot be loaded: {error}");
                yield SequenceEvent::Failed(SequenceFailure::Sequence(reason));
                return;
            }
        };
        request.adapter = Some(adapter);
        let mut events = generator.submit(request);
        while let Some(event) = events.next().await {
            yield event;
        }
    };
    events.boxed()
}

/// `None`, and the reason in the log: its files cannot be read.
async fn hash(name: &str, folder: Arc<Path>) -> Option<AdapterHash> {
    let read = tokio::task::spawn_blocking(move || hash_files(&folder)).await;
    let warn = |reason| tracing::warn!("routers cannot use the adapter {name}: {reason}");
    read.map_err(io::Error::other).flatten().map_err(warn).ok()
}

fn hash_files(folder: &Path) -> io::Result<AdapterHash> {
    let mut hash = Sha256::new();
    for name in FILES {
        let file = File::open(folder.join(name))?;
        hash.update(file.metadata()?.len().to_le_bytes());
        let mut reader = BufReader::with_capacity(READ_BYTES, file);
        while let read @ [_, ..] = reader.fill_buf()? {
            let num_bytes = read.len();
            hash.update(read);
            reader.consume(num_bytes);
        }
    }
    Ok(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_of_different_bytes_have_different_hashes() {
        let hash = |config: &str, weights: &str| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("adapter_config.json"), config).unwrap();
            std::fs::write(folder.path().join("adapter_model.safetensors"), weights).unwrap();
            hash_files(folder.path()).unwrap()
        };
        let one = hash("{}", "weights");
        assert_eq!(one, hash("{}", "weights"));
        for other in [hash("{ }", "weights"), hash("{}", "weighty"), hash("{}w", "eights")] {
            assert_ne!(one, other);
        }
    }
}
