use std::fs;

use serde_json::{Value, json};

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
    TextModel::load(folder(files).path(), 1, None)
}

fn chat(messages: Value) -> ChatInputs {
    ChatInputs { messages: messages.as_array().unwrap().clone(), ..ChatInputs::default() }
}

fn hello(model: &TextModel) -> Result<String, TemplateError> {
    model.render_chat(chat(json!([{"role": "user", "content": "Hi"}])))
}

#[test]
fn a_folder_without_a_tokenizer_is_refused() {
    let error = load(&[]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("has no tokenizer.json"), "{error}");
    let error = load(&[("tokenizer.json", "{}")]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json is not what it should be: "), "{error}");
    let error = load(&[("tokenizer.json", TOKENIZER), ("config.json", "[")]).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("config.json is not what it should be: ") && !error.contains('\n'), "{error}");
}

#[test]
fn every_eos_token_is_known() {
    let with = |files: &[(&str, &str)]| {
        let files = [&[("tokenizer.json", TOKENIZER)], files].concat();
        load(&files).unwrap().eos_token_ids().to_vec()
    };
    let tokenizer = ("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}}"#);
    assert_eq!(with(&[]), [0; 0]);
    assert_eq!(with(&[tokenizer]), [3]);
    assert_eq!(with(&[("config.json", r#"{"eos_token_id": 2}"#), tokenizer]), [2, 3]);
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

#[test]
fn a_template_is_found_wherever_models_keep_it() {
    let rendered = |files: &[(&str, &str)]| hello(&load(&[&[("tokenizer.json", TOKENIZER)], files].concat()).unwrap());
    let string = ("tokenizer_config.json", r#"{"chat_template": "1 {{ bos_token }}", "bos_token": "<s>"}"#);
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "2"}]}"#;
    assert_eq!(rendered(&[string]).unwrap(), "1 <s>");
    assert_eq!(rendered(&[("tokenizer_config.json", named)]).unwrap(), "2");
    let json = ("chat_template.json", r#"{"chat_template": "3"}"#);
    assert_eq!(rendered(&[string, json]).unwrap(), "3");
    assert_eq!(rendered(&[string, json, ("chat_template.jinja", "4")]).unwrap(), "4");
    let processor = ("processor_config.json", r#"{"chat_template": "5"}"#);
    assert_eq!(rendered(&[processor]).unwrap(), "5");
    assert_eq!(rendered(&[processor, json]).unwrap(), "3");
    assert_eq!(rendered(&[]).unwrap_err(), TemplateError::Missing);
}

#[test]
fn templates_for_tools_are_found_beside_the_default() {
    let shows = |files: &[(&str, &str)]| {
        let model = load(&[&[("tokenizer.json", TOKENIZER)], files].concat()).unwrap();
        let tools = Some(vec![json!({})]);
        (model.render_chat(ChatInputs { tools, ..ChatInputs::default() }).unwrap(), hello(&model).unwrap())
    };
    let both = ("x".to_owned(), "2".to_owned());
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "2"}]}"#;
    assert_eq!(shows(&[("tokenizer_config.json", list)]), both);
    let object = r#"{"chat_template": {"tool_use": "x", "default": "2"}}"#;
    assert_eq!(shows(&[("chat_template.json", object)]), both);
    let files = [("chat_template.jinja", "2"), ("additional_chat_templates/tool_use.jinja", "x")];
    assert_eq!(shows(&files), both);
}

#[test]
fn a_template_of_the_user_goes_before_the_folder_s() {
    let folder = folder(&[("tokenizer.json", TOKENIZER), ("chat_template.jinja", "4")]);
    let model = TextModel::load(folder.path(), 1, Some("mine {{ messages[0].content }}".to_owned())).unwrap();
    assert_eq!(hello(&model).unwrap(), "mine Hi");
}

#[tokio::test]
async fn prompts_are_never_cut_by_the_tokenizer() {
    let model = load(&[("tokenizer.json", TOKENIZER)]).unwrap();
    assert_eq!(model.encode("a b a b".into(), true).await.unwrap(), [1, 2, 1, 2]);
    let long = "a ".repeat(MAX_INLINE_BYTES);
    assert_eq!(model.encode(long.into(), true).await.unwrap().len(), MAX_INLINE_BYTES);
}
