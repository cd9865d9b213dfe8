//! Running sequences offer their blocks to the prefix cache, and wake who waits for them.
//!
//! A queued sequence whose next block is being computed waits for it instead of computing it too. It waits only for one
//! that runs and is ahead of it in line, and that one waits for nobody: so nobody waits in a circle. Meanwhile that one is
//! as urgent as whoever waits for it, and has less to compute than that one would have. Out of the queue it is in nobody's way. It is woken when the last block that it shares with
//! the other is planned, or when the other leaves the worker for whatever reason.

use crate::cache::Table;
use crate::plan::SequenceId;
use crate::prefix::NodeId;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Offers every block of a sequence that is planned to its end and whose ids are known.
    pub(crate) fn share(&mut self, id: SequenceId) {
        let block_tokens = self.limits.block_tokens as usize;
        let sequence = self.sequences.get_mut(&id).expect("invariant: who advances is known");
        let Some((table, root, token_ids, num_full)) = sequence.shared_parts() else { return };
        if table.path.len() < token_ids.len() / block_tokens {
            self.cache.extend_path(&mut table.path, root, token_ids);
        }
        let offered = table.num_offered..num_full.min(table.path.len()).max(table.num_offered);
        table.num_offered = offered.end;
        let mut done = Vec::new();
        for index in offered {
            let node = table.path[index];
            // It may have been passed before its ids were known.
            if index >= table.num_passed {
                self.cache.offer(node, table.block_ids[index]);
            }
            self.cache.tree.end_promise(node, id);
            done.push(node);
        }
        for node in done {
            self.wake(node);
        }
    }

    /// Gives up the blocks of a sequence that no step reads which is planned from now on.
    pub(crate) fn pass(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("invariant: who advances is known");
        let (table, num_passed) = sequence.passed_blocks();
        self.cache.pass(table, num_passed);
    }

    /// What a sequence that leaves the worker has promised and not computed, nobody needs to wait for.
    pub(crate) fn end_promises(&mut self, id: SequenceId, table: &Table) {
        for node in &table.path[table.num_offered..] {
            if self.cache.tree.end_promise(*node, id) {
                self.wake(*node);
            }
        }
    }

    /// Takes a sequence out of the queue until `node` has been computed or is not promised any more.
    pub(crate) fn wait(&mut self, id: SequenceId, node: NodeId) {
        let sequence = self.sequence_mut(id);
        sequence.set_awaits(Some(node));
        let precedence = sequence.precedence();
        self.queue.remove(precedence);
        self.waiting.entry(node).or_default().insert(id);
        self.num_waiting += 1;
    }

    /// Who computes `node` is as urgent until it has so many tokens as the one who waits for it, or a short prompt would wait
    /// behind a long one after all.
    pub(crate) fn lend(&mut self, node: NodeId, effort: u64, until_tokens: u32) {
        if let Some(promise) = self.cache.tree.promise(node) {
            self.sequence_mut(promise.id).lend(effort, until_tokens);
        }
    }

    pub(crate) fn wake(&mut self, node: NodeId) {
        if self.num_waiting == 0 {
            return;
        }
        for id in self.waiting.remove(&node).unwrap_or_default() {
            self.num_waiting -= 1;
            let sequence = self.sequence_mut(id);
            sequence.set_awaits(None);
            let precedence = sequence.precedence();
            self.queue.insert(precedence, id);
        }
    }

    pub(crate) fn stop_waiting(&mut self, node: NodeId, id: SequenceId) {
        if let Some(ids) = self.waiting.get_mut(&node)
            && ids.remove(&id)
        {
            self.num_waiting -= 1;
            if ids.is_empty() {
                self.waiting.remove(&node);
            }
        }
    }
}
