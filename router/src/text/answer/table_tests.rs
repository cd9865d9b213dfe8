//! The tables of `docs/tools.md` are written from the code: `UPDATE_DOCS=1 cargo test -p penstock-router --lib docs`.

use super::super::reasoning::ReasoningFormat;
use super::super::sample::written;
use super::*;

fn code(text: &str) -> String {
    let text = text.replace('\n', "⏎").replace('|', "\\|");
    if text.contains('`') { format!("`` {text} ``") } else { format!("`{text}`") }
}

fn formats() -> String {
    let mut table = "| format | models | a call; ⏎ is a line end |\n|---|---|---|\n".to_owned();
    for format in FORMATS {
        let call = written(format, &[("weather", r#"{"city": "Rome", "days": 2}"#)]);
        table.push_str(&format!("| `{}` | {} | {} |\n", format.name, format.families, code(&call)));
    }
    table
}

fn thoughts() -> String {
    let mut table = "| start | end |\n|---|---|\n".to_owned();
    for ReasoningFormat { open, close, .. } in ReasoningFormat::ALL {
        table.push_str(&format!("| {} | {} |\n", code(open), code(close)));
    }
    table
}

/// The page with this table between its comments.
fn with_table(page: &str, name: &str, table: &str) -> String {
    let (start, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let (head, rest) = page.split_once(&start).unwrap();
    let (_, tail) = rest.split_once(&end).unwrap();
    format!("{head}{start}{table}{end}{tail}")
}

#[test]
fn the_tables_in_the_docs_are_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tools.md");
    let page = std::fs::read_to_string(path).unwrap();
    let current = with_table(&with_table(&page, "formats", &formats()), "thoughts", &thoughts());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &current).unwrap();
    }
    assert!(page == current || std::env::var_os("UPDATE_DOCS").is_some(), "see the head of table_tests.rs");
}

#[test]
fn names_are_unique() {
    let names: std::collections::HashSet<_> = FORMATS.iter().map(|format| format.name).collect();
    assert_eq!(names.len(), FORMATS.len());
}
