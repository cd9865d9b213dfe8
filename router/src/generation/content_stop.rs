//! Stop strings in the content of a chat's answer. Reasoning and tool calls may contain them.

use super::stop_buffer::StopBuffer;
use super::text_stream::StopText;
use crate::text::{Part, StopMatcher, StopOutcome};

/// Ends the content of one answer at a stop string.
pub(super) struct ContentStop {
    matcher: StopMatcher,
    text: StopText,
    held: StopBuffer,
}

impl ContentStop {
    /// `stops`: none is empty.
    pub(super) fn new(stops: Vec<String>, text: StopText) -> Self {
        Self { matcher: StopMatcher::new(stops), text, held: StopBuffer::default() }
    }

    /// Cuts the parts behind a stop string, and holds back what may become part of one. Returns the stop string's position
    /// in the list if it is complete: no part follows then. `hidden`: text of a special token, which the parts do not show,
    /// but which may belong to a stop string.
    pub(super) fn apply(&mut self, hidden: &str, parts: &mut Vec<Part>) -> Option<usize> {
        let mut found = None;
        let mut kept = Vec::with_capacity(parts.len());
        for part in parts.drain(..) {
            let text = match part {
                Part::Content(text) => text,
                part => {
                    kept.push(part);
                    continue;
                }
            };
            let (text, stop) = self.push(&text, false);
            kept.extend((!text.is_empty()).then_some(Part::Content(text)));
            found = stop;
            if found.is_some() {
                break;
            }
        }
        if found.is_none() && !hidden.is_empty() {
            let (text, stop) = self.push(hidden, true);
            kept.extend((!text.is_empty()).then_some(Part::Content(text)));
            found = stop;
        }
        *parts = kept;
        found
    }

    /// What was held back, at the end of the answer.
    pub(super) fn finish(&mut self) -> Option<Part> {
        Some(self.held.release(usize::MAX)).filter(|text| !text.is_empty()).map(Part::Content)
    }

    fn push(&mut self, text: &str, hidden: bool) -> (String, Option<usize>) {
        let outcome = self.matcher.push(text);
        match (self.text, outcome) {
            (StopText::Cut, StopOutcome::Release(num_bytes)) => {
                self.held.push(text, hidden);
                (self.held.release(num_bytes), None)
            }
            (StopText::Cut, StopOutcome::Match { index, start, .. }) => {
                self.held.push(text, hidden);
                let shown = self.held.release(start);
                self.held = StopBuffer::default();
                (shown, Some(index))
            }
            (StopText::Kept | StopText::Included, outcome) => {
                let (end, stop) = match outcome {
                    StopOutcome::Release(_) => (text.len(), None),
                    StopOutcome::Match { index, end_in_piece, .. } => (end_in_piece, Some(index)),
                };
                (if hidden { String::new() } else { text[..end].to_owned() }, stop)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(text: &str) -> Part {
        Part::Content(text.to_owned())
    }

    fn stop(text: StopText) -> ContentStop {
        ContentStop::new(vec!["city".to_owned(), "<|x|>END".to_owned()], text)
    }

    #[test]
    fn only_content_is_matched() {
        let fragment = || Part::ToolCallArguments { index: 0, fragment: "{\"city\":".to_owned() };
        let reasoning = || Part::Reasoning("a city".to_owned());
        let mut stop = stop(StopText::Cut);
        let mut parts = vec![reasoning(), content("the ci"), fragment()];
        assert_eq!(stop.apply("", &mut parts), None);
        assert_eq!(parts, [reasoning(), content("the "), fragment()]);
        let mut parts = vec![content("ty!"), fragment()];
        assert_eq!(stop.apply("", &mut parts), Some(0));
        assert_eq!(parts, []);
        assert_eq!(stop.finish(), None);
    }

    #[test]
    fn text_that_became_no_stop_string_is_shown_at_the_end() {
        let mut stop = stop(StopText::Cut);
        let mut parts = vec![content("a ci")];
        assert_eq!(stop.apply("", &mut parts), None);
        assert_eq!((parts, stop.finish()), (vec![content("a ")], Some(content("ci"))));
    }

    #[test]
    fn a_special_token_may_be_part_of_a_stop_string() {
        for (text, shown) in [(StopText::Cut, "so"), (StopText::Included, "soEND")] {
            let mut stop = stop(text);
            let (mut first, mut last) = (vec![content("so")], vec![content("END more")]);
            assert_eq!(stop.apply("<|x|>", &mut first), None);
            assert_eq!(stop.apply("", &mut last), Some(1));
            let all: String = first
                .into_iter()
                .chain(last)
                .map(|part| match part {
                    Part::Content(text) => text,
                    part => panic!("{part:?}"),
                })
                .collect();
            assert_eq!(all, shown);
        }
    }
}
