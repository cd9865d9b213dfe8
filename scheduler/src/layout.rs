//! How a sequence's tokens lie in KV blocks, and which of these blocks it still reads.
//!
//! With a sliding window, no step reads the blocks before the window of the next token again. They are released, so a
//! sequence holds the blocks of one window, and while a step is in flight also those that the step writes.

/// Block size and attention window: together they decide how many blocks a sequence needs.
#[derive(Clone, Copy, Debug)]
pub struct BlockLayout {
    /// Tokens in one block.
    pub block_tokens: u32,
    /// Last tokens that a token attends to, itself included; `None`: all.
    pub window_tokens: Option<u32>,
}

impl BlockLayout {
    /// Blocks that hold `num_tokens` tokens.
    pub(crate) fn num_blocks(&self, num_tokens: u32) -> usize {
        num_tokens.div_ceil(self.block_tokens) as usize
    }

    /// Leading blocks that are outside the window of the next token, after `num_computed_tokens`.
    pub(crate) fn num_blocks_before_window(&self, num_computed_tokens: u32) -> usize {
        let num_hidden_tokens = self.window_tokens.map_or(0, |window| (num_computed_tokens + 1).saturating_sub(window));
        (num_hidden_tokens / self.block_tokens) as usize
    }

    /// Most blocks that a sequence holds at a time while its `num_tokens` tokens are computed one by one.
    pub fn num_required_blocks(&self, num_tokens: u32) -> usize {
        let num_blocks = self.num_blocks(num_tokens);
        // A window that begins with the last token of a block touches the most blocks.
        self.window_tokens.map_or(num_blocks, |window| num_blocks.min(self.num_blocks(window - 1) + 1))
    }

    /// Blocks that a sequence still has to allocate at a time until all its `num_tokens` tokens are computed. Its block
    /// table has `num_table_blocks` entries, and it holds the last `num_held_blocks` of them.
    pub(crate) fn num_missing_blocks(&self, num_tokens: u32, num_table_blocks: usize, num_held_blocks: usize) -> usize {
        let num_ahead = self.num_blocks(num_tokens).saturating_sub(num_table_blocks);
        num_ahead.min(self.num_required_blocks(num_tokens).saturating_sub(num_held_blocks))
    }
}
