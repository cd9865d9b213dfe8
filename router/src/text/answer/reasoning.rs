//! The markers around the reasoning that a model may write before its answer.

/// The markers around a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasoningFormat {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

impl ReasoningFormat {
    pub(super) const ALL: [Self; 9] = [
        Self { open: "<think>", close: "</think>" },
        Self { open: "[THINK]", close: "[/THINK]" },
        Self { open: "<seed:think>", close: "</seed:think>" },
        Self { open: "<longcat_think>", close: "</longcat_think>" },
        Self { open: "<|START_THINKING|>", close: "<|END_THINKING|>" },
        Self { open: "<|inner_prefix|>", close: "<|inner_suffix|>" },
        Self { open: "<|channel>thought", close: "<channel|>" },
        Self { open: "<|open|>think<|sep|>", close: "<|close|>think<|sep|>" },
        Self { open: "Here are my reasoning steps:", close: "[BEGIN FINAL RESPONSE]" },
    ];
}

/// The markers around the part of an answer that is for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Empty if the end of the reasoning is the start of the reply.
    pub(super) open: &'static str,
    pub(super) close: &'static [&'static str],
}

const REPLIES: [Reply; 5] = [
    Reply { open: "<|START_RESPONSE|>", close: &["<|END_RESPONSE|>"] },
    Reply { open: "<response>", close: &["</response>"] },
    Reply { open: "<answer>", close: &["</answer>"] },
    Reply { open: "<|open|>response<|sep|>", close: &["<|close|>response<|sep|>", "<|close|>message<|sep|>"] },
    Reply { open: "", close: &["[END FINAL RESPONSE]"] },
];

impl Reply {
    pub(super) fn markers(self) -> impl Iterator<Item = &'static str> {
        [self.open].into_iter().filter(|open| !open.is_empty()).chain(self.close.iter().copied())
    }

    /// Detects the markers from the texts that the template contains or writes.
    pub(crate) fn detect(texts: &[&str]) -> Option<Self> {
        let has = |marker: &str| texts.iter().any(|text| text.contains(marker));
        REPLIES.into_iter().find(|reply| has(reply.open) && reply.close.iter().all(|marker| has(marker)))
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

impl ReasoningFormat {
    /// Detects the format from the texts that the template contains or writes: those of a reasoning model have the closing
    /// marker.
    pub(crate) fn detect(texts: &[&str]) -> Option<Self> {
        Self::ALL.into_iter().find(|format| texts.iter().any(|text| text.contains(format.close)))
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

    /// The format of the reasoning, if there can be any.
    pub(super) fn format(self) -> Option<ReasoningFormat> {
        match self {
            Self::Off => None,
            Self::Possible(format) | Self::Started(format) => Some(format),
        }
    }
}
