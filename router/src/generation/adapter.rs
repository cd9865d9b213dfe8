//! LoRA adapters by name, and the leases of running requests on them.
//!
//! An adapter is loaded by its first request, and stays until another one needs its place (`adapter_place`). When every place is in use,
//! the request waits, like one in the queue.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use super::adapter_place::{Places, Step};
use super::error::GenerationError;
use super::validation::ValidationError;
use crate::config::AdapterConfig;
use crate::generator::Generator;
use crate::sequence::{Adapter, AdapterError, AdapterHash};

/// Adapters that an error names.
const MAX_NAMES_SHOWN: usize = 10;

/// The adapters of a server: those that its workers load, or, of a router, those of the servers behind it. Cheap to clone.
#[derive(Clone)]
pub struct Adapters {
    inner: Arc<Inner>,
}

struct Inner {
    generator: Arc<dyn Generator>,
    state: Mutex<State>,
    /// A place may be free, or an adapter loaded.
    changed: Notify,
    /// Names have come or gone.
    renamed: watch::Sender<()>,
}

struct State {
    by_name: BTreeMap<Arc<str>, Adapter>,
    /// By the ids of adapters with a name, why they cannot be used: another attempt would take the place of a usable adapter.
    unusable: HashMap<u64, String>,
    /// Adapters that have had a name.
    num_registered: u64,
    places: Places,
}

/// The right of a request to use an adapter.
pub(crate) enum AdapterLease {
    /// It stays loaded as long.
    Here { adapters: Adapters, adapter: Adapter },
    /// The server that computes a sequence takes a lease itself.
    Elsewhere(AdapterHash),
}

/// The adapters at one moment, in alphabetical order.
pub(crate) struct AdapterReport {
    pub(crate) max_loaded: usize,
    pub(crate) loaded: Vec<Arc<str>>,
    /// Names of the adapters that queued requests wait for.
    pub(crate) waiting: Vec<Arc<str>>,
}

/// A request that has no lease yet.
struct Waiting<'a> {
    adapters: &'a Adapters,
    ticket: u64,
}

/// Why an adapter cannot be added to a running server, or removed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum AdapterUpdateError {
    #[error("the name {0:?} is taken; unload that adapter first, or send \"load_inplace\": true")]
    Taken(String),
    #[error("there is no adapter {0:?}")]
    Unknown(String),
    #[error("the adapter cannot be loaded: {0}")]
    Unusable(String),
    #[error(transparent)]
    Generation(#[from] GenerationError),
}

impl Adapters {
    /// `generator` loads those of `config`, or knows those of other servers.
    pub fn new(config: &AdapterConfig, generator: Arc<dyn Generator>) -> Self {
        let (by_name, unusable) = (BTreeMap::new(), HashMap::new());
        let mut state = State { by_name, unusable, num_registered: 0, places: Places::new(config.max_loaded) };
        for source in &config.sources {
            let adapter = state.new_adapter(source.path.clone());
            state.by_name.insert(source.name.as_str().into(), adapter);
        }
        let renamed = watch::Sender::new(());
        Self { inner: Arc::new(Inner { generator, state: Mutex::new(state), changed: Notify::new(), renamed }) }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.state().by_name.contains_key(name) || self.inner.generator.adapter_hash(name).is_some()
    }

    /// Refuses a name that no adapter has, or one that cannot be used.
    pub(super) fn expect_usable(&self, name: &str) -> Result<(), GenerationError> {
        let reason = {
            let state = self.state();
            state.by_name.get(name).map(|adapter| state.unusable.get(&adapter.id).cloned())
        };
        match reason {
            None => self.hash_elsewhere(name).map(drop),
            Some(Some(reason)) => Err(unusable(name, &reason)),
            Some(None) => Ok(()),
        }
    }

    /// In alphabetical order.
    pub(crate) fn names(&self) -> Vec<Arc<str>> {
        let mut names: Vec<_> = self.state().by_name.keys().cloned().collect();
        names.extend(self.inner.generator.adapter_names());
        names.sort_unstable();
        names
    }

    /// The adapters that the workers here load, with their names.
    pub(crate) fn named(&self) -> Vec<(Arc<str>, Adapter)> {
        self.state().by_name.iter().map(|(name, adapter)| (Arc::clone(name), adapter.clone())).collect()
    }

    /// Changes when `named` does; changed at the start.
    pub(crate) fn name_changes(&self) -> watch::Receiver<()> {
        let mut changes = self.inner.renamed.subscribe();
        changes.mark_changed();
        changes
    }

    /// `None`: the server loads no adapters.
    pub(crate) fn report(&self) -> Option<AdapterReport> {
        let state = self.state();
        let (max_loaded, awaited) = (state.places.max_loaded(), state.places.awaited());
        let names = |is_one: &dyn Fn(u64) -> bool| {
            let named = state.by_name.iter().filter(|(_, adapter)| is_one(adapter.id));
            named.map(|(name, _)| Arc::clone(name)).collect()
        };
        let (loaded, waiting) = (names(&|id| state.places.is_loaded(id)), names(&|id| awaited.contains(&id)));
        (max_loaded > 0).then_some(AdapterReport { max_loaded, loaded, waiting })
    }

    /// Waits until the adapter that has this name now is loaded. Cancel safe.
    pub(crate) async fn lease(&self, name: &str) -> Result<AdapterLease, GenerationError> {
        let known = self.state().by_name.get(name).cloned();
        let Some(adapter) = known else { return self.hash_elsewhere(name).map(AdapterLease::Elsewhere) };
        self.lease_of(adapter).await.map_err(|error| {
            tracing::error!("the adapter {name} cannot be loaded: {error}");
            unusable(name, &error.to_string())
        })
    }

    /// Refuses a name that an adapter has, unless it may be replaced.
    pub(super) fn expect_free(&self, name: &str, replaces: bool) -> Result<(), AdapterUpdateError> {
        match self.contains(name) && !replaces {
            true => Err(AdapterUpdateError::Taken(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Loads an adapter and gives it a name; `replaces`: also one that another adapter has, whose running requests go on. Cancel safe.
    pub(super) async fn add(&self, name: &str, path: PathBuf, replaces: bool) -> Result<(), AdapterUpdateError> {
        let expect_free = |state: &State| match state.by_name.contains_key(name) && !replaces {
            true => Err(AdapterUpdateError::Taken(name.to_owned())),
            false => Ok(()),
        };
        let adapter = {
            let mut state = self.state();
            expect_free(&state)?;
            state.new_adapter(path)
        };
        // Another request may take the name while this one loads its adapter.
        let _lease = self.lease_of(adapter.clone()).await.map_err(|error| match error {
            AdapterError::Unusable(reason) => AdapterUpdateError::Unusable(reason),
            AdapterError::NoMemory(reason) => AdapterUpdateError::Unusable(reason),
            AdapterError::Worker(_) => GenerationError::Failed(error.to_string()).into(),
        })?;
        let mut state = self.state();
        let named = expect_free(&state).map(|()| state.by_name.insert(name.into(), adapter.clone()));
        if let Some(unused) = named.as_ref().map_or(Some(&adapter), Option::as_ref) {
            state.retire(unused.id);
        }
        self.inner.renamed.send_replace(());
        named.map(|_| ())
    }

    /// Takes an adapter's name. Its running requests go on.
    pub(super) fn remove(&self, name: &str) -> Result<(), AdapterUpdateError> {
        let mut state = self.state();
        let adapter = state.by_name.remove(name).ok_or_else(|| AdapterUpdateError::Unknown(name.to_owned()))?;
        state.retire(adapter.id);
        self.inner.renamed.send_replace(());
        Ok(())
    }

    fn hash_elsewhere(&self, name: &str) -> Result<AdapterHash, GenerationError> {
        self.inner.generator.adapter_hash(name).ok_or_else(|| self.unknown(name).into())
    }

    fn unknown(&self, given: &str) -> ValidationError {
        let served: Vec<String> = self.names().iter().take(MAX_NAMES_SHOWN).map(|name| format!("`{name}`")).collect();
        ValidationError::Adapter(match &served[..] {
            [] => format!("{given} is unknown: no adapters are served"),
            served => format!("{given} is unknown: the server has {}", served.join(", ")),
        })
    }

    /// Waits until the adapter is loaded. Cancel safe.
    pub(crate) async fn lease_of(&self, adapter: Adapter) -> Result<AdapterLease, AdapterError> {
        let waiting = Waiting { adapters: self, ticket: self.state().places.arrive(adapter.id) };
        loop {
            let mut changed = std::pin::pin!(self.inner.changed.notified());
            changed.as_mut().enable();
            let step = {
                let mut state = self.state();
                if let Some(reason) = state.unusable.get(&adapter.id) {
                    return Err(AdapterError::Unusable(reason.clone()));
                }
                state.places.step(waiting.ticket, adapter.id)
            };
            match step {
                Step::Leased => return Ok(AdapterLease::Here { adapters: self.clone(), adapter }),
                Step::Wait => changed.await,
                Step::Load { unloaded_ids } => return self.load(adapter, unloaded_ids).await,
            }
        }
    }

    /// Loads an adapter into the place that it has taken, also when the request is gone meanwhile.
    async fn load(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> Result<AdapterLease, AdapterError> {
        let adapters = self.clone();
        let loading = tokio::spawn(async move {
            let result = adapters.inner.generator.load_adapter(adapter.clone(), unloaded_ids).await;
            match &result {
                Ok(()) => adapters.state().places.loaded(adapter.id),
                Err(error) => adapters.state().failed(&adapter, error),
            }
            adapters.inner.changed.notify_waiters();
            result.map(|()| AdapterLease::Here { adapters, adapter })
        });
        loading.await.unwrap_or_else(|error| Err(AdapterError::Worker(error.to_string())))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn new_adapter(&mut self, path: PathBuf) -> Adapter {
        self.num_registered += 1;
        Adapter { id: self.num_registered, path: path.as_path().into() }
    }

    /// An adapter could not be loaded.
    fn failed(&mut self, adapter: &Adapter, error: &AdapterError) {
        self.places.failed(adapter.id);
        if let AdapterError::Unusable(reason) = error
            && self.by_name.values().any(|named| named.id == adapter.id)
        {
            self.unusable.insert(adapter.id, reason.clone());
        }
    }

    /// An adapter has no name any more.
    fn retire(&mut self, adapter_id: u64) {
        self.places.retire(adapter_id);
        self.unusable.remove(&adapter_id);
    }
}

fn unusable(name: &str, reason: &str) -> GenerationError {
    GenerationError::Failed(format!("the adapter `{name}` cannot be loaded: {reason}"))
}

impl AdapterLease {
    pub(super) fn adapter(&self) -> Option<&Adapter> {
        match self {
            Self::Here { adapter, .. } => Some(adapter),
            Self::Elsewhere(_) => None,
        }
    }

    pub(super) fn hash_elsewhere(&self) -> Option<AdapterHash> {
        match self {
            Self::Here { .. } => None,
            Self::Elsewhere(hash) => Some(*hash),
        }
    }
}

impl Drop for AdapterLease {
    fn drop(&mut self) {
        if let Self::Here { adapters, adapter } = self {
            adapters.state().places.release(adapter.id);
            adapters.inner.changed.notify_waiters();
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.adapters.state().places.leave(self.ticket);
        self.adapters.inner.changed.notify_waiters();
    }
}
