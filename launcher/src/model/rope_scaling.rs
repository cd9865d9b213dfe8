//! Writes the RoPE scaling that flags ask for into a model's configuration, in place of its own scaling.

use serde_json::{Map, Value, json};

use crate::flag::args::{Args, RopeScaling};

/// Parameters of a rope that stay: they are no part of its scaling.
const KEPT: [&str; 4] = ["rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"];
const ORIGINAL: &str = "original_max_position_embeddings";
/// Names of a model's maximum length.
const LENGTHS: [&str; 2] = ["max_position_embeddings", "max_seq_len"];

/// Whether flags ask for a scaling.
pub(crate) fn is_asked_for(args: &Args) -> bool {
    args.rope_scaling.is_some() || args.rope_factor.is_some()
}

/// Writes the scaling. The worker multiplies the original length by the factor: it becomes the model's limit.
/// COMPAT: `--rope-factor` without `--rope-scaling` means linear, and linear or dynamic without a factor means 1.
pub(crate) fn write(config: &mut Map<String, Value>, args: &Args) {
    let (kind, factor) = (args.rope_scaling.unwrap_or(RopeScaling::Linear), args.rope_factor.unwrap_or(1.0));
    // A model that reads images has the configuration of its text model inside of its own.
    match config.get_mut("text_config") {
        Some(Value::Object(text)) => write_text(text, kind, factor, args.rope_original_max_tokens),
        _ => write_text(config, kind, factor, args.rope_original_max_tokens),
    }
}

fn write_text(config: &mut Map<String, Value>, kind: RopeScaling, factor: f64, original: Option<u32>) {
    // If each type of layer has a rope of its own, the scaling belongs to the layers with full attention.
    let by_type = config
        .get("rope_parameters")
        .and_then(Value::as_object)
        .is_some_and(|parameters| parameters.values().any(Value::is_object));
    let own = if by_type { config["rope_parameters"].get("full_attention") } else { own_rope(config) };
    let own = own.and_then(Value::as_object).cloned().unwrap_or_default();
    let length = LENGTHS.iter().find(|name| config.get(**name).is_some_and(Value::is_number)).unwrap_or(&LENGTHS[0]);
    let original = match original {
        Some(tokens) => Value::from(tokens),
        None => [config.get(ORIGINAL), own.get(ORIGINAL), config.get(*length)]
            .into_iter()
            .flatten()
            .find(|value| value.is_number())
            .cloned()
            .unwrap_or_default(),
    };
    let mut rope: Map<String, Value> = own.into_iter().filter(|(name, _)| KEPT.contains(&name.as_str())).collect();
    rope.insert("rope_type".to_owned(), kind.name().into());
    rope.insert("factor".to_owned(), factor.into());
    config.remove(ORIGINAL);
    if !original.is_null() {
        if kind == RopeScaling::Yarn {
            rope.insert(ORIGINAL.to_owned(), original.clone());
        }
        config.insert((*length).to_owned(), original);
    }
    if kind == RopeScaling::Dynamic {
        // Otherwise the model would be long only with --max-total-tokens.
        rope.insert("lengthened".to_owned(), json!(true));
    }
    if by_type {
        config.remove("rope_scaling");
        config["rope_parameters"]["full_attention"] = rope.into();
    } else {
        config.remove("rope_parameters");
        config.insert("rope_scaling".to_owned(), rope.into());
    }
}

/// The model's own rope: `rope_scaling` replaces `rope_parameters`.
fn own_rope(config: &Map<String, Value>) -> Option<&Value> {
    let is_given = |name: &&str| config.get(*name).and_then(Value::as_object).is_some_and(|rope| !rope.is_empty());
    ["rope_scaling", "rope_parameters"].iter().find(|name| is_given(name)).and_then(|name| config.get(*name))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn written(config: &Value, flags: &str) -> Value {
        let args = Args::try_parse_from(["penstock"].into_iter().chain(flags.split_whitespace())).unwrap();
        let mut config = config.as_object().unwrap().clone();
        write(&mut config, &args);
        Value::Object(config)
    }

    #[test]
    fn flags_replace_the_models_own_scaling_and_keep_theta() {
        let config = json!({
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"type": "su", "rope_theta": 5e5, "long_factor": [2.0], "short_factor": [1.0]},
        });
        let expected = json!({
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 4096
            },
        });
        assert_eq!(written(&config, "--rope-scaling yarn --rope-factor 4"), expected);
    }

    #[test]
    fn the_original_length_is_that_of_the_flag_the_scaling_or_the_model() {
        let config = json!({
            "max_seq_len": 100, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50}
        });
        for (flags, length, rope) in [
            ("--rope-factor 2.5", 50, json!({"rope_type": "linear", "factor": 2.5})),
            ("--rope-scaling linear --rope-original-max-tokens 20", 20, json!({"rope_type": "linear", "factor": 1.0})),
            (
                "--rope-scaling dynamic --rope-factor 2",
                50,
                json!({"rope_type": "dynamic", "factor": 2.0, "lengthened": true}),
            ),
        ] {
            assert_eq!(written(&config, flags), json!({"max_seq_len": length, "rope_scaling": rope}), "{flags}");
        }
        let expected = json!({"max_position_embeddings": 8, "rope_scaling": {"rope_type": "linear", "factor": 2.0}});
        assert_eq!(written(&json!({"max_position_embeddings": 8}), "--rope-factor 2"), expected);
        assert_eq!(written(&json!({}), "--rope-factor 2"), json!({"rope_scaling": expected["rope_scaling"]}));
    }

    #[test]
    fn the_rope_of_a_text_model_and_of_full_attention_is_scaled() {
        let local = json!({"rope_type": "default", "rope_theta": 1e4});
        let full = json!({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0});
        let ropes = json!({"full_attention": full, "sliding_attention": local});
        let config = json!({"text_config": {"max_position_embeddings": 64, "rope_parameters": ropes}});
        let full = json!({"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0});
        let ropes = json!({"full_attention": full, "sliding_attention": local});
        let expected = json!({"text_config": {"max_position_embeddings": 64, "rope_parameters": ropes}});
        assert_eq!(written(&config, "--rope-factor 2"), expected);
    }
}
