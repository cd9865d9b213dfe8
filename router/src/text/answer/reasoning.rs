//! The markers around the reasoning that a model may write before its answer.

/// The markers around a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasoningFormat {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
    /// Starts the next message, if the reasoning is a message of its own.
    pub(super) next_message: &'static str,
}

const fn between(open: &'static str, close: &'static str) -> ReasoningFormat {
    ReasoningFormat { open, close, next_message: "" }
}

impl ReasoningFormat {
    pub(super) const ALL: [Self; 12] = [
        between("<think>", "</think>"),
        between("<think:opensource>", "</think:opensource>"),
        between("<mm:think>", "</mm:think>"),
        between("[THINK]", "[/THINK]"),
        between("<seed:think>", "</seed:think>"),
        between("<longcat_think>", "</longcat_think>"),
        between("<|START_THINKING|>", "<|END_THINKING|>"),
        between("<|inner_prefix|>", "<|inner_suffix|>"),
        between("<|channel>thought", "<channel|>"),
        between("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        between("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        Self { open: "<|think|>", close: "<|end|>", next_message: "<|begin|>assistant" },
    ];
}

/// The markers around the part of an answer that is for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Empty if the end of the reasoning is the start of the reply.
    pub(super) open: &'static str,
    pub(super) close: &'static [&'static str],
    /// Starts the model's reasoning, if other models write these markers around something else.
    reasoning: Option<&'static str>,
}

const fn reply(open: &'static str, close: &'static [&'static str]) -> Reply {
    Reply { open, close, reasoning: None }
}

const REPLIES: [Reply; 7] = [
    reply("<|START_RESPONSE|>", &["<|END_RESPONSE|>"]),
    Reply { reasoning: Some("<think>"), ..reply("<response>", &["</response>"]) },
    Reply { reasoning: Some("<think>"), ..reply("<answer>", &["</answer>"]) },
    reply("<|content|>", &["<|end|><|begin|>assistant"]),
    reply("<|python_start|>", &["<|python_end|>"]),
    reply("<|open|>response<|sep|>", &["<|close|>response<|sep|>", "<|close|>message<|sep|>"]),
    reply("", &["[END FINAL RESPONSE]"]),
];

impl Reply {
    pub(super) fn markers(self) -> impl Iterator<Item = &'static str> {
        [self.open].into_iter().filter(|open| !open.is_empty()).chain(self.close.iter().copied())
    }
}

/// The markers around the parts of a model's answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(super) reasoning: Option<ReasoningFormat>,
    pub(super) reply: Option<Reply>,
}

impl Frame {
    /// Detects the markers from the texts that the template contains or writes: those of a reasoning model have the markers
    /// that end thoughts.
    pub(crate) fn detect(texts: &[&str]) -> Self {
        let has = |marker: &str| texts.iter().any(|text| text.contains(marker));
        let reasoning =
            ReasoningFormat::ALL.into_iter().find(|format| has(&format!("{}{}", format.close, format.next_message)));
        let fits = |reply: &Reply| {
            let is_of_model = reply.reasoning.is_none_or(|open| reasoning.is_some_and(|format| format.open == open));
            is_of_model && has(reply.open) && reply.close.iter().all(|marker| has(marker))
        };
        Self { reasoning, reply: REPLIES.into_iter().find(fits) }
    }

    pub(super) fn markers(self) -> impl Iterator<Item = &'static str> {
        let reasoning = self.reasoning.into_iter().flat_map(ReasoningFormat::markers);
        reasoning.chain(self.reply.into_iter().flat_map(Reply::markers))
    }
}

/// Whether an answer contains reasoning, as known from the end of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReasoningState {
    /// The model has no reasoning, or the prompt has closed it.
    Off,
    /// The answer may start with reasoning.
    Possible(ReasoningFormat),
    /// The prompt has opened the reasoning.
    Started(ReasoningFormat),
}

/// How an answer's thoughts are ended when they may go on no longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ThoughtMarkers {
    /// Begins the thoughts; empty: the prompt has begun them.
    pub(crate) open: String,
    pub(crate) close: &'static str,
    /// What is written in the model's place.
    pub(crate) end: String,
    /// Whether thoughts may begin again.
    pub(crate) reopens: bool,
}

impl ReasoningFormat {
    pub(super) fn markers(self) -> impl Iterator<Item = &'static str> {
        [self.open, self.close, self.next_message].into_iter().filter(|marker| !marker.is_empty())
    }

    fn at_end_of(self, prompt: &str) -> ReasoningState {
        let prompt = prompt.trim_end();
        if prompt.ends_with(self.open) {
            ReasoningState::Started(self)
        } else if prompt.ends_with(self.close) {
            ReasoningState::Off
        } else {
            ReasoningState::Possible(self)
        }
    }
}

impl ReasoningState {
    /// The state after this rendered prompt.
    pub(crate) fn after(format: Option<ReasoningFormat>, prompt: &str) -> Self {
        format.map_or(Self::Off, |format| format.at_end_of(prompt))
    }

    /// How the reasoning is ended early, if there can be any.
    pub(super) fn thought_markers(self) -> Option<ThoughtMarkers> {
        let format = self.format()?;
        let open = if matches!(self, Self::Started(_)) { "" } else { format.open };
        let end = format!("{}{}", format.close, format.next_message);
        Some(ThoughtMarkers { open: open.to_owned(), close: format.close, end, reopens: false })
    }

    /// The format of the reasoning, if there can be any.
    pub(super) fn format(self) -> Option<ReasoningFormat> {
        match self {
            Self::Off => None,
            Self::Possible(format) | Self::Started(format) => Some(format),
        }
    }
}
