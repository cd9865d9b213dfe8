//! Markers as tokens: a grammar must name the added tokens in a marker, because text never matches them.

use std::sync::Arc;

/// A part of a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Text(&'static str),
    Token(u32),
}

/// The added tokens in a model's markers.
#[derive(Debug, Default)]
pub(super) struct MarkerTokens(Vec<(&'static str, Vec<Piece>)>);

impl MarkerTokens {
    /// `token_id`: returns the id of the added token with this text.
    pub(super) fn new(markers: Vec<&'static str>, token_id: impl Fn(&str) -> Option<u32>) -> Self {
        Self(markers.into_iter().map(|marker| (marker, pieces(marker, &token_id))).collect())
    }

    /// A marker of another format is text.
    pub(super) fn pieces(&self, marker: &'static str) -> Vec<Piece> {
        let known = self.0.iter().find(|(known, _)| *known == marker);
        known.map_or_else(|| vec![Piece::Text(marker)], |(_, pieces)| pieces.clone())
    }

    /// Ids of the tokens in these markers.
    pub(super) fn ids(&self, markers: impl Iterator<Item = &'static str>) -> Arc<[u32]> {
        let token = |piece| match piece {
            Piece::Token(id) => Some(id),
            Piece::Text(_) => None,
        };
        let mut ids: Vec<_> = markers.flat_map(|marker| self.pieces(marker)).filter_map(token).collect();
        ids.sort_unstable();
        ids.dedup();
        ids.into()
    }
}

/// Splits a marker at the longest tokens in it.
fn pieces(marker: &'static str, token_id: &impl Fn(&str) -> Option<u32>) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut text_start, mut at) = (0, 0);
    while at < marker.len() {
        let ends = (at + 1..=marker.len()).rev().filter(|&end| marker.is_char_boundary(end));
        // One character can be a token of any vocabulary.
        let mut longer = ends.take_while(|&end| marker[at..end].chars().nth(1).is_some());
        let Some((end, id)) = longer.find_map(|end| Some((end, token_id(&marker[at..end])?))) else {
            at += marker[at..].chars().next().map_or(1, char::len_utf8);
            continue;
        };
        if text_start < at {
            pieces.push(Piece::Text(&marker[text_start..at]));
        }
        pieces.push(Piece::Token(id));
        (text_start, at) = (end, end);
    }
    if text_start < marker.len() {
        pieces.push(Piece::Text(&marker[text_start..]));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_split_at_its_tokens() {
        let tokens = MarkerTokens::new(vec!["<|open|>tools<|sep|>", "</｜DSML｜invoke>", "plain"], |text| match text {
            "<|open|>" => Some(1),
            "<|sep|>" => Some(2),
            "｜DSML｜" => Some(3),
            "<" | "p" => Some(4),
            _ => None,
        });
        let (token, text) = (Piece::Token, Piece::Text);
        assert_eq!(tokens.pieces("<|open|>tools<|sep|>"), [token(1), text("tools"), token(2)]);
        assert_eq!(tokens.pieces("</｜DSML｜invoke>"), [text("</"), token(3), text("invoke>")]);
        assert_eq!(tokens.pieces("plain"), [text("plain")]);
        assert_eq!(*tokens.ids(["</｜DSML｜invoke>", "<|open|>tools<|sep|>"].into_iter()), [1, 2, 3]);
    }
}
