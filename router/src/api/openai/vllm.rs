//! Fields that vLLM added to both routes.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::api::field::{integer, named, or_default};
use crate::config::Config;
use crate::generation::{Parameters, StopText, ValidationError};

const MAX_PROMPT_LOGPROBS: u32 = 20;

/// Fields that vLLM added to both routes.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct VllmFields {
    /// Show the ids of the prompt's and the generated tokens.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) return_token_ids: bool,
    /// Name tokens in logprobs by their ids, as `token_id:7`, instead of by their text.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) return_tokens_as_token_ids: bool,
    /// Show the prompt's logprobs, with this number of most probable alternatives, on servers that run with
    /// `--enable-prefill-logprobs`. Not in streams.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether the answer ends with the stop string that ended it.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    include_stop_str_in_output: bool,
    /// Whether special tokens are left out of the text.
    #[schema(default = true)]
    skip_special_tokens: Option<bool>,
    /// Accepted without effect, as in vLLM with a fast tokenizer.
    #[serde(rename = "spaces_between_special_tokens")]
    #[schema(value_type = Option<bool>)]
    _spaces_between_special_tokens: Option<IgnoredAny>,
    /// Whether the tokenizer adds its special tokens, such as the one at the beginning of a text. By default true for a
    /// prompt, and false for a chat, whose template writes them.
    pub(crate) add_special_tokens: Option<bool>,
    /// Keep only this number of last tokens of the prompt; -1 means as many as the server allows.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<i64>, minimum = -1)]
    truncate_prompt_tokens: Option<i64>,
    /// The only tokens that may be generated. With a grammar also the stop tokens, where the grammar allows the end.
    #[schema(min_items = 1)]
    allowed_token_ids: Option<Vec<u32>>,
    /// Texts that the model does not write: the last token of each, with and without a space in front, is never
    /// generated behind its other tokens.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<Vec<String>>, max_items = 1024)]
    bad_words: Vec<String>,
    /// Requests share cached prompts only with those that have the same salt.
    cache_salt: Option<String>,
}

impl<'de> Deserialize<'de> for VllmFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Calls the derived function, which `remote` makes an inherent one.
        named(deserializer, |deserializer| Self::deserialize(deserializer))
    }
}

impl VllmFields {
    /// Adds these fields to the parameters.
    pub(super) fn apply(
        &self,
        parameters: &mut Parameters,
        config: &Config,
        streams: bool,
    ) -> Result<StopText, ValidationError> {
        if let Some(given) = self.prompt_logprobs {
            let refuse = |why| Err(ValidationError::Unsupported { field: "prompt_logprobs", why });
            if streams {
                return refuse("streams have no place for it; send `stream`: false");
            }
            if !config.prefill_logprobs {
                return refuse("it needs a server that runs with --enable-prefill-logprobs");
            }
            if given > MAX_PROMPT_LOGPROBS {
                return Err(ValidationError::Logprobs { field: "prompt_logprobs", max: MAX_PROMPT_LOGPROBS, given });
            }
            parameters.decoder_input_details = true;
            parameters.extension.prompt_top_n_tokens = Some(given);
        }
        parameters.truncate = match self.truncate_prompt_tokens {
            None => None,
            Some(-1) => Some(config.limits.max_input_tokens),
            // Out of the range that is checked later.
            Some(given) => Some(usize::try_from(given).unwrap_or(0)),
        };
        parameters.extension.add_special_tokens = self.add_special_tokens;
        parameters.extension.shows_special_tokens = self.skip_special_tokens == Some(false);
        parameters.extension.cache_salt.clone_from(&self.cache_salt);
        parameters.extension.allowed_token_ids.clone_from(&self.allowed_token_ids);
        parameters.extension.bad_words.clone_from(&self.bad_words);
        Ok(if self.include_stop_str_in_output { StopText::Included } else { StopText::Cut })
    }
}
