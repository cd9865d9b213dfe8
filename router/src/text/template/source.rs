//! Rewrites a template's text where minijinja reads it differently from jinja as transformers sets it up.

use std::sync::LazyLock;

use regex::Regex;

/// The tags with which transformers marks the assistant's part (for training): a block without effect on the text.
static GENERATION_TAG: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("invariant: the pattern is valid")
});

pub(super) fn adapted(source: &str) -> String {
    // Jinja knows lines by \n only.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    without_generation_tags(&source)
}

/// Replaced by tags that do nothing either, so that whitespace around them is trimmed as before.
fn without_generation_tags(source: &str) -> String {
    let replaced = GENERATION_TAG.replace_all(source, |tag: &regex::Captures<'_>| {
        let word = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {word} {}%}}", &tag[1], &tag[3])
    });
    replaced.into_owned()
}
