//! Checks the order in which queued sequences start.

use penstock_scheduler::{Plan, SequenceId};

use super::{Ledger, Live};
use crate::model::num_image_bytes;
use crate::submitted::Submitted;

impl Ledger {
    pub(super) fn check_queue_order(&mut self, plan: &Plan, live: &Live) {
        let Some(last_started) = plan.new_sequences.iter().map(|start| self.entries[&start.id].order).max() else {
            return;
        };
        let is_overtaken = |id: &SequenceId, queued: &Submitted| !self.knows(*id) && queued.order < last_started;
        let overtaken: Vec<_> = live.iter().filter(|(id, queued)| is_overtaken(id, queued)).collect();
        for (id, queued) in &overtaken {
            let may_await_room = self.may_await_image_room(queued, live);
            assert!(may_await_room || self.may_be_blocked(queued, live), "{id:?} was not admitted in its turn");
            let name = ["overtaken while blocked on a prefix", "overtaken while waiting for image room"];
            self.tally.add(name[usize::from(may_await_room)], 1);
        }
    }

    /// Whether there is no room for the images of this queued sequence, or of one of higher precedence.
    fn may_await_image_room(&self, queued: &Submitted, live: &Live) -> bool {
        let groups = |it: &Submitted| it.traits.images.groups();
        let known: Vec<_> = self.entries.keys().flat_map(|id| groups(&live[id])).collect();
        let fits =
            |it: &Submitted| num_image_bytes(known.iter().copied().chain(groups(it))) <= self.limits.max_image_bytes;
        let mut ahead = live.iter().filter(|(id, it)| !self.knows(**id) && it.order <= queued.order);
        !groups(queued).is_empty() && ahead.any(|(_, it)| !fits(it))
    }

    /// Whether a queued sequence can be waiting for blocks that only `id` is computing.
    pub fn is_awaited(&self, id: SequenceId, live: &Live) -> bool {
        let others: Live = live.iter().filter(|(other, _)| **other != id).map(|(id, it)| (*id, it.clone())).collect();
        let is_queued = |other: &SequenceId| !self.knows(*other);
        let waits = |it: &Submitted| self.may_be_blocked(it, live) && !self.may_be_blocked(it, &others);
        self.knows(id) && others.iter().any(|(other, it)| is_queued(other) && waits(it))
    }

    /// Whether a sequence of higher precedence is computing blocks that `queued` needs.
    fn may_be_blocked(&self, queued: &Submitted, live: &Live) -> bool {
        let block_tokens = self.limits.block_tokens as usize;
        let known = queued.known();
        let num_common_blocks = |other: &Submitted| {
            let has_same_images = |position| queued.traits.images.at(position).eq(other.traits.images.at(position));
            let other = other.known();
            let pairs = known[..known.len() - 1].iter().zip(&other).enumerate();
            let num_common = pairs.take_while(|(position, (a, b))| a == b && has_same_images(*position)).count();
            num_common / block_tokens
        };
        queued.may_look_up()
            && self.entries.iter().any(|(id, entry)| {
                let num_full = entry.num_computed_tokens as usize / block_tokens;
                let Some(computing) = live.get(id) else { return false };
                computing.scope == queued.scope && entry.order < queued.order && num_common_blocks(computing) > num_full
            })
    }
}
