//! The responses that later requests can continue.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::api::conversation::Conversation;

/// The newest responses' conversations, in memory. Cheap to clone.
#[derive(Clone)]
pub(super) struct ResponseStore {
    /// 0: nothing is stored.
    max_responses: usize,
    stored: Arc<Mutex<Stored>>,
}

#[derive(Default)]
struct Stored {
    conversations: HashMap<String, Conversation>,
    /// Ids, the oldest first.
    ids: VecDeque<String>,
}

impl ResponseStore {
    pub(super) fn new(max_responses: usize) -> Self {
        Self { max_responses, stored: Arc::default() }
    }

    /// Whether anything is stored.
    pub(super) fn is_on(&self) -> bool {
        self.max_responses > 0
    }

    /// The conversation that ends with this response.
    pub(super) fn get(&self, id: &str) -> Option<Conversation> {
        self.stored().conversations.get(id).cloned()
    }

    /// Stores the conversation that ends with this response, in place of the oldest one if there are too many.
    pub(super) fn insert(&self, id: String, conversation: Conversation) {
        if !self.is_on() {
            return;
        }
        let mut stored = self.stored();
        if stored.ids.len() >= self.max_responses
            && let Some(oldest) = stored.ids.pop_front()
        {
            stored.conversations.remove(&oldest);
        }
        stored.ids.push_back(id.clone());
        stored.conversations.insert(id, conversation);
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        // Every statement leaves both collections usable.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_response_is_replaced() {
        let store = ResponseStore::new(2);
        for id in ["a", "b", "c"] {
            store.insert(id.to_owned(), Conversation::default());
        }
        assert_eq!(["a", "b", "c"].map(|id| store.get(id).is_some()), [false, true, true]);
        assert_eq!(store.stored().conversations.len(), 2);
    }

    #[test]
    fn nothing_is_stored_by_default() {
        let store = ResponseStore::new(0);
        store.insert("a".to_owned(), Conversation::default());
        assert!(!store.is_on() && store.get("a").is_none());
    }
}
