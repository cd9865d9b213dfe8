//! The running generations of one request: their deltas as they arrive, or their complete texts.

use std::sync::Arc;

use futures::future::try_join_all;
use futures::{Stream, StreamExt, stream};

use super::adapter::AdapterLease;
use super::admission::Permit;
use super::chat::ToolCallIds;
use super::content_stop::ContentStop;
use super::delta::{Draft, Finish, FinishReason, PromptToken, TextDelta, TextToken};
use super::error::GenerationError;
use super::summary::{self, RequestTotal};
use super::text_stream::TextStream;
use crate::telemetry::RequestSummary;
use crate::text::{AnswerParser, Part};

/// The generations of one request. Dropping it aborts them and returns the request's permit.
pub(crate) struct Generations {
    /// In the request's order.
    pub(crate) prompts: Vec<StartedPrompt>,
    pub(crate) num_per_prompt: usize,
    /// The first prompt's generations, then the next prompt's.
    pub(super) running: Vec<Running>,
    pub(super) permit: Permit,
}

/// A prompt, as it was encoded.
pub(crate) struct StartedPrompt {
    /// As given, or as the chat template rendered it; `None` for a prompt of token ids.
    pub(crate) text: Option<Arc<str>>,
    /// After truncation.
    pub(crate) token_ids: Vec<u32>,
    /// The format of the ids of tool calls; `None` unless the prompt is a chat in which the model may call tools.
    pub(crate) tool_call_ids: Option<ToolCallIds>,
}

/// What one step added to one generation.
pub(crate) struct GenerationDelta {
    /// The generation's position among those of the request.
    pub(crate) index: usize,
    pub(crate) delta: TextDelta,
    /// The text so far of a chat's answer, split into content, reasoning and tool calls. The parser may hold text back.
    pub(crate) parts: Vec<Part>,
    /// Whether the token is one of the answer's thoughts, without their markers.
    pub(crate) is_thought: bool,
    /// Whether this is the last delta of a chat's answer, which ends within a tool call.
    pub(crate) ends_in_call: bool,
    /// With the generation's first delta, if prompt logprobs were requested.
    pub(crate) prompt_tokens: Vec<PromptToken>,
    /// With the generation's last delta.
    pub(crate) summary: Option<RequestSummary>,
    /// With the request's last delta: the sum over all generations, each prompt counted once.
    pub(crate) total: Option<RequestSummary>,
}

/// A generation that has ended.
pub(crate) struct Finished {
    pub(crate) text: String,
    pub(crate) tokens: Vec<TextToken>,
    /// Empty unless prompt logprobs were requested.
    pub(crate) prompt_tokens: Vec<PromptToken>,
    /// Draft tokens that steps verified, in the order of their positions.
    pub(crate) drafts: Vec<Draft>,
    pub(crate) finish: Finish,
    /// `None` if nothing was sampled.
    pub(crate) seed: Option<u64>,
}

impl Generations {
    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    /// Characters of all prompts that are text.
    pub(crate) fn num_prompt_characters(&self) -> usize {
        self.prompts.iter().filter_map(|prompt| prompt.text.as_ref()).map(|text| text.chars().count()).sum()
    }

    /// The seed of the first generation; `None` if nothing is sampled.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.running.first().and_then(|running| running.seed)
    }

    /// Returns when all generations have left the queue: the prompt tokens that each found in the prefix cache.
    pub(crate) async fn started(&mut self) -> Result<Vec<usize>, GenerationError> {
        try_join_all(self.running.iter_mut().map(|running| running.stream.started())).await
    }

    /// Like [`Self::started`], but the tokens of all prompts together: a prompt's first generation put into the cache what
    /// its others found there.
    pub(crate) async fn started_prompts(&mut self) -> Result<usize, GenerationError> {
        let num_per_prompt = self.num_per_prompt;
        let found = self.started().await?;
        Ok(found.chunks(num_per_prompt).filter_map(|of_prompt| of_prompt.iter().min()).sum())
    }

    /// The deltas of all generations as they arrive. Ends after the last, or after the first error.
    /// PERF: boxed, because each of the streams between a step and its event would copy a delta's 450 bytes.
    pub(crate) fn deltas(self) -> impl Stream<Item = Result<Box<GenerationDelta>, GenerationError>> + Send {
        let Self { running, num_per_prompt, permit, .. } = self;
        let mut total = RequestTotal::new(running.len(), num_per_prompt);
        let mut all: Vec<_> =
            running.into_iter().enumerate().map(|(index, running)| running.deltas(index).boxed()).collect();
        // PERF: `select_all` allocates for each item.
        let mut all = if all.len() == 1 { all.remove(0) } else { stream::select_all(all).boxed() };
        async_stream::stream! {
            let _permit = permit;
            while let Some(result) = all.next().await {
                let is_error = result.is_err();
                yield result.map(|mut delta| {
                    delta.total = delta.summary.and_then(|summary| total.add(delta.index, summary));
                    delta
                });
                if is_error {
                    break;
                }
            }
        }
    }

    /// Waits for all generations; also returns what they cost together. The first failure aborts the others.
    pub(crate) async fn collect(self) -> Result<(Vec<Finished>, RequestSummary), GenerationError> {
        let Self { running, num_per_prompt, permit: _permit, .. } = self;
        let mut total = RequestTotal::new(running.len(), num_per_prompt);
        let finished = try_join_all(running.into_iter().map(Running::collect)).await?;
        let sum = finished.iter().enumerate().filter_map(|(index, (_, summary))| total.add(index, *summary)).last();
        Ok((finished.into_iter().map(|(finished, _)| finished).collect(), sum.unwrap_or_default()))
    }
}

/// One running generation.
pub(super) struct Running {
    pub(super) stream: TextStream,
    /// The parser of a chat's answer, until its last delta.
    pub(super) parser: Option<AnswerParser>,
    /// Ends a chat's answer at its stop strings, which the stream does not have then.
    pub(super) content_stop: Option<ContentStop>,
    /// `None` if nothing is sampled.
    pub(super) seed: Option<u64>,
    pub(super) num_prompt_tokens: usize,
    /// Dropped after the stream, which aborts the sequence.
    pub(super) _adapter: Option<Arc<AdapterLease>>,
}

impl Running {
    fn deltas(self, index: usize) -> impl Stream<Item = Result<Box<GenerationDelta>, GenerationError>> + Send {
        // PERF: boxed, because `unfold` moves it for each item.
        stream::unfold(Some(Box::new(self)), move |running| async move {
            let mut running = running?;
            match running.next(index).await {
                Ok(delta) => {
                    let rest = delta.summary.is_none().then_some(running);
                    Some((Ok(delta), rest))
                }
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    async fn next(&mut self, index: usize) -> Result<Box<GenerationDelta>, GenerationError> {
        let mut delta = self.stream.next().await?;
        let is_within_thoughts =
            |parser: &Option<AnswerParser>| parser.as_ref().is_some_and(AnswerParser::is_within_thoughts);
        let begins_within = is_within_thoughts(&self.parser);
        let mut parts = self.parser.as_mut().map(|parser| parser.push(&delta.text)).unwrap_or_default();
        let is_thought = begins_within && is_within_thoughts(&self.parser);
        let mut ends_in_call = false;
        if delta.finish.is_some()
            && let Some(rest) = self.parser.take().map(AnswerParser::finish)
        {
            parts.extend(rest.parts);
            ends_in_call = rest.is_cut;
        }
        if let Some(stop) = &mut self.content_stop {
            let writes_content = self.parser.as_ref().is_some_and(AnswerParser::is_in_content);
            let hidden =
                if delta.token.special && delta.text.is_empty() && writes_content { &delta.token.text } else { "" };
            if let Some(index) = stop.apply(hidden, &mut parts) {
                let reason = FinishReason::StopString(index);
                delta.finish = Some(match delta.finish {
                    Some(finish) => Finish { reason, ..finish },
                    None => self.stream.end(reason),
                });
                ends_in_call = false;
            } else if delta.finish.is_some() {
                parts.extend(stop.finish());
            }
        }
        let prompt_tokens = self.stream.take_prompt_tokens();
        let summary = delta.finish.map(|finish| summary::of_generation(self.num_prompt_tokens, &finish));
        Ok(Box::new(GenerationDelta {
            index,
            delta,
            parts,
            is_thought,
            ends_in_call,
            prompt_tokens,
            summary,
            total: None,
        }))
    }

    async fn collect(mut self) -> Result<(Finished, RequestSummary), GenerationError> {
        let (mut text, mut tokens, mut drafts) = (String::new(), Vec::new(), Vec::new());
        loop {
            let delta = self.stream.next().await?;
            text.push_str(&delta.text);
            tokens.push(delta.token);
            drafts.extend(delta.draft);
            if let Some(finish) = delta.finish {
                let summary = summary::of_generation(self.num_prompt_tokens, &finish);
                let prompt_tokens = self.stream.take_prompt_tokens();
                return Ok((Finished { text, tokens, prompt_tokens, drafts, finish, seed: self.seed }, summary));
            }
        }
    }
}
