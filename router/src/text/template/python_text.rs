//! Python's methods of `str` as functions over texts.

pub(super) fn swap_case(text: &str) -> String {
    let swap = |c: char| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() };
    text.chars().map(swap).collect()
}

/// `str.isspace`, which includes four separators that Unicode classifies as control characters.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// The predicates of `str`, which are false for an empty text.
pub(super) fn has_only(text: &str, method: &str) -> bool {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    match method {
        "isspace" => all(is_space),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "islower" => text.chars().any(is_cased) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(is_cased) && !text.chars().any(char::is_lowercase),
        _ => all(char::is_numeric),
    }
}

/// `str.strip`, of whitespace or of the characters of `set`.
pub(super) fn strip(text: &str, set: Option<&str>) -> String {
    match set {
        Some(set) => text.trim_matches(|c| set.contains(c)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    }
}

/// A character at the start of a word. Most have one form for that and for words in capitals.
fn title_char(c: char) -> String {
    match c {
        'Ǆ'..='ǆ' => "ǅ".to_owned(),
        'Ǉ'..='ǉ' => "ǈ".to_owned(),
        'Ǌ'..='ǌ' => "ǋ".to_owned(),
        'Ǳ'..='ǳ' => "ǲ".to_owned(),
        '\u{10d0}'..='\u{10ff}' => c.to_string(),
        _ => {
            let mut upper = c.to_uppercase();
            upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect()
        }
    }
}

/// `str.capitalize`.
pub(super) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| title_char(first) + &chars.as_str().to_lowercase()).unwrap_or_default()
}

/// `str.title`: every letter after another one is in lower case.
pub(super) fn title(text: &str) -> String {
    let mut is_in_word = false;
    let mut out = String::new();
    for c in text.chars() {
        if is_in_word {
            out.extend(c.to_lowercase())
        } else {
            out.push_str(&title_char(c))
        }
        is_in_word = is_cased(c);
    }
    out
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ')
}

/// `str.center`: odd space is on the left if the width is odd, too.
pub(super) fn center(text: &str, width: usize, fill: char) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = missing / 2 + (missing & width & 1);
    let fill = |count| std::iter::repeat_n(fill, count).collect::<String>();
    format!("{}{text}{}", fill(left), fill(missing - left))
}

/// `str.ljust` and `str.rjust`.
pub(super) fn justified(text: &str, width: usize, fill: char, to_right: bool) -> String {
    let missing: String = std::iter::repeat_n(fill, width.saturating_sub(text.chars().count())).collect();
    if to_right { missing + text } else { text.to_owned() + &missing }
}

/// `str.zfill`.
pub(super) fn with_zeros(text: &str, width: usize) -> String {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let sign = &text[..text.len() - digits.len()];
    format!("{sign}{}", justified(digits, width.saturating_sub(sign.len()), '0', true))
}

/// `str.expandtabs`.
pub(super) fn with_spaces_for_tabs(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let missing = if size == 0 { 0 } else { size - column % size };
                out.push_str(&" ".repeat(missing));
                column += missing;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// `str.istitle`.
pub(super) fn is_title(text: &str) -> bool {
    text.chars().any(is_cased) && title(text) == text
}

/// `str.splitlines`.
pub(super) fn lines<'a>(text: &'a str, keeps_ends: bool) -> Vec<&'a str> {
    let is_end = |c| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let cut = |line: &'a str| {
        let content = line.strip_suffix("\r\n").or_else(|| line.strip_suffix(is_end)).unwrap_or(line);
        if keeps_ends { line } else { content }
    };
    let mut lines = Vec::new();
    let mut start = 0;
    for (at, end) in text.match_indices(is_end) {
        let stop = at + end.len();
        if end != "\r" || !text[stop..].starts_with('\n') {
            lines.push(cut(&text[start..stop]));
            start = stop;
        }
    }
    if start < text.len() {
        lines.push(cut(&text[start..]));
    }
    lines
}
