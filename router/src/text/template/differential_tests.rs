//! Renderings equal those of transformers byte for byte, and templates that transformers refuses are refused. The
//! expectations are written by tests/fixtures/templates/generate.py.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::compiled::Compiled;
use super::{ChatInputs, TemplateError};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates")
}

fn read(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(folder().join(name)).unwrap()).unwrap()
}

/// generate.py's FixedClock.
fn clock() -> jiff::Zoned {
    jiff::civil::date(2026, 3, 7).at(9, 5, 2, 0).in_tz("UTC").unwrap()
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

fn inputs(case: &Value) -> ChatInputs {
    ChatInputs {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: case["tools"].as_array().cloned(),
        documents: case.get("documents").cloned(),
        // transformers' default is false for both.
        add_generation_prompt: Some(case["add_generation_prompt"] == true),
        continue_final_message: Some(case["continue_final_message"] == true),
        kwargs: object(&case["kwargs"]),
        image_text: None,
    }
}

/// Describes a rendering that is not as expected.
fn difference(name: &str, expected: &Value, rendered: Result<String, TemplateError>) -> Option<String> {
    match (expected.as_str(), rendered) {
        (Some(expected), Ok(rendered)) if expected == rendered => None,
        (None, Err(_)) => None,
        (expected, rendered) => Some(format!("{name}\n  expected {expected:?}\n  rendered {rendered:?}\n")),
    }
}

#[test]
fn families_are_rendered_as_by_transformers() {
    let conversations = read("conversation.json");
    let expectation = read("expectation.json");
    let mut differences = Vec::new();
    for (family, expected) in expectation["families"].as_object().unwrap() {
        let source = fs::read_to_string(folder().join(format!("family/{family}.jinja"))).unwrap();
        let template = Compiled::new(&source, object(&conversations["special_tokens"]), clock).unwrap();
        for (name, case) in conversations["cases"].as_object().unwrap() {
            let rendered = template.render(inputs(case));
            differences.extend(difference(&format!("{family}: {name}"), &expected[name], rendered));
        }
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.concat());
}

#[test]
fn jinja_is_read_as_by_transformers() {
    let snippets = read("snippet.json");
    let expectation = read("expectation.json");
    let hello = json!({"messages": [{"role": "user", "content": "Hi"}], "kwargs": snippets["context"]});
    let mut differences = Vec::new();
    let sources = snippets["sources"].as_array().unwrap();
    for (source, expected) in sources.iter().zip(expectation["snippets"].as_array().unwrap()) {
        let source = source.as_str().unwrap();
        let rendered = Compiled::new(source, Map::new(), clock).and_then(|template| template.render(inputs(&hello)));
        differences.extend(difference(source, expected, rendered));
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.concat());
}

/// Every operation of Python and jinja on values of every type. Where transformers refuse, so do we. Where transformers
/// render, we render the same, or refuse if grid.json lists the operation and the value.
#[test]
fn operations_are_those_of_python() {
    let (grid, expectation) = (read("grid.json"), read("expectation.json"));
    let context = read("snippet.json")["context"].clone();
    let hello = json!({"messages": [{"role": "user", "content": "Hi"}], "kwargs": context});
    let mut differences = Vec::new();
    for operation in grid["operations"].as_array().unwrap() {
        let operation = operation.as_str().unwrap();
        let mut refused = Vec::new();
        for (index, (name, value)) in grid["values"].as_object().unwrap().iter().enumerate() {
            let source = format!("{{% set x = {} %}}{operation}", value.as_str().unwrap());
            let rendered =
                Compiled::untried(&source, Map::new(), clock).and_then(|template| template.render(inputs(&hello)));
            let expected = &expectation["grid"][operation][index];
            match rendered {
                Err(_) if expected.is_string() => refused.push(name.as_str()),
                rendered => differences.extend(difference(&source, expected, rendered)),
            }
        }
        let listed = &grid["refused"][operation];
        if json!(refused) != *listed && !(listed.is_null() && refused.is_empty()) {
            differences.push(format!("{operation}\n  refused {}\n  listed  {listed}\n", json!(refused)));
        }
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.concat());
}
