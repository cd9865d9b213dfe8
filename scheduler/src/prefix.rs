//! The prefix tree: each node is one full block of token ids after the block of its parent, so a path from a root
//! spells a prefix.
//!
//! INVARIANT: two prefixes share a node only if their token ids and content salts are equal. The index is by hash, but a hit is verified:
//! the parent must be the same node, and ids and salts must be equal. A node lives while it has a child, so a node id is never
//! reused while another node refers to it. When two different blocks have the same hash, the second one gets no node
//! and is not cached.

use std::collections::HashMap;

use crate::plan::{BlockHash, BlockId, ContentSalt, SequenceId, SlotId, SnapshotId, TokenId};
use crate::precedence::Precedence;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(pub(crate) u32);

/// The start of a prefix. Prefixes with different roots differ, even if their token ids are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Root {
    /// Blocks are shared by all sequences with this salt, and stay cached when no sequence holds them.
    Cache { salt: Option<u64> },
    /// Blocks are shared within this group, while one of its sequences is on the worker.
    Group(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    Root(Root),
    Node(NodeId),
}

/// What a sequence's blocks are functions of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content<'a> {
    pub(crate) root: Root,
    pub(crate) token_ids: &'a [TokenId],
    /// In the order of their offsets.
    pub(crate) salts: &'a [ContentSalt],
}

/// What one full block adds to the prefix before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockContent<'a> {
    token_ids: &'a [TokenId],
    /// Salts of the content that begins in the block.
    salts: &'a [ContentSalt],
}

impl<'a> Content<'a> {
    /// The full blocks at the beginning that are the same in `other`.
    pub(crate) fn num_common_blocks(self, other: Content<'_>, block_tokens: u32) -> usize {
        let pairs = self.blocks(block_tokens).zip(other.blocks(block_tokens)).filter(|_| self.root == other.root);
        pairs.take_while(|(block, other)| block == other).count()
    }

    /// The full blocks.
    pub(crate) fn blocks(self, block_tokens: u32) -> impl Iterator<Item = BlockContent<'a>> {
        let blocks = self.token_ids.chunks_exact(block_tokens as usize);
        (0..blocks.len()).map(move |index| {
            let first = index * block_tokens as usize;
            let num_before = |end: usize| self.salts.partition_point(|salt| (salt.offset as usize) < end);
            let end = first + block_tokens as usize;
            let salts = &self.salts[num_before(first)..num_before(end)];
            BlockContent { token_ids: &self.token_ids[first..end], salts }
        })
    }
}

/// The sequence that is going to compute a node's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingPrefix {
    pub(crate) precedence: Precedence,
    pub(crate) producer: SequenceId,
}

#[derive(Debug)]
struct Node {
    parent: Parent,
    token_ids: Box<[TokenId]>,
    salts: Box<[ContentSalt]>,
    hash: u64,
    /// Whether the block stays cached when no sequence holds it.
    is_kept: bool,
    num_children: u32,
    /// Sequences on the worker whose prefix includes the node.
    ref_count: u32,
    /// The block with the keys and values, written or planned to be written.
    block_id: Option<BlockId>,
    /// The slot beside the pool with the keys and values; never together with a block.
    slot: Option<SlotId>,
    pending: Option<PendingPrefix>,
    /// The snapshot of the states after the block; never without a block or a slot.
    snapshot: Option<SnapshotId>,
    /// The sequence that is going to save a snapshot.
    pending_snapshot: Option<PendingPrefix>,
}

impl Node {
    fn has_content(&self) -> bool {
        self.block_id.is_some() || self.slot.is_some()
    }
}

#[derive(Debug)]
pub(crate) struct PrefixTree {
    hash: BlockHash,
    nodes: Vec<Option<Node>>,
    unused: Vec<NodeId>,
    index: HashMap<u64, NodeId>,
}

impl PrefixTree {
    pub(crate) fn new(hash: BlockHash) -> Self {
        Self { hash, nodes: Vec::new(), unused: Vec::new(), index: HashMap::new() }
    }

    /// Removes all nodes.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.hash);
    }

    pub(crate) fn find(&self, parent: Parent, block: BlockContent<'_>) -> Option<NodeId> {
        self.verified(self.hash(parent, block), parent, block)
    }

    fn verified(&self, hash: u64, parent: Parent, block: BlockContent<'_>) -> Option<NodeId> {
        let id = *self.index.get(&hash)?;
        let node = self.node(id);
        let content = BlockContent { token_ids: &node.token_ids, salts: &node.salts };
        (node.parent == parent && content == block).then_some(id)
    }

    fn hash(&self, parent: Parent, block: BlockContent<'_>) -> u64 {
        let prefix_hash = match parent {
            Parent::Root(Root::Cache { salt }) => salt.map_or(0, |salt| salt.wrapping_mul(2).wrapping_add(2)),
            Parent::Root(Root::Group(group)) => group.wrapping_mul(2).wrapping_add(1),
            Parent::Node(id) => self.node(id).hash,
        };
        let with_salt = |hash, &ContentSalt { offset, salt }: &ContentSalt| {
            (self.hash)(hash, &[offset, salt as TokenId, (salt >> TokenId::BITS) as TokenId])
        };
        (self.hash)(block.salts.iter().fold(prefix_hash, with_salt), block.token_ids)
    }

    /// Adds a reference to the node of this block, creating the node if necessary. `None`: another node has the same
    /// hash.
    pub(crate) fn acquire(&mut self, parent: Parent, block: BlockContent<'_>) -> Option<NodeId> {
        let hash = self.hash(parent, block);
        let id = match self.index.get(&hash) {
            Some(_) => self.verified(hash, parent, block)?,
            None => self.insert(hash, parent, block),
        };
        self.node_mut(id).ref_count += 1;
        Some(id)
    }

    fn insert(&mut self, hash: u64, parent: Parent, block: BlockContent<'_>) -> NodeId {
        let is_kept = match parent {
            Parent::Root(root) => matches!(root, Root::Cache { .. }),
            Parent::Node(parent) => {
                let parent = self.node_mut(parent);
                parent.num_children += 1;
                parent.is_kept
            }
        };
        let node = Node {
            parent,
            token_ids: block.token_ids.into(),
            salts: block.salts.into(),
            hash,
            is_kept,
            num_children: 0,
            ref_count: 0,
            block_id: None,
            slot: None,
            pending: None,
            snapshot: None,
            pending_snapshot: None,
        };
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            NodeId(self.nodes.len() as u32 - 1)
        });
        self.nodes[id.0 as usize] = Some(node);
        self.index.insert(hash, id);
        id
    }

    /// Removes a reference.
    pub(crate) fn release(&mut self, id: NodeId) {
        self.node_mut(id).ref_count -= 1;
        self.remove_unneeded(id);
    }

    pub(crate) fn block_id(&self, id: NodeId) -> Option<BlockId> {
        self.node(id).block_id
    }

    /// Returns the slot that the node does not need any more.
    pub(crate) fn set_block_id(&mut self, id: NodeId, block_id: BlockId) -> Option<SlotId> {
        let node = self.node_mut(id);
        node.block_id = Some(block_id);
        node.slot.take()
    }

    /// The content is lost. Returns the snapshot that the node loses with it.
    pub(crate) fn clear_block_id(&mut self, id: NodeId) -> Option<SnapshotId> {
        self.move_out(id, None)
    }

    /// Nodes whose content is in a slot. For audits: it takes time proportional to all nodes.
    pub(crate) fn num_with_slot(&self) -> usize {
        self.nodes.iter().flatten().filter(|node| node.slot.is_some()).count()
    }

    pub(crate) fn slot(&self, id: NodeId) -> Option<SlotId> {
        self.node(id).slot
    }

    /// The content has moved to a slot, from the node's block or from another slot. `None`: it is lost. Returns the
    /// snapshot that the node loses with it.
    pub(crate) fn move_out(&mut self, id: NodeId, slot: Option<SlotId>) -> Option<SnapshotId> {
        let node = self.node_mut(id);
        (node.block_id, node.slot) = (None, slot);
        let snapshot = node.snapshot.take_if(|_| slot.is_none());
        self.remove_unneeded(id);
        snapshot
    }

    pub(crate) fn has_content(&self, id: NodeId) -> bool {
        self.node(id).has_content()
    }

    pub(crate) fn snapshot(&self, id: NodeId) -> Option<SnapshotId> {
        self.node(id).snapshot
    }

    pub(crate) fn num_children(&self, id: NodeId) -> u32 {
        self.node(id).num_children
    }

    pub(crate) fn set_snapshot(&mut self, id: NodeId, snapshot: Option<SnapshotId>) {
        self.node_mut(id).snapshot = snapshot;
    }

    /// Nodes with a snapshot. For audits: it takes time proportional to all nodes.
    pub(crate) fn num_with_snapshot(&self) -> usize {
        self.nodes.iter().flatten().filter(|node| node.snapshot.is_some()).count()
    }

    /// Whether the node's block stays cached when no sequence holds it.
    pub(crate) fn is_kept(&self, id: NodeId) -> bool {
        self.node(id).is_kept
    }

    pub(crate) fn pending(&self, id: NodeId) -> Option<PendingPrefix> {
        self.node(id).pending
    }

    /// Sets the node's producer, unless it already has one of higher precedence: that one is done first.
    pub(crate) fn set_pending(&mut self, id: NodeId, pending: PendingPrefix) {
        let node = self.node_mut(id);
        if node.pending.is_none_or(|other| pending.precedence < other.precedence) {
            node.pending = Some(pending);
        }
    }

    /// The sequence that is going to save a snapshot of the states after the node.
    pub(crate) fn pending_snapshot(&self, id: NodeId) -> Option<PendingPrefix> {
        self.node(id).pending_snapshot
    }

    /// Sets the sequence that saves the snapshot, unless there is already one of higher precedence.
    pub(crate) fn set_pending_snapshot(&mut self, id: NodeId, pending: PendingPrefix) {
        let node = self.node_mut(id);
        if node.pending_snapshot.is_none_or(|other| pending.precedence < other.precedence) {
            node.pending_snapshot = Some(pending);
        }
    }

    /// Returns whether `producer` was going to save the snapshot.
    pub(crate) fn clear_pending_snapshot(&mut self, id: NodeId, producer: SequenceId) -> bool {
        self.node_mut(id).pending_snapshot.take_if(|pending| pending.producer == producer).is_some()
    }

    /// Returns whether `producer` was the node's producer.
    pub(crate) fn clear_pending(&mut self, id: NodeId, producer: SequenceId) -> bool {
        self.node_mut(id).pending.take_if(|pending| pending.producer == producer).is_some()
    }

    fn remove_unneeded(&mut self, mut id: NodeId) {
        loop {
            let node = self.node(id);
            if node.has_content() || node.ref_count > 0 || node.num_children > 0 {
                return;
            }
            let (hash, parent) = (node.hash, node.parent);
            self.index.remove(&hash);
            self.nodes[id.0 as usize] = None;
            self.unused.push(id);
            let Parent::Node(parent) = parent else { return };
            self.node_mut(parent).num_children -= 1;
            id = parent;
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize].as_ref().expect("invariant: a node lives while something refers to it")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0 as usize].as_mut().expect("invariant: a node lives while something refers to it")
    }

    /// Panics unless all counts and links are right. `ref_counts`: for each node, the sequences that refer to it.
    pub(crate) fn audit(&self, ref_counts: &HashMap<NodeId, u32>, node_of_block: impl Fn(BlockId) -> Option<NodeId>) {
        let mut num_children = vec![0; self.nodes.len()];
        let nodes = || self.nodes.iter().zip(0..).filter_map(|(node, id)| Some((NodeId(id), node.as_ref()?)));
        for (_, node) in nodes() {
            if let Parent::Node(parent) = node.parent {
                num_children[parent.0 as usize] += 1;
            }
        }
        for (id, node) in nodes() {
            assert_eq!(node.num_children, num_children[id.0 as usize], "children of {id:?}");
            assert_eq!(node.ref_count, ref_counts.get(&id).copied().unwrap_or(0), "references to {id:?}");
            assert!(node.has_content() || node.num_children + node.ref_count > 0, "{id:?} is not needed");
            assert!(node.has_content() || node.snapshot.is_none(), "{id:?} has a snapshot without content");
            assert!(node.pending_snapshot.is_none() || node.ref_count > 0, "{id:?} waits for a snapshot in vain");
            assert!(node.block_id.is_none() || node.slot.is_none(), "{id:?} has a block and a slot");
            assert_eq!(self.index.get(&node.hash), Some(&id));
            assert!(node.pending.is_none() || node.ref_count > 0, "{id:?} is pending without a producer");
            if let Some(block_id) = node.block_id {
                assert_eq!(node_of_block(block_id), Some(id), "block {block_id}");
            }
        }
        assert_eq!(self.index.len(), nodes().count());
        assert_eq!(self.nodes.len(), self.unused.len() + nodes().count());
    }
}
