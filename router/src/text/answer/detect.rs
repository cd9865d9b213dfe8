//! Detects a model's tool-call format from what its chat template writes.

use serde_json::Value;

use super::call_item::Item;
use super::expected::Expected;
use super::format::{Encoding, Format, Layout};
use super::parser::AnswerParser;
use super::part::Part;
use super::reasoning::{Frame, ReasoningState};
use super::table::FORMATS;
use super::tool::Tool;

/// Longest example of a call in an instruction.
const MAX_EXAMPLE_CHARS: usize = 400;

/// A call that a template has been asked to write.
pub(in crate::text) struct WrittenCall<'a> {
    pub(in crate::text) name: &'a str,
    pub(in crate::text) arguments: &'a Value,
    /// JSON schema of the arguments.
    pub(in crate::text) parameters: &'a Value,
}

impl Format {
    /// The formats that read exactly these calls from the text of a message. `frame`: of the model's answers.
    pub(in crate::text) fn all_of_calls(
        text: &str,
        calls: &[WrittenCall<'_>],
        frame: Frame,
    ) -> impl Iterator<Item = &'static Self> {
        FORMATS.iter().filter(move |format| format.reads(text, calls, frame))
    }

    pub(in crate::text) fn reads(&'static self, text: &str, calls: &[WrittenCall<'_>], frame: Frame) -> bool {
        // The parser accepts an answer that ends before them.
        if self.run().is_some_and(|run| !run.close.iter().all(|marker| text.contains(marker))) {
            return false;
        }
        let tool =
            |call: &WrittenCall<'_>| Tool { name: call.name.to_owned(), parameters: Some(call.parameters.clone()) };
        let expected = Expected {
            calls: Some(self),
            tools: calls.iter().map(tool).collect(),
            reasoning_state: frame.reasoning.map_or(ReasoningState::Off, ReasoningState::Possible),
            reply: frame.reply,
            only_calls: false,
        };
        let mut parser = AnswerParser::new(Some(self), expected);
        let parts = parser.push(text);
        let rest = parser.finish();
        let mut read: Vec<(String, String)> = Vec::new();
        for part in parts.into_iter().chain(rest.parts) {
            match part {
                Part::ToolCallStart { name, .. } => read.push((name, String::new())),
                Part::ToolCallArguments { fragment, .. } => {
                    if let Some((_, arguments)) = read.last_mut() {
                        arguments.push_str(&fragment);
                    }
                }
                Part::Content(_) | Part::Reasoning(_) => {}
            }
        }
        let is_same = |(call, (name, arguments)): (&WrittenCall<'_>, &(String, String))| {
            call.name == name && serde_json::from_str::<Value>(arguments).is_ok_and(|read| read == *call.arguments)
        };
        !rest.is_cut && read.len() == calls.len() && calls.iter().zip(&read).all(is_same)
    }

    /// The format whose markers, all of them and in this order, an instruction contains.
    pub(in crate::text) fn of_instruction(text: &str) -> Option<&'static Self> {
        FORMATS.iter().find(|format| !format.is_bare() && format.is_described_by(text))
    }

    fn is_described_by(&self, text: &str) -> bool {
        let Layout::Run(run) = &self.layout else { return false };
        let (head, tail) = run.call_items();
        let marker = |item: Item| if let Item::Marker(marker) = item { Some(marker) } else { None };
        let mut markers: Vec<_> = run.open.to_vec();
        markers.extend(head.into_iter().chain(tail).filter_map(marker));
        if let Encoding::Tags(tags) = run.encoding() {
            let at = markers.len() - run.after.len();
            markers.splice(at..at, [tags.before_key, tags.after_value]);
        }
        markers.extend(run.close);
        text.match_indices(markers[0]).any(|(start, _)| {
            let end = text[start..].char_indices().nth(MAX_EXAMPLE_CHARS).map_or(text.len(), |(at, _)| start + at);
            let mut rest = &text[start..end];
            markers.iter().all(|marker| match rest.split_once(marker) {
                Some((_, after)) => {
                    rest = after;
                    true
                }
                None => false,
            })
        })
    }

    /// The only format with the most of these tokens: those of its markers that look like special tokens, if it has several.
    pub(in crate::text) fn of_vocabulary(is_token: impl Fn(&str) -> bool) -> Option<&'static Self> {
        let num_tokens = |format: &'static Self| {
            let markers = format.markers();
            let tokens: Vec<_> = markers.iter().filter(|marker| marker.starts_with("<|")).collect();
            let fits = !format.is_bare() && !tokens.is_empty() && tokens.iter().all(|marker| is_token(marker));
            fits.then_some((tokens.len(), format))
        };
        let found: Vec<_> = FORMATS.iter().filter_map(num_tokens).collect();
        let most = found.iter().map(|(num_tokens, _)| *num_tokens).max()?;
        let mut best = found.into_iter().filter(|(num_tokens, _)| *num_tokens == most);
        best.next().map(|(_, format)| format).filter(|_| best.next().is_none())
    }
}

#[cfg(test)]
#[path = "detect_tests.rs"]
mod tests;
