//! Splits a growing answer into its parts. Text that does not match the model's format is content, never an error.
//!
//! INVARIANT: the parser decides only when further text cannot change the decision, so its output does not depend on how
//! the text is cut into pieces.

use super::call_item::{Item, Match, is_space, match_items};
use super::object_scan::ObjectScan;
#[cfg(test)]
use super::part::Answer;
use super::part::{Part, Rest};
use super::reasoning::{ReasoningFormat, ReasoningState};
use super::tool_call_format::{Shape, ToolCallFormat, markers};

/// The parser of one answer.
pub(crate) struct AnswerParser {
    calls: Option<CallSyntax>,
    reasoning: Option<ReasoningFormat>,
    stage: Stage,
    /// Text that is not decided yet.
    pending: String,
    parts: Vec<Part>,
    num_calls: usize,
    /// Whether the last part belongs to a call: whitespace after a call is content only if text follows.
    after_call: bool,
    /// Whether the grammar allows nothing but calls after the reasoning: an unfinished call is then never content.
    only_calls: bool,
}

/// The items of a format, split at the points between which the parser matches.
struct CallSyntax {
    shape: &'static Shape,
    /// The first call of a run, up to its arguments.
    first: Vec<Item>,
    /// The rest of a call after its arguments.
    tail: Vec<Item>,
    /// From the end of a call to the arguments of the next one.
    next: Vec<Item>,
    close: Vec<Item>,
}

enum Stage {
    /// At the start of the answer, or of its content after the reasoning; only whitespace so far.
    Start {
        after_reasoning: bool,
    },
    /// Inside the reasoning.
    Reasoning {
        begun: bool,
    },
    Text,
    /// At a possible start of a run of calls.
    Opening,
    Arguments(ObjectScan),
    /// After the arguments of a call.
    Closing,
    /// After a call.
    Between,
}

/// Parses a whole answer in one push.
#[cfg(test)]
pub(super) fn parse_whole(text: &str, format: Option<ToolCallFormat>, reasoning_state: ReasoningState) -> Answer {
    let mut parser = AnswerParser::new(format, reasoning_state, false);
    let mut answer = Answer::default();
    answer.extend(parser.push(text, false));
    answer.end(parser.finish());
    answer
}

impl CallSyntax {
    fn new(shape: &'static Shape) -> Self {
        let mut head = shape.call_items();
        let after_arguments = head.iter().position(|&item| item == Item::Arguments).map_or(head.len(), |at| at + 1);
        let tail = head.split_off(after_arguments);
        Self {
            shape,
            first: shape.hint.map(Item::Hint).into_iter().chain(markers(shape.open)).chain(head.clone()).collect(),
            tail,
            next: markers(shape.separator).chain(head).collect(),
            close: markers(shape.close).collect(),
        }
    }
}

impl AnswerParser {
    /// `format`: `None` if the answer may not contain tool calls. `only_calls`: the grammar allows nothing else.
    pub(crate) fn new(format: Option<ToolCallFormat>, reasoning_state: ReasoningState, only_calls: bool) -> Self {
        let stage = match reasoning_state {
            ReasoningState::Started(_) => Stage::Reasoning { begun: false },
            ReasoningState::Off | ReasoningState::Possible(_) => Stage::Start { after_reasoning: false },
        };
        Self {
            calls: format.map(|format| CallSyntax::new(format.shape())),
            reasoning: reasoning_state.format(),
            stage,
            pending: String::new(),
            parts: Vec::new(),
            num_calls: 0,
            after_call: false,
            only_calls,
        }
    }

    /// Parses the next piece. A special token must be a piece of its own; special tokens other than markers of the format
    /// are dropped.
    pub(crate) fn push(&mut self, text: &str, special: bool) -> Vec<Part> {
        if !special || self.is_marker(text) {
            self.pending.push_str(text);
            while self.advance() {}
        }
        std::mem::take(&mut self.parts)
    }

    /// Ends the answer and returns the parts that were held back.
    pub(crate) fn finish(mut self) -> Rest {
        let is_layout = self.pending.chars().all(is_space);
        match self.stage {
            Stage::Reasoning { .. } => self.reason(self.pending.len()),
            Stage::Arguments(_) => return Rest { parts: self.parts, is_cut: true },
            // The rest is the start of the markers that end the call.
            Stage::Closing => {}
            Stage::Between if self.is_closing() => {}
            Stage::Start { after_reasoning: true } if is_layout => {}
            _ if is_layout && self.after_call => {}
            // `max_tokens` cut the answer inside a call's head.
            _ if self.only_calls => {}
            _ => self.show(self.pending.len()),
        }
        Rest { parts: self.parts, is_cut: false }
    }

    fn is_marker(&self, text: &str) -> bool {
        self.reasoning.is_some_and(|format| text == format.open || text == format.close)
            || self.calls.as_ref().is_some_and(|calls| calls.shape.markers().any(|marker| marker == text))
    }

    fn is_closing(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| match_items(&calls.close, &self.pending) == Match::Unfinished)
    }

    /// Decides about the next part of `pending`. Returns false if that takes more text.
    fn advance(&mut self) -> bool {
        match &mut self.stage {
            Stage::Start { after_reasoning } => {
                let after_reasoning = *after_reasoning;
                self.start(after_reasoning)
            }
            Stage::Reasoning { begun } => {
                let begun = *begun;
                self.think(begun)
            }
            Stage::Text => self.text(),
            Stage::Opening => self.open(),
            Stage::Arguments(scan) => {
                let (bytes, ends) = scan.push(&self.pending);
                if ends {
                    self.stage = Stage::Closing;
                }
                let fragment = self.take(bytes);
                if !fragment.is_empty() {
                    self.parts.push(Part::ToolCallArguments { index: self.num_calls - 1, fragment });
                }
                ends
            }
            Stage::Closing => self.close_call(),
            Stage::Between => self.next_call(),
        }
    }

    fn start(&mut self, after_reasoning: bool) -> bool {
        let rest = self.pending.trim_start_matches(is_space);
        let layout = self.pending.len() - rest.len();
        if rest.is_empty() {
            return false;
        }
        if let Some(format) = self.reasoning.filter(|_| !after_reasoning) {
            if rest.starts_with(format.open) {
                self.take(layout + format.open.len());
                self.stage = Stage::Reasoning { begun: false };
                return true;
            }
            if format.open.starts_with(rest) {
                return false;
            }
        }
        let is_call = rest.starts_with('{') && self.calls.as_ref().is_some_and(|calls| calls.shape.is_bare());
        if after_reasoning {
            self.take(layout);
        }
        self.stage = if is_call { Stage::Opening } else { Stage::Text };
        true
    }

    /// Drops whitespace at both ends of the reasoning.
    fn think(&mut self, begun: bool) -> bool {
        let Some(close) = self.reasoning.map(|format| format.close) else { return false };
        if !begun {
            self.take(self.pending.len() - self.pending.trim_start_matches(is_space).len());
            self.stage = Stage::Reasoning { begun: !self.pending.is_empty() };
        }
        match self.pending.find(close) {
            Some(end) => {
                self.reason(trimmed_len(&self.pending[..end]));
                self.take(self.pending.find(close).map_or(0, |start| start + close.len()));
                self.stage = Stage::Start { after_reasoning: true };
                true
            }
            None => {
                self.reason(settled_len(&self.pending, Some(close)));
                false
            }
        }
    }

    fn text(&mut self) -> bool {
        let Some(calls) = &self.calls else {
            self.show(self.pending.len());
            return false;
        };
        let trigger = calls.shape.trigger();
        match trigger.and_then(|trigger| self.pending.find(trigger)) {
            Some(start) => {
                self.show(trimmed_len(&self.pending[..start]));
                self.stage = Stage::Opening;
                true
            }
            None => {
                self.show(settled_len(&self.pending, trigger));
                false
            }
        }
    }

    fn open(&mut self) -> bool {
        match self.calls.as_ref().map_or(Match::Not, |calls| match_items(&calls.first, &self.pending)) {
            Match::Full { bytes, name } => self.begin_call(bytes, name),
            Match::Unfinished => return false,
            Match::Not => {
                // The first character becomes content, so that the same trigger is not found again.
                let rest = self.pending.trim_start_matches(is_space);
                let first = rest.chars().next().map_or(0, char::len_utf8);
                self.show(self.pending.len() - rest.len() + first);
                self.stage = Stage::Text;
            }
        }
        true
    }

    fn close_call(&mut self) -> bool {
        let Some(calls) = &self.calls else { return false };
        match match_items(&calls.tail, &self.pending) {
            Match::Full { bytes, .. } => {
                self.take(bytes);
                self.stage = Stage::Between;
            }
            Match::Unfinished => return false,
            Match::Not => self.stage = Stage::Text,
        }
        true
    }

    fn next_call(&mut self) -> bool {
        let Some(calls) = &self.calls else { return false };
        match match_items(&calls.next, &self.pending) {
            Match::Full { bytes, name } => self.begin_call(bytes, name),
            Match::Unfinished => return false,
            Match::Not => match match_items(&calls.close, &self.pending) {
                Match::Full { bytes, .. } => {
                    self.take(bytes);
                    self.stage = Stage::Text;
                }
                Match::Unfinished => return false,
                Match::Not => self.stage = Stage::Text,
            },
        }
        true
    }

    fn begin_call(&mut self, head_bytes: usize, name: String) {
        self.take(head_bytes);
        self.parts.push(Part::ToolCallStart { index: self.num_calls, name });
        self.num_calls += 1;
        self.after_call = true;
        self.stage = Stage::Arguments(ObjectScan::default());
    }

    fn show(&mut self, bytes: usize) {
        if bytes > 0 {
            let text = self.take(bytes);
            self.parts.push(Part::Content(text));
            self.after_call = false;
        }
    }

    fn reason(&mut self, bytes: usize) {
        if bytes > 0 {
            let text = self.take(bytes);
            self.parts.push(Part::Reasoning(text));
        }
    }

    fn take(&mut self, bytes: usize) -> String {
        let rest = self.pending.split_off(bytes);
        std::mem::replace(&mut self.pending, rest)
    }
}

fn trimmed_len(text: &str) -> usize {
    text.trim_end_matches(is_space).len()
}

/// Length of the text without a possible start of `marker` at its end and the whitespace before it.
fn settled_len(text: &str, marker: Option<&str>) -> usize {
    let is_begun =
        |start: usize| marker.is_some_and(|marker| text.is_char_boundary(start) && marker.starts_with(&text[start..]));
    let longest = marker.map_or(0, |marker| marker.len() - 1).min(text.len());
    let end = (text.len() - longest..text.len()).find(|&start| is_begun(start)).unwrap_or(text.len());
    trimmed_len(&text[..end])
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
