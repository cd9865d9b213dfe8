//! GBNF, the grammars of llama.cpp (`name ::= …`), as grammars in Lark's syntax.
//!
//! GBNF describes characters and has no tokens. So every rule stays a rule, and every character class a terminal of one
//! character: a longer terminal would take characters that the rule behind it needs. Line breaks are spaces, as in other
//! readers of GBNF: a rule ends where the next one begins.

use std::collections::HashMap;
use std::fmt::Write;

use regex::Regex;
use serde_json::Value;

/// Longest grammar; the workers have the same limit for grammars that need no translation.
const MAX_BYTES: usize = 256 << 10;
/// Groups inside of groups.
const MAX_DEPTH: usize = 64;
/// The largest number of repetitions.
const MAX_REPEATS: u32 = 10_000;

/// Whether a grammar is GBNF: some line begins with a rule of it.
pub(super) fn is_gbnf(text: &str) -> bool {
    let rule = Regex::new(r"(?m)^\s*[A-Za-z0-9_-]+\s*::=").expect("invariant: a regular expression");
    rule.is_match(text)
}

/// The same grammar for llguidance. Errors begin with the number of their line.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    if text.len() > MAX_BYTES {
        return Err(format!("the grammar has {} bytes, at most {MAX_BYTES} are allowed", text.len()));
    }
    Reader { rest: text, line: 1, rules: HashMap::new() }.grammar()
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    /// By name: the rule's number, the line of its definition, and the line where it was named first.
    rules: HashMap<&'a str, Rule>,
}

struct Rule {
    number: usize,
    defined: Option<usize>,
    named: usize,
}

impl<'a> Reader<'a> {
    fn grammar(mut self) -> Result<String, String> {
        let mut lark = String::new();
        self.skip_space();
        while !self.rest.is_empty() {
            let name = self.name();
            if name.is_empty() || !self.skip("::=") {
                return Err(self.error(&format!("expected a rule (`name ::= …`), found {}", self.found())));
            }
            let line = self.line;
            let rule = self.rule(name);
            if let Some(first) = rule.defined.replace(line) {
                return Err(self.error(&format!("rule `{name}` is already defined in line {first}")));
            }
            let label = label(name, rule.number);
            self.skip_space();
            let body = self.alternatives(0)?;
            // Writing to a string cannot fail.
            let _ = writeln!(lark, "{label}: {body}");
        }
        let undefined = self.rules.iter().filter(|(_, rule)| rule.defined.is_none());
        if let Some((name, rule)) = undefined.min_by_key(|(_, rule)| rule.number) {
            return Err(format!("line {}: rule `{name}` is not defined", rule.named));
        }
        if !self.rules.contains_key("root") {
            return Err("no rule is called `root`".to_owned());
        }
        Ok(lark)
    }

    /// Alternatives up to the end of the rule or the group.
    fn alternatives(&mut self, depth: usize) -> Result<String, String> {
        if depth > MAX_DEPTH {
            return Err(self.error(&format!("more than {MAX_DEPTH} groups are inside of each other")));
        }
        let mut alternatives = vec![self.sequence(depth)?];
        while self.skip("|") {
            alternatives.push(self.sequence(depth)?);
        }
        Ok(alternatives.join(" | "))
    }

    fn sequence(&mut self, depth: usize) -> Result<String, String> {
        let mut items = Vec::new();
        while let Some(item) = self.item(depth)? {
            items.push(item + &self.repetition()?);
        }
        Ok(if items.is_empty() { "\"\"".to_owned() } else { items.join(" ") })
    }

    /// The next item of a sequence; `None` at its end.
    fn item(&mut self, depth: usize) -> Result<Option<String>, String> {
        let Some(first) = self.rest.chars().next() else { return Ok(None) };
        let item = match first {
            '|' | ')' => return Ok(None),
            '"' => self.literal()?,
            '[' => self.class()?,
            '.' => {
                self.skip(".");
                "/(?s:.)/".to_owned()
            }
            '(' => {
                self.skip("(");
                let group = self.alternatives(depth + 1)?;
                if !self.skip(")") {
                    return Err(self.error(&format!("expected `)`, found {}", self.found())));
                }
                format!("({group})")
            }
            _ => {
                let before = (self.rest, self.line);
                let name = self.name();
                if name.is_empty() {
                    return Err(self.error(&format!("{} is not supported here", self.found())));
                }
                if self.rest.starts_with("::=") {
                    (self.rest, self.line) = before;
                    return Ok(None);
                }
                let number = self.rule(name).number;
                label(name, number)
            }
        };
        Ok(Some(item))
    }

    /// The operator behind an item, if there is one.
    fn repetition(&mut self) -> Result<String, String> {
        for operator in ["*", "+", "?"] {
            if self.skip(operator) {
                return Ok(operator.to_owned());
            }
        }
        if !self.skip("{") {
            return Ok(String::new());
        }
        let min = self.number()?;
        let max = if self.skip(",") {
            if self.rest.starts_with('}') { None } else { Some(self.number()?) }
        } else {
            Some(min)
        };
        if !self.skip("}") {
            return Err(self.error(&format!("expected `}}`, found {}", self.found())));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.error("a repetition ends below its beginning"));
        }
        Ok(format!("{{{min},{}}}", max.map(|max| max.to_string()).unwrap_or_default()))
    }

    fn number(&mut self) -> Result<u32, String> {
        let digits = self.take_while(|c| c.is_ascii_digit());
        match digits.parse() {
            Ok(number) if number <= MAX_REPEATS => Ok(number),
            _ => Err(self.error(&format!("expected a number up to {MAX_REPEATS}, found `{digits}`"))),
        }
    }

    /// Text in quotes.
    fn literal(&mut self) -> Result<String, String> {
        self.next_char()?;
        let mut text = String::new();
        loop {
            match self.character()? {
                ('"', false) => break,
                (character, _) => text.push(character),
            }
        }
        self.skip_space();
        // Lark writes strings as JSON does.
        Ok(Value::String(text).to_string())
    }

    /// One of the characters, or none of them.
    fn class(&mut self) -> Result<String, String> {
        self.next_char()?;
        let mut class = String::new();
        let start = if self.rest.starts_with('^') { "[^" } else { "[" };
        if start == "[^" {
            self.next_char()?;
        }
        loop {
            let (first, is_escaped) = self.character()?;
            if first == ']' && !is_escaped {
                break;
            }
            let mut last = first;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            if is_range {
                self.next_char()?;
                last = self.character()?.0;
            }
            if last < first {
                return Err(self.error(&format!("the range `{first}-{last}` ends before it begins")));
            }
            let _ = write!(class, "\\x{{{:X}}}-\\x{{{:X}}}", u32::from(first), u32::from(last));
        }
        self.skip_space();
        if class.is_empty() {
            return Err(self.error("a character class is empty"));
        }
        Ok(format!("/{start}{class}]/"))
    }

    /// The next character of a text or class, and whether it was escaped.
    fn character(&mut self) -> Result<(char, bool), String> {
        let character = self.next_char()?;
        if character != '\\' {
            return Ok((character, false));
        }
        let escaped = match self.next_char()? {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'x' => self.code(2)?,
            'u' => self.code(4)?,
            'U' => self.code(8)?,
            same @ ('\\' | '"' | '\'' | '[' | ']' | '-' | '^' | '/') => same,
            other => return Err(self.error(&format!("the escape `\\{other}` is not supported"))),
        };
        Ok((escaped, true))
    }

    /// The character with this code of hexadecimal digits.
    fn code(&mut self, num_digits: usize) -> Result<char, String> {
        let digits: String = (0..num_digits).map(|_| self.next_char()).collect::<Result<_, _>>()?;
        let character = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
        character.ok_or_else(|| self.error(&format!("`{digits}` is not the code of a character")))
    }

    fn next_char(&mut self) -> Result<char, String> {
        let character =
            self.rest.chars().next().ok_or_else(|| self.error("the grammar ends inside of quotes or brackets"))?;
        self.advance(character.len_utf8());
        Ok(character)
    }

    /// The name of a rule; may be empty.
    fn name(&mut self) -> &'a str {
        self.take_while(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    }

    fn rule(&mut self, name: &'a str) -> &mut Rule {
        let (number, named) = (self.rules.len(), self.line);
        self.rules.entry(name).or_insert(Rule { number, defined: None, named })
    }

    /// Skips this text and the space behind it, if it comes next.
    fn skip(&mut self, text: &str) -> bool {
        let comes_next = self.rest.starts_with(text);
        if comes_next {
            self.advance(text.len());
            self.skip_space();
        }
        comes_next
    }

    /// Takes characters and skips the space behind them.
    fn take_while(&mut self, holds: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !holds(c)).unwrap_or(self.rest.len());
        let taken = &self.rest[..end];
        self.advance(end);
        self.skip_space();
        taken
    }

    /// Skips spaces, line breaks and comments.
    fn skip_space(&mut self) {
        loop {
            let space = self.rest.len() - self.rest.trim_start().len();
            self.advance(space);
            if !self.rest.starts_with('#') {
                return;
            }
            self.advance(self.rest.find('\n').unwrap_or(self.rest.len()));
        }
    }

    fn advance(&mut self, num_bytes: usize) {
        let (taken, rest) = self.rest.split_at(num_bytes);
        self.line += taken.matches('\n').count();
        self.rest = rest;
    }

    fn found(&self) -> String {
        self.rest.chars().next().map_or("the end".to_owned(), |character| format!("`{character}`"))
    }

    fn error(&self, problem: &str) -> String {
        format!("line {}: {problem}", self.line)
    }
}

/// The name of a rule in Lark, where rules are in lower case.
fn label(name: &str, number: usize) -> String {
    if name == "root" { "start".to_owned() } else { format!("{}_{number}", name.replace('-', "_").to_lowercase()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_construct_has_its_counterpart() {
        let gbnf = r#"
            # a comment
            root  ::= "a\"b\n" item-1* ( "x" | ) Item_2{2} | .   # another
            item-1 ::=
              [a-z\-] | [^"\\\x7F]+
              | root?
            Item_2 ::= "\u00e9" [0-9]{1,} [-+]{0,3} []-a]"#
            .replace("[]-a]", r"[\]-a]");
        insta::assert_snapshot!(to_lark(&gbnf).unwrap(), @r#"
        start: "a\"b\n" item_1_1* ("x" | "") item_2_2{2,2} | /(?s:.)/
        item_1_1: /[\x{61}-\x{7A}\x{2D}-\x{2D}]/ | /[^\x{22}-\x{22}\x{5C}-\x{5C}\x{7F}-\x{7F}]/+ | start?
        item_2_2: "é" /[\x{30}-\x{39}]/{1,} /[\x{2D}-\x{2D}\x{2B}-\x{2B}]/{0,3} /[\x{5D}-\x{61}]/
        "#);
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_line() {
        for (gbnf, message) in [
            ("root ::= a", "line 1: rule `a` is not defined"),
            ("root ::= \"a\"\nb ::= \"b\"\nroot ::= b", "line 3: rule `root` is already defined in line 1"),
            ("a ::= \"a\"", "no rule is called `root`"),
            ("root ::= \"a\nb", "line 2: the grammar ends inside of quotes"),
            ("root ::=\n(\"a\"\n", "line 3: expected `)`, found the end"),
            ("root ::= \"a\")", "line 1: expected a rule (`name ::= …`), found `)`"),
            ("root ::= 'a'", "line 1: `'` is not supported here"),
            ("root ::=\n <think>", "line 2: `<` is not supported here"),
            ("root ::= \"\\d\"", "line 1: the escape `\\d` is not supported"),
            ("root ::= \"\\uD800\"", "line 1: `D800` is not the code of a character"),
            ("root ::= \"\\xZZ\"", "line 1: `ZZ` is not the code of a character"),
            ("root ::= []", "line 1: a character class is empty"),
            ("root ::= [z-a]", "line 1: the range `z-a` ends before it begins"),
            ("root ::= \"a\"{2,1}", "line 1: a repetition ends below its beginning"),
            ("root ::= \"a\"{99999}", "line 1: expected a number up to 10000, found `99999`"),
            ("root ::= \"a\"{,3}", "line 1: expected a number up to 10000, found ``"),
            ("root ::= \"a\"{1", "line 1: expected `}`, found the end"),
        ] {
            let error = to_lark(gbnf).unwrap_err();
            assert!(error.starts_with(message), "{gbnf}: {error}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(100), ")".repeat(100));
        assert_eq!(to_lark(&deep).unwrap_err(), "line 1: more than 64 groups are inside of each other");
    }

    #[test]
    fn lark_is_not_taken_for_gbnf() {
        assert!(is_gbnf("# x\nroot ::= \"a\""));
        assert!(is_gbnf("root\n::= \"a\""));
        assert!(!is_gbnf("start: \"a ::= b\""));
    }

    #[test]
    fn a_grammar_s_length_has_a_bound() {
        let of = |num_bytes: usize| to_lark(&format!("root ::= \"a\"{}", " ".repeat(num_bytes - 12)));
        assert!(of(MAX_BYTES).is_ok());
        assert_eq!(of(MAX_BYTES + 1), Err("the grammar has 262145 bytes, at most 262144 are allowed".to_owned()));
    }
}
