//! Parameters that TGI does not have, under the same names on every route.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;
use utoipa::openapi::schema::{AdditionalProperties, ArrayBuilder, ObjectBuilder, OneOfBuilder, Schema, Type};

use super::field::{integer, named, or_default};
use crate::generation::{Extension, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES};

/// Parameters that TGI does not have, under the same names on every route.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct ExtensionFields {
    /// Do not sample tokens whose probability is below this fraction of the most probable token's.
    #[schema(minimum = 0, maximum = 1, default = 0)]
    min_p: Option<f32>,
    /// Subtracted once from the logit of every token that was already generated.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f32>,
    /// Maps token ids to values from -100 to 100 that are added to their logits.
    #[serde(default, deserialize_with = "logit_bias")]
    #[schema(schema_with = logit_bias_schema, required = false)]
    logit_bias: Vec<(u32, f32)>,
    /// Do not sample a stop token before this many tokens were generated.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, default = 0)]
    min_tokens: Option<u32>,
    /// Continue after the model's end-of-sequence tokens.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    ignore_eos: bool,
    /// Tokens that end the answer, in addition to the model's end-of-sequence tokens.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<Vec<u32>>, max_items = 128)]
    stop_token_ids: Vec<u32>,
    /// Number of answers to the same prompt.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<usize>, minimum = 1, maximum = 128, default = 1)]
    n: Option<usize>,
    /// From -100 to 100; requests with a higher priority are served first, or with a lower one, as `--priority-order` says.
    #[schema(minimum = -100, maximum = 100, default = 0)]
    priority: Option<i32>,
    /// Seconds from the request's arrival after which it fails if it has not ended.
    #[schema(exclusive_minimum = 0, maximum = 86400)]
    timeout: Option<f64>,
    /// Show the drafts that steps verified (`--speculate`), in each choice, or in the `details` of TGI's routes.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) return_drafts: bool,
}

impl<'de> Deserialize<'de> for ExtensionFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Calls the derived function, which `remote` makes an inherent one.
        named(deserializer, |deserializer| Self::deserialize(deserializer))
    }
}

impl From<ExtensionFields> for Extension {
    fn from(given: ExtensionFields) -> Self {
        Self {
            min_p: given.min_p,
            presence_penalty: given.presence_penalty,
            logit_bias: given.logit_bias,
            min_tokens: given.min_tokens,
            ignore_eos: given.ignore_eos,
            stop_token_ids: given.stop_token_ids,
            n: given.n,
            priority: given.priority,
            timeout: given.timeout,
            ..Self::default()
        }
    }
}

/// OpenAI's object from token ids to numbers. COMPAT: TGI's field is a list without effect; an empty list is accepted.
fn logit_bias<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(u32, f32)>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an object from token ids to numbers")]
    enum Given {
        ByToken(BTreeMap<String, f32>),
        List([(); 0]),
    }
    let by_token = match Option::deserialize(deserializer)? {
        Some(Given::ByToken(by_token)) => by_token,
        Some(Given::List([])) | None => return Ok(Vec::new()),
    };
    let entry = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => Err(D::Error::custom(format!("`{id}` is not a token id"))),
    };
    by_token.into_iter().map(entry).collect()
}

fn logit_bias_schema() -> Schema {
    let bias =
        ObjectBuilder::new().schema_type(Type::Number).minimum(Some(-MAX_LOGIT_BIAS)).maximum(Some(MAX_LOGIT_BIAS));
    let by_token = ObjectBuilder::new()
        .property_names(Some(ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[0-9]+$"))))
        .additional_properties(Some(AdditionalProperties::from(bias)))
        .max_properties(Some(MAX_LOGIT_BIASES));
    OneOfBuilder::new()
        .item(by_token)
        .item(ArrayBuilder::new().max_items(Some(0)))
        .item(ObjectBuilder::new().schema_type(Type::Null))
        .description(Some("Maps token ids to values that are added to their logits."))
        .into()
}
