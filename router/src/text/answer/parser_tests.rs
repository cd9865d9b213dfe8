//! Tests the parser on answers of models, and that its output does not depend on how the text is cut.

use proptest::prelude::*;

use super::super::part::ToolCall;
use super::super::sample::{FORMATS, written};
use super::*;

fn think() -> ReasoningFormat {
    ReasoningFormat::detect("{{ message.content.split('</think>')[-1] }}").unwrap()
}

fn calls_of(answer: &Answer) -> Vec<(&str, &str)> {
    answer.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

#[test]
fn calls_are_found_in_every_format() {
    let calls = [("get_weather", r#"{"city": "a \" } </tool_call> ] [TOOL_CALLS]"}"#), ("now", "{}")];
    for format in FORMATS {
        let answer = parse_whole(&written(format, &calls), Some(format), ReasoningState::Off);
        let expected = Answer {
            tool_calls: calls
                .map(|(name, arguments)| ToolCall { name: name.to_owned(), arguments: arguments.to_owned() })
                .to_vec(),
            ..Answer::default()
        };
        assert_eq!(answer, expected, "{format:?}");
    }
}

#[test]
fn text_before_a_call_is_content_without_the_whitespace_between() {
    for format in FORMATS.into_iter().filter(|format| !format.shape().is_bare()) {
        let text = format!("Let me see.\n\n{}\n", written(format, &[("f", r#"{"a": [1, {"b": 2}]}"#)]));
        let answer = parse_whole(&text, Some(format), ReasoningState::Off);
        assert_eq!(answer.content, "Let me see.", "{format:?}");
        assert_eq!(calls_of(&answer), [("f", r#"{"a": [1, {"b": 2}]}"#)], "{format:?}");
    }
}

#[test]
fn a_python_tag_before_a_llama_call_is_dropped() {
    let text = r#"<|python_tag|>{"name": "f", "parameters": {}}"#;
    assert_eq!(calls_of(&parse_whole(text, Some(ToolCallFormat::Llama), ReasoningState::Off)), [("f", "{}")]);
    let text = format!("Well. {text}");
    assert_eq!(parse_whole(&text, Some(ToolCallFormat::Llama), ReasoningState::Off).content, "Well.");
}

#[test]
fn a_forced_call_cut_before_its_arguments_is_not_content() {
    for format in FORMATS {
        let text = written(format, &[("get_weather", r#"{"city": "Rome"}"#)]);
        let arguments = text.find("{\"city").unwrap();
        for end in (0..=arguments).filter(|&end| text.is_char_boundary(end)) {
            let mut parser = AnswerParser::new(Some(format), ReasoningState::Off, true);
            let mut parts = parser.push(&text[..end], false);
            parts.extend(parser.finish().parts);
            assert!(!parts.iter().any(|part| matches!(part, Part::Content(_))), "{format:?}: {:?}", &text[..end]);
        }
    }
}

#[test]
fn names_are_unescaped() {
    let text = r#"<tool_call>{"name": "a\"\u00e9", "arguments": {}}</tool_call>"#;
    assert_eq!(calls_of(&parse_whole(text, Some(ToolCallFormat::Hermes), ReasoningState::Off)), [("a\"é", "{}")]);
}

#[test]
fn the_name_is_sent_once_and_arguments_as_they_arrive() {
    let mut parser = AnswerParser::new(Some(ToolCallFormat::Hermes), ReasoningState::Off, false);
    assert_eq!(parser.push("Hi <tool", false), [Part::Content("Hi".to_owned())]);
    assert_eq!(parser.push("_call>\n{\"name\": \"f\", \"argu", false), []);
    let start = Part::ToolCallStart { index: 0, name: "f".to_owned() };
    let fragment = |text: &str| Part::ToolCallArguments { index: 0, fragment: text.to_owned() };
    assert_eq!(parser.push("ments\": {\"a\"", false), [start, fragment("{\"a\"")]);
    assert_eq!(parser.push(": 1}}", false), [fragment(": 1}")]);
    assert_eq!(parser.push("\n</tool_call>", false), []);
    assert_eq!(parser.finish(), Rest { parts: vec![], is_cut: false });
}

#[test]
fn text_that_is_not_a_call_is_content() {
    let not_calls = [
        (ToolCallFormat::Hermes, "<tool_call> tags hold calls, like <tool_call>[]</tool_call>."),
        (ToolCallFormat::Hermes, r#"<tool_call>{"name": "f", "arguments": 1}</tool_call>"#),
        (ToolCallFormat::Hermes, r#"<tool_call>{"name": "\x", "arguments": {}}</tool_call>"#),
        (ToolCallFormat::Llama, r#"{"a": {"name": 1}}"#),
        (ToolCallFormat::Generic, r#" {"name": "f", "other": {}}"#),
        (ToolCallFormat::Generic, r#"No: {"name": "f", "arguments": {}}"#),
        (ToolCallFormat::MistralList, "[TOOL_CALLS]"),
        (ToolCallFormat::DeepSeek, "<｜tool▁calls▁begin｜><｜tool▁calls▁begin｜>"),
        (ToolCallFormat::MistralNamed, "[TOOL_CALLS][ARGS]{}"),
    ];
    for (format, text) in not_calls {
        let answer = parse_whole(text, Some(format), ReasoningState::Off);
        assert_eq!(answer, Answer { content: text.to_owned(), ..Answer::default() }, "{format:?}");
    }
}

#[test]
fn an_incomplete_second_call_is_content() {
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    for (after, content) in [(" \n", ""), ("\nDone. ", "\nDone. "), ("\n<tool_call>{", "\n<tool_call>{")] {
        let answer = parse_whole(&format!("{call}{after}"), Some(ToolCallFormat::Hermes), ReasoningState::Off);
        assert_eq!((answer.content.as_str(), calls_of(&answer)), (content, vec![("f", "{}")]), "{after:?}");
    }
}

#[test]
fn an_answer_that_ends_inside_arguments_is_cut() {
    let text = r#"<tool_call>{"name": "f", "arguments": {"a": "b"#;
    let answer = parse_whole(text, Some(ToolCallFormat::Hermes), ReasoningState::Off);
    assert_eq!((answer.is_cut, calls_of(&answer)), (true, vec![("f", r#"{"a": "b"#)]));
    let answer = parse_whole(&format!("{text}\"}}}}</tool"), Some(ToolCallFormat::Hermes), ReasoningState::Off);
    assert_eq!((answer.is_cut, calls_of(&answer)), (false, vec![("f", r#"{"a": "b"}"#)]));
    assert_eq!(answer.content, "");
}

#[test]
fn reasoning_is_separated_from_content() {
    let expected = |reasoning: &str, content: &str| Answer {
        reasoning: reasoning.to_owned(),
        content: content.to_owned(),
        ..Answer::default()
    };
    let possible = ReasoningState::Possible(think());
    let started = ReasoningState::Started(think());
    let cases = [
        (possible, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", expected("Hm.\n\nSo.", "Yes.\n")),
        (possible, "\n<think></think>Yes", expected("", "Yes")),
        (possible, "Yes <think> no", expected("", "Yes <think> no")),
        (possible, "<thin", expected("", "<thin")),
        (started, "Hm.</thin </think>\n", expected("Hm.</thin", "")),
        (started, "Hm.</think", expected("Hm.</think", "")),
        (ReasoningState::Off, "<think>a</think> b", expected("", "<think>a</think> b")),
    ];
    for (reasoning_state, text, answer) in cases {
        assert_eq!(parse_whole(text, None, reasoning_state), answer, "{text:?}");
        assert_eq!(parse_whole(text, Some(ToolCallFormat::Hermes), reasoning_state), answer, "{text:?}");
    }
}

#[test]
fn calls_are_found_after_reasoning_and_not_inside_it() {
    for format in FORMATS {
        let call = written(format, &[("f", "{}")]);
        let answer =
            parse_whole(&format!("I do {call}\n</think>\n\n{call}"), Some(format), ReasoningState::Started(think()));
        assert_eq!((answer.reasoning, answer.tool_calls.len()), (format!("I do {call}"), 1), "{format:?}");
    }
}

#[test]
fn special_tokens_other_than_markers_are_dropped() {
    let mut parser = AnswerParser::new(Some(ToolCallFormat::MistralNamed), ReasoningState::Off, false);
    let mut answer = Answer::default();
    let pieces = [("[TOOL_CALLS]", true), ("f", false), ("[ARGS]", true), ("{}", false), ("</s>", true)];
    for (text, special) in pieces {
        answer.extend(parser.push(text, special));
    }
    answer.end(parser.finish());
    assert_eq!((calls_of(&answer), answer.content.as_str()), (vec![("f", "{}")], ""));
}

#[test]
fn without_tools_and_reasoning_no_piece_is_held_back() {
    let mut parser = AnswerParser::new(None, ReasoningState::Off, false);
    for text in ["a", "b \n", "\n", " <tool_call>"] {
        assert_eq!(parser.push(text, false), [Part::Content(text.to_owned())]);
    }
}

#[test]
fn an_endless_name_is_content() {
    let text = format!("<tool_call>{{\"name\": \"{}", "x".repeat(10_000));
    let mut parser = AnswerParser::new(Some(ToolCallFormat::Hermes), ReasoningState::Off, false);
    assert_eq!(parser.push(&text, false).iter().filter(|part| matches!(part, Part::Content(_))).count(), 2);
    assert!(parser.pending.is_empty());
}

#[test]
fn the_length_limit_does_not_depend_on_the_pieces() {
    for spaces in 4000..4100 {
        let text = format!("<tool_call>{{\"name\": {}\"f\", \"arguments\": {{}}}}</tool_call>", " ".repeat(spaces));
        let pieces: Vec<_> = text.as_bytes().chunks(97).map(|piece| std::str::from_utf8(piece).unwrap()).collect();
        let whole = parse_whole(&text, Some(ToolCallFormat::Hermes), ReasoningState::Off);
        assert_eq!(fold(&pieces, ToolCallFormat::Hermes, ReasoningState::Off), whole, "{spaces}");
    }
}

fn any_format() -> impl Strategy<Value = ToolCallFormat> {
    prop::sample::select(FORMATS.to_vec())
}

fn any_reasoning_state() -> impl Strategy<Value = ReasoningState> {
    prop::sample::select(vec![ReasoningState::Off, ReasoningState::Possible(think()), ReasoningState::Started(think())])
}

/// JSON whose strings contain markers, quotes and brackets.
fn arguments() -> impl Strategy<Value = String> {
    let marker = prop::sample::select(vec![
        "</tool_call>",
        "```",
        "}",
        "\"",
        "\\",
        "[TOOL_CALLS]",
        "<｜tool▁call▁end｜>",
        "é😀",
        "]",
    ]);
    let string = prop_oneof![marker.prop_map(str::to_owned), "\\PC{0,6}"];
    let leaf = prop_oneof![
        string.clone().prop_map(serde_json::Value::from),
        any::<i32>().prop_map(serde_json::Value::from),
        Just(serde_json::Value::Null)
    ];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(serde_json::Value::from),
            prop::collection::vec(("\\PC{0,3}", inner), 0..3).prop_map(|fields| fields.into_iter().collect()),
        ]
    });
    prop::collection::vec((string, value), 0..3)
        .prop_map(|fields| fields.into_iter().collect::<serde_json::Value>().to_string())
}

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9_-]{1,8}"
}

/// Text, reasoning and calls of this or another format, in any order, and fragments of them.
fn any_answer(format: ToolCallFormat) -> impl Strategy<Value = String> {
    let call = (prop::collection::vec((name(), arguments()), 1..3), any_format(), prop::bool::weighted(0.8)).prop_map(
        move |(calls, other, own)| {
            let calls: Vec<_> = calls.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str())).collect();
            written(if own { format } else { other }, &calls)
        },
    );
    let markers: Vec<_> =
        format.shape().markers().chain(["<think>", "</think>", "{", "\n", " ", "{\"name\": \"f\""]).collect();
    let fragment = prop_oneof![
        4 => call,
        3 => "[a-z ]{0,6}",
        2 => "\\PC{0,6}",
        2 => prop::sample::select(markers).prop_map(str::to_owned),
        1 => Just("<think>hm</think>".to_owned()),
    ];
    (prop::collection::vec(fragment, 0..6), any::<prop::sample::Index>(), prop::bool::weighted(0.5)).prop_map(
        |(fragments, end, is_truncated)| {
            let mut text = fragments.concat();
            if is_truncated && !text.is_empty() {
                let end = (0..=end.index(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
                text.truncate(end);
            }
            text
        },
    )
}

fn fold(pieces: &[&str], format: ToolCallFormat, reasoning_state: ReasoningState) -> Answer {
    let mut parser = AnswerParser::new(Some(format), reasoning_state, false);
    let mut answer = Answer::default();
    for piece in pieces {
        answer.extend(parser.push(piece, false));
    }
    answer.end(parser.finish());
    answer
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_parts_do_not_depend_on_how_the_text_is_cut(
        (format, text) in any_format().prop_flat_map(|format| (Just(format), any_answer(format))),
        reasoning_state in any_reasoning_state(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let whole = parse_whole(&text, Some(format), reasoning_state);
        let characters: Vec<_> = text.split_inclusive(|_| true).collect();
        prop_assert_eq!(&fold(&characters, format, reasoning_state), &whole);

        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(characters.len() + 1)).chain([0, characters.len()]).collect();
        cuts.sort_unstable();
        let pieces: Vec<_> = cuts.windows(2).map(|cut| characters[cut[0]..cut[1]].concat()).collect();
        let pieces: Vec<_> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(&fold(&pieces, format, reasoning_state), &whole);
    }

    #[test]
    fn text_without_markers_is_content(format in any_format(), text in "[a-zé😀 \n]{0,20}") {
        let answer = parse_whole(&text, Some(format), ReasoningState::Possible(think()));
        prop_assert_eq!(answer, Answer { content: text, ..Answer::default() });
    }

    #[test]
    fn names_and_arguments_are_returned_byte_for_byte(
        format in any_format(),
        calls in prop::collection::vec((name(), arguments()), 1..4),
        end in any::<prop::sample::Index>(),
    ) {
        let calls: Vec<_> = calls.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str())).collect();
        let mut text = written(format, &calls);
        let answer = parse_whole(&text, Some(format), ReasoningState::Off);
        prop_assert_eq!(calls_of(&answer), calls.clone());
        prop_assert_eq!((answer.content.as_str(), answer.is_cut), ("", false));

        // A truncated answer gives a prefix of the same calls.
        let end = (0..=end.index(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        let answer = parse_whole(&text, Some(format), ReasoningState::Off);
        for (index, (found, written)) in calls_of(&answer).into_iter().zip(&calls).enumerate() {
            let is_last = index + 1 == answer.tool_calls.len();
            prop_assert_eq!(found.0, written.0);
            prop_assert!(written.1.starts_with(found.1));
            prop_assert_eq!(found.1.len() < written.1.len(), is_last && answer.is_cut);
        }
    }

    #[test]
    fn no_content_is_lost(
        (format, text) in any_format().prop_flat_map(|format| (Just(format), any_answer(format))),
    ) {
        // The parser drops only the format's own text: markers, names and the JSON around them.
        let answer = parse_whole(&text, Some(format), ReasoningState::Off);
        if answer.tool_calls.is_empty() {
            prop_assert_eq!(&answer.content, &text);
        }
        for part in answer.tool_calls.iter().map(|call| &call.arguments) {
            prop_assert!(text.contains(part.as_str()));
        }
        let kept: usize = answer.tool_calls.iter().map(|call| call.arguments.len()).sum::<usize>() + answer.content.len();
        let most: usize = answer.tool_calls.iter().map(|call| call.name.len() * 6 + 200).sum();
        let spaces = text.chars().filter(|&c| is_space(c)).count();
        prop_assert!(text.len() <= kept + most + spaces);
    }
}
