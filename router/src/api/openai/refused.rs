//! Fields of other servers that would change the answer, and that this server does not have.

use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::field::is_given;
use crate::generation::ValidationError;

/// Refused by name, unless the value has no effect: an answer without it would not be what was asked for.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct RefusedFields {
    /// Not supported unless false.
    use_beam_search: Option<Value>,
    /// Not supported unless 1.
    length_penalty: Option<Value>,
    /// Not supported unless false.
    early_stopping: Option<Value>,
    /// Not supported unless empty.
    logits_processors: Option<Value>,
    /// Not supported unless empty: send it in `response_format`.
    structural_tag: Option<Value>,
    /// Not supported unless empty.
    prompt_embeds: Option<Value>,
    /// Not supported unless empty.
    mm_processor_kwargs: Option<Value>,
    /// Not supported unless empty.
    kv_transfer_params: Option<Value>,
    /// Not supported unless empty.
    vllm_xargs: Option<Value>,
    /// Not supported unless empty.
    repetition_detection: Option<Value>,
    /// Not supported unless empty: send `top_logprobs`.
    logprob_token_ids: Option<Value>,
    /// Not supported unless `left`, the side at which `truncate_prompt_tokens` cuts.
    truncation_side: Option<Value>,
    /// Not supported unless false.
    watermarking: Option<Value>,
    /// Not supported unless false: `/chat_tokenize` shows the prompt.
    return_prompt_text: Option<Value>,
    /// Not supported unless 1.
    stream_interval: Option<Value>,
    /// Not supported unless empty.
    ec_transfer_params: Option<Value>,
    /// Not supported unless empty.
    media_io_kwargs: Option<Value>,
    /// OpenAI's; not supported.
    web_search_options: Option<Value>,
    /// Not supported unless empty: send `structured_outputs.regex`.
    regex: Option<Value>,
    /// Not supported unless empty: send `structured_outputs.grammar`.
    ebnf: Option<Value>,
    /// Not supported unless empty: send `stop`.
    stop_regex: Option<Value>,
    /// Not supported unless empty: name the adapter as `model`.
    lora_path: Option<Value>,
    /// Not supported unless empty: clients cannot bring code.
    custom_logit_processor: Option<Value>,
    /// Not supported unless false: the answer is text.
    return_hidden_states: Option<Value>,
    /// Not supported unless empty: send it in `response_format`.
    json_schema: Option<Value>,
    /// Not supported: send `max_tokens`.
    n_predict: Option<Value>,
    /// Not supported unless 1: send `repetition_penalty`.
    repeat_penalty: Option<Value>,
    /// Not supported unless 0: send `temperature`, `top_p` or `min_p`.
    mirostat: Option<Value>,
    /// Not supported unless 0: send `temperature`.
    dynatemp_range: Option<Value>,
    /// Not supported unless 0: send `top_p` or `min_p`.
    xtc_probability: Option<Value>,
    /// Not supported unless 0: send a penalty.
    dry_multiplier: Option<Value>,
}

const BEAMS: &str = "this server samples, and has no beam search";
const TAGS: &str = "send it in `response_format` or `structured_outputs`";

impl RefusedFields {
    pub(super) fn check(&self) -> Result<(), ValidationError> {
        let fields = [
            ("use_beam_search", &self.use_beam_search, json!(false), BEAMS),
            ("length_penalty", &self.length_penalty, json!(1.0), BEAMS),
            ("early_stopping", &self.early_stopping, json!(false), BEAMS),
            ("logits_processors", &self.logits_processors, json!([]), "clients cannot bring code"),
            ("structural_tag", &self.structural_tag, json!({}), TAGS),
            ("prompt_embeds", &self.prompt_embeds, json!([]), "send text or token ids"),
            ("mm_processor_kwargs", &self.mm_processor_kwargs, json!({}), "the model reads text only"),
            ("kv_transfer_params", &self.kv_transfer_params, json!({}), "this server keeps its KV cache to itself"),
            ("vllm_xargs", &self.vllm_xargs, json!({}), "this server has no such extensions"),
            ("repetition_detection", &self.repetition_detection, json!({}), "send a penalty"),
            ("logprob_token_ids", &self.logprob_token_ids, json!([]), "send `top_logprobs`"),
            ("truncation_side", &self.truncation_side, json!("left"), "the end of a prompt is kept"),
            ("watermarking", &self.watermarking, json!(false), "TGI's routes have `watermark`"),
            ("return_prompt_text", &self.return_prompt_text, json!(false), "/chat_tokenize shows the prompt"),
            ("stream_interval", &self.stream_interval, json!(1), "every token has a chunk"),
            ("ec_transfer_params", &self.ec_transfer_params, json!({}), "the model reads text only"),
            ("media_io_kwargs", &self.media_io_kwargs, json!({}), "the model reads text only"),
            ("web_search_options", &self.web_search_options, json!(null), "this server searches nothing; send `tools`"),
            ("regex", &self.regex, json!(""), "send `structured_outputs.regex`"),
            ("ebnf", &self.ebnf, json!(""), "send `structured_outputs.grammar`"),
            ("stop_regex", &self.stop_regex, json!([]), "send `stop`"),
            ("lora_path", &self.lora_path, json!(""), "name the adapter as `model`"),
            ("custom_logit_processor", &self.custom_logit_processor, json!(""), "clients cannot bring code"),
            ("return_hidden_states", &self.return_hidden_states, json!(false), "the answer is text"),
            ("json_schema", &self.json_schema, json!({}), "send it in `response_format`"),
            ("n_predict", &self.n_predict, json!(null), "send `max_tokens`"),
            ("repeat_penalty", &self.repeat_penalty, json!(1.0), "send `repetition_penalty`"),
            ("mirostat", &self.mirostat, json!(0), "send `temperature`, `top_p` or `min_p`"),
            ("dynatemp_range", &self.dynatemp_range, json!(0.0), "send `temperature`"),
            ("xtc_probability", &self.xtc_probability, json!(0.0), "send `top_p` or `min_p`"),
            ("dry_multiplier", &self.dry_multiplier, json!(0.0), "send a penalty"),
        ];
        // A number may be written as `1` or `1.0`.
        let is_neutral = |value: &Value, neutral: &Value| match neutral {
            Value::Null => value.is_null(),
            Value::String(_) => value.is_null() || value == neutral,
            _ => !is_given(Some(value)) || value.as_f64().is_some_and(|value| Some(value) == neutral.as_f64()),
        };
        let refused = |(_, value, neutral, _): &&(_, &Option<Value>, Value, _)| {
            value.as_ref().is_some_and(|value| !is_neutral(value, neutral))
        };
        match fields.iter().find(refused) {
            Some(&(field, .., why)) => Err(ValidationError::Unsupported { field, why }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_with_an_effect_are_refused() {
        for (field, neutral, refused) in [
            ("use_beam_search", json!(false), json!(true)),
            ("length_penalty", json!(1), json!(0.5)),
            ("logits_processors", json!([]), json!(["module.Class"])),
            ("kv_transfer_params", json!(null), json!({"do_remote_decode": true})),
            ("truncation_side", json!("left"), json!("right")),
            ("truncation_side", json!(null), json!("")),
            ("stream_interval", json!(1), json!(5)),
            ("regex", json!(""), json!("a+")),
            ("repeat_penalty", json!(1.0), json!(1.1)),
            ("mirostat", json!(0), json!(2)),
            ("json_schema", json!({}), json!({"type": "object"})),
            ("web_search_options", json!(null), json!({})),
        ] {
            let check = |value: &Value| serde_json::from_value::<RefusedFields>(json!({field: value})).unwrap().check();
            assert_eq!(check(&neutral), Ok(()), "{field}");
            let error = check(&refused).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{field}` is not supported")), "{error}");
        }
    }
}
