//! Warnings about a request that is served: the answer carries them in the header `x-penstock-warning`, and the request's log line
//! repeats them.

use std::fmt::Write;

/// The name of the header.
pub(crate) const WARNING: &str = "x-penstock-warning";
/// Size of the header's value.
const MAX_BYTES: usize = 2048;
/// Size of one warning.
const MAX_WARNING_BYTES: usize = 512;
/// More warnings are only counted.
const MAX_KEPT: usize = 32;
const SEPARATOR: &str = "; ";

/// Warnings about one request, each once, in the order of their discovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Warnings {
    kept: Vec<String>,
    num_more: usize,
}

impl Warnings {
    /// Adds a warning: one sentence without a full stop. It may quote the client.
    pub(crate) fn push(&mut self, warning: impl AsRef<str>) {
        let warning = visible(warning.as_ref());
        if self.kept.contains(&warning) {
            return;
        }
        if self.kept.len() < MAX_KEPT { self.kept.push(warning) } else { self.num_more += 1 }
    }

    /// Adds all warnings of `others`.
    pub(crate) fn append(&mut self, others: Self) {
        self.num_more += others.num_more;
        others.kept.into_iter().for_each(|warning| self.push(warning));
    }

    /// All warnings as one line of visible ASCII; `None` if there are none. Counts what there is no room for.
    pub(crate) fn line(&self) -> Option<String> {
        let mut line = self.kept.first()?.clone();
        let mut num_written = 1;
        for warning in &self.kept[1..] {
            if line.len() + SEPARATOR.len() + warning.len() > MAX_BYTES {
                break;
            }
            line.push_str(SEPARATOR);
            line.push_str(warning);
            num_written += 1;
        }
        let num_more = self.kept.len() - num_written + self.num_more;
        if num_more > 0 {
            // Writing to a string cannot fail.
            let _ = write!(line, "{SEPARATOR}{num_more} more");
        }
        Some(line)
    }
}

impl<S: AsRef<str>> FromIterator<S> for Warnings {
    fn from_iter<I: IntoIterator<Item = S>>(listed: I) -> Self {
        let mut warnings = Self::default();
        listed.into_iter().for_each(|warning| warnings.push(warning));
        warnings
    }
}

/// The text as visible ASCII, cut to its limit.
fn visible(text: &str) -> String {
    let mut visible = String::new();
    for c in text.chars() {
        if visible.len() >= MAX_WARNING_BYTES {
            visible.push_str("...");
            break;
        }
        if c == ' ' || c.is_ascii_graphic() { visible.push(c) } else { visible.extend(c.escape_default()) }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_one_line_of_visible_ascii() {
        let mut warnings = Warnings::default();
        assert_eq!(warnings.line(), None);
        warnings.push("unknown field `größe\r\n`");
        warnings.push("another");
        warnings.push("another");
        assert_eq!(warnings.line().as_deref(), Some("unknown field `gr\\u{f6}\\u{df}e\\r\\n`; another"));
    }

    #[test]
    fn the_line_is_bounded_and_says_how_many_warnings_it_lacks() {
        let mut warnings = Warnings::default();
        (0..1000).for_each(|index| warnings.push(format!("{index} {}", "x".repeat(10_000))));
        let mut others = Warnings::default();
        others.push("other");
        warnings.append(others);
        let line = warnings.line().unwrap();
        assert!(line.len() < 2 * MAX_BYTES, "{}", line.len());
        assert!(line.ends_with("; 998 more"), "{line}");
    }
}
