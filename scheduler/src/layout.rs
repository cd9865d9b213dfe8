//! How a sequence's tokens lie in blocks, and which of these it still needs.
//!
//! With a window, a block that stands before all that the next token sees is passed: no step that is planned from now on
//! reads it. So a sequence holds no more than the blocks of a window, and while a step is out those that it writes.

use crate::plan::Limits;

#[derive(Clone, Copy, Debug)]
pub struct BlockLayout {
    pub block_tokens: u32,
    /// A token sees so many of the last ones, itself included; `None`: all.
    pub window_tokens: Option<u32>,
}

impl BlockLayout {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self { block_tokens: limits.block_tokens, window_tokens: limits.window_tokens }
    }

    /// Blocks that hold so many tokens.
    pub fn num_blocks(&self, num_tokens: u32) -> usize {
        num_tokens.div_ceil(self.block_tokens) as usize
    }

    /// Of the first blocks, how many nobody reads any more who has computed so many tokens.
    pub(crate) fn num_passed_blocks(&self, num_computed_tokens: u32) -> usize {
        let num_unseen_tokens = self.window_tokens.map_or(0, |window| (num_computed_tokens + 1).saturating_sub(window));
        (num_unseen_tokens / self.block_tokens) as usize
    }

    /// Blocks that a sequence of so many tokens needs at a time, if it is computed token by token.
    pub fn num_required_blocks(&self, num_tokens: u32) -> usize {
        let num_blocks = self.num_blocks(num_tokens);
        // A window that begins with the last token of a block touches the most.
        self.window_tokens.map_or(num_blocks, |window| num_blocks.min(self.num_blocks(window - 1) + 1))
    }

    /// Blocks that one of `num_tokens` tokens lacks to compute them all, which stands in `num_placed_blocks`.
    pub(crate) fn num_lacking_blocks(
        &self,
        num_tokens: u32,
        num_placed_blocks: usize,
        num_held_blocks: usize,
    ) -> usize {
        let num_ahead = self.num_blocks(num_tokens).saturating_sub(num_placed_blocks);
        num_ahead.min(self.num_required_blocks(num_tokens).saturating_sub(num_held_blocks))
    }
}
