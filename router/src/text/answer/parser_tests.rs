//! Tests the parser on answers of models, and that its output does not depend on how the text is cut.

use proptest::prelude::*;

use serde_json::{Value, json};

use super::super::call_item::is_space;
use super::super::format::{Encoding, Run};
use super::super::reasoning::{Frame, ReasoningFormat, ReasoningState};
use super::super::sample::{chat_template, compiled, expected, formats, tool, written};
use super::super::tool::Tool;
use super::*;

fn think() -> ReasoningFormat {
    Frame::detect(&["</think>"]).reasoning.unwrap()
}

fn format(name: &str) -> &'static Format {
    Format::named(name).unwrap()
}

fn tools() -> Vec<Tool> {
    let any = json!({});
    let city = json!({"city": {"type": "string"}});
    let typed = json!({
        "text": {"type": "string"}, "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"}, "flag": {"type": "boolean"}, "list": {"type": "array"}, "map": {"type": "object"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    });
    vec![tool("get_weather", city), tool("now", any.clone()), tool("f", any), tool("typed", typed)]
}

fn parse_whole(text: &str, format: Option<&'static Format>, reasoning_state: ReasoningState) -> Answer {
    parse([text], format, expected(format, &tools(), reasoning_state))
}

fn parser(format: Option<&'static Format>) -> AnswerParser {
    AnswerParser::new(format, expected(format, &tools(), ReasoningState::Off))
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn calls_of(answer: &Answer) -> Vec<(&str, &str)> {
    answer.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

#[test]
fn calls_are_found_in_every_format() {
    let calls = [("get_weather", r#"{"city": "a \" } </tool_call> ] [TOOL_CALLS]"}"#), ("now", "{}")];
    for format in formats() {
        let answer = parse_whole(&written(format, &calls), Some(format), ReasoningState::Off);
        let found: Vec<_> = calls_of(&answer).into_iter().map(|(name, arguments)| (name, json(arguments))).collect();
        assert_eq!(found, calls.map(|(name, arguments)| (name, json(arguments))), "{format:?}");
        assert_eq!((answer.content.as_str(), answer.is_cut), ("", false), "{format:?}");
    }
}

#[test]
fn the_format_is_detected_from_what_the_template_writes() {
    for format in formats() {
        let template = compiled(&chat_template(format));
        let traits = template.traits();
        let is_shown = (traits.format.as_deref(), traits.shows_tools, traits.parallel_calls);
        assert_eq!(is_shown, (Some(format.name()), true, true), "{format:?}");
    }
}

#[test]
fn text_before_a_call_is_content_without_the_whitespace_between() {
    for format in formats().filter(|format| !format.is_bare() && format.channels().is_none()) {
        let text = format!("Let me see.\n\n{}\n", written(format, &[("f", r#"{"a": [1, {"b": 2}]}"#)]));
        let answer = parse_whole(&text, Some(format), ReasoningState::Off);
        assert_eq!(answer.content, "Let me see.", "{format:?}");
        let [(name, arguments)] = calls_of(&answer)[..] else { panic!("{format:?}: {answer:?}") };
        assert_eq!((name, json(arguments)), ("f", json!({"a": [1, {"b": 2}]})), "{format:?}");
    }
}

#[test]
fn messages_with_headers_are_thoughts_words_and_calls() {
    let thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
    let cases = [
        (format!("{thoughts}<|channel|>final<|message|>Yes.<|return|>"), "Hm.", "Yes.", 0),
        (format!("{thoughts}{call}<|call|>"), "Hm.", "", 1),
        (format!("{thoughts}{thoughts}{call}"), "Hm.\n\nHm.", "", 1),
        (format!("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{call}"), "", "I look.", 1),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>".to_owned(), "", "", 1),
        ("Hello.".to_owned(), "", "Hello.", 0),
        ("<|channel|>anal".to_owned(), "", "", 0),
    ];
    for (text, reasoning, content, num_calls) in cases {
        let pieces = text.split_inclusive(|_| true);
        let harmony = Some(format("harmony"));
        let answer = parse(pieces, harmony, expected(harmony, &tools(), ReasoningState::Off));
        let found = (answer.reasoning.as_str(), answer.content.as_str(), answer.tool_calls.len());
        assert_eq!(found, (reasoning, content, num_calls), "{text}");
    }
    let call = "<atem:function_calls>\n<atem:invoke name=\"now\">\n</atem:invoke>\n</atem:function_calls>";
    let cases = [
        (" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>".to_owned(), "Hm.", "Yes.", 0),
        (format!(" to=self<|message|>Hm.<|eom|><|start|>assistant to=now<|message|>{call}<|eot|>"), "Hm.", "", 1),
        (format!(" to=now<|message|>{call}<|eom|><|start|>assistant to=now<|message|>{call}"), "", "", 2),
        (" to=now<|message|>No call".to_owned(), "", "No call", 0),
        (" to=se".to_owned(), "", "", 0),
    ];
    for (text, reasoning, content, num_calls) in cases {
        let atem = Some(format("atem"));
        let answer = parse(text.split_inclusive(|_| true), atem, expected(atem, &tools(), ReasoningState::Off));
        let found = (answer.reasoning.as_str(), answer.content.as_str(), answer.tool_calls.len());
        assert_eq!(found, (reasoning, content, num_calls), "{text}");
    }
    let answer = parse_whole("all\nI look.\n>>>now\n{}", Some(format("functionary")), ReasoningState::Off);
    assert_eq!((answer.content.as_str(), calls_of(&answer)), ("I look.\n", vec![("now", "{}")]));
}

#[test]
fn the_markers_around_a_reply_are_dropped() {
    let reply = Frame::detect(&["<|START_RESPONSE|> <|END_RESPONSE|>"]).reply;
    let command = Some(format("command"));
    let read = |text: &str| {
        let expected = Expected { reply, ..expected(command, &tools(), ReasoningState::Off) };
        parse(text.split_inclusive(|_| true), command, expected)
    };
    assert_eq!(read("<|START_RESPONSE|>Yes.<|END_RESPONSE|>").content, "Yes.");
    assert_eq!(read("Yes").content, "Yes");
    let call = written(format("command"), &[("now", "{}")]);
    assert_eq!(calls_of(&read(&call)), [("now", "{}")]);
}

#[test]
fn solar_writes_thoughts_words_and_calls_as_messages() {
    let frame = Frame::detect(&["<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|><|begin|>assistant"]);
    let state = ReasoningState::after(frame.reasoning, "<|begin|>user<|content|>Hi<|end|>\n<|begin|>assistant");
    let solar = Some(format("solar"));
    let thoughts = "<|think|>\nHm.<|end|><|begin|>assistant";
    let words = "<|content|>Let me see.<|end|><|begin|>assistant";
    let call = written(format("solar"), &[("now", "{}")]);
    let cases = [
        (format!("{thoughts}<|content|>Yes."), "Hm.", "Yes.", 0),
        (format!("{thoughts}{words}{call}"), "Hm.", "Let me see.", 1),
        (format!("{thoughts}{call}"), "Hm.", "", 1),
        (format!("{words}{call}"), "", "Let me see.", 1),
        ("<|content|>Yes.".to_owned(), "", "Yes.", 0),
        ("Yes.".to_owned(), "", "Yes.", 0),
    ];
    for (text, reasoning, content, num_calls) in cases {
        let expected = Expected { reply: frame.reply, ..expected(solar, &tools(), state) };
        let answer = parse(text.split_inclusive(|_| true), solar, expected);
        let found = (answer.reasoning.as_str(), answer.content.as_str(), answer.tool_calls.len());
        assert_eq!(found, (reasoning, content, num_calls), "{text}");
    }
}

#[test]
fn llama_4_writes_words_between_markers_and_calls_without() {
    let reply = Frame::detect(&["<|python_start|><|python_end|>"]).reply;
    let call = r#"{"name": "now", "parameters": {}}"#;
    let cases = [
        (format!("<|python_start|><|python_end|>{call}{call}"), "", 2),
        (format!("<|python_start|>I look.<|python_end|>{call}"), "I look.", 1),
        (format!("<|python_start|>{call}<|python_end|>"), "", 1),
        (format!("{call}\n{call}"), "", 2),
        ("Hello {".to_owned(), "Hello {", 0),
    ];
    for (text, content, num_calls) in cases {
        let llama = Some(format("llama4"));
        let expected = Expected { reply, ..expected(llama, &tools(), ReasoningState::Off) };
        let answer = parse(text.split_inclusive(|_| true), llama, expected);
        assert_eq!((answer.content.as_str(), answer.tool_calls.len()), (content, num_calls), "{text}");
    }
    let python = Some(format("python"));
    let expected = Expected { reply, ..expected(python, &tools(), ReasoningState::Off) };
    let answer = parse(["<|python_start|>[now()]<|python_end|>"], python, expected);
    assert_eq!((answer.content.as_str(), calls_of(&answer)), ("", vec![("now", "{}")]));
}

#[test]
fn markers_that_enclose_a_tool_s_result_are_not_those_of_a_reply() {
    let granite = "<think></think> <response></response>";
    assert!(Frame::detect(&[granite]).reply.is_some());
    assert_eq!(Frame::detect(&["<mm:think></mm:think> <response></response>"]).reply, None);
}

#[test]
fn ids_that_the_model_writes_are_kept() {
    let text = written(format("kimi-k2"), &[("now", "{}"), ("f", "{}")]);
    let mut parser = parser(Some(format("kimi-k2")));
    let ids = parser.push(&text).into_iter().filter_map(|part| match part {
        Part::ToolCallStart { id, .. } => id,
        _ => None,
    });
    assert_eq!(ids.collect::<Vec<_>>(), ["functions.now:0", "functions.f:1"]);
}

#[test]
fn literals_are_read_as_models_write_them() {
    let cases = [
        (
            "python",
            r#"[f(a='it\'s', b=(1, 2,), c={"k": None, 'l': [True]}, d=-1.5e3)]"#,
            json!({"a": "it's", "b": [1, 2], "c": {"k": null, "l": [true]}, "d": -1.5e3}),
        ),
        ("python", r#"[f(a="\x41\u00e9\ud83d\ude00\n", b=word)]"#, json!({"a": "Aé😀\n", "b": "word"})),
        ("python", "[f( )]", json!({})),
        (
            "gemma",
            r#"<|tool_call>call:f{a:<|"|>it's, {<|"|>,b:[1,{k:null}],c:true}<tool_call|>"#,
            json!({"a": "it's, {", "b": [1, {"k": null}], "c": true}),
        ),
    ];
    for (name, text, arguments) in cases {
        let answer = parse_whole(text, Some(format(name)), ReasoningState::Off);
        assert_eq!(json(&answer.tool_calls[0].arguments), arguments, "{text}");
        assert!(!answer.is_cut, "{text}");
    }
}

#[test]
fn elements_are_what_the_schema_says_and_lists_of_items_where_it_says_nothing() {
    let place = json!({"type": "object", "properties": {"item": {"type": "string"}, "lat": {"type": "number"}}});
    let schema = json!({
        "code": {"type": "string"}, "none": {"type": "array"}, "empty": {"type": "object"}, "maybe": {"type": ["integer", "null"]},
        "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    });
    let mut tool = tool("f", schema);
    tool.parameters.as_mut().unwrap()["$defs"] = json!({"place": place});
    let cases = [
        ("<code> 007\n</code>", json!({"code": " 007\n"})),
        ("<code><b>bold</b></code>", json!({"code": "<b>bold</b>"})),
        ("<code></code><none></none><empty></empty>", json!({"code": "", "none": [], "empty": {}})),
        ("<maybe></maybe>", json!({"maybe": null})),
        ("<place><item>1</item>\n<lat>1</lat></place>", json!({"place": {"item": "1", "lat": 1}})),
        ("<places>\n<item><lat>1.5</lat></item><item></item></places>", json!({"places": [{"lat": 1.5}, {}]})),
        ("<other><item>1</item><item>a</item></other>", json!({"other": [1, "a"]})),
        ("<other><a>true</a><b><item>x</item></b></other>", json!({"other": {"a": true, "b": ["x"]}})),
    ];
    for (elements, arguments) in cases {
        // In a text, tags without the marker are text.
        let marked = if elements.contains("bold") { "<code>" } else { "<" };
        let elements = elements.replace(marked, &format!("]<]minimax[>[{marked}"));
        let elements = elements.replace("</b></code>", "</b>]<]minimax[>[</code>");
        let m = "]<]minimax[>[";
        let text = format!("{m}<tool_call>\n{m}<invoke name=\"f\">{elements}{m}</invoke>\n{m}</tool_call>");
        let format = Some(format("minimax-m3"));
        let expected = expected(format, std::slice::from_ref(&tool), ReasoningState::Off);
        let answer = parse(text.split_inclusive(|_| true), format, expected);
        assert_eq!(json(&answer.tool_calls[0].arguments), arguments, "{text}");
        assert_eq!((answer.content.as_str(), answer.is_cut), ("", false), "{text}");
    }
}

#[test]
fn a_python_tag_before_a_llama_call_is_dropped() {
    let text = r#"<|python_tag|>{"name": "f", "parameters": {}}"#;
    assert_eq!(calls_of(&parse_whole(text, Some(format("llama")), ReasoningState::Off)), [("f", "{}")]);
    let text = format!("Well. {text}");
    assert_eq!(parse_whole(&text, Some(format("llama")), ReasoningState::Off).content, "Well.");
}

#[test]
fn a_forced_call_cut_before_its_arguments_is_not_content() {
    for format in formats().filter(|format| format.channels().is_none()) {
        let text = written(format, &[("get_weather", r#"{"city": "Rome"}"#)]);
        let arguments = text.find("city").unwrap();
        for end in (0..=arguments).filter(|&end| text.is_char_boundary(end)) {
            let expected = Expected { only_calls: true, ..expected(Some(format), &tools(), ReasoningState::Off) };
            let mut parser = AnswerParser::new(Some(format), expected);
            let mut parts = parser.push(&text[..end]);
            parts.extend(parser.finish().parts);
            assert!(!parts.iter().any(|part| matches!(part, Part::Content(_))), "{format:?}: {:?}", &text[..end]);
        }
    }
}

#[test]
fn names_are_unescaped() {
    let text = r#"<tool_call>{"name": "a\"\u00e9", "arguments": {}}</tool_call>"#;
    assert_eq!(calls_of(&parse_whole(text, Some(format("hermes")), ReasoningState::Off)), [("a\"é", "{}")]);
}

#[test]
fn the_name_is_sent_once_and_arguments_as_they_arrive() {
    let mut parser = parser(Some(format("hermes")));
    assert_eq!(parser.push("Hi <tool"), [Part::Content("Hi".to_owned())]);
    assert_eq!(parser.push("_call>\n{\"name\": \"f\", \"argu"), []);
    let start = Part::ToolCallStart { index: 0, name: "f".to_owned(), id: None };
    let fragment = |text: &str| Part::ToolCallArguments { index: 0, fragment: text.to_owned() };
    assert_eq!(parser.push("ments\": {\"a\""), [start, fragment("{\"a\"")]);
    assert_eq!(parser.push(": 1}}"), [fragment(": 1}")]);
    assert_eq!(parser.push("\n</tool_call>"), []);
    assert_eq!(parser.finish(), Rest { parts: vec![], is_cut: false });
}

#[test]
fn text_that_is_not_a_call_is_content() {
    let not_calls = [
        (format("hermes"), "<tool_call> tags hold calls, like <tool_call>[]</tool_call>."),
        (format("hermes"), r#"<tool_call>{"name": "f", "arguments": 1}</tool_call>"#),
        (format("hermes"), r#"<tool_call>{"name": "\x", "arguments": {}}</tool_call>"#),
        (format("llama"), r#"{"a": {"name": 1}}"#),
        (format("json"), r#" {"name": "f", "other": {}}"#),
        (format("json"), r#"No: {"name": "f", "arguments": {}}"#),
        (format("mistral-list"), "[TOOL_CALLS]"),
        (format("deepseek"), "<｜tool▁calls▁begin｜><｜tool▁calls▁begin｜>"),
        (format("mistral"), "[TOOL_CALLS][ARGS]{}"),
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
        let answer = parse_whole(&format!("{call}{after}"), Some(format("hermes")), ReasoningState::Off);
        assert_eq!((answer.content.as_str(), calls_of(&answer)), (content, vec![("f", "{}")]), "{after:?}");
    }
}

#[test]
fn an_answer_that_ends_inside_arguments_is_cut() {
    let text = r#"<tool_call>{"name": "f", "arguments": {"a": "b"#;
    let answer = parse_whole(text, Some(format("hermes")), ReasoningState::Off);
    assert_eq!((answer.is_cut, calls_of(&answer)), (true, vec![("f", r#"{"a": "b"#)]));
    let answer = parse_whole(&format!("{text}\"}}}}</tool"), Some(format("hermes")), ReasoningState::Off);
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
        (possible, "\n</think>\n\nYes </think>", expected("", "Yes </think>")),
        (possible, "Yes <think> no", expected("", "Yes <think> no")),
        (possible, "<thin", expected("", "<thin")),
        (started, "Hm.</thin </think>\n", expected("Hm.</thin", "")),
        (started, "Hm.</think", expected("Hm.</think", "")),
        (ReasoningState::Off, "<think>a</think> b", expected("", "<think>a</think> b")),
    ];
    for (reasoning_state, text, answer) in cases {
        assert_eq!(parse_whole(text, None, reasoning_state), answer, "{text:?}");
        assert_eq!(parse_whole(text, Some(format("hermes")), reasoning_state), answer, "{text:?}");
    }
}

#[test]
fn calls_are_found_after_reasoning_and_not_inside_it() {
    for format in formats().filter(|format| format.channels().is_none()) {
        let call = written(format, &[("f", "{}")]);
        let answer =
            parse_whole(&format!("I do {call}\n</think>\n\n{call}"), Some(format), ReasoningState::Started(think()));
        assert_eq!((answer.reasoning, answer.tool_calls.len()), (format!("I do {call}"), 1), "{format:?}");
    }
}

#[test]
fn without_tools_and_reasoning_no_piece_is_held_back() {
    let mut parser = parser(None);
    for text in ["a", "b \n", "\n", " <tool_call>"] {
        assert_eq!(parser.push(text), [Part::Content(text.to_owned())]);
    }
}

#[test]
fn an_endless_name_is_content() {
    let text = format!("<tool_call>{{\"name\": \"{}", "x".repeat(10_000));
    let mut parser = parser(Some(format("hermes")));
    assert_eq!(parser.push(&text).iter().filter(|part| matches!(part, Part::Content(_))).count(), 2);
    assert_eq!(parser.finish().parts, []);
}

#[test]
fn the_length_limit_does_not_depend_on_the_pieces() {
    for spaces in 4000..4100 {
        let text = format!("<tool_call>{{\"name\": {}\"f\", \"arguments\": {{}}}}</tool_call>", " ".repeat(spaces));
        let pieces: Vec<_> = text.as_bytes().chunks(97).map(|piece| std::str::from_utf8(piece).unwrap()).collect();
        let whole = parse_whole(&text, Some(format("hermes")), ReasoningState::Off);
        assert_eq!(fold(&pieces, format("hermes"), ReasoningState::Off), whole, "{spaces}");
    }
}

fn any_format() -> impl Strategy<Value = &'static Format> {
    prop::sample::select(formats().collect::<Vec<_>>())
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
    let leaf = prop_oneof![string.clone().prop_map(Value::from), any::<i32>().prop_map(Value::from), Just(Value::Null)];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec(("\\PC{0,3}", inner), 0..3).prop_map(|fields| fields.into_iter().collect()),
        ]
    });
    prop::collection::vec((string, value), 0..3).prop_map(|fields| fields.into_iter().collect::<Value>().to_string())
}

fn name() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9_-]{1,8}"
}

/// Text, reasoning and calls of this or another format, in any order, and fragments of them.
fn any_answer(format: &'static Format) -> impl Strategy<Value = String> {
    let call = (prop::collection::vec((name(), arguments()), 1..3), any_format(), prop::bool::weighted(0.8)).prop_map(
        move |(calls, other, own)| {
            let calls: Vec<_> = calls.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str())).collect();
            written(if own { format } else { other }, &calls)
        },
    );
    let markers: Vec<_> =
        format.markers().into_iter().chain(["<think>", "</think>", "{", "\n", " ", "{\"name\": \"f\""]).collect();
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

fn fold(pieces: &[&str], format: &'static Format, reasoning_state: ReasoningState) -> Answer {
    parse(pieces.iter().copied(), Some(format), expected(Some(format), &tools(), reasoning_state))
}

/// Arguments of `typed`. Texts have no markers, which formats without escapes cannot write.
fn typed_arguments() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<", "</", "</para", "<|", "<esc", "}", "]", ")", "'", "\"", "\\", "\n", ",", "=", ": ", "null", "7", "é😀",
        " a ",
    ]);
    let text = prop::collection::vec(prop_oneof![fragment.prop_map(str::to_owned), "[a-z \n]{0,4}"], 0..6)
        .prop_map(|fragments| fragments.concat());
    let inner = prop_oneof![
        text.clone().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null)
    ];
    let list = prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from);
    let map =
        prop::collection::btree_map("[a-z_]{1,3}", inner, 0..3).prop_map(|map| map.into_iter().collect::<Value>());
    let optional = prop_oneof![
        text.clone()
            .prop_filter("a word for null", |text| !["null", "None"].contains(&text.trim()))
            .prop_map(Value::from),
        Just(Value::Null)
    ];
    let texts = prop::collection::vec(text.clone(), 0..3);
    let counts = prop::collection::btree_map("[a-z_]{1,3}", any::<i32>(), 0..3);
    let fields = (text, optional, any::<i64>(), any::<bool>(), list, map, texts, counts);
    (fields, any::<[bool; 8]>()).prop_map(|((text, optional, count, flag, list, map, texts, counts), given)| {
        let all = [
            ("text", text.into()),
            ("optional", optional),
            ("count", count.into()),
            ("flag", flag.into()),
            ("list", list),
            ("map", map),
            ("texts", texts.into()),
            ("counts", json!(counts)),
        ];
        let given =
            all.into_iter().zip(given).filter(|(_, given)| *given).map(|((key, value), _)| (key.to_owned(), value));
        given.collect::<Value>().to_string()
    })
}

/// The arguments of `typed` that a format can write: elements are text unless the schema says what they are, and never null.
fn writable(format: &Format, arguments: &str) -> String {
    let mut arguments = json(arguments);
    if matches!(format.run().map(Run::encoding), Some(Encoding::Elements(_))) {
        let fields = arguments.as_object_mut().unwrap();
        fields.retain(|key, value| !["list", "map"].contains(&key.as_str()) && !value.is_null());
    }
    arguments.to_string()
}

/// The text in pieces.
fn cut<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let mut ends: Vec<_> = text.char_indices().map(|(at, _)| at).collect();
    ends.push(text.len());
    let mut cuts: Vec<_> = cuts.iter().map(|cut| ends[cut.index(ends.len())]).chain([0, text.len()]).collect();
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect()
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
        prop_assert_eq!(&fold(&cut(&text, &cuts), format, reasoning_state), &whole);
    }

    #[test]
    fn text_without_markers_is_content(
        format in any_format().prop_filter("no headers", |format| format.channels().is_none()),
        text in "[a-zé😀 \n]{0,20}",
    ) {
        let answer = parse_whole(&text, Some(format), ReasoningState::Possible(think()));
        prop_assert_eq!(answer, Answer { content: text, ..Answer::default() });
    }

    #[test]
    fn what_a_template_writes_is_read_back(
        format in any_format(),
        calls in prop::collection::vec(typed_arguments(), 1..4),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        end in any::<prop::sample::Index>(),
    ) {
        let calls: Vec<_> = calls.iter().map(|arguments| writable(format, arguments)).collect();
        let calls: Vec<_> = calls.iter().map(|arguments| ("typed", arguments.as_str())).collect();
        let text = written(format, &calls);
        let answer = fold(&cut(&text, &cuts), format, ReasoningState::Off);
        let found: Vec<_> = calls_of(&answer).into_iter().map(|(name, arguments)| (name, json(arguments))).collect();
        let expected: Vec<_> = calls.iter().map(|(name, arguments)| (*name, json(arguments))).collect();
        prop_assert_eq!(found, expected, "{}", text);
        prop_assert_eq!((answer.content.as_str(), answer.is_cut), ("", false));

        // A truncated answer gives a prefix of the same calls.
        let end = (0..=end.index(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        let part = parse_whole(&text[..end], Some(format), ReasoningState::Off);
        for (found, whole) in part.tool_calls.iter().zip(&answer.tool_calls) {
            prop_assert_eq!(&found.name, &whole.name);
            prop_assert!(whole.arguments.starts_with(&found.arguments), "{:?} {:?}", found, whole);
        }
    }

    #[test]
    fn no_content_is_lost(
        (format, text) in prop::sample::select(vec!["hermes", "deepseek", "mistral", "granite"]).prop_flat_map(|name| (Just(format(name)), any_answer(format(name)))),
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
