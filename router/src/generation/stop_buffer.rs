//! Text that is held back because it may turn out to be part of a stop string.

use std::collections::VecDeque;

/// Held text in pieces. Stop strings may be spelled with special tokens, so their text is held too, but never shown.
#[derive(Default)]
pub(super) struct StopBuffer {
    pieces: VecDeque<(String, bool)>,
}

impl StopBuffer {
    pub(super) fn push(&mut self, text: &str, special: bool) {
        if !text.is_empty() {
            self.pieces.push_back((text.to_owned(), special));
        }
    }

    /// Removes `num_bytes` from the front and returns the visible part of them.
    pub(super) fn release(&mut self, mut num_bytes: usize) -> String {
        let mut text = String::new();
        while num_bytes > 0 {
            let Some((mut piece, special)) = self.pieces.pop_front() else { break };
            if piece.len() > num_bytes {
                self.pieces.push_front((piece.split_off(num_bytes), special));
            }
            num_bytes -= piece.len();
            if !special {
                text.push_str(&piece);
            }
        }
        text
    }
}
