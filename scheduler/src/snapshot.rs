//! The snapshots of the states that some models keep between tokens. Such a model can continue a cached prefix only where
//! a snapshot of its states was saved.
//!
//! A snapshot belongs to the node of the prefix tree at whose end it was taken, and is given up with that node's content.
//! When all are in use, a save takes the one of least value: a snapshot is worth the tokens that it saves from being computed, as
//! often as it was used, and loses against newer ones as others are given up (GreedyDual with frequencies,
//! <https://www.usenix.org/legacy/publications/library/proceedings/usits97/cao.html>). A snapshot in front of another one, where no text
//! branched off in between, is worth a small part of that: the next turn of its conversation continues at the other one.
//! `tests/hit_rate.rs` compares the policy with a model that needs no snapshots.
//!
//! INVARIANT: no snapshot has to be pinned. The worker executes plans in order, and the saves of a plan before its
//! restores, so a save never overwrites what an earlier plan, or a sequence that starts with the same plan, restores.

use std::collections::{BTreeSet, HashSet};

use crate::plan::{Save, SnapshotId};
use crate::prefix::NodeId;
use crate::resident::Residency;

/// The most uses that count.
const MAX_USES: u32 = 8;
/// Above what was given up last, a snapshot in front of another one is worth the value that it had by this. More of it keeps
/// conversations that go on from using all snapshots; less of it, edited ones from losing theirs.
const DEMOTION: u64 = 32;

#[derive(Debug)]
pub(crate) struct Snapshots {
    full: Vec<Option<Full>>,
    free: Vec<SnapshotId>,
    by_value: BTreeSet<(u64, SnapshotId)>,
    /// The value of the snapshot that was given up last for another one.
    lost_value: u64,
    /// Saves of the next plan, each to another snapshot.
    saves: Vec<PendingSave>,
}

/// What a snapshot is of.
#[derive(Clone, Copy, Debug)]
struct Full {
    node: NodeId,
    value: u64,
    /// How often it was used, and once for its save.
    num_uses: u32,
}

/// A save with the residency whose states it copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingSave {
    pub(crate) residency: Residency,
    pub(crate) save: Save,
}

impl Snapshots {
    pub(crate) fn new(num_snapshots: u32) -> Self {
        Self {
            full: vec![None; num_snapshots as usize],
            free: (0..num_snapshots).rev().collect(),
            by_value: BTreeSet::new(),
            lost_value: 0,
            saves: Vec::new(),
        }
    }

    /// Gives up all snapshots.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.full.len() as u32);
    }

    pub(crate) fn num_full(&self) -> usize {
        self.by_value.len()
    }

    /// A snapshot for `node`, and the node that loses it. `None`: there are no snapshots.
    pub(crate) fn take(&mut self, node: NodeId, num_tokens: u32) -> Option<(SnapshotId, Option<NodeId>)> {
        let mut lost = None;
        if self.free.is_empty() {
            let (value, id) = *self.by_value.first()?;
            lost = self.node(id);
            self.lost_value = self.lost_value.max(value);
            self.give_up(id);
        }
        let id = self.free.pop()?;
        self.full[id as usize] = Some(Full { node, value: 0, num_uses: 1 });
        self.by_value.insert((0, id));
        self.touch(id, num_tokens);
        Some((id, lost))
    }

    /// Counts as a use of a snapshot after `num_tokens` tokens.
    pub(crate) fn use_again(&mut self, id: SnapshotId, num_tokens: u32) {
        self.change(id, |full| full.num_uses = MAX_USES.min(full.num_uses + 1));
        self.touch(id, num_tokens);
    }

    /// Makes a snapshot after `num_tokens` tokens worth as much as it was when it was used last.
    pub(crate) fn touch(&mut self, id: SnapshotId, num_tokens: u32) {
        let lost_value = self.lost_value;
        self.change(id, |full| full.value = lost_value + u64::from(num_tokens) * u64::from(full.num_uses));
    }

    /// Makes a snapshot in front of another one worth less, until it is used again.
    pub(crate) fn demote(&mut self, id: SnapshotId) {
        let lost_value = self.lost_value;
        self.change(id, |full| full.value = lost_value + full.value.saturating_sub(lost_value) / DEMOTION);
    }

    fn change(&mut self, id: SnapshotId, change: impl FnOnce(&mut Full)) {
        if let Some(full) = &mut self.full[id as usize] {
            self.by_value.remove(&(full.value, id));
            change(full);
            self.by_value.insert((full.value, id));
        }
    }

    /// Gives up a snapshot. What was to be saved to it is not.
    pub(crate) fn give_up(&mut self, id: SnapshotId) {
        if let Some(full) = self.full[id as usize].take() {
            self.by_value.remove(&(full.value, id));
            self.free.push(id);
            self.saves.retain(|pending| pending.save.snapshot != id);
        }
    }

    pub(crate) fn add_save(&mut self, pending: PendingSave) {
        self.saves.push(pending);
    }

    /// What the next plan has to save.
    pub(crate) fn take_saves(&mut self) -> Vec<PendingSave> {
        std::mem::take(&mut self.saves)
    }

    /// The snapshots to which the next plan would save states of these residencies.
    pub(crate) fn to_be_saved(&self, residencies: &HashSet<Residency>) -> impl Iterator<Item = SnapshotId> {
        self.saves.iter().filter(|it| residencies.contains(&it.residency)).map(|it| it.save.snapshot)
    }

    pub(crate) fn node(&self, id: SnapshotId) -> Option<NodeId> {
        self.full[id as usize].map(|full| full.node)
    }

    /// Panics unless the snapshots are counted right. `snapshot_of`: the snapshot that a node says it has.
    pub(crate) fn audit(&self, num_nodes_with_snapshot: usize, snapshot_of: impl Fn(NodeId) -> Option<SnapshotId>) {
        let full = || self.full.iter().zip(0..).filter_map(|(full, id)| full.map(|full| (id, full.value, full.node)));
        for (id, _, node) in full() {
            assert_eq!(snapshot_of(node), Some(id), "the node of snapshot {id}");
        }
        assert_eq!(full().count(), num_nodes_with_snapshot);
        assert_eq!(self.by_value, full().map(|(id, value, _)| (value, id)).collect());
        assert!(self.free.iter().all(|id| self.full[*id as usize].is_none()));
        assert_eq!(self.free.len() + self.num_full(), self.full.len(), "a snapshot leaked");
        let saved: HashSet<_> = self.saves.iter().map(|pending| pending.save.snapshot).collect();
        assert_eq!(saved.len(), self.saves.len(), "two saves to one snapshot");
        assert!(saved.iter().all(|id| self.full[*id as usize].is_some()), "a save to a free snapshot");
    }
}
