//! The slots beside the pool, to which the content of evicted blocks moves, and from which it comes back.
//!
//! The slots are in tiers, the fastest first: host memory, then a disk. An evicted content goes to the first tier. When a tier is full,
//! the content that was evicted first makes room: it moves to the next tier, and from the last one it is lost.
//!
//! INVARIANT: a node of the prefix tree has a block or a slot, never both.

use std::collections::BTreeSet;

use crate::plan::{BlockId, SlotId, Transfer};
use crate::prefix::NodeId;

#[derive(Debug)]
pub(crate) struct Offload {
    /// What each slot has, and when that was evicted. The slots in memory come first.
    slots: Vec<Option<(u64, NodeId)>>,
    tiers: [Tier; 2],
    num_stored: u64,
    /// Transfers of the next plan, in the order in which the worker makes them.
    transfers: Vec<Transfer>,
}

#[derive(Debug)]
struct Tier {
    num_slots: u32,
    free: Vec<SlotId>,
    /// Full slots that may be reused, by the time at which their content was evicted.
    by_age: BTreeSet<(u64, SlotId)>,
}

impl Offload {
    pub(crate) fn new(num_memory_slots: u32, num_disk_slots: u32) -> Self {
        let num_slots = num_memory_slots + num_disk_slots;
        let tier = |slots: std::ops::Range<SlotId>| Tier {
            num_slots: slots.len() as u32,
            free: slots.rev().collect(),
            by_age: BTreeSet::new(),
        };
        Self {
            slots: vec![None; num_slots as usize],
            tiers: [tier(0..num_memory_slots), tier(num_memory_slots..num_slots)],
            num_stored: 0,
            transfers: Vec::new(),
        }
    }

    /// Empties all slots.
    pub(crate) fn clear(&mut self) {
        let [memory, disk] = &self.tiers;
        *self = Self::new(memory.num_slots, disk.num_slots);
    }

    /// Slots with content: in memory, and on disk.
    pub(crate) fn num_full(&self) -> [usize; 2] {
        self.tiers.each_ref().map(|tier| tier.num_slots as usize - tier.free.len())
    }

    pub(crate) fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }

    pub(crate) fn take_transfers(&mut self) -> Vec<Transfer> {
        std::mem::take(&mut self.transfers)
    }

    /// Moves the node's content out of a block. Tells `moved` the new slot of each content that moves, this one and those that make room
    /// for it. `None`: it is lost.
    pub(crate) fn store(&mut self, block_id: BlockId, node: NodeId, mut moved: impl FnMut(NodeId, Option<SlotId>)) {
        let slot = self.make_room(0, &mut moved);
        if let Some(slot) = slot {
            self.num_stored += 1;
            self.fill(slot, self.num_stored, node);
            self.transfers.push(Transfer::Store { block_id, slot });
        }
        moved(node, slot);
    }

    /// Empties a slot of the tier, or of a later one if the tier has none that may be reused.
    fn make_room(&mut self, tier: usize, moved: &mut impl FnMut(NodeId, Option<SlotId>)) -> Option<SlotId> {
        let Tier { free, by_age, .. } = self.tiers.get_mut(tier)?;
        if let Some(slot) = free.pop() {
            return Some(slot);
        }
        let Some((age, from)) = by_age.pop_first() else { return self.make_room(tier + 1, moved) };
        let (_, node) = self.slots[from as usize].take().expect("invariant: a slot with an age is full");
        let to = self.make_room(tier + 1, moved);
        if let Some(to) = to {
            self.fill(to, age, node);
            self.transfers.push(Transfer::Demote { from, to });
        }
        moved(node, to);
        Some(from)
    }

    fn fill(&mut self, slot: SlotId, age: u64, node: NodeId) {
        self.slots[slot as usize] = Some((age, node));
        self.unpin(slot);
    }

    /// Keeps a slot's content where it is until `unpin`, `load` or `forget`.
    pub(crate) fn pin(&mut self, slot: SlotId) {
        if let Some((age, _)) = self.slots[slot as usize] {
            self.tier_of(slot).by_age.remove(&(age, slot));
        }
    }

    /// Ends `pin`.
    pub(crate) fn unpin(&mut self, slot: SlotId) {
        if let Some((age, _)) = self.slots[slot as usize] {
            self.tier_of(slot).by_age.insert((age, slot));
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
        self.tier_of(slot).free.push(slot);
    }

    fn tier_of(&mut self, slot: SlotId) -> &mut Tier {
        let [memory, disk] = &mut self.tiers;
        if slot < memory.num_slots { memory } else { disk }
    }

    /// Panics unless the slots are counted right. `slot_of`: the slot that a node says it has.
    pub(crate) fn audit(&self, num_nodes_with_slot: usize, slot_of: impl Fn(NodeId) -> Option<SlotId>) {
        let full = || self.slots.iter().zip(0..).filter_map(|(slot, id)| slot.map(|(age, node)| (id, age, node)));
        for (slot, _, node) in full() {
            assert_eq!(slot_of(node), Some(slot), "the node of slot {slot}");
        }
        assert_eq!(full().count(), num_nodes_with_slot);
        let mut first = 0;
        for tier in &self.tiers {
            let end = first + tier.num_slots;
            let ages: BTreeSet<_> =
                full().filter(|full| (first..end).contains(&full.0)).map(|full| (full.1, full.0)).collect();
            assert_eq!(tier.by_age, ages, "a slot is pinned, or in the wrong tier");
            assert!(tier.free.iter().all(|slot| (first..end).contains(slot) && self.slots[*slot as usize].is_none()));
            assert_eq!(tier.free.len() + ages.len(), tier.num_slots as usize);
            first = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// The contents as a worker has them, named by the node that they belong to.
    struct World {
        offload: Offload,
        slots: Vec<Option<NodeId>>,
        slot_of: HashMap<NodeId, SlotId>,
        num_stored: u32,
    }

    impl World {
        fn new(num_memory_slots: u32, num_disk_slots: u32) -> Self {
            Self {
                offload: Offload::new(num_memory_slots, num_disk_slots),
                slots: vec![None; (num_memory_slots + num_disk_slots) as usize],
                slot_of: HashMap::new(),
                num_stored: 0,
            }
        }

        /// Evicts a new node from a block that has its number, and makes the transfers.
        fn store(&mut self) {
            let node = NodeId(self.num_stored);
            self.num_stored += 1;
            self.offload.store(node.0, node, |node, slot| {
                match slot {
                    Some(slot) => self.slot_of.insert(node, slot),
                    None => self.slot_of.remove(&node),
                };
            });
            for transfer in self.offload.take_transfers() {
                match transfer {
                    Transfer::Store { block_id, slot } => self.slots[slot as usize] = Some(NodeId(block_id)),
                    Transfer::Demote { from, to } => self.slots[to as usize] = self.slots[from as usize].take(),
                    Transfer::Load { .. } => unreachable!("loads are made at once"),
                }
            }
        }

        /// The nodes with a slot, those in memory before those on disk, each in the order of their eviction.
        fn kept(&self) -> [Vec<u32>; 2] {
            let [memory, _] = &self.offload.tiers;
            let (mut in_memory, mut on_disk): (Vec<_>, Vec<_>) =
                self.slot_of.iter().partition(|(_, slot)| **slot < memory.num_slots);
            [&mut in_memory, &mut on_disk].map(|nodes| {
                nodes.sort_unstable();
                nodes.iter().map(|(node, _)| node.0).collect()
            })
        }
    }

    #[test]
    fn memory_has_what_was_evicted_last_and_the_disk_what_was_evicted_before() {
        let mut world = World::new(2, 3);
        (0..8).for_each(|_| world.store());
        assert_eq!(world.kept(), [vec![6, 7], vec![3, 4, 5]]);
        assert_eq!(world.offload.num_full(), [2, 3]);
    }

    #[test]
    fn one_tier_alone_keeps_what_was_evicted_last() {
        for (memory, disk) in [(3, 0), (0, 3)] {
            let mut world = World::new(memory, disk);
            (0..8).for_each(|_| world.store());
            assert_eq!(world.kept().concat(), [5, 6, 7]);
        }
        let mut nowhere = World::new(0, 0);
        nowhere.store();
        assert!(nowhere.slot_of.is_empty());
    }

    #[test]
    fn what_is_pinned_in_memory_stays_and_the_rest_goes_to_disk() {
        let mut world = World::new(2, 2);
        (0..2).for_each(|_| world.store());
        (0..2).for_each(|slot| world.offload.pin(slot));
        (0..3).for_each(|_| world.store());
        assert_eq!(world.kept(), [vec![0, 1], vec![3, 4]]);
    }

    proptest! {
        /// With any numbers of slots, and any slots that are loaded or pinned meanwhile.
        #[test]
        fn each_node_finds_its_content_in_its_slot(
            num_memory_slots in 0..5u32,
            num_disk_slots in 0..5u32,
            events in prop::collection::vec((0..4u8, any::<prop::sample::Index>()), 0..80),
        ) {
            let mut world = World::new(num_memory_slots, num_disk_slots);
            let mut pinned = Vec::new();
            for (kind, index) in events {
                let mut nodes: Vec<_> = world.slot_of.keys().copied().collect();
                nodes.sort_unstable();
                match kind {
                    2 if !nodes.is_empty() => {
                        let node = *index.get(&nodes);
                        let slot = world.slot_of.remove(&node).unwrap();
                        pinned.retain(|(_, other)| *other != node);
                        world.offload.load(slot, 0);
                        prop_assert_eq!(world.offload.take_transfers(), [Transfer::Load { slot, block_id: 0 }]);
                        prop_assert_eq!(world.slots[slot as usize].take(), Some(node));
                    }
                    3 if !nodes.is_empty() => {
                        let slot = world.slot_of[index.get(&nodes)];
                        world.offload.pin(slot);
                        pinned.push((slot, *index.get(&nodes)));
                    }
                    _ => world.store(),
                }
                for (slot, node) in &pinned {
                    prop_assert_eq!(world.slot_of.get(node), Some(slot));
                }
                for (node, slot) in &world.slot_of {
                    prop_assert_eq!(world.slots[*slot as usize], Some(*node));
                }
            }
            pinned.iter().for_each(|(slot, _)| world.offload.unpin(*slot));
            world.offload.audit(world.slot_of.len(), |node| world.slot_of.get(&node).copied());
        }
    }
}
