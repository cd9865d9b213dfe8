//! Takes an answer apart as it arrives. What does not fit the model's format is content; nothing is an error.
//!
//! INVARIANT: a decision is made when no further text could change it, so it does not depend on how the text was cut.

use super::format::{Shape, ToolFormat, marks};
use super::item::{Item, Match, is_space, match_items};
use super::json_scan::ObjectScan;
#[cfg(test)]
use super::part::Answer;
use super::part::{Part, Rest};
use super::reasoning::{ReasoningFormat, Thinking};

/// One answer's parser.
pub(crate) struct AnswerParser {
    calls: Option<CallSyntax>,
    reasoning: Option<ReasoningFormat>,
    stage: Stage,
    /// Not decided yet.
    pending: String,
    parts: Vec<Part>,
    num_calls: usize,
    /// The last part was a call's: whitespace after it belongs to the format unless text follows.
    after_call: bool,
}

/// A format's items, cut where the parser waits.
struct CallSyntax {
    shape: &'static Shape,
    /// The first call of a run, up to its arguments.
    first: Vec<Item>,
    /// From the arguments to the call's end.
    tail: Vec<Item>,
    /// Between two calls, and the second up to its arguments.
    next: Vec<Item>,
    close: Vec<Item>,
}

enum Stage {
    /// Nothing but whitespace so far.
    Start {
        after_thoughts: bool,
    },
    /// Within thoughts.
    Thoughts {
        begun: bool,
    },
    Text,
    /// At what may be a run of calls.
    Opening,
    Arguments(ObjectScan),
    /// After a call's arguments.
    Closing,
    /// After a call.
    Between,
}

/// The fold over one push.
#[cfg(test)]
pub(super) fn parse_whole(text: &str, format: Option<ToolFormat>, thinking: Thinking) -> Answer {
    let mut parser = AnswerParser::new(format, thinking);
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
            first: shape.hint.map(Item::Hint).into_iter().chain(marks(shape.open)).chain(head.clone()).collect(),
            tail,
            next: marks(shape.separator).chain(head).collect(),
            close: marks(shape.close).collect(),
        }
    }
}

impl AnswerParser {
    /// `format`: `None` where the request has no tools, or wants none called.
    pub(crate) fn new(format: Option<ToolFormat>, thinking: Thinking) -> Self {
        let stage = match thinking {
            Thinking::Started(_) => Stage::Thoughts { begun: false },
            Thinking::Off | Thinking::Possible(_) => Stage::Start { after_thoughts: false },
        };
        Self {
            calls: format.map(|format| CallSyntax::new(format.shape())),
            reasoning: thinking.format(),
            stage,
            pending: String::new(),
            parts: Vec::new(),
            num_calls: 0,
            after_call: false,
        }
    }

    /// Goes on with the answer. A piece is one token's text where it is special; special tokens that do not belong to
    /// the format are not content.
    pub(crate) fn push(&mut self, text: &str, special: bool) -> Vec<Part> {
        if !special || self.is_mark(text) {
            self.pending.push_str(text);
            while self.advance() {}
        }
        std::mem::take(&mut self.parts)
    }

    /// The answer is over.
    pub(crate) fn finish(mut self) -> Rest {
        let is_layout = self.pending.chars().all(is_space);
        match self.stage {
            Stage::Thoughts { .. } => self.reason(self.pending.len()),
            Stage::Arguments(_) => return Rest { parts: self.parts, is_cut: true },
            // What is left is the beginning of the call's end.
            Stage::Closing => {}
            Stage::Between if self.is_closing() => {}
            Stage::Start { after_thoughts: true } if is_layout => {}
            _ if is_layout && self.after_call => {}
            _ => self.show(self.pending.len()),
        }
        Rest { parts: self.parts, is_cut: false }
    }

    fn is_mark(&self, text: &str) -> bool {
        self.reasoning.is_some_and(|format| text == format.open || text == format.close)
            || self.calls.as_ref().is_some_and(|calls| calls.shape.marks().any(|mark| mark == text))
    }

    fn is_closing(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| match_items(&calls.close, &self.pending) == Match::Unfinished)
    }

    /// Decides the next thing; false when that takes more text.
    fn advance(&mut self) -> bool {
        match &mut self.stage {
            Stage::Start { after_thoughts } => {
                let after_thoughts = *after_thoughts;
                self.start(after_thoughts)
            }
            Stage::Thoughts { begun } => {
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

    fn start(&mut self, after_thoughts: bool) -> bool {
        let rest = self.pending.trim_start_matches(is_space);
        let layout = self.pending.len() - rest.len();
        if rest.is_empty() {
            return false;
        }
        if let Some(format) = self.reasoning.filter(|_| !after_thoughts) {
            if rest.starts_with(format.open) {
                self.take(layout + format.open.len());
                self.stage = Stage::Thoughts { begun: false };
                return true;
            }
            if format.open.starts_with(rest) {
                return false;
            }
        }
        let is_call = rest.starts_with('{') && self.calls.as_ref().is_some_and(|calls| calls.shape.is_bare());
        if after_thoughts {
            self.take(layout);
        }
        self.stage = if is_call { Stage::Opening } else { Stage::Text };
        true
    }

    /// Whitespace at both ends of the thoughts is layout.
    fn think(&mut self, begun: bool) -> bool {
        let Some(close) = self.reasoning.map(|format| format.close) else { return false };
        if !begun {
            self.take(self.pending.len() - self.pending.trim_start_matches(is_space).len());
            self.stage = Stage::Thoughts { begun: !self.pending.is_empty() };
        }
        match self.pending.find(close) {
            Some(end) => {
                self.reason(trimmed_len(&self.pending[..end]));
                self.take(self.pending.find(close).map_or(0, |start| start + close.len()));
                self.stage = Stage::Start { after_thoughts: true };
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
                // Without its first character the trigger is not found again.
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

/// Length of the text without what may be the beginning of `mark`, and the whitespace before that.
fn settled_len(text: &str, mark: Option<&str>) -> usize {
    let is_begun =
        |start: usize| mark.is_some_and(|mark| text.is_char_boundary(start) && mark.starts_with(&text[start..]));
    let longest = mark.map_or(0, |mark| mark.len() - 1).min(text.len());
    let end = (text.len() - longest..text.len()).find(|&start| is_begun(start)).unwrap_or(text.len());
    trimmed_len(&text[..end])
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
