//! Finds stop sequences in the decoded text, independently of token boundaries.

/// Finds the stop sequence that is completed first, and the text that cannot become part of one.
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Text that has been pushed but not released.
    held: String,
    /// Longest end of the text that may still belong to a match.
    max_held_bytes: usize,
}

/// The result of a push.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StopOutcome {
    /// This many bytes of the text that is not released yet cannot be part of a match.
    Release(usize),
    /// A stop sequence is complete. `index`: its position among the stop sequences. `start`: its first byte in the text
    /// that is not released yet. `end_in_piece`: the byte after it in the text of this push.
    Match { index: usize, start: usize, end_in_piece: usize },
}

impl StopMatcher {
    /// `stops` must not contain an empty string.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        let max_held_bytes = stops.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        Self { stops, held: String::new(), max_held_bytes }
    }

    /// Adds text. The caller must release the text that the outcome names.
    pub(crate) fn push(&mut self, text: &str) -> StopOutcome {
        if self.stops.is_empty() {
            return StopOutcome::Release(text.len());
        }
        let num_held_bytes = self.held.len();
        self.held.push_str(text);
        // The match that ends first wins; among those, the longest.
        let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        if let Some((end, start, index)) = found.min() {
            return StopOutcome::Match { index, start, end_in_piece: end - num_held_bytes };
        }
        let released = self.held.len() - self.longest_prefix_at_end();
        self.held.drain(..released);
        StopOutcome::Release(released)
    }

    /// Bytes at the end of the held text that some stop string begins with.
    fn longest_prefix_at_end(&self) -> usize {
        let first = self.held.len().saturating_sub(self.max_held_bytes);
        let starts = self.held.char_indices().map(|(index, _)| index).skip_while(|&index| index < first);
        let begins = |start: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[start..]));
        starts.into_iter().find(|&start| begins(start)).map_or(0, |start| self.held.len() - start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Text before the stop, and whether it was found.
    fn cut(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(ToString::to_string).collect());
        let (mut pending, mut released) = (String::new(), String::new());
        for piece in pieces {
            pending.push_str(piece);
            match matcher.push(piece) {
                StopOutcome::Release(bytes) => released.extend(pending.drain(..bytes)),
                StopOutcome::Match { start, .. } => {
                    released.push_str(&pending[..start]);
                    return (released, true);
                }
            }
        }
        (released + &pending, false)
    }

    #[test]
    fn a_stop_sequence_is_found_across_pieces() {
        assert_eq!(cut(&["END"], &["so E", "N", "D more"]), ("so ".to_owned(), true));
        assert_eq!(cut(&["END"], &["so E", "N", "d"]), ("so ENd".to_owned(), false));
    }

    #[test]
    fn a_possible_start_is_held_back() {
        let mut matcher = StopMatcher::new(vec!["\n\nUser:".to_owned()]);
        assert_eq!(matcher.push("Hi.\n"), StopOutcome::Release(3));
        assert_eq!(matcher.push("\n"), StopOutcome::Release(0));
        assert_eq!(matcher.push("\n"), StopOutcome::Release(1));
        assert_eq!(matcher.push("Us"), StopOutcome::Release(0));
        assert_eq!(matcher.push("ing"), StopOutcome::Release(7));
    }

    #[test]
    fn the_match_that_ends_first_wins() {
        assert_eq!(cut(&["xabc", "ab"], &["xabc"]), ("x".to_owned(), true));
        assert_eq!(cut(&["b", "ab"], &["ab"]), (String::new(), true));
    }

    proptest! {
        #[test]
        fn the_match_does_not_depend_on_how_the_text_is_cut(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let stops: Vec<_> = stops.iter().map(String::as_str).collect();
            let whole = pieces.concat();
            let chars: Vec<_> = whole.chars().map(String::from).collect();
            let by_char = cut(&stops, &chars.iter().map(String::as_str).collect::<Vec<_>>());
            let by_piece = cut(&stops, &pieces.iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert_eq!(&by_piece, &by_char);
            prop_assert_eq!(by_piece, cut(&stops, &[&whole]));
        }
    }
}
