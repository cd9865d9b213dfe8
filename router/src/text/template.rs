//! Chat templates, rendered as `transformers.apply_chat_template` renders them. All of minijinja is in this file.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use regex::Regex;
use serde_json::Map;

use super::python_json::{self, Style};

const NAME: &str = "chat_template";

/// The tags with which transformers marks the assistant's part (for training): a block without effect on the text.
static GENERATION_TAG: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("invariant: the pattern is valid")
});

/// Why a conversation could not be made into a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error("the model has no chat template; use a completion route, or a model that has one")]
    Missing,
    #[error("{0}")]
    Invalid(String),
    #[error("the last message cannot be continued: the template does not write the assistant's text as it is")]
    NotContinuable,
}

impl From<Error> for TemplateError {
    fn from(error: Error) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// A compiled template and the special tokens it may write.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    pub(super) fn new(
        source: Option<String>,
        special_tokens: Map<String, serde_json::Value>,
    ) -> Result<Self, TemplateError> {
        let source = source.ok_or(TemplateError::Missing)?;
        let mut environment = environment();
        environment.add_template_owned(NAME, without_generation_tags(&source))?;
        Ok(Self { environment, special_tokens })
    }

    /// A conversation that ends with an assistant's message is continued instead of answered, as in TGI.
    pub(super) fn render(&self, messages: &[serde_json::Value]) -> Result<String, TemplateError> {
        let mut context = self.special_tokens.clone();
        context.insert("messages".to_owned(), messages.into());
        context.insert("tools".to_owned(), serde_json::Value::Null);
        context.insert("documents".to_owned(), serde_json::Value::Null);
        context.insert("add_generation_prompt".to_owned(), true.into());
        let mut prompt = self.environment.get_template(NAME)?.render(context)?;
        if let Some(start) = continued(messages) {
            let end = prompt.rfind(start).ok_or(TemplateError::NotContinuable)? + start.len();
            prompt.truncate(end);
            prompt.truncate(prompt.trim_end().len());
        }
        Ok(prompt)
    }
}

/// The text to go on from. Templates may trim it.
fn continued(messages: &[serde_json::Value]) -> Option<&str> {
    let last = messages.last().filter(|message| message["role"] == "assistant")?;
    last["content"].as_str().map(str::trim)
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(format_as_python);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Replaced by tags that do nothing either, so that whitespace around them is trimmed as before.
fn without_generation_tags(source: &str) -> String {
    let replaced = GENERATION_TAG.replace_all(source, |tag: &regex::Captures<'_>| {
        let word = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {word} {}%}}", &tag[1], &tag[3])
    });
    replaced.into_owned()
}

fn format_as_python(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.write_str("None").map_err(Error::from),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }).map_err(Error::from),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let style = Style {
        indent: options.get("indent")?,
        separators: options.get::<Option<Vec<String>>>("separators")?.and_then(|pair| match pair.as_slice() {
            [item, key] => Some((item.clone(), key.clone())),
            _ => None,
        }),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let value = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot write this value as JSON").with_source(error)
    })?;
    Ok(Value::from_safe_string(python_json::to_string(&value, &style)))
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, messages: serde_json::Value) -> Result<String, TemplateError> {
        let tokens = json!({"bos_token": "<s>", "eos_token": "</s>"});
        let template = ChatTemplate::new(Some(source.to_owned()), tokens.as_object().unwrap().clone())?;
        template.render(messages.as_array().unwrap())
    }

    fn hello() -> serde_json::Value {
        json!([{"role": "user", "content": "Hello <&> \"you\""}])
    }

    #[test]
    fn chatml_is_rendered() {
        let chatml = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + \
            '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
        insta::assert_snapshot!(render(chatml, hello()).unwrap(), @r#"
        <|im_start|>user
        Hello <&> "you"<|im_end|>
        <|im_start|>assistant
        "#);
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_does() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if true %}\n{{ m.content | trim }}\n    {% endif %}\n{% endfor %}\nend\n";
        assert_eq!(render(source, hello()).unwrap(), "<s>\nHello <&> \"you\"\nend");
    }

    #[test]
    fn python_methods_slices_and_loop_controls_work() {
        let source = "{% for m in messages[::-1] %}{% if m.role.startswith('x') %}{% continue %}{% endif %}\
            {{ m.content.split(' ')[0].strip('H').upper() }}{% break %}{% endfor %}\
            {% set ns = namespace(n=0) %}{% for k, v in messages[0].items() %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\
            {{ none }}{{ true }}{{ tools is none }}{{ messages[0].get('x', 'd') }}{{ 'a' in messages[0]['content'] }}";
        assert_eq!(render(source, hello()).unwrap(), "ELLO2NoneTrueTruedFalse");
    }

    #[test]
    fn json_is_python_s() {
        let source = "{{ messages[0] | tojson }}{{ {'b': [1]} | tojson(indent=2) }}";
        assert_eq!(
            render(source, hello()).unwrap(),
            "{\"role\": \"user\", \"content\": \"Hello <&> \\\"you\\\"\"}{\n  \"b\": [\n    1\n  ]\n}"
        );
    }

    #[test]
    fn generation_tags_have_no_effect_on_the_text() {
        let source = "a\n{%- generation -%}\n b {% endgeneration %}\nc";
        assert_eq!(render(source, hello()).unwrap(), "ab c");
    }

    #[test]
    fn a_template_refuses_a_conversation_with_its_own_words() {
        let error = render("{{ raise_exception('roles must alternate') }}", hello()).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    #[test]
    fn a_trailing_assistant_message_is_continued() {
        let source = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>\n{% endfor %}[assistant]";
        let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]);
        assert_eq!(render(source, messages).unwrap(), "[user] Hi</s>\n[assistant] Well,");
    }

    #[test]
    fn dates_are_formatted() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') | length }}", hello()).unwrap(), "11");
    }
}
