//! Splits an answer of text and runs of calls.

use std::sync::Arc;

use super::argument::{ArgumentReader, len_before};
use super::call_item::{CallHead, Item, Match, is_space, match_items};
use super::expected::Expected;
use super::format::{Encoding, Run, markers};
use super::part::{Part, Rest};
use super::reasoning::{ReasoningFormat, ReasoningState, Reply};
use super::tool::Tool;

pub(super) struct RunParser {
    calls: Option<CallSyntax>,
    tools: Arc<[Tool]>,
    reasoning: Option<ReasoningFormat>,
    reply: Option<Reply>,
    stage: Stage,
    /// Text that is not decided yet.
    pending: String,
    parts: Vec<Part>,
    num_calls: usize,
    /// Whether the last part belongs to a call or ends the reply: whitespace after it is content only if text follows.
    after_marker: bool,
    only_calls: bool,
}

/// The items of a format, split at the points between which the parser matches.
struct CallSyntax {
    encoding: Encoding,
    trigger: Option<&'static str>,
    /// With which a run without markers starts.
    first_bracket: Option<&'static str>,
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
    Arguments(ArgumentReader),
    /// After the arguments of a call.
    Closing,
    /// After a call.
    Between,
}

impl CallSyntax {
    fn new(run: &Run) -> Self {
        let (head, tail) = run.call_items();
        Self {
            encoding: run.encoding(),
            trigger: run.trigger(),
            first_bracket: run.is_bare().then(|| run.first_bracket()),
            first: run.hint.map(Item::Hint).into_iter().chain(markers(run.open)).chain(head.clone()).collect(),
            tail,
            next: markers(run.separator).chain(head).collect(),
            close: markers(run.close).collect(),
        }
    }
}

impl RunParser {
    pub(super) fn new(expected: Expected) -> Self {
        let stage = match expected.reasoning_state {
            ReasoningState::Started(_) => Stage::Reasoning { begun: false },
            ReasoningState::Off | ReasoningState::Possible(_) => Stage::Start { after_reasoning: false },
        };
        Self {
            calls: expected.calls.and_then(|format| format.run()).map(CallSyntax::new),
            tools: expected.tools,
            reasoning: expected.reasoning_state.format(),
            reply: expected.reply,
            stage,
            pending: String::new(),
            parts: Vec::new(),
            num_calls: 0,
            after_marker: false,
            only_calls: expected.only_calls,
        }
    }

    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.pending.push_str(text);
        while self.advance() {}
        std::mem::take(&mut self.parts)
    }

    pub(super) fn is_in_content(&self) -> bool {
        matches!(self.stage, Stage::Start { .. } | Stage::Text)
    }

    pub(super) fn is_within_thoughts(&self) -> bool {
        matches!(self.stage, Stage::Reasoning { .. })
    }

    pub(super) fn finish(mut self) -> Rest {
        let is_layout = self.pending.chars().all(is_space);
        match self.stage {
            Stage::Reasoning { .. } => self.reason(self.pending.len()),
            Stage::Arguments(_) => return Rest { parts: self.parts, is_cut: true },
            // The rest is the start of the markers that end the call.
            Stage::Closing => {}
            Stage::Between if self.is_closing() => {}
            Stage::Start { after_reasoning: true } if is_layout => {}
            _ if is_layout && self.after_marker => {}
            // `max_tokens` cut the answer inside a call's head.
            _ if self.only_calls => {}
            _ => self.show(self.pending.len()),
        }
        Rest { parts: self.parts, is_cut: false }
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
            Stage::Arguments(reader) => {
                let read = reader.push(&self.pending);
                if read.ends {
                    self.stage = Stage::Closing;
                }
                self.take(read.bytes);
                if !read.json.is_empty() {
                    self.parts.push(Part::ToolCallArguments { index: self.num_calls - 1, fragment: read.json });
                }
                read.ends
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
        if let Some(format) = self.reasoning.filter(|format| after_reasoning && !format.next_message.is_empty()) {
            if rest.starts_with(format.next_message) {
                self.take(layout + format.next_message.len());
                return true;
            }
            if format.next_message.starts_with(rest) {
                return false;
            }
        }
        if let Some(format) = self.reasoning.filter(|_| !after_reasoning) {
            if rest.starts_with(format.open) {
                self.take(layout + format.open.len());
                self.stage = Stage::Reasoning { begun: false };
                return true;
            }
            // Some models end thoughts that they have not started.
            if rest.starts_with(format.close) {
                self.take(layout + format.close.len());
                self.stage = Stage::Start { after_reasoning: true };
                return true;
            }
            if format.open.starts_with(rest) || format.close.starts_with(rest) {
                return false;
            }
        }
        if let Some(reply) = self.reply.filter(|reply| !reply.open.is_empty()) {
            if rest.starts_with(reply.open) {
                self.take(layout + reply.open.len());
                self.pass_reply_marker();
                return true;
            }
            if reply.open.starts_with(rest) {
                return false;
            }
        }
        let bracket = self.calls.as_ref().and_then(|calls| calls.first_bracket);
        let is_call = bracket.is_some_and(|bracket| rest.starts_with(bracket));
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
                self.reason(settled_len(&self.pending, close));
                false
            }
        }
    }

    fn text(&mut self) -> bool {
        let trigger = self.calls.as_ref().and_then(|calls| calls.trigger);
        let ends = self.reply.iter().flat_map(|reply| reply.close.iter().copied());
        let markers = trigger.into_iter().chain(ends);
        match markers.clone().filter_map(|marker| Some((self.pending.find(marker)?, marker))).min() {
            Some((start, marker)) => {
                self.show(trimmed_len(&self.pending[..start]));
                if Some(marker) == trigger {
                    self.stage = Stage::Opening;
                } else {
                    self.take(self.pending.find(marker).map_or(0, |start| start + marker.len()));
                    self.after_marker = true;
                    self.pass_reply_marker();
                }
                true
            }
            None => {
                let has_markers = markers.clone().next().is_some();
                let settled = markers.map(|marker| settled_len(&self.pending, marker)).min();
                // Whitespace before a marker is not content.
                self.show(if has_markers { settled.unwrap_or(0) } else { self.pending.len() });
                false
            }
        }
    }

    /// A run without markers may follow the markers of a reply.
    fn pass_reply_marker(&mut self) {
        let is_bare = self.calls.as_ref().is_some_and(|calls| calls.first_bracket.is_some());
        self.stage = if is_bare { Stage::Start { after_reasoning: true } } else { Stage::Text };
    }

    fn open(&mut self) -> bool {
        match self.calls.as_ref().map_or(Match::Not, |calls| match_items(&calls.first, &self.pending)) {
            Match::Full { bytes, call } => self.begin_call(bytes, call),
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
            Match::Full { bytes, call } => self.begin_call(bytes, call),
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

    fn begin_call(&mut self, head_bytes: usize, call: CallHead) {
        self.take(head_bytes);
        if let Some(calls) = &self.calls {
            self.stage = Stage::Arguments(ArgumentReader::new(calls.encoding, &self.tools, &call.name));
        }
        self.parts.push(Part::ToolCallStart { index: self.num_calls, name: call.name, id: call.id });
        self.num_calls += 1;
        self.after_marker = true;
    }

    fn show(&mut self, bytes: usize) {
        if bytes > 0 {
            let text = self.take(bytes);
            self.parts.push(Part::Content(text));
            self.after_marker = false;
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
fn settled_len(text: &str, marker: &str) -> usize {
    trimmed_len(&text[..len_before(text, marker)])
}
