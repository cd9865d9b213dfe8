//! The sequences that the worker does not know: those ready for admission, those blocked on a prefix, and those that wait
//! for the room of their images.
//!
//! A queued sequence whose next block is being computed by a running one waits for that block instead of computing it
//! too. While it is blocked, it does not hold up the ready sequences behind it.
//!
//! A queued sequence for whose images there is no room does not hold up the sequences without images, which need no such
//! room, but those with images behind it.
//!
//! INVARIANT: a queued sequence is ready, or blocked on exactly one pending node of the prefix cache, or waits for image room.

use rustc_hash::FxHashMap;

use crate::plan::SequenceId;
use crate::precedence::{Precedence, SequenceSet};
use crate::prefix::NodeId;

#[derive(Debug, Default)]
pub(crate) struct Queue {
    ready: SequenceSet,
    blocked: FxHashMap<NodeId, SequenceSet>,
    /// The node that each blocked sequence waits for.
    awaited_nodes: FxHashMap<SequenceId, NodeId>,
    awaiting_image_room: SequenceSet,
}

impl Queue {
    /// Adds a sequence that is ready for admission.
    pub(crate) fn insert(&mut self, precedence: Precedence, id: SequenceId) {
        self.ready.insert(precedence, id);
    }

    /// Removes a sequence.
    pub(crate) fn remove(&mut self, precedence: Precedence, id: SequenceId) {
        let Some(node) = self.awaited_nodes.remove(&id) else {
            self.ready.remove(&precedence);
            self.awaiting_image_room.remove(&precedence);
            return;
        };
        if let Some(waiters) = self.blocked.get_mut(&node) {
            waiters.remove(&precedence);
            if waiters.is_empty() {
                self.blocked.remove(&node);
            }
        }
    }

    /// Blocks a ready sequence until `unblock(node)`.
    pub(crate) fn block(&mut self, precedence: Precedence, id: SequenceId, node: NodeId) {
        self.ready.remove(&precedence);
        self.blocked.entry(node).or_default().insert(precedence, id);
        self.awaited_nodes.insert(id, node);
    }

    /// Makes the sequences ready that wait for `node`.
    pub(crate) fn unblock(&mut self, node: NodeId) {
        for (precedence, id) in self.blocked.remove(&node).unwrap_or_default() {
            self.awaited_nodes.remove(&id);
            self.ready.insert(precedence, id);
        }
    }

    /// Lets a ready sequence wait until `end_wait_for_images` reaches it.
    pub(crate) fn await_image_room(&mut self, precedence: Precedence, id: SequenceId) {
        self.ready.remove(&precedence);
        self.awaiting_image_room.insert(precedence, id);
    }

    /// Makes the first sequence ready that waits for image room.
    pub(crate) fn end_wait_for_images(&mut self) {
        self.ready.extend(self.awaiting_image_room.pop_first());
    }

    /// The sequences that wait for image room, highest precedence first.
    pub(crate) fn awaiting_image_room(&self) -> &SequenceSet {
        &self.awaiting_image_room
    }

    /// The ready sequences, highest precedence first.
    pub(crate) fn ready(&self) -> impl Iterator<Item = SequenceId> {
        self.ready.values().copied()
    }

    pub(crate) fn num_ready(&self) -> usize {
        self.ready.len()
    }

    pub(crate) fn num_blocked(&self) -> usize {
        self.awaited_nodes.len()
    }

    /// All queued sequences.
    pub(crate) fn len(&self) -> usize {
        self.num_ready() + self.num_blocked() + self.awaiting_image_room.len()
    }

    pub(crate) fn awaited_node(&self, id: SequenceId) -> Option<NodeId> {
        self.awaited_nodes.get(&id).copied()
    }

    /// Panics unless the invariant holds. `queued`: the sequences without a residency.
    pub(crate) fn audit(&self, queued: impl Iterator<Item = (Precedence, SequenceId)>) {
        let mut num_queued = 0;
        for (precedence, id) in queued {
            num_queued += 1;
            let is_ready = self.ready.contains_key(&precedence);
            let node = self.awaited_node(id);
            let is_blocked = node.is_some_and(|node| self.blocked[&node].contains_key(&precedence));
            let awaits_room = self.awaiting_image_room.contains_key(&precedence);
            let num_states = [is_ready, is_blocked, awaits_room].into_iter().filter(|is| *is).count();
            assert_eq!(num_states, 1, "{id:?} is ready: {is_ready}, blocked: {is_blocked}, awaits room: {awaits_room}");
        }
        assert_eq!(self.len(), num_queued);
        assert_eq!(self.blocked.values().map(SequenceSet::len).sum::<usize>(), self.num_blocked());
        assert!(self.blocked.values().all(|waiters| !waiters.is_empty()));
    }
}
