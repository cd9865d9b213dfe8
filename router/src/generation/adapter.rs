//! LoRA adapters by name: which of them the workers have loaded, and which running requests use them.
//!
//! An adapter is loaded by its first request, and stays until another one needs its place. The least recently used adapter
//! without a running request then gives way; when every place is in use, the request waits, like one in the queue.
//!
//! INVARIANT: at most `max_loaded` adapters are loaded or being loaded, and none with a lease is unloaded.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::error::GenerationError;
use super::validation::ValidationError;
use crate::config::AdapterConfig;
use crate::engine::Generator;
use crate::sequence::{Adapter, AdapterError};

/// Adapters that an error names.
const MAX_NAMES_SHOWN: usize = 10;

/// The adapters of a server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Adapters {
    inner: Arc<Inner>,
}

struct Inner {
    generator: Arc<dyn Generator>,
    by_name: BTreeMap<Arc<str>, Adapter>,
    max_loaded: usize,
    state: Mutex<State>,
    /// A place may be free, or an adapter loaded.
    changed: Notify,
}

struct State {
    /// By the adapter's id.
    places: HashMap<u64, Place>,
    /// Leases that were given, the time of `last_lease`.
    num_leased: u64,
}

/// An adapter in the workers.
struct Place {
    is_loaded: bool,
    num_leases: usize,
    last_lease: u64,
}

/// The right of a request to use an adapter, which stays loaded as long.
pub(crate) struct AdapterLease {
    adapters: Adapters,
    adapter: Adapter,
}

impl Adapters {
    pub(crate) fn new(config: &AdapterConfig, generator: Arc<dyn Generator>) -> Self {
        let registered = config.sources.iter().zip(1..).map(|(source, id)| {
            let adapter = Adapter { id, path: source.path.as_path().into() };
            (source.name.as_str().into(), adapter)
        });
        let state = Mutex::new(State { places: HashMap::new(), num_leased: 0 });
        let by_name = registered.collect();
        let max_loaded = config.max_loaded;
        Self { inner: Arc::new(Inner { generator, by_name, max_loaded, state, changed: Notify::new() }) }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.inner.by_name.contains_key(name)
    }

    /// In alphabetical order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.by_name.keys().map(AsRef::as_ref)
    }

    /// Waits until the adapter is loaded. Cancel safe.
    pub(crate) async fn lease(&self, name: &str) -> Result<AdapterLease, GenerationError> {
        let adapter = self.inner.by_name.get(name).ok_or_else(|| self.unknown(name))?;
        loop {
            let mut changed = std::pin::pin!(self.inner.changed.notified());
            changed.as_mut().enable();
            let step = self.state().step(adapter, self.inner.max_loaded);
            match step {
                Step::Leased => return Ok(AdapterLease { adapters: self.clone(), adapter: adapter.clone() }),
                Step::Wait => changed.await,
                Step::Load { unloaded_ids } => self.load(name, adapter.clone(), unloaded_ids).await?,
            }
        }
    }

    fn unknown(&self, given: &str) -> ValidationError {
        let served: Vec<String> = self.names().take(MAX_NAMES_SHOWN).map(|name| format!("`{name}`")).collect();
        ValidationError::Adapter(match &served[..] {
            [] => format!("{given} is unknown: no adapters are served"),
            served => format!("{given} is unknown: the server has {}", served.join(", ")),
        })
    }

    /// Loads an adapter into the place that is reserved for it, also when the request is gone meanwhile.
    async fn load(&self, name: &str, adapter: Adapter, unloaded_ids: Vec<u64>) -> Result<(), GenerationError> {
        let adapters = self.clone();
        let loading = tokio::spawn(async move {
            let result = adapters.inner.generator.load_adapter(adapter.clone(), unloaded_ids).await;
            let mut state = adapters.state();
            match (&result, state.places.get_mut(&adapter.id)) {
                (Ok(()), Some(place)) => place.is_loaded = true,
                _ => drop(state.places.remove(&adapter.id)),
            }
            drop(state);
            adapters.inner.changed.notify_waiters();
            result
        });
        let result = match loading.await {
            Ok(result) => result,
            Err(error) => Err(AdapterError::Worker(error.to_string())),
        };
        result.map_err(|error| {
            tracing::error!("the adapter {name} cannot be loaded: {error}");
            GenerationError::Failed(format!("the adapter `{name}` cannot be loaded: {error}"))
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a request for an adapter does next.
#[derive(Debug, PartialEq)]
enum Step {
    Leased,
    /// Until something changes.
    Wait,
    /// The place is reserved.
    Load {
        unloaded_ids: Vec<u64>,
    },
}

impl State {
    fn step(&mut self, adapter: &Adapter, max_loaded: usize) -> Step {
        self.num_leased += 1;
        if let Some(place) = self.places.get_mut(&adapter.id) {
            if !place.is_loaded {
                return Step::Wait;
            }
            place.num_leases += 1;
            place.last_lease = self.num_leased;
            return Step::Leased;
        }
        let mut unloaded_ids = Vec::new();
        if self.places.len() >= max_loaded {
            let idle = self.places.iter().filter(|(_, place)| place.is_loaded && place.num_leases == 0);
            let Some((&oldest, _)) = idle.min_by_key(|(_, place)| place.last_lease) else { return Step::Wait };
            self.places.remove(&oldest);
            unloaded_ids.push(oldest);
        }
        self.places.insert(adapter.id, Place { is_loaded: false, num_leases: 0, last_lease: self.num_leased });
        Step::Load { unloaded_ids }
    }
}

impl AdapterLease {
    pub(super) fn adapter(&self) -> &Adapter {
        &self.adapter
    }
}

impl Drop for AdapterLease {
    fn drop(&mut self) {
        if let Some(place) = self.adapters.state().places.get_mut(&self.adapter.id) {
            place.num_leases -= 1;
        }
        self.adapters.inner.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn adapter(id: u64) -> Adapter {
        Adapter { id, path: Path::new("/adapter").into() }
    }

    /// The next step of a request for adapter `id`, with two places. What is to be loaded is loaded at once.
    fn step(state: &mut State, id: u64) -> Step {
        let step = state.step(&adapter(id), 2);
        if let (Step::Load { .. }, Some(place)) = (&step, state.places.get_mut(&id)) {
            place.is_loaded = true;
        }
        step
    }

    fn end(state: &mut State, id: u64) {
        state.places.get_mut(&id).unwrap().num_leases -= 1;
    }

    #[test]
    fn an_adapter_with_a_lease_keeps_its_place() {
        let mut state = State { places: HashMap::new(), num_leased: 0 };
        for id in [1, 2] {
            assert_eq!(step(&mut state, id), Step::Load { unloaded_ids: vec![] });
            assert_eq!(step(&mut state, id), Step::Leased);
        }
        assert_eq!(step(&mut state, 3), Step::Wait);
        assert_eq!(step(&mut state, 1), Step::Leased);
        end(&mut state, 1);
        assert_eq!(step(&mut state, 3), Step::Wait);
        end(&mut state, 2);
        assert_eq!(step(&mut state, 3), Step::Load { unloaded_ids: vec![2] });
    }

    #[test]
    fn a_place_that_is_being_filled_is_waited_for() {
        let mut state = State { places: HashMap::new(), num_leased: 0 };
        assert_eq!(state.step(&adapter(1), 1), Step::Load { unloaded_ids: vec![] });
        assert_eq!(state.step(&adapter(1), 1), Step::Wait);
        assert_eq!(state.step(&adapter(2), 1), Step::Wait);
    }
}
