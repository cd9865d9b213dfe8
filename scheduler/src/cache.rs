//! The prefix cache: the blocks of the pool, found again by the token ids in them.
//!
//! A block is offered to the tree when all its ids are known and every step that writes it has been planned. Whoever is
//! planned later may then read it, although it may not be written yet: the worker executes plans strictly in order.
//! That the step may fail for the sequence that writes is dealt with in `fault.rs`.

use crate::layout::BlockLayout;
use crate::order::Precedence;
use crate::plan::{BlockHash, BlockId, SequenceId, TokenId};
use crate::pool::BlockPool;
use crate::prefix::{NodeId, Parent, PrefixTree, Promise, Root};

#[derive(Debug)]
pub(crate) struct Cache {
    pub pool: BlockPool,
    pub tree: PrefixTree,
    layout: BlockLayout,
}

/// Stands in a table for one that nobody reads.
const ANY_BLOCK: BlockId = 0;

/// What is known of a prefix.
#[derive(Debug, Default)]
pub(crate) struct Lookup {
    /// The blocks that can be shared, in order, and their nodes. The first `num_passed` are any: nobody reads them.
    pub block_ids: Vec<BlockId>,
    pub nodes: Vec<NodeId>,
    pub num_passed: usize,
    /// Those of the others that are available to others as long as nobody holds them.
    pub num_available: usize,
    /// What follows is being computed up to and including this node, by one who is further ahead in line.
    pub awaited: Option<NodeId>,
    /// How many blocks there are up to and including it.
    pub num_awaited_blocks: usize,
    /// Nodes looked at: what it cost.
    pub num_visited: usize,
}

impl Lookup {
    /// The blocks that one who starts with them needs.
    pub fn held(&self) -> &[BlockId] {
        &self.block_ids[self.num_passed..]
    }
}

/// What a sequence has on the worker.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub block_ids: Vec<BlockId>,
    /// How many of the first it has given up.
    pub num_passed: usize,
    /// The nodes of its first blocks: of all whose ids are known, as far as the tree remembers them.
    pub path: Vec<NodeId>,
    /// How much of the path has been offered to the tree.
    pub num_offered: usize,
}

impl Table {
    /// The blocks that are its own.
    pub fn held(&self) -> &[BlockId] {
        &self.block_ids[self.num_passed..]
    }
}

impl Cache {
    pub fn new(num_blocks: u32, layout: BlockLayout, hash: BlockHash) -> Self {
        Self { pool: BlockPool::new(num_blocks), tree: PrefixTree::new(hash), layout }
    }

    /// Another of the same kind, with nothing in it.
    pub fn emptied(&self) -> Self {
        Self::new(self.pool.num_blocks(), self.layout, self.tree.hash_function())
    }

    /// The longest prefix of `token_ids` that is computed, or being computed by one further ahead than `precedence`.
    ///
    /// Of what is computed only the blocks that a next token sees have to be there.
    pub fn look_up(&self, root: Root, token_ids: &[TokenId], precedence: Precedence) -> Lookup {
        let mut lookup = Lookup::default();
        let mut parent = Parent::Root(root);
        let mut computing: Option<SequenceId> = None;
        let (mut num_found, mut num_in_row) = (0, 0);
        for token_ids in token_ids.chunks_exact(self.layout.block_tokens as usize) {
            lookup.num_visited += 1;
            let Some(node) = self.tree.find(parent, token_ids) else { break };
            parent = Parent::Node(node);
            match (computing, self.tree.block_id(node), self.tree.promise(node)) {
                (None, Some(block_id), _) => {
                    lookup.block_ids.push(block_id);
                    lookup.nodes.push(node);
                    num_in_row += 1;
                    let num_blocks = lookup.block_ids.len();
                    if num_blocks - self.num_passed_blocks(num_blocks) <= num_in_row {
                        num_found = num_blocks;
                    }
                }
                (None, None, Some(promise)) if promise.precedence < precedence => {
                    computing = Some(promise.id);
                    lookup.awaited = Some(node);
                }
                (Some(id), None, Some(promise)) if promise.id == id => lookup.awaited = Some(node),
                (None, None, _) if self.layout.window_tokens.is_some() => {
                    lookup.block_ids.push(ANY_BLOCK);
                    lookup.nodes.push(node);
                    num_in_row = 0;
                }
                _ => break,
            }
            if computing.is_some() {
                lookup.num_awaited_blocks = lookup.num_visited;
            }
        }
        lookup.block_ids.truncate(num_found);
        lookup.nodes.truncate(num_found);
        lookup.num_passed = self.num_passed_blocks(num_found);
        let is_available = |block_id: &&BlockId| self.pool.is_available(**block_id);
        lookup.num_available = lookup.held().iter().filter(is_available).count();
        lookup
    }

    /// Of the first blocks, how many one does not need who starts with so many.
    fn num_passed_blocks(&self, num_blocks: usize) -> usize {
        self.layout.num_passed_blocks(num_blocks as u32 * self.layout.block_tokens)
    }

    /// Takes a block, evicting the least recently used if none is free.
    pub fn take(&mut self) -> Option<BlockId> {
        let (block_id, evicted) = self.pool.take()?;
        if let Some(node) = evicted {
            self.tree.clear_block_id(node);
        }
        Some(block_id)
    }

    /// The table of a sequence that starts with what was found.
    pub fn hold(&mut self, root: Root, token_ids: &[TokenId], lookup: Lookup) -> Table {
        let Lookup { block_ids, nodes, num_passed, .. } = lookup;
        let mut table = Table { block_ids, num_passed, path: Vec::new(), num_offered: nodes.len() };
        for block_id in table.held() {
            self.pool.hold(*block_id);
        }
        self.extend_path(&mut table.path, root, token_ids);
        debug_assert!(table.path.starts_with(&nodes));
        table
    }

    /// Enters the nodes of all full blocks of known ids.
    pub fn extend_path(&mut self, path: &mut Vec<NodeId>, root: Root, token_ids: &[TokenId]) {
        for token_ids in token_ids.chunks_exact(self.layout.block_tokens as usize).skip(path.len()) {
            let parent = path.last().map_or(Parent::Root(root), |node| Parent::Node(*node));
            let Some(node) = self.tree.enter(parent, token_ids) else { break };
            path.push(node);
        }
    }

    pub fn promise(&mut self, table: &Table, promise: Promise) {
        for node in &table.path[table.num_offered..] {
            if self.tree.block_id(*node).is_none() {
                self.tree.make_promise(*node, promise);
            }
        }
    }

    /// Gives `node` the block, unless it has one: then there are two with the same content, and this one is not shared.
    pub fn offer(&mut self, node: NodeId, block_id: BlockId) {
        if self.tree.block_id(node).is_none() {
            self.tree.set_block_id(node, block_id);
            self.pool.set_node(block_id, Some(node));
        }
    }

    /// Nobody may share this block any more.
    pub fn forget(&mut self, block_id: BlockId) {
        if let Some(node) = self.pool.node(block_id) {
            self.pool.set_node(block_id, None);
            self.tree.clear_block_id(node);
        }
    }

    /// Gives up the first `num_passed` blocks of a sequence, which it does not need any more.
    pub fn pass(&mut self, table: &mut Table, num_passed: usize) {
        for block_id in &table.block_ids[table.num_passed..num_passed] {
            self.pool.release(*block_id, false);
            self.drop_unkept(*block_id);
        }
        table.num_passed = num_passed;
    }

    /// Gives up what a sequence has. `left` if its blocks were told so. Returns the nodes that had no block and got one of
    /// these.
    ///
    /// From the last to the first, and all of them count as used: so of a prefix the end is evicted first, and what is idle can
    /// be reached from its root. Where a window has passed its beginning, that went before; nobody needs it to go on from the end.
    pub fn release(&mut self, table: &Table, left: bool) -> Vec<NodeId> {
        let mut regained = Vec::new();
        for index in (table.num_passed..table.block_ids.len()).rev() {
            let block_id = table.block_ids[index];
            if index < table.num_offered && self.use_node(table.path[index], block_id) {
                regained.push(table.path[index]);
            }
            self.pool.release(block_id, left);
            self.drop_unkept(block_id);
        }
        for node in table.path.iter().rev() {
            self.tree.exit(*node);
        }
        regained
    }

    /// `block_id` has the content of `node`, but may not be the block that the tree knows. Whether it is from now on.
    fn use_node(&mut self, node: NodeId, block_id: BlockId) -> bool {
        match self.tree.block_id(node) {
            Some(known) if known != block_id => self.pool.touch(known),
            // The known one was evicted, or is forgotten: then this one stands in, unless it may be part of the fault.
            None if self.pool.is_written(block_id) => {
                self.offer(node, block_id);
                return true;
            }
            _ => {}
        }
        false
    }

    fn drop_unkept(&mut self, block_id: BlockId) {
        if let Some(node) = self.pool.node(block_id)
            && !self.pool.is_held(block_id)
            && !self.tree.is_kept(node)
        {
            self.forget(block_id);
        }
    }
}
