//! Recounts what the scheduler keeps count of. For tests: the cost grows with everything there is.

use std::collections::HashMap;

use crate::scheduler::Scheduler;

impl Scheduler {
    /// Panics where a count, a reference or a place is wrong.
    pub fn audit(&self) {
        let mut holders = vec![(0, 0); self.cache.pool.num_blocks() as usize];
        let mut paths = HashMap::new();
        let (mut num_waiting, mut num_on_worker) = (0, 0);
        for (id, sequence) in &self.sequences {
            let table = sequence.table();
            for block_id in table.held() {
                let (num_holders, num_leaving) = &mut holders[*block_id as usize];
                *num_holders += 1;
                *num_leaving += u32::from(sequence.is_planned_out());
            }
            for node in &table.path {
                *paths.entry(*node).or_insert(0) += 1;
            }
            if let Some(node) = sequence.awaits() {
                num_waiting += 1;
                assert!(self.waiting[&node].contains(id), "{id:?} is not among those who wait");
                let promise = self.cache.tree.promise(node).expect("a promise for what is waited for");
                assert!(promise.precedence < sequence.precedence() && self.cache.tree.block_id(node).is_none());
                let table = self.sequences[&promise.id].table();
                assert!(table.path[table.num_offered..].contains(&node), "{id:?} waits for nobody");
            }
            num_on_worker += usize::from(sequence.stay().is_some());
        }
        assert_eq!(num_waiting, self.num_waiting);
        assert_eq!(self.queue.len() + num_waiting + num_on_worker, self.sequences.len());
        self.cache.pool.audit(&holders);
        self.cache.tree.audit(&paths, |block_id| self.cache.pool.node(block_id));
    }
}
