//! Detects a model's tool-call format from what its chat template writes.

use serde_json::Value;

use super::call_item::Item;
use super::format::{Encoding, Format, Layout};
use super::parser::{AnswerParser, Expected};
use super::part::Part;
use super::reasoning::{ReasoningFormat, ReasoningState};
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
    /// The first format that reads exactly these calls from the text of a message. `reasoning`: of the model, whose
    /// thoughts may precede the calls.
    pub(in crate::text) fn of_calls(
        text: &str,
        calls: &[WrittenCall<'_>],
        reasoning: Option<ReasoningFormat>,
    ) -> Option<&'static Self> {
        FORMATS.iter().find(|format| format.reads(text, calls, reasoning))
    }

    fn reads(&'static self, text: &str, calls: &[WrittenCall<'_>], reasoning: Option<ReasoningFormat>) -> bool {
        let tool =
            |call: &WrittenCall<'_>| Tool { name: call.name.to_owned(), parameters: Some(call.parameters.clone()) };
        let expected = Expected {
            calls: Some(self),
            tools: calls.iter().map(tool).collect(),
            reasoning_state: reasoning.map_or(ReasoningState::Off, ReasoningState::Possible),
            reply: None,
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

    /// The only format that has these tokens: those of its markers that look like special tokens, if it has several.
    pub(in crate::text) fn of_vocabulary(is_token: impl Fn(&str) -> bool) -> Option<&'static Self> {
        let has_tokens = |format: &&Self| {
            let markers = format.markers();
            let tokens: Vec<_> = markers.iter().filter(|marker| marker.starts_with("<|")).collect();
            !format.is_bare() && !tokens.is_empty() && tokens.iter().all(|marker| is_token(marker))
        };
        let mut found = FORMATS.iter().filter(has_tokens);
        found.next().filter(|_| found.next().is_none())
    }
}

#[cfg(test)]
#[path = "detect_tests.rs"]
mod tests;
