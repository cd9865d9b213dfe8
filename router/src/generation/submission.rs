//! Submits the generations of a prepared prompt to the engine.

use std::hash::BuildHasher;
use std::sync::Arc;

use super::adapter::AdapterLease;
use super::content_stop::ContentStop;
use super::context::Context;
use super::deadline::Deadlines;
use super::parameter::Checked;
use super::preparation::Prepared;
use super::running::{Running, StartedPrompt};
use super::text_stream::{SequenceOptions, ShownTokens, StopText, TextStream};
use crate::config::PriorityOrder;
use crate::sequence::{ContentSalt, ImageSpan, Sampling, SequenceRequest};
use crate::telemetry::{RequestRecord, metrics};

/// Submits the prompts of one request.
pub(super) struct Submission<'a> {
    pub(super) context: &'a Context,
    pub(super) adapter: Option<Arc<AdapterLease>>,
    pub(super) stop_text: StopText,
    pub(super) deadlines: Deadlines,
    pub(super) record: &'a RequestRecord,
}

impl Submission<'_> {
    /// Starts the generations of one prompt.
    pub(super) fn submit(&self, prepared: Prepared) -> (StartedPrompt, Vec<Running>) {
        let Context { config, generator, text: model, abandoned, .. } = self.context;
        let Prepared { prompt, images, max_new_tokens, checked, shown_token_ids, parsers, reservations } = prepared;
        let num_prompt_tokens = prompt.token_ids.len();
        let common = self.request(&prompt.token_ids, images, max_new_tokens, &checked, reservations.len());
        let mut parsers = parsers.into_iter();
        let start = |(index, reservation)| {
            let parser = parsers.next();
            let content_stop = (parser.is_some() && !checked.stop_strings.is_empty())
                .then(|| ContentStop::new(checked.stop_strings.clone(), self.stop_text));
            let seed = checked.seed_of(index);
            metrics::prompt_accepted(num_prompt_tokens, max_new_tokens);
            let shown_seed = checked.seed.map(|_| seed);
            let request = SequenceRequest {
                sampling: Sampling { seed, ..common.sampling.clone() },
                timeline: self.record.trace().map(|trace| trace.add_sequence(num_prompt_tokens, shown_seed)),
                ..common.clone()
            };
            let options = SequenceOptions {
                request,
                decoder_prefix: Arc::clone(&config.decoder_prefix),
                ignore_eos: checked.ignore_eos,
                stop_strings: if parser.is_some() { Vec::new() } else { checked.stop_strings.clone() },
                stop_text: self.stop_text,
                shown: match checked.shows_special_tokens {
                    true => ShownTokens::All,
                    false => ShownTokens::These(Arc::clone(&shown_token_ids)),
                },
                num_alternatives: checked.num_alternatives,
                deadlines: self.deadlines,
            };
            let stream = TextStream::start(generator.as_ref(), model, options, reservation, abandoned.clone());
            Running {
                stream,
                parser,
                content_stop,
                seed: shown_seed,
                num_prompt_tokens,
                _adapter: self.adapter.clone(),
            }
        };
        let running = reservations.into_iter().enumerate().map(start).collect();
        (prompt, running)
    }

    /// What the generations of a prompt ask of the engine. Their seeds differ.
    fn request(
        &self,
        token_ids: &[u32],
        images: Arc<[ImageSpan]>,
        max_new_tokens: u32,
        checked: &Checked,
        num_generations: usize,
    ) -> SequenceRequest {
        let lease = self.adapter.as_deref();
        let adapter = lease.and_then(AdapterLease::adapter).cloned();
        let adapter_hash = lease.and_then(AdapterLease::hash_elsewhere);
        let has_own = self.context.image_input().is_some_and(|input| input.has_adapter);
        let uses_own = has_own && !images.is_empty() && lease.is_none();
        // The keys and values of a prefix are the adapter's.
        let adapter_id = adapter.as_ref().map(|adapter| adapter.id);
        let cache_salt = match (&checked.cache_salt, adapter_id, adapter_hash, uses_own) {
            (None, None, None, false) => None,
            of_sequence => Some(self.context.salts.hash_one(of_sequence)),
        };
        SequenceRequest {
            prompt_token_ids: token_ids.to_vec(),
            generated_token_ids: Vec::new(),
            num_source_tokens: 0,
            max_new_tokens,
            sampling: checked.sampling.clone(),
            grammar: checked.grammar.clone(),
            num_second_text_tokens: 0,
            needs_prompt_outputs: false,
            priority: match self.context.config.priority_order {
                PriorityOrder::HighestFirst => checked.priority,
                PriorityOrder::LowestFirst => -checked.priority,
            },
            group: (num_generations > 1).then(rand::random),
            cache_salt,
            content_salts: self.content_salts(token_ids, &images),
            images,
            adapter,
            adapter_hash,
            timeline: None,
        }
    }

    /// What separates cached blocks with the same tokens: the images, or, if all tokens of a prompt attend to each other, the whole
    /// prompt.
    fn content_salts(&self, token_ids: &[u32], images: &[ImageSpan]) -> Arc<[ContentSalt]> {
        let salts = &self.context.salts;
        if self.context.image_input().is_some_and(|input| input.is_prompt_whole) {
            let hashes: Vec<_> = images.iter().map(|span| span.image.hash()).collect();
            return [ContentSalt { offset: 0, salt: salts.hash_one((token_ids, hashes)) }].into();
        }
        images.iter().map(|span| ContentSalt { offset: span.offset, salt: salts.hash_one(span.image.hash()) }).collect()
    }
}
