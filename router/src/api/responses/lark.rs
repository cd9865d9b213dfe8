//! Lark grammars of custom tools as regular expressions. The input is a string within JSON, which only a regular expression can
//! constrain, so a grammar with rules that contain themselves cannot be enforced.

use std::collections::HashMap;

/// Limit on the regular expression that a grammar becomes.
const MAX_BYTES: usize = 16 << 10;
/// Limit on the nesting of rules and groups.
const MAX_DEPTH: usize = 64;

/// What terminals of Lark's library match.
const LIBRARY: [(&str, &str); 18] = [
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9a-fA-F]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"),
    ("FLOAT", r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"),
    ("NUMBER", r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", r#""(?:[^"\\\n]|\\[^\n])*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[a-zA-Z]"),
    ("WORD", "[a-zA-Z]+"),
    ("CNAME", "[a-zA-Z_][a-zA-Z0-9_]*"),
    ("WS_INLINE", "[ \\t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("LF", r"\n"),
    ("NEWLINE", r"(?:\r?\n)+"),
];

/// A regular expression of the texts that the grammar's rule `start` matches. The error says why there is none.
pub(super) fn pattern(grammar: &str) -> Result<String, String> {
    let rules = rules(grammar)?;
    let pattern = expand("start", &rules, &mut Vec::new())?;
    if pattern.len() > MAX_BYTES {
        return Err(format!("its regular expression has {} bytes, at most {MAX_BYTES} are allowed", pattern.len()));
    }
    Ok(pattern)
}

/// The definitions of a grammar by their names.
fn rules(grammar: &str) -> Result<HashMap<String, Vec<Token>>, String> {
    let mut rules: HashMap<String, Vec<Token>> = HashMap::new();
    let mut current: Option<String> = None;
    for line in grammar.lines() {
        let text = without_comment(line).trim();
        if text.is_empty() {
            continue;
        }
        if let Some(import) = text.strip_prefix("%import") {
            import_into(&mut rules, import)?;
            current = None;
        } else if text.starts_with('%') {
            return Err(format!("`{}` is not supported", text.split_whitespace().next().unwrap_or(text)));
        } else if let Some(name) = current.as_ref().filter(|_| text.starts_with('|')) {
            rules.entry(name.clone()).or_default().extend(tokens(text)?);
        } else {
            let (name, body) = defined(text).ok_or_else(|| format!("{text:?} is not a rule"))?;
            if rules.contains_key(&name) {
                return Err(format!("`{name}` is defined twice"));
            }
            rules.insert(name.clone(), tokens(body)?);
            current = Some(name);
        }
    }
    Ok(rules)
}

/// Name and body of a rule. `?` and `!` before a name, and a priority after it, only matter for trees.
fn defined(text: &str) -> Option<(String, &str)> {
    let text = text.trim_start_matches(['?', '!']);
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))?;
    let (name, rest) = text.split_at(end);
    let rest = match rest.strip_prefix('.') {
        Some(rest) => rest.trim_start_matches(|c: char| c.is_ascii_digit()),
        None => rest,
    };
    let body = rest.trim_start().strip_prefix(':')?;
    (!name.is_empty()).then(|| (name.to_owned(), body))
}

/// `common.LF`, `common.INT -> NUMBER`, or `common (LF, INT)`.
fn import_into(rules: &mut HashMap<String, Vec<Token>>, import: &str) -> Result<(), String> {
    let unknown = || format!("`%import{import}` is not supported");
    let rest = import.trim().strip_prefix("common").ok_or_else(unknown)?.trim();
    let names: Vec<(&str, &str)> = if let Some(list) = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        list.split(',').map(|name| (name.trim(), name.trim())).collect()
    } else {
        let rest = rest.strip_prefix('.').ok_or_else(unknown)?;
        let (name, alias) = rest.split_once("->").unwrap_or((rest, rest));
        vec![(name.trim(), alias.trim())]
    };
    for (name, alias) in names {
        let (_, pattern) = LIBRARY.into_iter().find(|(known, _)| *known == name).ok_or_else(unknown)?;
        rules.insert(alias.to_owned(), vec![Token::Pattern(format!("(?:{pattern})"))]);
    }
    Ok(())
}

/// The line without a comment, which starts outside of strings and regular expressions.
fn without_comment(line: &str) -> &str {
    let mut open = None;
    let mut escaped = false;
    for (at, c) in line.char_indices() {
        match open {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(end) if c == end => open = None,
            Some(_) => {}
            None if line[at..].starts_with("//") => return &line[..at],
            None if c == '"' || c == '/' => open = Some(c),
            None => {}
        }
    }
    line
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A string or a regular expression, as one.
    Pattern(String),
    Name(String),
    Open(char),
    Close(char),
    Or,
    /// `?`, `*`, `+`, or a number of times.
    Repeat(String),
}

fn tokens(body: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = body.trim_start();
    while let Some(first) = rest.chars().next() {
        let (token, num_bytes) = match first {
            '"' | '/' => literal(rest, first)?,
            '(' | '[' => (Token::Open(first), 1),
            ')' | ']' => (Token::Close(first), 1),
            '|' => (Token::Or, 1),
            '?' | '*' | '+' => (Token::Repeat(first.to_string()), 1),
            '~' => times(rest)?,
            // The name of a tree, up to the end of the alternative.
            '-' if rest.starts_with("->") => {
                let name = rest[2..].trim_start();
                let end = name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(name.len());
                rest = name[end..].trim_start();
                continue;
            }
            c if c.is_ascii_alphanumeric() || c == '_' => {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
                (Token::Name(rest[..end].to_owned()), end)
            }
            other => return Err(format!("`{other}` is not supported")),
        };
        tokens.push(token);
        rest = rest[num_bytes..].trim_start();
    }
    Ok(tokens)
}

/// A string or a regular expression at the beginning of `text`, and its length.
fn literal(text: &str, quote: char) -> Result<(Token, usize), String> {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, c)| {
        let ends = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    let (end, _) = end.ok_or_else(|| format!("{text:?} does not end"))?;
    let inside = &text[1..end];
    let flags: String = text[end + 1..].chars().take_while(char::is_ascii_lowercase).collect();
    let pattern = if quote == '"' {
        let text: String = serde_json::from_str(&text[..=end]).map_err(|_| format!("{text:?} is not a string"))?;
        regex::escape(&text)
    } else {
        inside.replace("\\/", "/")
    };
    let flagged = if flags.is_empty() { format!("(?:{pattern})") } else { format!("(?{flags}:{pattern})") };
    Ok((Token::Pattern(flagged), end + 1 + flags.len()))
}

/// `~3` or `~2..5`.
fn times(text: &str) -> Result<(Token, usize), String> {
    let end = text[1..].find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ' ')).map_or(text.len(), |end| end + 1);
    let given = text[1..end].trim();
    let (least, most) = given.split_once("..").unwrap_or((given, given));
    let number = |text: &str| text.trim().parse::<u16>().map_err(|_| format!("`~{given}` is not a number of times"));
    Ok((Token::Repeat(format!("{{{},{}}}", number(least)?, number(most)?)), end))
}

/// The regular expression of a rule. `within`: the rules that contain it.
fn expand<'a>(
    name: &'a str,
    rules: &'a HashMap<String, Vec<Token>>,
    within: &mut Vec<&'a str>,
) -> Result<String, String> {
    if within.contains(&name) {
        return Err(format!("`{name}` contains itself"));
    }
    if within.len() >= MAX_DEPTH {
        return Err(format!("more than {MAX_DEPTH} rules are within each other"));
    }
    let tokens = rules.get(name).ok_or_else(|| format!("`{name}` is not defined"))?;
    within.push(name);
    let mut pattern = String::new();
    let mut open = Vec::new();
    for token in tokens {
        match token {
            Token::Pattern(text) => pattern.push_str(text),
            Token::Name(name) => {
                let inner = expand(name, rules, within)?;
                pattern.push_str(&inner);
            }
            Token::Open(bracket) if open.len() < MAX_DEPTH => {
                open.push(*bracket);
                pattern.push_str("(?:");
            }
            Token::Open(_) => return Err(format!("more than {MAX_DEPTH} groups are within each other")),
            Token::Close(bracket) => match (open.pop(), bracket) {
                (Some('('), ')') => pattern.push(')'),
                // What is between them may be missing.
                (Some('['), ']') => pattern.push_str(")?"),
                _ => return Err(format!("`{bracket}` does not close a group")),
            },
            Token::Or => pattern.push('|'),
            Token::Repeat(_) if pattern.is_empty() || pattern.ends_with(['|', '(']) => {
                return Err(format!("`{name}` repeats nothing"));
            }
            Token::Repeat(times) => pattern.push_str(times),
        }
        if pattern.len() > MAX_BYTES {
            return Err(format!("its regular expression has more than {MAX_BYTES} bytes"));
        }
    }
    if !open.is_empty() {
        return Err(format!("a group of `{name}` does not end"));
    }
    within.pop();
    Ok(format!("(?:{pattern})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(grammar: &str, text: &str) -> bool {
        regex::Regex::new(&format!("^(?:{})$", pattern(grammar).unwrap())).unwrap().is_match(text)
    }

    /// The shape of the grammar with which coding agents send patches.
    const PATCH: &str = r#"
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?

hunk: add | update // one file
add: "*** Add: " name LF line+
update: "*** Update: " name LF change?
name: /(.+)/
line: "+" /(.*)/ LF -> line
change: ("@@" | "@@ " /(.+)/) LF (("+" | "-" | " ") /(.*)/ LF)+

%import common.LF
"#;

    #[test]
    fn a_grammar_without_recursion_is_a_regular_expression() {
        for text in [
            "*** Begin\n*** Add: a/b.txt\n+one\n+\n*** End\n",
            "*** Begin\n*** Update: a\n@@ f()\n-x\n+y\n z\n*** Add: b\n+1\n*** End",
        ] {
            assert!(matches(PATCH, text), "{text}");
        }
        for text in [
            "",
            "*** Begin\n*** End\n",
            "*** Begin\n*** Add: a\none\n*** End\n",
            "*** Begin\n*** Add: a\n+one\n*** End\nx",
        ] {
            assert!(!matches(PATCH, text), "{text}");
        }
    }

    #[test]
    fn operators_strings_and_flags_are_those_of_lark() {
        let grammar = "?start.2: A~2..3 [B] \"a/b\\\"\" /x\\/y/i\n    | INT -> number\nA: \"aa\"\nB: \"(\" // end\n%import common (INT, WS)";
        for text in ["aaaaa/b\"x/Y", "aaaaaa(a/b\"X/y", "42"] {
            assert!(matches(grammar, text), "{text}");
        }
        for text in ["aaa/b\"x/y", "aaaaaaaaa/b\"x/y", "42 "] {
            assert!(!matches(grammar, text), "{text}");
        }
    }

    #[test]
    fn what_no_regular_expression_can_say_is_named() {
        for (grammar, reason) in [
            ("start: \"(\" start? \")\"", "`start` contains itself"),
            ("start: a\na: b\nb: a", "`a` contains itself"),
            ("start: a", "`a` is not defined"),
            ("a: \"x\"", "`start` is not defined"),
            ("start: \"x\"\n%ignore \" \"", "`%ignore` is not supported"),
            ("start: \"x\"\n%import python.NAME", "`%import python.NAME` is not supported"),
            ("start: (\"x\"", "does not end"),
            ("start: \"x", "does not end"),
            ("start: *", "repeats nothing"),
            ("nothing", "is not a rule"),
        ] {
            let error = pattern(grammar).unwrap_err();
            assert!(error.contains(reason), "{grammar}: {error}");
        }
        let doubling: String = (0..30).map(|index| format!("r{index}: r{} r{}\n", index + 1, index + 1)).collect();
        let error = pattern(&format!("start: r0\n{doubling}r30: \"x\"")).unwrap_err();
        assert!(error.contains("more than 16384 bytes"), "{error}");
    }
}
