//! What Python processes say, under their rank in the log; and how the last of it explains their end.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::signal::Signal;
use serde::Deserialize;
use tokio::io::AsyncRead;

use crate::process;

/// How much of what a process last said may explain its end.
const MAX_LAST_LINES: usize = 20;

/// Of one process.
#[derive(Clone, Debug, Default)]
pub struct LastWords {
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl LastWords {
    /// Logs a process's standard error, and remembers the end of it. No rank: it is no worker.
    pub async fn follow(self, rank: Option<usize>, stderr: impl AsyncRead + Unpin) {
        process::for_each_line(stderr, |line| {
            if let Some(line) = re_emit(rank, line) {
                self.remember(line);
            }
        })
        .await;
    }

    fn remember(&self, line: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == MAX_LAST_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// One sentence on how and, as far as its last words tell, why a process ended.
    pub fn exit_reason(&self, who: &str, status: ExitStatus) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<&str> = lines.iter().flat_map(|lines| lines.lines()).map(str::trim).collect();
        let stated = lines.iter().rev().find_map(|line| line.strip_prefix("error: "));
        let last = lines.iter().rev().find(|line| !line.is_empty()).copied();
        let how = match (status.signal(), status.code()) {
            (Some(signal), _) => {
                let name = Signal::try_from(signal).map_or_else(|_| signal.to_string(), |signal| signal.to_string());
                let hint = if signal == Signal::SIGKILL as i32 { ", as happens when memory runs out" } else { "" };
                format!("was ended by {name}{hint}")
            }
            (None, Some(0)) => "ended".to_owned(),
            (None, code) => format!("ended with exit status {}", code.unwrap_or_default()),
        };
        match stated.or(last) {
            Some(why) => format!("{who} {how}: {why}"),
            None => format!("{who} {how}"),
        }
    }
}

#[derive(Deserialize)]
struct LogLine {
    level: String,
    message: String,
    #[serde(default)]
    target: String,
}

/// Logs a line of standard error. What may explain the process's end comes back.
fn re_emit(rank: Option<usize>, line: &str) -> Option<String> {
    let Ok(LogLine { level, message, target: module }) = serde_json::from_str(line) else {
        // Not from its logger: the interpreter's or a library's own words.
        tracing::warn!(target: "worker", rank, "{line}");
        return Some(line.to_owned());
    };
    match level.as_str() {
        "TRACE" | "DEBUG" => tracing::debug!(target: "worker", rank, module, "{message}"),
        "INFO" => tracing::info!(target: "worker", rank, module, "{message}"),
        "WARN" | "WARNING" => tracing::warn!(target: "worker", rank, module, "{message}"),
        _ => {
            tracing::error!(target: "worker", rank, module, "{message}");
            return Some(message);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(raw_status: i32, lines: &[&str]) -> String {
        let words = LastWords::default();
        lines.iter().for_each(|line| words.remember((*line).to_owned()));
        words.exit_reason("the worker of rank 2", ExitStatus::from_raw(raw_status))
    }

    #[test]
    fn an_exit_is_explained_by_the_workers_stated_error() {
        let lines = ["error: no model here", "some library's farewell"];
        assert_eq!(reason(1 << 8, &lines), "the worker of rank 2 ended with exit status 1: no model here");
    }

    #[test]
    fn an_exit_without_a_stated_error_is_explained_by_the_last_line() {
        let lines = ["Traceback (most recent call last):\n  File x\nValueError: no", "  "];
        assert_eq!(reason(3 << 8, &lines), "the worker of rank 2 ended with exit status 3: ValueError: no");
    }

    #[test]
    fn a_kill_hints_at_memory() {
        let expected = "the worker of rank 2 was ended by SIGKILL, as happens when memory runs out";
        assert_eq!(reason(Signal::SIGKILL as i32, &[]), expected);
    }

    #[test]
    fn log_lines_explain_an_end_only_when_they_are_errors() {
        assert_eq!(re_emit(Some(0), r#"{"level":"INFO","message":"loaded","target":"a"}"#), None);
        let error = r#"{"level":"ERROR","message":"boom\nValueError: x","target":"a"}"#;
        assert_eq!(re_emit(Some(0), error), Some("boom\nValueError: x".to_owned()));
        assert_eq!(re_emit(None, "Segmentation fault"), Some("Segmentation fault".to_owned()));
    }
}
