//! What a tool-call format is made of. The formats themselves are the rows of `table.rs`.

use super::call_item::Item;

/// The format in which a model was trained, or is prompted, to write tool calls.
pub(crate) struct Format {
    /// Unique.
    pub(super) name: &'static str,
    /// Models that write it.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test writes it into the documentation"))]
    pub(super) families: &'static str,
    pub(super) layout: Layout,
    pub(crate) ids: CallIds,
}

/// The ids of calls that the model's template can read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallIds {
    /// The API's prefix, such as `call_`, and 24 hexadecimal digits.
    Prefixed,
    /// Nine letters and digits.
    Nine,
    /// Ten letters and digits.
    Ten,
    /// The model writes the id, which contains the name.
    Written,
}

pub(super) enum Layout {
    Run(Run),
    Channels(Channels),
}

/// A run of calls: `open`, calls separated by `separator`, `close`. JSON whitespace is allowed between any two items.
pub(super) struct Run {
    /// An optional marker before a run.
    pub(super) hint: Option<&'static str>,
    pub(super) open: &'static [&'static str],
    /// Before the name or, with [`Body::Object`], before the object.
    pub(super) before: &'static [&'static str],
    pub(super) body: Body,
    pub(super) after: &'static [&'static str],
    pub(super) separator: &'static [&'static str],
    pub(super) close: &'static [&'static str],
}

/// The name and the arguments of a call.
pub(super) enum Body {
    /// A JSON object with the name and the arguments under these keys.
    Object { name_key: &'static str, arguments_key: &'static str, index_key: Option<&'static str> },
    /// A JSON object whose only key is the name.
    Keyed,
    /// The name without quotes, these markers, the arguments.
    Named { after_name: &'static [&'static str], arguments: Encoding },
    /// `functions.NAME:INDEX`, which is the call's id, these markers, the arguments as JSON.
    Id { after_id: &'static [&'static str] },
    /// The name, a marker, the call's id, these markers, the arguments as JSON.
    Identified { before_id: &'static str, after_id: &'static [&'static str] },
    /// The call's id of ten letters and digits, a marker, the name, these markers, the arguments as JSON.
    AfterId { before_name: &'static str, after_name: &'static [&'static str] },
    /// The name, a marker, the call's index, these markers, the arguments.
    Indexed { before_index: &'static str, after_index: &'static [&'static str], arguments: Encoding },
}

/// How arguments are written.
#[derive(Clone, Copy)]
pub(super) enum Encoding {
    /// A JSON object.
    Json,
    Tags(&'static Tags),
    Elements(&'static Elements),
    Literals(&'static Literals),
}

/// Each argument between markers. Text is written as it is, other values as JSON.
pub(super) struct Tags {
    pub(super) before_key: &'static str,
    /// After the key, with the types of the values that follow. All start with the same character, which no key contains.
    pub(super) after_key: &'static [(&'static str, Types)],
    pub(super) before_value: &'static str,
    pub(super) after_value: &'static str,
    /// Whether a line end separates the value from the markers.
    pub(super) own_lines: bool,
}

/// Each argument is an element, as in XML. Its tag is the key. An object contains an element for each field, and a list one
/// for each item. Text is written as it is, numbers and booleans as JSON, and a field that is null is left out.
pub(super) struct Elements {
    /// Before each tag.
    pub(super) before_tag: &'static str,
    /// The tag of a list's items.
    pub(super) item: &'static str,
}

/// The types of JSON values to which a marker refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Types {
    /// All: the tool's schema says whether a value is text.
    BySchema,
    Text,
    Number,
    Boolean,
    Null,
    Object,
    Array,
    /// All but text.
    NotText,
}

/// Keys without quotes, and literals of Python or of Gemma's notation.
pub(super) struct Literals {
    /// Between a key and its value.
    pub(super) after_key: char,
    /// The end of the arguments.
    pub(super) close: char,
    /// Encloses text, which has no escapes inside. `None`: Python's quotes and escapes.
    pub(super) quote: Option<&'static str>,
}

/// An answer as messages, each with a header that names its recipient.
pub(super) struct Channels {
    /// Starts a header. The prompt ends inside the first header.
    pub(super) start: &'static str,
    /// The header's first words, which the prompt has written for the first message.
    pub(super) role: &'static str,
    /// Ends a header.
    pub(super) end_of_header: &'static str,
    /// Markers that end a message.
    pub(super) ends: &'static [&'static str],
    /// The addressee of a header.
    pub(super) addressee: fn(&str) -> Addressee<'_>,
    /// Headers, without start and end, of the model's thoughts and of texts that precede a call.
    pub(super) asides: &'static [&'static str],
    /// Ends an aside.
    pub(super) end_of_aside: &'static str,
    /// The header of an answer in words.
    pub(super) content: &'static str,
    /// The header of a call, before and after the name.
    pub(super) call: (&'static str, &'static str),
    /// The items of a call's body before and after its arguments.
    pub(super) body: (&'static [Item], &'static [Item]),
    pub(super) arguments: Encoding,
    /// Whether one answer may have several calls.
    pub(super) parallel: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Addressee<'a> {
    User,
    /// Thoughts.
    Model,
    Function(&'a str),
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl std::fmt::Debug for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Format {
    pub(in crate::text) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn run(&self) -> Option<&Run> {
        match &self.layout {
            Layout::Run(run) => Some(run),
            Layout::Channels(_) => None,
        }
    }

    pub(super) fn channels(&self) -> Option<&Channels> {
        match &self.layout {
            Layout::Run(_) => None,
            Layout::Channels(channels) => Some(channels),
        }
    }

    /// Whether a call can start only at the start of the answer, so that text that starts like a call is one.
    pub(in crate::text) fn is_bare(&self) -> bool {
        self.run().is_some_and(Run::is_bare)
    }

    /// All markers, without JSON's punctuation.
    pub(super) fn markers(&self) -> Vec<&'static str> {
        match &self.layout {
            Layout::Run(run) => run.markers(),
            Layout::Channels(channels) => {
                let (before, after) = channels.call;
                let mut all = vec![channels.start, channels.role, channels.end_of_header, channels.end_of_aside];
                all.extend([channels.content, before, after]);
                all.extend(channels.ends.iter().chain(channels.asides));
                let marker = |item: &Item| if let Item::Marker(marker) = item { Some(*marker) } else { None };
                all.extend(channels.body.0.iter().chain(channels.body.1).filter_map(marker));
                all.extend(channels.arguments.markers());
                all.retain(|marker| !marker.is_empty());
                all
            }
        }
    }
}

impl Run {
    /// The items of one call, up to its arguments and after them.
    pub(super) fn call_items(&self) -> (Vec<Item>, Vec<Item>) {
        let mut head: Vec<_> = markers(self.before).collect();
        let mut tail = Vec::new();
        match self.body {
            Body::Object { name_key, arguments_key, index_key } => {
                head.push(Item::Marker("{"));
                if let Some(key) = index_key {
                    head.extend([
                        Item::Fields(key),
                        Item::Marker(key),
                        Item::Marker(":"),
                        Item::QuotedIndex,
                        Item::Marker(","),
                    ]);
                }
                head.extend([Item::Fields(name_key), Item::Marker(name_key), Item::Marker(":"), Item::QuotedName]);
                head.extend([Item::Marker(","), Item::Fields(arguments_key), Item::Marker(arguments_key)]);
                head.extend([Item::Marker(":"), Item::Object]);
                tail.extend([Item::MoreFields, Item::Marker("}")]);
            }
            Body::Keyed => {
                head.extend([Item::Marker("{"), Item::QuotedName, Item::Marker(":"), Item::Object]);
                tail.push(Item::Marker("}"));
            }
            Body::Named { after_name, arguments } => {
                head.push(Item::BareName);
                head.extend(markers(after_name));
                head.extend(arguments.first_item());
            }
            Body::Id { after_id } => {
                head.push(Item::NameInId);
                head.extend(markers(after_id));
                head.push(Item::Object);
            }
            Body::Identified { before_id, after_id } => {
                head.extend([Item::BareName, Item::Marker(before_id), Item::Id(9)]);
                head.extend(markers(after_id));
                head.push(Item::Object);
            }
            Body::AfterId { before_name, after_name } => {
                head.extend([Item::Id(10), Item::Marker(before_name), Item::BareName]);
                head.extend(markers(after_name));
                head.push(Item::Object);
            }
            Body::Indexed { before_index, after_index, arguments } => {
                head.extend([Item::BareName, Item::Marker(before_index), Item::Index]);
                head.extend(markers(after_index));
                head.extend(arguments.first_item());
            }
        }
        tail.extend(markers(self.after));
        (head, tail)
    }

    pub(super) fn encoding(&self) -> Encoding {
        match self.body {
            Body::Named { arguments, .. } | Body::Indexed { arguments, .. } => arguments,
            Body::Object { .. } | Body::Keyed | Body::Id { .. } | Body::Identified { .. } | Body::AfterId { .. } => {
                Encoding::Json
            }
        }
    }

    /// The marker that starts a run anywhere in a text. `None`: a run starts only at the start of the text.
    pub(super) fn trigger(&self) -> Option<&'static str> {
        let first = self.hint.or(self.open.first().copied()).or(self.before.first().copied());
        first.filter(|_| !self.is_bare() || self.hint.is_some())
    }

    /// Whether a run starts with JSON's or Python's brackets.
    pub(super) fn is_bare(&self) -> bool {
        self.open.iter().chain(self.before).all(|marker| *marker == "[")
    }

    /// The bracket with which a bare run starts.
    pub(super) fn first_bracket(&self) -> &'static str {
        self.open.first().copied().unwrap_or("{")
    }

    fn markers(&self) -> Vec<&'static str> {
        let in_body = match self.body {
            Body::Named { after_name: markers, .. }
            | Body::Id { after_id: markers }
            | Body::AfterId { after_name: markers, .. }
            | Body::Identified { after_id: markers, .. }
            | Body::Indexed { after_index: markers, .. } => markers,
            Body::Object { .. } | Body::Keyed => &[],
        };
        let mut all: Vec<_> = self.hint.into_iter().collect();
        all.extend([self.open, self.before, in_body, self.after, self.close].into_iter().flatten());
        all.extend(self.encoding().markers());
        all.retain(|marker| !marker.is_empty());
        all
    }
}

impl Encoding {
    fn markers(self) -> Vec<&'static str> {
        match self {
            Self::Json => Vec::new(),
            Self::Tags(tags) => {
                let after_key = tags.after_key.iter().map(|(marker, _)| *marker);
                [tags.before_key, tags.before_value, tags.after_value].into_iter().chain(after_key).collect()
            }
            Self::Elements(elements) => vec![elements.before_tag],
            Self::Literals(literals) => literals.quote.into_iter().collect(),
        }
    }

    fn first_item(self) -> Option<Item> {
        matches!(self, Self::Json).then_some(Item::Object)
    }
}

/// One item for each marker.
pub(super) fn markers(texts: &'static [&'static str]) -> impl Iterator<Item = Item> {
    texts.iter().map(|text| Item::Marker(text))
}
