//! Tests the grammars, and that the parser understands every text that they allow.
//!
//! `fixture/grammar.json` holds the grammars with texts that they must accept and refuse. `fixture/walk.py` checks them
//! with llguidance and generates random texts from the grammars into `fixture/walk.json`. To update both, run
//! `UPDATE_FIXTURE=1 cargo test -p penstock-router --lib text::answer::grammar`, then `walk.py`, then the test again.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::expected::Expected;
use super::super::parser::parse;
use super::super::part::Answer;
use super::super::reasoning::Frame;
use super::super::sample::{self, expected, formats};
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
    note: Option<String>,
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
            "note": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 4}, {"type": "null"}]},
        },
        "required": ["place"],
        "$defs": {"place": place},
    });
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters };
    vec![tool("get_weather", Some(weather)), tool("now", None)]
}

fn think() -> ReasoningFormat {
    Frame::detect(&["</think>"]).reasoning.unwrap()
}

/// Tokens in the markers of Solar Open and of Llama 4.
const FRAME_TOKENS: [&str; 6] =
    ["<|think|>", "<|end|>", "<|begin|>", "<|content|>", "<|python_start|>", "<|python_end|>"];
const SOLAR: &str = "<|end|><|begin|>assistant<|content|>";
const LLAMA_4: &str = "<|python_start|><|python_end|>";

/// Ids as in `walk.py`: after the 256 bytes and the end token.
fn token_ids() -> Vec<(String, u32)> {
    let token = regex::Regex::new(
        r#"\]<\]minimax\[>\[|｜DSML｜|<｜[^｜]*｜>|<\|[a-zA-Z_"]+\|?>|<[a-z_]+\|>|</?[a-zA-Z_:]+>|\[[A-Z_]+\]"#,
    )
    .unwrap();
    let mut texts = vec!["<think>".to_owned(), "</think>".to_owned()];
    texts.extend(FRAME_TOKENS.map(str::to_owned));
    for marker in formats().flat_map(Format::markers) {
        let found = token.find_iter(marker).map(|found| found.as_str().to_owned());
        texts.extend(found.collect::<Vec<_>>());
    }
    let mut known = std::collections::HashSet::new();
    texts.retain(|text| known.insert(text.clone()));
    texts.into_iter().zip(257..).collect()
}

fn marker_tokens(with_tokens: bool) -> MarkerTokens {
    let ids = token_ids();
    let frames = [SOLAR, LLAMA_4].into_iter().flat_map(|text| Frame::detect(&[text]).markers());
    let markers = formats().flat_map(Format::markers).chain(["<think>", "</think>"]).chain(frames).collect();
    MarkerTokens::new(markers, |text| ids.iter().find(|(known, _)| with_tokens && known == text).map(|(_, id)| *id))
}

fn tools_grammar(
    format: &'static Format,
    setting: &Setting,
    content: Option<&Grammar>,
) -> Result<Option<Grammar>, ToolError> {
    let tokens = marker_tokens(setting.with_tokens);
    let grammar = AnswerGrammar {
        channels: format.channels(),
        reasoning_state: setting.reasoning_state,
        reply: None,
        tokens: &tokens,
    };
    grammar.tools(format, &tools(), &setting.choice, setting.parallel, content)
}

/// Calls as the grammar allows them: with little whitespace and without further fields.
fn written(format: &'static Format, calls: &[(&str, &str)]) -> String {
    if let Some(channels) = format.channels().filter(|channels| !matches!(channels.arguments, Encoding::Json)) {
        let text = sample::written(format, calls);
        let start = format!("{}{}", channels.start, channels.role);
        return text.strip_prefix(&start).unwrap().strip_suffix("<|eot|>").unwrap().to_owned();
    }
    if let Some(channels) = format.channels() {
        let (before, after) = channels.call;
        let call =
            |(name, arguments): &(&str, &str)| format!("{before}{name}{after}{}{arguments}", channels.end_of_header);
        return calls.iter().map(call).collect::<Vec<_>>().join(channels.start);
    }
    let fields = regex::Regex::new(", \"id\": \"[^\"]*\"").unwrap();
    fields.replace_all(&sample::written(format, calls), "").replace("\n    ", "\n")
}

fn parse_whole(text: &str, format: &'static Format, reasoning_state: ReasoningState) -> Answer {
    parse([text], Some(format), expected(Some(format), &tools(), reasoning_state))
}

/// Whether the grammar has a rule for an answer with reasoning, or in words, that is not its own.
fn has_headers(format: &Format) -> bool {
    format.channels().is_some()
}

fn lark(grammar: Grammar) -> String {
    match grammar {
        Grammar::Lark(text) => text,
        other => panic!("not Lark: {other:?}"),
    }
}

fn settings() -> [Setting; 3] {
    let (possible, started) = (ReasoningState::Possible(think()), ReasoningState::Started(think()));
    let named = ToolChoice::Named("now".to_owned());
    let setting =
        |choice, parallel, reasoning_state, with_tokens| Setting { choice, parallel, reasoning_state, with_tokens };
    [
        setting(ToolChoice::Auto, true, possible, false),
        setting(ToolChoice::Required, false, ReasoningState::Off, true),
        setting(named, true, started, true),
    ]
}

fn cases() -> impl Iterator<Item = (&'static Format, Setting)> {
    formats().flat_map(|format| {
        settings()
            .into_iter()
            .chain([Setting {
                choice: ToolChoice::Auto,
                parallel: true,
                reasoning_state: ReasoningState::Off,
                with_tokens: true,
            }])
            .map(move |mut setting| {
                if has_headers(format) {
                    setting.reasoning_state = ReasoningState::Off;
                }
                (format, setting)
            })
    })
}

/// Texts without reasoning that a setting accepts and refuses.
fn texts(format: &'static Format, setting: &Setting) -> (Vec<String>, Vec<String>) {
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
    let is_parallel = setting.parallel && !is_named && format.channels().is_none_or(|channels| channels.parallel);
    to(is_parallel, run(&[WEATHER, NOW]), &mut accepted, &mut refused);
    let is_auto = setting.choice == ToolChoice::Auto;
    let words = |text: &str| match format.channels() {
        Some(channels) => format!("{}{}{text}", channels.content, channels.end_of_header),
        None => text.to_owned(),
    };
    to(is_auto, words("Hello.\n"), &mut accepted, &mut refused);
    to(is_auto, words(""), &mut accepted, &mut refused);
    if !format.is_bare() && !has_headers(format) {
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

fn name_of(format: &Format, setting: &Setting) -> String {
    let markers = if setting.with_tokens { "token" } else { "text" };
    format!("{format:?} {:?} {markers}", setting.choice)
}

fn tool_cases() -> Vec<Case> {
    let case = |(format, setting): (&'static Format, Setting)| {
        let grammar = tools_grammar(format, &setting, None).unwrap().unwrap();
        let (accepted, refused) = with_reasoning(setting.reasoning_state, texts(format, &setting));
        Case {
            name: name_of(format, &setting),
            lark: lark(grammar),
            with_tokens: setting.with_tokens,
            accepted,
            refused,
        }
    };
    cases().map(case).collect()
}

fn after_reasoning(
    channels: Option<&'static Channels>,
    reasoning_state: ReasoningState,
    with_tokens: bool,
    grammar: &Grammar,
) -> Grammar {
    let tokens = marker_tokens(with_tokens);
    AnswerGrammar { channels, reasoning_state, reply: None, tokens: &tokens }.after_reasoning(grammar.clone())
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
                lark: lark(after_reasoning(None, reasoning_state, with_tokens, grammar)),
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
    let case = |format: &'static Format, with_tokens| {
        let setting =
            Setting { choice: ToolChoice::Auto, parallel: true, reasoning_state: ReasoningState::Off, with_tokens };
        let words = |text: &str| match format.channels() {
            Some(channels) => format!("{}{}{text}", channels.content, channels.end_of_header),
            None => text.to_owned(),
        };
        Case {
            name: format!("{format:?} content {}", if with_tokens { "token" } else { "text" }),
            lark: lark(tools_grammar(format, &setting, Some(&schema)).unwrap().unwrap()),
            with_tokens,
            accepted: vec![words(r#"{"a":1}"#), written(format, &[NOW])],
            refused: vec![words("Hello."), words(r#"{"a":2}"#), written(format, &[("other", "{}")])],
        }
    };
    let mut cases: Vec<_> = ["hermes", "llama", "python", "harmony", "functionary"]
        .map(|name| case(Format::named(name).unwrap(), true))
        .into();
    let harmony = Format::named("harmony").and_then(|format| format.channels());
    let aside = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    cases.push(Case {
        name: "own harmony token".to_owned(),
        lark: lark(after_reasoning(harmony, ReasoningState::Off, true, &schema)),
        with_tokens: true,
        accepted: vec![format!(r#"{aside}<|channel|>final<|message|>{{"a":1}}"#)],
        refused: vec![format!("{aside}{{\"a\":1}}"), "<|channel|>final<|message|>1".to_owned()],
    });
    cases
}

/// Arguments whose elements the schema describes only in part.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "deserializing is the check")]
struct Loose {
    flags: Vec<bool>,
    either: Option<Either>,
    any: Option<Value>,
    map: Option<serde_json::Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "deserializing is the check")]
enum Either {
    Numbers(Vec<u8>),
    Text(String),
}

fn loose_tool() -> Tool {
    let numbers = json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}});
    let parameters = json!({
        "type": "object",
        "properties": {
            "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            "either": {"anyOf": [numbers, {"type": "string"}]},
            "any": {},
            "map": {"type": "object"},
        },
        "required": ["flags"],
    });
    Tool { name: "loose".to_owned(), parameters: Some(parameters) }
}

fn element_cases() -> Vec<Case> {
    let format = Format::named("minimax-m3").unwrap();
    let call = |arguments: &str| written(format, &[("loose", arguments)]);
    let case = |with_tokens| {
        let tokens = marker_tokens(with_tokens);
        let grammar =
            AnswerGrammar { channels: None, reasoning_state: ReasoningState::Off, reply: None, tokens: &tokens };
        Case {
            name: format!("elements {}", if with_tokens { "token" } else { "text" }),
            lark: lark(grammar.tools(format, &[loose_tool()], &ToolChoice::Required, false, None).unwrap().unwrap()),
            with_tokens,
            accepted: vec![
                call(r#"{"flags": [true]}"#),
                call(r#"{"flags": [true, false], "either": [1, 2], "any": {"a": ["b", {"c": 1}]}, "map": {"d": {}}}"#),
                call(r#"{"flags": [true], "either": "<1>", "any": "", "map": {}}"#),
            ],
            refused: vec![
                call(r#"{"flags": []}"#),
                call(r#"{"flags": [true, true, true]}"#),
                call(r#"{"flags": [1]}"#),
                call(r#"{"flags": true}"#),
                call(r#"{"flags": [true], "map": "a"}"#),
            ],
        }
    };
    vec![case(false), case(true)]
}

/// A name that must be escaped twice.
fn name_cases() -> Vec<Case> {
    let name = "say \"\\é/\n\u{1}\"";
    let case = |format: &'static Format| {
        let tool = Tool { name: name.to_owned(), parameters: None };
        let accepted = written(format, &[(name, "{}")]);
        assert_eq!(parse_whole(&accepted, format, ReasoningState::Off).tool_calls[0].name, name);
        let tokens = marker_tokens(false);
        let grammar =
            AnswerGrammar { channels: None, reasoning_state: ReasoningState::Off, reply: None, tokens: &tokens };
        Case {
            name: format!("{format:?} name"),
            lark: lark(grammar.tools(format, &[tool], &ToolChoice::Required, true, None).unwrap().unwrap()),
            with_tokens: false,
            accepted: vec![accepted],
            refused: vec![written(format, &[("say", "{}")])],
        }
    };
    ["hermes", "llama", "json-list", "apertus"].map(|name| case(Format::named(name).unwrap())).into()
}

/// Answers of Solar Open and Llama 4, whose parts have markers of their own.
fn frame_cases() -> Vec<(Case, &'static Format, Frame)> {
    let case = |name: &str, frame: &str, choice: ToolChoice, accepted: &[&str], refused: &[&str]| {
        let (format, frame) = (Format::named(name).unwrap(), Frame::detect(&[frame]));
        let tokens = marker_tokens(true);
        let reasoning_state = ReasoningState::after(frame.reasoning, "");
        let grammar = AnswerGrammar { channels: None, reasoning_state, reply: frame.reply, tokens: &tokens };
        let with_call = |text: &&str| text.replace("CALL", &written(format, &[NOW]));
        let case = Case {
            name: format!("{name} frame {choice:?}"),
            lark: lark(grammar.tools(format, &tools(), &choice, true, None).unwrap().unwrap()),
            with_tokens: true,
            accepted: accepted.iter().map(with_call).collect(),
            refused: refused.iter().map(with_call).collect(),
        };
        (case, format, frame)
    };
    let thoughts = "<|think|>Hm.<|end|><|begin|>assistant";
    let solar_call = format!("{thoughts}CALL");
    let solar_words = format!("{thoughts}<|content|>I look.<|end|><|begin|>assistantCALL");
    let solar_answer = format!("{thoughts}<|content|>Yes.");
    let solar: &[&str] = &[&solar_call, &solar_words, &solar_answer, "CALL", "<|content|>Yes."];
    let llama: &[&str] = &["<|python_start|><|python_end|>CALL", "CALLCALL", "<|python_start|>CALL<|python_end|>"];
    vec![
        case("solar", SOLAR, ToolChoice::Auto, solar, &["<|think|>Hm.<|end|>CALL"]),
        case("solar", SOLAR, ToolChoice::Required, &[&solar_call, "CALL"], &[&solar_words, &solar_answer]),
        case("llama4", LLAMA_4, ToolChoice::Auto, llama, &["CALL<|python_start|>"]),
        case("llama4", LLAMA_4, ToolChoice::Required, &["CALL", "CALLCALL"], &["Hello"]),
    ]
}

/// The markers around a reply, which are tokens.
fn reply_cases() -> Vec<Case> {
    let reply = Frame::detect(&["<|START_RESPONSE|><|END_RESPONSE|>"]).reply;
    let tokens = MarkerTokens::new(vec!["<|START_RESPONSE|>", "<|END_RESPONSE|>"], |text| match text {
        "<|START_RESPONSE|>" => Some(257),
        "<|END_RESPONSE|>" => Some(258),
        _ => None,
    });
    let grammar = AnswerGrammar { channels: None, reasoning_state: ReasoningState::Off, reply, tokens: &tokens };
    let own = grammar.after_reasoning(Grammar::Regex("[0-9]+".to_owned()));
    let command = Format::named("command").unwrap();
    let auto = grammar.tools(command, &tools(), &ToolChoice::Auto, true, None).unwrap().unwrap();
    // The first two tokens of the fixture stand for the markers.
    let case = |name: &str, grammar, accepted: &[&str]| Case {
        name: name.to_owned(),
        lark: lark(grammar),
        with_tokens: true,
        accepted: accepted.iter().map(|text| (*text).to_owned()).collect(),
        refused: vec!["<think><think>1".to_owned()],
    };
    vec![
        case("reply own", own, &["<think>12</think>", "12"]),
        case("reply auto", auto, &["<think>Hm.</think>", "Hm.", "<think>Hm."]),
    ]
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
    let frames = frame_cases().into_iter().map(|(case, ..)| case).collect();
    let cases: Vec<_> =
        [tool_cases(), after_reasoning_cases(), content_cases(), name_cases(), reply_cases(), element_cases(), frames]
            .into_iter()
            .flatten()
            .collect();
    let now = serde_json::to_string_pretty(&json!({"tokens": token_ids().into_iter().map(|(text, id)| (text, Value::from(id))).collect::<Value>(), "cases": cases})).unwrap() + "\n";
    if std::env::var_os("UPDATE_FIXTURE").is_some() {
        std::fs::write(fixture("grammar.json"), &now).unwrap();
    }
    let then = std::fs::read_to_string(fixture("grammar.json")).unwrap();
    assert!(now == then, "the grammars have changed: see the head of grammar_tests.rs");
}

#[test]
fn the_parser_understands_every_text_that_a_grammar_allows() {
    let walks: Value = serde_json::from_str(&std::fs::read_to_string(fixture("walk.json")).unwrap()).unwrap();
    let mut num_calls = 0;
    for ((format, setting), case) in cases().zip(tool_cases()) {
        let texts = walks[&case.name].as_array().expect("every grammar has walks");
        for text in texts.iter().filter_map(Value::as_str).chain(case.accepted.iter().map(String::as_str)) {
            let answer = parse_whole(text, format, setting.reasoning_state);
            check(&case.name, &answer, &setting, text);
            num_calls += answer.tool_calls.len();
        }
    }
    assert!(num_calls > 600, "only {num_calls} calls were walked");
    for (case, format, frame) in frame_cases() {
        let texts = walks[&case.name].as_array().unwrap().iter().filter_map(Value::as_str);
        for text in texts.chain(case.accepted.iter().map(String::as_str)) {
            let state = ReasoningState::after(frame.reasoning, "");
            let expected = Expected { reply: frame.reply, ..expected(Some(format), &tools(), state) };
            let answer = parse([text], Some(format), expected);
            let markers = FRAME_TOKENS.iter().any(|token| answer.content.contains(token));
            assert!(!answer.is_cut && !markers, "{}: {text:?} gives {answer:?}", case.name);
            assert!(case.name.ends_with("Auto") || answer.content.is_empty(), "{}: {text:?}", case.name);
        }
    }
    for case in element_cases() {
        let texts = walks[&case.name].as_array().unwrap().iter().filter_map(Value::as_str);
        for text in texts.chain(case.accepted.iter().map(String::as_str)) {
            let format = Format::named("minimax-m3");
            let answer = parse([text], format, expected(format, &[loose_tool()], ReasoningState::Off));
            let [call] = &answer.tool_calls[..] else { panic!("{text:?}") };
            drop(serde_json::from_str::<Loose>(&call.arguments).expect(text));
        }
    }
}

#[test]
fn without_tools_or_reasoning_there_is_no_grammar_to_add() {
    let tokens = marker_tokens(false);
    let grammar = AnswerGrammar { channels: None, reasoning_state: ReasoningState::Off, reply: None, tokens: &tokens };
    let hermes = Format::named("hermes").unwrap();
    assert_eq!(grammar.tools(hermes, &[], &ToolChoice::Auto, true, None), Ok(None));
    assert_eq!(grammar.tools(hermes, &tools(), &ToolChoice::None, true, None), Ok(None));
    assert_eq!(grammar.after_reasoning(Grammar::Regex("a".to_owned())), Grammar::Regex("a".to_owned()));
}

#[test]
fn unusable_tools_are_refused_by_name() {
    let tokens = marker_tokens(false);
    let grammar = AnswerGrammar { channels: None, reasoning_state: ReasoningState::Off, reply: None, tokens: &tokens };
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters };
    let refusal = |tools: &[Tool], choice: &ToolChoice| {
        let formats = ["deepseek", "harmony", "glm", "gemma"].map(|name| Format::named(name).unwrap());
        let errors = formats.map(|format| grammar.tools(format, tools, choice, true, None).unwrap_err());
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        errors[0].clone()
    };
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
fn an_error_of_the_engine_belongs_to_the_tool_whose_rule_it_points_at() {
    let tokens = marker_tokens(false);
    let grammar = AnswerGrammar { channels: None, reasoning_state: ReasoningState::Off, reply: None, tokens: &tokens };
    let content = Grammar::JsonSchema("{}".to_owned());
    for format in ["hermes", "glm", "gemma"].map(|name| Format::named(name).unwrap()) {
        let grammar = grammar.tools(format, &tools(), &ToolChoice::Auto, true, Some(&content)).unwrap().unwrap();
        let Grammar::Lark(text) = &grammar else { panic!("{grammar:?}") };
        for (rule, fault) in [("arguments_0", Fault::Tool(0)), ("content", Fault::Content)] {
            let line = text.lines().position(|line| line.starts_with(rule)).unwrap() + 1;
            let error =
                format!("the Lark grammar cannot be used: at {line}(14): failed to compile JSON schema: too big");
            assert_eq!(Fault::find(&grammar, &error), Some((fault, "too big")), "{text}");
        }
        assert_eq!(Fault::find(&grammar, "the Lark grammar cannot be used: at 1(1): too big"), None);
        assert_eq!(Fault::find(&grammar, "the Lark grammar has 9 bytes, at most 8 are allowed"), None);
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
fn patterns_that_no_grammar_expresses_are_left_out_and_named() {
    let email = json!({"type": "string", "pattern": "^(?!\\.)[a-z.]+$", "format": "email"});
    let word = json!({"type": "string", "pattern": "^[a-z]{1,9000}$"});
    let data = json!({"enum": [{"pattern": "(?!a)"}]});
    let properties = json!({"pattern": email, "words": {"items": word}, "data": data});
    let tool = Tool { name: "a".to_owned(), parameters: Some(json!({"properties": properties})) };
    let (kept, left_out) = tool.enforceable().unwrap();
    let kept = kept.parameters.unwrap();
    let email = json!({"type": "string", "format": "email"});
    assert_eq!(kept["properties"], json!({"pattern": email, "words": {"items": word}, "data": data}));
    let [note] = &left_out[..] else { panic!("{left_out:?}") };
    assert!(note.starts_with("the parameters of the function \"a\": `pattern` "), "{note}");
    assert!(note.ends_with(" at `/properties/pattern` is not enforced"), "{note}");
}
