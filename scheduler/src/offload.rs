//! The slots beside the pool, to which the content of evicted blocks moves, and from which it comes back.
//!
//! INVARIANT: a node of the prefix tree has a block or a slot, never both. The slot that was filled first is reused first.

use std::collections::BTreeSet;

use crate::plan::{BlockId, SlotId, Transfer};
use crate::prefix::NodeId;

#[derive(Debug)]
pub(crate) struct Offload {
    /// What each slot has, and when it was filled.
    slots: Vec<Option<(u64, NodeId)>>,
    free: Vec<SlotId>,
    /// Full slots that may be reused, by the time at which they were filled.
    by_age: BTreeSet<(u64, SlotId)>,
    num_filled: u64,
    /// Those of the next plan, in the order in which the worker makes them.
    transfers: Vec<Transfer>,
}

impl Offload {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self {
            slots: vec![None; num_slots as usize],
            free: (0..num_slots).rev().collect(),
            by_age: BTreeSet::new(),
            num_filled: 0,
            transfers: Vec::new(),
        }
    }

    pub(crate) fn num_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(crate) fn num_full(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }

    pub(crate) fn take_transfers(&mut self) -> Vec<Transfer> {
        std::mem::take(&mut self.transfers)
    }

    /// Moves the node's content out of a block. Returns the slot, and the node that lost it. `None`: no slot may be used.
    pub(crate) fn store(&mut self, block_id: BlockId, node: NodeId) -> Option<(SlotId, Option<NodeId>)> {
        let (slot, loser) = match self.free.pop() {
            Some(slot) => (slot, None),
            None => {
                let (_, slot) = self.by_age.pop_first()?;
                (slot, self.slots[slot as usize].map(|(_, loser)| loser))
            }
        };
        self.num_filled += 1;
        self.slots[slot as usize] = Some((self.num_filled, node));
        self.by_age.insert((self.num_filled, slot));
        self.transfers.push(Transfer::Store { block_id, slot });
        Some((slot, loser))
    }

    /// Keeps a slot from being reused until `unpin`, `load` or `forget`.
    pub(crate) fn pin(&mut self, slot: SlotId) {
        if let Some((age, _)) = self.slots[slot as usize] {
            self.by_age.remove(&(age, slot));
        }
    }

    /// Ends `pin`.
    pub(crate) fn unpin(&mut self, slot: SlotId) {
        if let Some((age, _)) = self.slots[slot as usize] {
            self.by_age.insert((age, slot));
        }
    }

    /// Moves a slot's content into a block.
    pub(crate) fn load(&mut self, slot: SlotId, block_id: BlockId) {
        self.transfers.push(Transfer::Load { slot, block_id });
        self.forget(slot);
    }

    /// Frees a slot. The worker makes transfers in order, so the slot may be filled again in the same plan.
    pub(crate) fn forget(&mut self, slot: SlotId) {
        self.pin(slot);
        self.slots[slot as usize] = None;
        self.free.push(slot);
    }

    /// Panics unless the slots are counted right. `slot_of`: the slot that a node says it has.
    pub(crate) fn audit(&self, num_nodes_with_slot: usize, slot_of: impl Fn(NodeId) -> Option<SlotId>) {
        let full = || self.slots.iter().zip(0..).filter_map(|(slot, id)| slot.map(|(age, node)| (id, age, node)));
        for (slot, age, node) in full() {
            assert_eq!(slot_of(node), Some(slot), "the node of slot {slot}");
            assert!(self.by_age.contains(&(age, slot)), "slot {slot} is pinned");
        }
        assert_eq!((full().count(), self.by_age.len()), (num_nodes_with_slot, num_nodes_with_slot));
        assert_eq!(self.num_full(), num_nodes_with_slot);
    }
}
