//! The responses that later requests can continue, read and delete.
//!
//! INVARIANT: a response is visible only to the API key that made it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::key_hash::KeyHash;
use crate::api::conversation::Conversation;
use crate::api::responses::Response;

/// The newest responses, in memory. Cheap to clone.
#[derive(Clone)]
pub(super) struct ResponseStore {
    /// 0: nothing is stored.
    max_responses: usize,
    /// The oldest first.
    stored: Arc<Mutex<VecDeque<Entry>>>,
}

struct Entry {
    owner: KeyHash,
    response: Arc<StoredResponse>,
}

pub(super) struct StoredResponse {
    pub(super) response: Response,
    /// The items that it answers, those of the responses that it continues included. Each has an id.
    pub(super) input: Vec<Value>,
    /// That ends with it.
    pub(super) conversation: Conversation,
}

impl StoredResponse {
    /// The items of the conversation that ends with it.
    pub(super) fn items(&self) -> Vec<Value> {
        self.input.iter().cloned().chain(self.output()).collect()
    }

    fn output(&self) -> impl Iterator<Item = Value> {
        self.response.output.iter().filter_map(|item| serde_json::to_value(item).ok())
    }
}

impl ResponseStore {
    pub(super) fn new(max_responses: usize) -> Self {
        Self { max_responses, stored: Arc::default() }
    }

    /// Whether anything is stored.
    pub(super) fn is_on(&self) -> bool {
        self.max_responses > 0
    }

    /// The owner's response with this id.
    pub(super) fn get(&self, owner: KeyHash, id: &str) -> Option<Arc<StoredResponse>> {
        let stored = self.stored();
        let found = stored.iter().find(|entry| entry.is(owner, id))?;
        Some(Arc::clone(&found.response))
    }

    /// The item with this id of one of the owner's responses.
    pub(super) fn item(&self, owner: KeyHash, id: &str) -> Option<Value> {
        let responses: Vec<_> = self
            .stored()
            .iter()
            .rev()
            .filter(|entry| entry.owner == owner)
            .map(|entry| Arc::clone(&entry.response))
            .collect();
        let has_id = |item: &Value| item["id"] == id;
        responses.iter().find_map(|response| response.output().chain(response.input.iter().cloned()).find(has_id))
    }

    /// Stores a response, in place of the oldest one if there are too many.
    pub(super) fn insert(&self, owner: KeyHash, response: StoredResponse) {
        if !self.is_on() {
            return;
        }
        let mut stored = self.stored();
        if stored.len() >= self.max_responses {
            stored.pop_front();
        }
        stored.push_back(Entry { owner, response: Arc::new(response) });
    }

    /// Whether the owner had a response with this id.
    pub(super) fn remove(&self, owner: KeyHash, id: &str) -> bool {
        let mut stored = self.stored();
        let position = stored.iter().position(|entry| entry.is(owner, id));
        position.is_some_and(|position| stored.remove(position).is_some())
    }

    fn stored(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        // Every statement leaves it usable.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn is(&self, owner: KeyHash, id: &str) -> bool {
        self.owner == owner && self.response.response.id == id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(id: &str) -> StoredResponse {
        StoredResponse {
            response: Response { id: id.to_owned(), ..Response::default() },
            input: Vec::new(),
            conversation: Conversation::default(),
        }
    }

    #[test]
    fn the_oldest_response_is_replaced() {
        let (store, owner) = (ResponseStore::new(2), KeyHash::default());
        for id in ["a", "b", "c"] {
            store.insert(owner, response(id));
        }
        assert_eq!(["a", "b", "c"].map(|id| store.get(owner, id).is_some()), [false, true, true]);
        assert!(store.remove(owner, "b") && !store.remove(owner, "b"));
        assert!(store.get(owner, "b").is_none());
    }

    #[test]
    fn nothing_is_stored_by_default() {
        let (store, owner) = (ResponseStore::new(0), KeyHash::default());
        store.insert(owner, response("a"));
        assert!(!store.is_on() && store.get(owner, "a").is_none());
    }
}
