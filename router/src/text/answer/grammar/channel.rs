//! Grammars of answers that consist of messages with headers.

use super::lark::{Lark, literal, nested};
use crate::sequence::Grammar;
use crate::text::answer::call_item::is_plain;
use crate::text::answer::format::{Addressee, Channels};
use crate::text::answer::tool::{Tool, ToolError};

/// Thoughts and announcements, then a call or, unless it is forced, the answer in words.
pub(super) fn tools(
    mut lark: Lark<'_>,
    channels: &'static Channels,
    tools: &[Tool],
    forced: bool,
    parallel: bool,
    content: Option<&Grammar>,
) -> Result<Grammar, ToolError> {
    let Channels { start, role, end_of_header, end_of_aside, call: (before, after), body: (head, tail), .. } =
        *channels;
    for (index, tool) in tools.iter().enumerate() {
        if !(tool.name.starts_with(is_plain) && tool.name.chars().all(is_plain)) {
            return Err(ToolError::Name { name: tool.name.clone() });
        }
        let parts = [lark.marker(before), literal(&tool.name), lark.marker(after), lark.marker(end_of_header)];
        let header: Vec<_> = parts.into_iter().filter(|part| part != "\"\"").collect();
        let body = lark.call_rest(channels.arguments, head, tail, index, tool)?;
        lark.rule(&format!("call_{index}"), &format!("{} {body}", header.join(" ")));
    }
    let calls: Vec<_> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
    lark.rule("call", &calls.join(" | "));
    let next = [end_of_aside, start, role].map(|marker| lark.marker(marker));
    let next = next.into_iter().filter(|part| part != "\"\"").collect::<Vec<_>>().join(" ");
    let run = if parallel && channels.parallel { format!("call ({next} call)*") } else { "call".to_owned() };
    lark.rule("run", &run);
    let asides = asides(&mut lark, channels, forced);
    if forced {
        return Ok(lark.finish(&format!("{asides} run")));
    }
    let header = [channels.content, end_of_header].map(|marker| lark.marker(marker)).join(" ");
    let body = match content {
        Some(grammar) => {
            lark.rule("content", &nested(grammar));
            "content".to_owned()
        }
        None => "TEXT?".to_owned(),
    };
    // Without asides, a text may precede a call.
    let text_and_run = if channels.asides.is_empty() && content.is_none() {
        let text = lark.until("announcement", start);
        format!(" | {header} {text} run")
    } else {
        String::new()
    };
    Ok(lark.finish(&format!("{asides} run | {asides} {header} {body}{text_and_run}")))
}

/// Thoughts, then the client's grammar.
pub(super) fn content(mut lark: Lark<'_>, channels: &'static Channels, grammar: &Grammar) -> Grammar {
    let asides = asides(&mut lark, channels, true);
    let header = [channels.content, channels.end_of_header].map(|marker| lark.marker(marker)).join(" ");
    lark.rule("content", &nested(grammar));
    lark.finish(&format!("{asides} {header} content"))
}

/// `only_thoughts`: texts for the user may not precede the answer.
fn asides(lark: &mut Lark<'_>, channels: &'static Channels, only_thoughts: bool) -> String {
    if channels.asides.is_empty() {
        return String::new();
    }
    let text = lark.until("aside_text", channels.end_of_aside);
    let next = [channels.start, channels.role].map(|marker| lark.marker(marker)).join(" ");
    let is_allowed = |header: &&&str| !only_thoughts || (channels.addressee)(header) == Addressee::Model;
    let headers: Vec<_> = channels.asides.iter().filter(is_allowed).map(|header| lark.marker(header)).collect();
    let end_of_header = lark.marker(channels.end_of_header);
    lark.rule("aside", &format!("({}) {end_of_header} {text} {next}", headers.join(" | ")));
    "aside*".to_owned()
}
