use std::fs;

use super::*;

const TOKENIZER: &str = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "a": 1, "b": 2, "</s>": 3}}}"#;

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    folder
}

fn load(files: &[(&str, &str)]) -> Result<TextModel, LoadError> {
    TextModel::load(folder(files).path(), 1, None, Path::new("unused"))
}

#[test]
fn a_folder_without_a_tokenizer_is_refused() {
    let error = load(&[]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("has no tokenizer.json"), "{error}");
    let error = load(&[("tokenizer.json", "{}")]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json is malformed: "), "{error}");
    let error = load(&[("tokenizer.json", TOKENIZER), ("config.json", "[")]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("config.json is malformed: ") && !error.contains('\n'), "{error}");
}

#[test]
fn eos_tokens_are_collected_from_all_files() {
    let with = |files: &[(&str, &str)]| {
        let files = [&[("tokenizer.json", TOKENIZER)], files].concat();
        load(&files).unwrap().eos_token_ids().to_vec()
    };
    let tokenizer = ("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}}"#);
    assert_eq!(with(&[]), [0; 0]);
    assert_eq!(with(&[tokenizer]), [3]);
    assert_eq!(with(&[("config.json", r#"{"eos_token_id": 2}"#), tokenizer]), [2, 3]);
    assert_eq!(with(&[("config.json", r#"{"eos_token_id": [2.0, 1e1]}"#)]), [2, 10]);
    let nothing = ("generation_config.json", r#"{"eos_token_id": -1}"#);
    assert_eq!(with(&[nothing, ("config.json", r#"{"eos_token_id": [null, 2, -1]}"#)]), [2]);
    let generation = ("generation_config.json", r#"{"eos_token_id": [1, 3]}"#);
    assert_eq!(with(&[generation, ("config.json", r#"{"eos_token_id": 2}"#), tokenizer]), [1, 3]);
    assert_eq!(
        with(&[
            ("generation_config.json", "{}"),
            ("config.json", r#"{"eos_token_id": null, "text_config": {"eos_token_id": 2}}"#)
        ]),
        [2]
    );
}

#[tokio::test]
async fn tokens_without_an_embedding_are_no_part_of_the_vocabulary() {
    let eos = ("generation_config.json", r#"{"eos_token_id": [1, 3]}"#);
    let model = load(&[("tokenizer.json", TOKENIZER), eos]).unwrap();
    assert_eq!((model.vocabulary_size(), model.clone().with_embeddings(0).vocabulary_size()), (4, 4));
    assert_eq!(model.clone().with_embeddings(9).vocabulary_size(), 4);
    let smaller = model.with_embeddings(2);
    assert_eq!((smaller.vocabulary_size(), smaller.tokenizer_size()), (2, 4));
    assert_eq!(&*smaller.eos_token_ids(), [1]);
    // A word that the model cannot write needs not be forbidden.
    assert_eq!(smaller.encode_bad_words(&["a".to_owned(), "a b".to_owned()]).await.unwrap(), [[1]]);
}

#[test]
fn special_tokens_with_a_name_are_variables_of_templates() {
    let config =
        r#"{"eos_token": "</s>", "add_bos_token": true, "extra_special_tokens": {"image": "<i>"}, "sep": "x"}"#;
    let folder = folder(&[("tokenizer_config.json", config)]);
    let tokens = TokenizerConfig::read(folder.path()).unwrap().special_tokens;
    assert_eq!(serde_json::Value::from(tokens), serde_json::json!({"eos_token": "</s>", "image": "<i>"}));
}

fn templates(files: &[(&str, &str)]) -> TemplateSources {
    let folder = folder(files);
    TokenizerConfig::read(folder.path()).unwrap().chat_templates(folder.path()).unwrap()
}

#[test]
fn the_default_template_is_found_in_every_place_where_models_keep_it() {
    let default = |files: &[(&str, &str)]| templates(files).default;
    let found = |text: &str| Some(text.to_owned());
    let string = ("tokenizer_config.json", r#"{"chat_template": "1"}"#);
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "2"}]}"#;
    assert_eq!(default(&[string]), found("1"));
    assert_eq!(default(&[("tokenizer_config.json", named)]), found("2"));
    let json = ("chat_template.json", r#"{"chat_template": "3"}"#);
    assert_eq!(default(&[string, json]), found("3"));
    assert_eq!(default(&[string, json, ("chat_template.jinja", "4")]), found("4"));
    let processor = ("processor_config.json", r#"{"chat_template": "5"}"#);
    assert_eq!(default(&[processor]), found("5"));
    assert_eq!(default(&[processor, json]), found("3"));
    assert_eq!(default(&[]), None);
}

#[test]
fn the_template_for_tools_is_found_next_to_the_default() {
    let both = TemplateSources { default: Some("2".to_owned()), tool_use: Some("x".to_owned()) };
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "2"}]}"#;
    assert_eq!(templates(&[("tokenizer_config.json", list)]), both);
    let object = r#"{"chat_template": {"tool_use": "x", "default": "2"}}"#;
    assert_eq!(templates(&[("chat_template.json", object)]), both);
    let files = [("chat_template.jinja", "2"), ("additional_chat_templates/tool_use.jinja", "x")];
    assert_eq!(templates(&files), both);
}

#[tokio::test]
async fn the_tokenizer_never_truncates_prompts() {
    let model = load(&[("tokenizer.json", TOKENIZER)]).unwrap();
    assert_eq!(model.encode("a b a b".into(), true).await.unwrap(), [1, 2, 1, 2]);
    let long = "a ".repeat(MAX_INLINE_BYTES);
    assert_eq!(model.encode(long.into(), true).await.unwrap().len(), MAX_INLINE_BYTES);
}
