//! Splits an answer of messages with headers: to the user, to the model itself, and to functions.

use std::sync::Arc;

use super::argument::{ArgumentReader, len_before};
use super::call_item::{Match, match_items};
use super::format::{Addressee, Channels};
use super::part::{Part, Rest};
use super::tool::Tool;

/// Longest header. Longer text is an answer without headers.
const MAX_HEADER_BYTES: usize = 512;

pub(super) struct ChannelParser {
    channels: &'static Channels,
    tools: Arc<[Tool]>,
    stage: Stage,
    /// Text that is not decided yet.
    pending: String,
    parts: Vec<Part>,
    has_content: bool,
    has_reasoning: bool,
    num_calls: usize,
}

enum Stage {
    Header,
    /// `begun`: whether the message has had text.
    Words {
        thoughts: bool,
        begun: bool,
    },
    Arguments(ArgumentReader),
    /// After the arguments of a call.
    Skipped,
}

impl ChannelParser {
    pub(super) fn new(channels: &'static Channels, tools: Arc<[Tool]>) -> Self {
        Self {
            channels,
            tools,
            stage: Stage::Header,
            pending: String::new(),
            parts: Vec::new(),
            has_content: false,
            has_reasoning: false,
            num_calls: 0,
        }
    }

    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.pending.push_str(text);
        while self.advance() {}
        std::mem::take(&mut self.parts)
    }

    pub(super) fn is_in_content(&self) -> bool {
        matches!(self.stage, Stage::Words { thoughts: false, .. })
    }

    pub(super) fn is_within_thoughts(&self) -> bool {
        matches!(self.stage, Stage::Words { thoughts: true, .. })
    }

    pub(super) fn finish(mut self) -> Rest {
        let is_cut = matches!(self.stage, Stage::Arguments(_));
        match self.stage {
            Stage::Words { .. } => self.show(self.pending.len()),
            // An answer without any header is content; a header that `max_tokens` cut is not.
            Stage::Header if !self.has_content && !self.has_reasoning && self.num_calls == 0 => {
                let text = self.pending.trim_start();
                if !text.starts_with(['<', '>']) && !text.starts_with("to=") {
                    self.stage = Stage::Words { thoughts: false, begun: false };
                    self.show(self.pending.len());
                }
            }
            Stage::Header | Stage::Arguments(_) | Stage::Skipped => {}
        }
        Rest { parts: self.parts, is_cut }
    }

    /// Decides about the next part of `pending`. Returns false if that takes more text.
    fn advance(&mut self) -> bool {
        match &mut self.stage {
            Stage::Header => self.header(),
            Stage::Words { .. } => {
                let (len, end) = self.message_end();
                self.show(len);
                end.is_some_and(|bytes| self.end_message(bytes))
            }
            Stage::Skipped => {
                let (len, end) = self.message_end();
                self.take(len);
                end.is_some_and(|bytes| self.end_message(bytes))
            }
            Stage::Arguments(reader) => {
                let read = reader.push(&self.pending);
                if read.ends {
                    self.stage = Stage::Skipped;
                }
                self.take(read.bytes);
                if !read.json.is_empty() {
                    self.parts.push(Part::ToolCallArguments { index: self.num_calls - 1, fragment: read.json });
                }
                read.ends
            }
        }
    }

    fn header(&mut self) -> bool {
        let Channels { start, end_of_header, addressee, body: (items, _), arguments, .. } = *self.channels;
        let Some(end) = self.pending.find(end_of_header) else {
            let is_text = self.pending.len() > MAX_HEADER_BYTES;
            if is_text {
                self.stage = Stage::Words { thoughts: false, begun: false };
            }
            return is_text;
        };
        let header = self.pending[..end].rsplit(start).next().unwrap_or_default();
        let body = &self.pending[end + end_of_header.len()..];
        self.stage = match addressee(header) {
            Addressee::Model => Stage::Words { thoughts: true, begun: false },
            Addressee::Function(name) if self.tools.iter().any(|tool| tool.name == name) => {
                match match_items(items, body) {
                    Match::Full { bytes, .. } => {
                        let name = name.to_owned();
                        self.take(end + end_of_header.len() + bytes);
                        self.stage = Stage::Arguments(ArgumentReader::new(arguments, &self.tools, &name));
                        self.parts.push(Part::ToolCallStart { index: self.num_calls, name, id: None });
                        self.num_calls += 1;
                        return true;
                    }
                    Match::Unfinished => return false,
                    Match::Not => Stage::Words { thoughts: false, begun: false },
                }
            }
            Addressee::User => Stage::Words { thoughts: false, begun: false },
            // A text without a header.
            Addressee::Function(_) => {
                self.stage = Stage::Words { thoughts: false, begun: false };
                return true;
            }
        };
        self.take(end + end_of_header.len());
        true
    }

    /// The length of the text that belongs to the message, and the length of the marker that ends it.
    fn message_end(&self) -> (usize, Option<usize>) {
        let markers = || self.channels.ends.iter().copied().chain([self.channels.start]);
        let found = markers().filter_map(|marker| Some((self.pending.find(marker)?, marker.len()))).min();
        match found {
            Some((at, bytes)) => (at, Some(bytes)),
            None => (markers().map(|marker| len_before(&self.pending, marker)).min().unwrap_or(0), None),
        }
    }

    fn end_message(&mut self, marker_bytes: usize) -> bool {
        self.take(marker_bytes);
        self.stage = Stage::Header;
        true
    }

    /// Adds to the message's text. Messages are paragraphs.
    fn show(&mut self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut text = self.take(bytes);
        let Stage::Words { thoughts, begun } = &mut self.stage else { return };
        let has_any = if *thoughts { &mut self.has_reasoning } else { &mut self.has_content };
        if !std::mem::replace(begun, true) && std::mem::replace(has_any, true) {
            text.insert_str(0, "\n\n");
        }
        self.parts.push(if *thoughts { Part::Reasoning(text) } else { Part::Content(text) });
    }

    fn take(&mut self, bytes: usize) -> String {
        let rest = self.pending.split_off(bytes);
        std::mem::replace(&mut self.pending, rest)
    }
}
