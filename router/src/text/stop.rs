//! Stop strings, found in the decoded text wherever token boundaries fall.

/// Finds the first stop string to become complete, and tells which text is safe from ever being part of one.
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Text that was pushed but not released.
    held: String,
    /// Bytes at the end of all text that may still belong to a match.
    max_held_bytes: usize,
}

/// What a push settles.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// So many bytes of the text not yet released can no longer be cut.
    Release(usize),
    /// A stop string is complete. `start`: its first byte in the text not yet released. `end_in_piece`: the byte after
    /// it in the text pushed last.
    Match { start: usize, end_in_piece: usize },
}

impl StopMatcher {
    /// `stops` holds no empty string.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        let max_held_bytes = stops.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        Self { stops, held: String::new(), max_held_bytes }
    }

    /// The caller releases what the outcome says.
    pub(crate) fn push(&mut self, text: &str) -> Outcome {
        if self.stops.is_empty() {
            return Outcome::Release(text.len());
        }
        let num_held_bytes = self.held.len();
        self.held.push_str(text);
        // The first to be complete wins, whatever the token boundaries; of those, the longest.
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        if let Some((end, start)) = found.min() {
            return Outcome::Match { start, end_in_piece: end - num_held_bytes };
        }
        let released = self.held.len() - self.longest_prefix_at_end();
        self.held.drain(..released);
        Outcome::Release(released)
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
                Outcome::Release(bytes) => released.extend(pending.drain(..bytes)),
                Outcome::Match { start, .. } => {
                    released.push_str(&pending[..start]);
                    return (released, true);
                }
            }
        }
        (released + &pending, false)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces() {
        assert_eq!(cut(&["END"], &["so E", "N", "D more"]), ("so ".to_owned(), true));
        assert_eq!(cut(&["END"], &["so E", "N", "d"]), ("so ENd".to_owned(), false));
    }

    #[test]
    fn possible_beginnings_are_held_back() {
        let mut matcher = StopMatcher::new(vec!["\n\nUser:".to_owned()]);
        assert_eq!(matcher.push("Hi.\n"), Outcome::Release(3));
        assert_eq!(matcher.push("\n"), Outcome::Release(0));
        assert_eq!(matcher.push("\n"), Outcome::Release(1));
        assert_eq!(matcher.push("Us"), Outcome::Release(0));
        assert_eq!(matcher.push("ing"), Outcome::Release(7));
    }

    #[test]
    fn the_first_complete_one_wins() {
        assert_eq!(cut(&["xabc", "ab"], &["xabc"]), ("x".to_owned(), true));
        assert_eq!(cut(&["b", "ab"], &["ab"]), (String::new(), true));
    }

    proptest! {
        #[test]
        fn the_cut_does_not_depend_on_where_pieces_end(
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
