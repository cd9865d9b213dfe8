//! Tests the grammars, and that the parser understands every text that they allow.
//!
//! `fixture/grammar.json` holds the grammars with texts that they must accept and refuse. `fixture/walk.py` checks them
//! with llguidance and generates random texts from the grammars into `fixture/walk.json`. To update both, run
//! `UPDATE_FIXTURE=1 cargo test -p penstock-router --lib text::answer::grammar`, then `walk.py`, then the test again.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::parser::parse_whole;
use super::super::part::Answer;
use super::super::sample::{FORMATS, written};
use super::*;

const WEATHER: (&str, &str) = ("get_weather", r#"{"place": {"city": "Rome"}, "unit": "C"}"#);
const NOW: (&str, &str) = ("now", "{}");

/// One grammar with texts that it accepts and refuses.
#[derive(Debug, Serialize)]
struct Case {
    name: String,
    lark: String,
    /// Whether the markers are single tokens.
    with_tokens: bool,
    accepted: Vec<String>,
    refused: Vec<String>,
}

/// The options of one grammar.
struct Setting {
    choice: ToolChoice,
    parallel: bool,
    reasoning_state: ReasoningState,
    with_tokens: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "deserializing is the check")]
struct Weather {
    place: Place,
    unit: Option<Unit>,
    days: Option<Vec<u8>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "deserializing is the check")]
struct Place {
    city: String,
    within: Option<Box<Place>>,
}

#[derive(Debug, Deserialize)]
enum Unit {
    C,
    F,
}

fn tools() -> Vec<Tool> {
    let place = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "within": {"$ref": "#/$defs/place"}},
        "required": ["city"],
        "additionalProperties": false,
    });
    let weather = json!({
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/place"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        },
        "required": ["place"],
        "$defs": {"place": place},
    });
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters };
    vec![tool("get_weather", Some(weather)), tool("now", None)]
}

fn think() -> ReasoningFormat {
    ReasoningFormat::detect("</think>").unwrap()
}

/// Ids as in `walk.py`: after the 256 bytes and the end token.
fn token_id(marker: &str) -> Option<u32> {
    let mut markers = vec!["<think>", "</think>"];
    for marker in FORMATS.iter().flat_map(|format| format.shape().markers()) {
        let is_token = marker.len() > 1 && (marker.starts_with('<') || marker.starts_with('['));
        if is_token && !markers.contains(&marker) {
            markers.push(marker);
        }
    }
    markers.iter().position(|known| *known == marker).map(|at| 257 + u32::try_from(at).unwrap())
}

fn tokens() -> Value {
    let markers = FORMATS.iter().flat_map(|format| format.shape().markers()).chain(["<think>", "</think>"]);
    markers.filter_map(|marker| Some((marker, token_id(marker)?))).collect()
}

fn grammar_of(format: ToolCallFormat, reasoning_state: ReasoningState, with_tokens: bool) -> AnswerGrammar<'static> {
    AnswerGrammar { format, reasoning_state, token_id: if with_tokens { &token_id } else { &|_| None } }
}

fn lark(grammar: Grammar) -> String {
    match grammar {
        Grammar::Lark(text) => text,
        other => panic!("not Lark: {other:?}"),
    }
}

fn settings() -> [Setting; 6] {
    let (possible, started) = (ReasoningState::Possible(think()), ReasoningState::Started(think()));
    let named = ToolChoice::Named("now".to_owned());
    let setting =
        |choice, parallel, reasoning_state, with_tokens| Setting { choice, parallel, reasoning_state, with_tokens };
    [
        setting(ToolChoice::Auto, true, ReasoningState::Off, false),
        setting(ToolChoice::Required, true, possible, false),
        setting(ToolChoice::Auto, false, started, false),
        setting(ToolChoice::Auto, true, possible, true),
        setting(ToolChoice::Required, false, ReasoningState::Off, true),
        setting(named, true, started, true),
    ]
}

/// Texts without reasoning that a setting accepts and refuses.
fn texts(format: ToolCallFormat, setting: &Setting) -> (Vec<String>, Vec<String>) {
    let run = |calls: &[(&str, &str)]| written(format, calls);
    let mut accepted = vec![run(&[NOW])];
    let mut refused = vec![
        run(&[("get_weather", r#"{"place": 1}"#)]),
        run(&[("get_weather", "{}")]),
        run(&[("now", r#"{"a": 1}"#)]),
        run(&[("other", "{}")]),
    ];
    let is_named = matches!(setting.choice, ToolChoice::Named(_));
    let to = |yes: bool, text: String, accepted: &mut Vec<String>, refused: &mut Vec<String>| {
        if yes { accepted.push(text) } else { refused.push(text) }
    };
    to(!is_named, run(&[WEATHER]), &mut accepted, &mut refused);
    to(setting.parallel && !is_named, run(&[WEATHER, NOW]), &mut accepted, &mut refused);
    let is_auto = setting.choice == ToolChoice::Auto;
    to(is_auto, "Hello.\n".to_owned(), &mut accepted, &mut refused);
    to(is_auto, String::new(), &mut accepted, &mut refused);
    if !format.shape().is_bare() {
        to(is_auto, format!("Let me see.\n\n{}", run(&[NOW])), &mut accepted, &mut refused);
    }
    (accepted, refused)
}

fn with_reasoning(
    reasoning_state: ReasoningState,
    (accepted, refused): (Vec<String>, Vec<String>),
) -> (Vec<String>, Vec<String>) {
    let before = |reasoning: &str, texts: &[String]| texts.iter().map(|text| format!("{reasoning}{text}")).collect();
    match reasoning_state {
        ReasoningState::Off => (accepted, refused),
        ReasoningState::Started(_) => (before("\nHm, {.\n</think>\n\n", &accepted), before("Hm.</think>", &refused)),
        ReasoningState::Possible(_) => {
            let reasoned: Vec<String> = before("<think>\nHm, {.\n</think>\n\n", &accepted);
            ([accepted, reasoned].concat(), [before("<think></think>", &refused), refused].concat())
        }
    }
}

fn tool_cases() -> Vec<Case> {
    let case = |format: ToolCallFormat, setting: &Setting| {
        let grammar = grammar_of(format, setting.reasoning_state, setting.with_tokens);
        let grammar = grammar.tools(&tools(), &setting.choice, setting.parallel, None).unwrap().unwrap();
        let (accepted, refused) = with_reasoning(setting.reasoning_state, texts(format, setting));
        let markers = if setting.with_tokens { "token" } else { "text" };
        let reasoning_state = match setting.reasoning_state {
            ReasoningState::Off => "off",
            ReasoningState::Possible(_) => "possible",
            ReasoningState::Started(_) => "started",
        };
        Case {
            name: format!(
                "{format:?} {:?} parallel={} reasoning={reasoning_state} {markers}",
                setting.choice, setting.parallel
            ),
            lark: lark(grammar),
            with_tokens: setting.with_tokens,
            accepted,
            refused,
        }
    };
    FORMATS.iter().flat_map(|&format| settings().map(|setting| case(format, &setting))).collect()
}

/// Grammars of a client, after reasoning.
fn after_reasoning_cases() -> Vec<Case> {
    let schema =
        Grammar::JsonSchema(r#"{"type":"object","properties":{"a":{"enum":["}",1]}},"required":["a"]}"#.to_owned());
    let regex = Grammar::Regex("[a-c]+/\\/\n[0-9]".to_owned());
    let nested = Grammar::Lark("start: \"{\" inner \"}\"\ninner: /[0-9]+/ | start // braces {\n".to_owned());
    let of = [(schema, r#"{"a":"}"}"#), (regex, "ab//\n1"), (nested, "{{12}}")];
    let states = [("possible", ReasoningState::Possible(think())), ("started", ReasoningState::Started(think()))];
    let mut cases = Vec::new();
    for ((name, reasoning_state), with_tokens) in states.into_iter().flat_map(|of| [(of, false), (of, true)]) {
        for (index, (grammar, text)) in of.iter().enumerate() {
            let (accepted, refused) =
                with_reasoning(reasoning_state, (vec![(*text).to_owned()], vec!["no".to_owned()]));
            cases.push(Case {
                name: format!("own {index} reasoning={name} {}", if with_tokens { "token" } else { "text" }),
                lark: lark(
                    grammar_of(ToolCallFormat::Generic, reasoning_state, with_tokens).after_reasoning(grammar.clone()),
                ),
                with_tokens,
                accepted,
                refused,
            });
        }
    }
    cases
}

/// A client's grammar for the content, or a call.
fn content_cases() -> Vec<Case> {
    let schema = Grammar::JsonSchema(r#"{"type":"object","properties":{"a":{"const":1}},"required":["a"]}"#.to_owned());
    let of = [(schema, r#"{"a":1}"#), (Grammar::Regex("[0-9]{2}".to_owned()), "42")];
    let case = |format: ToolCallFormat, (grammar, text): &(Grammar, &str), with_tokens| {
        let writer = grammar_of(format, ReasoningState::Off, with_tokens);
        let markers = if with_tokens { "token" } else { "text" };
        Case {
            name: format!("{format:?} content {text} {markers}"),
            lark: lark(writer.tools(&tools(), &ToolChoice::Auto, true, Some(grammar)).unwrap().unwrap()),
            with_tokens,
            accepted: vec![(*text).to_owned(), written(format, &[NOW]), written(format, &[WEATHER, NOW])],
            refused: vec!["Hello.".to_owned(), r#"{"a":2}"#.to_owned(), written(format, &[("other", "{}")])],
        }
    };
    let pairs = FORMATS.iter().flat_map(|&format| of.iter().map(move |of| (format, of)));
    pairs.flat_map(|(format, of)| [case(format, of, false), case(format, of, true)]).collect()
}

/// A name that must be escaped twice.
fn name_cases() -> Vec<Case> {
    let name = "say \"\\é/\n\u{1}\"";
    let case = |format| {
        let grammar = grammar_of(format, ReasoningState::Off, false);
        let tool = Tool { name: name.to_owned(), parameters: None };
        let accepted = written(format, &[(name, "{}")]);
        assert_eq!(parse_whole(&accepted, Some(format), ReasoningState::Off).tool_calls[0].name, name);
        Case {
            name: format!("{format:?} name"),
            lark: lark(grammar.tools(&[tool], &ToolChoice::Required, true, None).unwrap().unwrap()),
            with_tokens: false,
            accepted: vec![accepted],
            refused: vec![written(format, &[("say", "{}")])],
        }
    };
    [ToolCallFormat::Hermes, ToolCallFormat::Llama, ToolCallFormat::MistralList].map(case).into()
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/text/answer/fixture").join(name)
}

fn check(name: &str, answer: &Answer, setting: &Setting, text: &str) {
    assert!(!answer.is_cut, "{name}: {text:?}");
    for call in &answer.tool_calls {
        match call.name.as_str() {
            "get_weather" => drop(serde_json::from_str::<Weather>(&call.arguments).expect(text)),
            "now" => assert_eq!(call.arguments, "{}", "{name}: {text:?}"),
            other => panic!("{name}: {other:?} is no tool, in {text:?}"),
        }
    }
    let num_calls = answer.tool_calls.len();
    assert!(setting.parallel || num_calls <= 1, "{name}: {text:?}");
    if setting.choice != ToolChoice::Auto {
        assert!(num_calls >= 1 && answer.content.is_empty(), "{name}: {text:?} gives {answer:?}");
    }
    if matches!(setting.choice, ToolChoice::Named(_)) {
        assert_eq!((num_calls, answer.tool_calls[0].name.as_str()), (1, "now"), "{name}: {text:?}");
    }
}

#[test]
fn the_fixture_holds_the_current_grammars() {
    let cases: Vec<_> =
        [tool_cases(), after_reasoning_cases(), content_cases(), name_cases()].into_iter().flatten().collect();
    let now = serde_json::to_string_pretty(&json!({"tokens": tokens(), "cases": cases})).unwrap() + "\n";
    if std::env::var_os("UPDATE_FIXTURE").is_some() {
        std::fs::write(fixture("grammar.json"), &now).unwrap();
    }
    let then = std::fs::read_to_string(fixture("grammar.json")).unwrap();
    assert!(now == then, "the grammars have changed: see the head of grammar_tests.rs");
}

#[test]
fn the_parser_understands_every_text_that_a_grammar_allows() {
    let walks: Value = serde_json::from_str(&std::fs::read_to_string(fixture("walk.json")).unwrap()).unwrap();
    let settings = settings();
    let pairs = FORMATS.iter().flat_map(|&format| settings.iter().map(move |setting| (format, setting)));
    let mut num_calls = 0;
    for ((format, setting), case) in pairs.zip(tool_cases()) {
        let texts = walks[&case.name].as_array().expect("every grammar has walks");
        for text in texts.iter().filter_map(Value::as_str).chain(case.accepted.iter().map(String::as_str)) {
            let answer = parse_whole(text, Some(format), setting.reasoning_state);
            check(&case.name, &answer, setting, text);
            num_calls += answer.tool_calls.len();
        }
    }
    assert!(num_calls > 300, "only {num_calls} calls were walked");
}

#[test]
fn without_tools_or_reasoning_there_is_no_grammar_to_add() {
    let grammar = grammar_of(ToolCallFormat::Hermes, ReasoningState::Off, false);
    assert_eq!(grammar.tools(&[], &ToolChoice::Auto, true, None), Ok(None));
    assert_eq!(grammar.tools(&tools(), &ToolChoice::None, true, None), Ok(None));
    assert_eq!(grammar.after_reasoning(Grammar::Regex("a".to_owned())), Grammar::Regex("a".to_owned()));
}

#[test]
fn unusable_tools_are_refused_by_name() {
    let grammar = grammar_of(ToolCallFormat::DeepSeek, ReasoningState::Off, false);
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters };
    let refusal = |tools: &[Tool], choice: &ToolChoice| grammar.tools(tools, choice, true, None).unwrap_err();
    assert_eq!(refusal(&[], &ToolChoice::Required), ToolError::NoTools);
    let other = "other".to_owned();
    assert_eq!(refusal(&tools(), &ToolChoice::Named(other.clone())), ToolError::Unknown { name: other });
    let twice = [tool("a", None), tool("a", None)];
    assert_eq!(refusal(&twice, &ToolChoice::Auto), ToolError::Duplicate { name: "a".to_owned() });
    assert_eq!(refusal(&[tool("", None)], &ToolChoice::Auto), ToolError::NoName);
    for name in ["a b", "a<｜tool▁sep｜>"] {
        assert_eq!(refusal(&[tool(name, None)], &ToolChoice::Auto), ToolError::Name { name: name.to_owned() });
    }
    for schema in [json!({"type": "string"}), json!([]), json!(true), json!({"type": ["null"]})] {
        let error = refusal(&[tool("a", Some(schema))], &ToolChoice::Auto);
        assert_eq!(error, ToolError::Parameters { name: "a".to_owned() });
    }
}

#[test]
fn undeclared_arguments_are_excluded_unless_the_schema_allows_them() {
    let schema = |parameters| -> Value {
        let tool = Tool { name: "a".to_owned(), parameters: Some(parameters) };
        serde_json::from_str(&tool.arguments_schema().unwrap()).unwrap()
    };
    assert_eq!(schema(json!({"properties": {"a": {}}, "required": ["a"]}))["additionalProperties"], false);
    assert_eq!(schema(json!({}))["additionalProperties"], false);
    for open in [json!({"required": ["a"]}), json!({"$ref": "#/$defs/a", "$defs": {"a": {}}}), json!({"anyOf": []})] {
        assert_eq!(schema(open)["additionalProperties"], Value::Null);
    }
    assert_eq!(schema(json!({"additionalProperties": true}))["additionalProperties"], true);
    assert_eq!(schema(json!({"type": ["object", "null"]}))["type"], "object");
}

#[test]
fn a_grammar_has_this_text() {
    let tools = [Tool { name: "f\"/é".to_owned(), parameters: None }];
    let grammar = grammar_of(ToolCallFormat::Hermes, ReasoningState::Possible(think()), true);
    let text = lark(grammar.tools(&tools, &ToolChoice::Auto, true, None).unwrap().unwrap());
    insta::assert_snapshot!(text, @r##"
    start: (reasoning SPACE?)? answer
    TEXT: /(?s:.*)/
    WS: /[ \n]{0,2}/
    SPACE: /[ \n]{1,2}/
    T_0_0: "{" WS "\"name\"" WS ":" WS "\"f\\\"/é\"" WS "," WS "\"arguments\"" WS ":" WS
    T_0_1: WS "}" WS
    arguments_0: %json {"type":"object","additionalProperties":false,"x-guidance":{"whitespace_flexible":false,"item_separator":", ?","key_separator":": ?"}}
    call_0: SPACE? T_0_0 arguments_0 T_0_1 <[260]>
    call_rest: call_0
    call: <[259]> call_rest
    run_rest: call_rest (SPACE? call)*
    run: <[259]> run_rest
    PLAIN: /(?s:.*)/
    answer: PLAIN? run?
    reasoning: <[257]> TEXT? <[258]>
    "##);
}
