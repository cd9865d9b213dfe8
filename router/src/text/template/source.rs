//! Rewrites parts of a template's source that minijinja reads differently from transformers' jinja environment.

use std::sync::LazyLock;

use regex::Regex;

/// Tags that mark the assistant's text for training. They have no effect on the rendered text.
static GENERATION_TAG: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("invariant: the pattern is valid")
});

static RAW_TAG: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(\{%[-+]?\s*raw\s*%\})\n").expect("invariant: the pattern is valid"));

pub(super) fn adapted(source: &str) -> String {
    // Jinja normalizes line ends to \n.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    with_line_after_raw(&without_generation_tags(&source))
}

/// minijinja drops the line end after `raw`, which jinja keeps.
fn with_line_after_raw(source: &str) -> String {
    RAW_TAG.replace_all(source, "$1\n\n").into_owned()
}

/// Replaces them with tags that have no effect either and keep the trimming of whitespace around them.
fn without_generation_tags(source: &str) -> String {
    let replaced = GENERATION_TAG.replace_all(source, |tag: &regex::Captures<'_>| {
        let word = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {word} {}%}}", &tag[1], &tag[3])
    });
    replaced.into_owned()
}
