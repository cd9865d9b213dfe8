//! The sequences of routers that wait here for their first step. They pass by this server's admission, which counts those of its HTTP routes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sequence::SequenceRequest;

/// Counts the queued sequences of routers. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct RoutedQueue(Arc<AtomicU64>);

/// A queued sequence. Dropping it ends its wait.
#[derive(Debug)]
pub(crate) struct Queued {
    queue: RoutedQueue,
    num_tokens: u64,
}

impl RoutedQueue {
    /// Prompt tokens plus `max_new_tokens` of all queued sequences of routers.
    pub fn num_tokens(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, request: &SequenceRequest) -> Queued {
        let num_tokens = request.prompt_token_ids.len() as u64 + u64::from(request.max_new_tokens);
        self.0.fetch_add(num_tokens, Ordering::Relaxed);
        Queued { queue: self.clone(), num_tokens }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.queue.0.fetch_sub(self.num_tokens, Ordering::Relaxed);
    }
}
