//! The tree of prefixes. A node is one full block of token ids that follow its parent's; a path from a root spells a prefix.
//!
//! INVARIANT: two prefixes share a node only when they are equal, id by id. The index is by hash, but a hit counts only when
//! the parent is the same node and the ids are the same; and a node lives while it has a child, so its id names nobody else.
//! Of two links with one hash the later is not remembered: its prefix is computed like one that was never seen.

use std::collections::HashMap;

use crate::order::Precedence;
use crate::plan::{BlockHash, BlockId, SequenceId, TokenId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(pub u32);

/// Where a prefix starts. Prefixes with different roots differ, even if their token ids are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Root {
    /// Blocks are shared by all sequences, and cached after their last holder has gone.
    Cache,
    /// Blocks are shared within this group only, while one of its sequences is on the worker.
    Group(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    Root(Root),
    Node(NodeId),
}

/// Who is going to compute a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    pub precedence: Precedence,
    pub id: SequenceId,
}

#[derive(Debug)]
struct Node {
    parent: Parent,
    token_ids: Box<[TokenId]>,
    hash: u64,
    is_kept: bool,
    num_children: u32,
    /// Sequences on the worker whose path it is in.
    num_paths: u32,
    /// Where its keys and values stand, or will when all that is planned has been executed.
    block_id: Option<BlockId>,
    promise: Option<Promise>,
}

#[derive(Debug)]
pub(crate) struct PrefixTree {
    hash: BlockHash,
    nodes: Vec<Option<Node>>,
    unused: Vec<NodeId>,
    index: HashMap<u64, NodeId>,
}

impl PrefixTree {
    pub fn new(hash: BlockHash) -> Self {
        Self { hash, nodes: Vec::new(), unused: Vec::new(), index: HashMap::new() }
    }

    pub fn hash_function(&self) -> BlockHash {
        self.hash
    }

    pub fn find(&self, parent: Parent, token_ids: &[TokenId]) -> Option<NodeId> {
        self.verified(self.hash(parent, token_ids), parent, token_ids)
    }

    fn verified(&self, hash: u64, parent: Parent, token_ids: &[TokenId]) -> Option<NodeId> {
        let id = *self.index.get(&hash)?;
        let node = self.node(id);
        (node.parent == parent && *node.token_ids == *token_ids).then_some(id)
    }

    fn hash(&self, parent: Parent, token_ids: &[TokenId]) -> u64 {
        let parent_hash = match parent {
            Parent::Root(Root::Cache) => 0,
            Parent::Root(Root::Group(group)) => group.wrapping_mul(2).wrapping_add(1),
            Parent::Node(id) => self.node(id).hash,
        };
        (self.hash)(parent_hash, token_ids)
    }

    /// The node of these ids, made if need be, for one more path. `None`: another link has their hash.
    pub fn enter(&mut self, parent: Parent, token_ids: &[TokenId]) -> Option<NodeId> {
        let hash = self.hash(parent, token_ids);
        let id = match self.index.get(&hash) {
            Some(_) => self.verified(hash, parent, token_ids)?,
            None => self.insert(hash, parent, token_ids),
        };
        self.node_mut(id).num_paths += 1;
        Some(id)
    }

    fn insert(&mut self, hash: u64, parent: Parent, token_ids: &[TokenId]) -> NodeId {
        let is_kept = match parent {
            Parent::Root(root) => root == Root::Cache,
            Parent::Node(parent) => {
                let parent = self.node_mut(parent);
                parent.num_children += 1;
                parent.is_kept
            }
        };
        let node = Node {
            parent,
            token_ids: token_ids.into(),
            hash,
            is_kept,
            num_children: 0,
            num_paths: 0,
            block_id: None,
            promise: None,
        };
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            NodeId(self.nodes.len() as u32 - 1)
        });
        self.nodes[id.0 as usize] = Some(node);
        self.index.insert(hash, id);
        id
    }

    /// One path less.
    pub fn exit(&mut self, id: NodeId) {
        self.node_mut(id).num_paths -= 1;
        self.remove_unneeded(id);
    }

    pub fn block_id(&self, id: NodeId) -> Option<BlockId> {
        self.node(id).block_id
    }

    pub fn set_block_id(&mut self, id: NodeId, block_id: BlockId) {
        self.node_mut(id).block_id = Some(block_id);
    }

    pub fn clear_block_id(&mut self, id: NodeId) {
        self.node_mut(id).block_id = None;
        self.remove_unneeded(id);
    }

    /// Whether its block stays when nobody holds it.
    pub fn is_kept(&self, id: NodeId) -> bool {
        self.node(id).is_kept
    }

    pub fn promise(&self, id: NodeId) -> Option<Promise> {
        self.node(id).promise
    }

    /// Of two who compute the same the first in line counts: it is done first.
    pub fn make_promise(&mut self, id: NodeId, promise: Promise) {
        let node = self.node_mut(id);
        if node.promise.is_none_or(|other| promise.precedence < other.precedence) {
            node.promise = Some(promise);
        }
    }

    /// False when the promise was somebody else's, or none.
    pub fn end_promise(&mut self, id: NodeId, by: SequenceId) -> bool {
        self.node_mut(id).promise.take_if(|promise| promise.id == by).is_some()
    }

    fn remove_unneeded(&mut self, mut id: NodeId) {
        loop {
            let node = self.node(id);
            if node.block_id.is_some() || node.num_paths > 0 || node.num_children > 0 {
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

    /// Recounts everything. `paths`: how many sequences on the worker have the node in their path.
    pub fn audit(&self, paths: &HashMap<NodeId, u32>, node_of_block: impl Fn(BlockId) -> Option<NodeId>) {
        let mut num_children = vec![0; self.nodes.len()];
        let nodes = || self.nodes.iter().zip(0..).filter_map(|(node, id)| Some((NodeId(id), node.as_ref()?)));
        for (_, node) in nodes() {
            if let Parent::Node(parent) = node.parent {
                num_children[parent.0 as usize] += 1;
            }
        }
        for (id, node) in nodes() {
            assert_eq!(node.num_children, num_children[id.0 as usize], "children of {id:?}");
            assert_eq!(node.num_paths, paths.get(&id).copied().unwrap_or(0), "paths of {id:?}");
            assert!(node.block_id.is_some() || node.num_children + node.num_paths > 0, "{id:?} is of no use");
            assert_eq!(self.index.get(&node.hash), Some(&id));
            assert!(node.promise.is_none() || node.num_paths > 0, "a promise for {id:?} by nobody");
            if let Some(block_id) = node.block_id {
                assert_eq!(node_of_block(block_id), Some(id), "block {block_id}");
            }
        }
        assert_eq!(self.index.len(), nodes().count());
        assert_eq!(self.nodes.len(), self.unused.len() + nodes().count());
    }
}
