//! Output of Python processes: lines of bounded length, re-emitted into our log, and the last of them to explain an exit.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::signal::Signal;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Bytes of a line that are kept. The rest is read and dropped, so that a process cannot fill our memory.
const MAX_LINE_BYTES: usize = 1 << 16;
/// Lines of standard error that are kept to explain an exit.
const MAX_TAIL_LINES: usize = 20;

/// The lines of a pipe. Bytes beyond `MAX_LINE_BYTES` are cut off and counted at the end of the line.
pub(crate) struct Lines<R> {
    pipe: BufReader<R>,
    line: Vec<u8>,
    num_cut_bytes: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(pipe: R) -> Self {
        Self { pipe: BufReader::new(pipe), line: Vec::new(), num_cut_bytes: 0 }
    }

    /// The next line that is not blank, without trailing whitespace; `None` at the end. Bytes that are not UTF-8 become
    /// replacement characters. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            // A pipe that cannot be read has ended.
            let bytes = self.pipe.fill_buf().await.unwrap_or_default();
            let has_ended = bytes.is_empty();
            let newline = bytes.iter().position(|&byte| byte == b'\n');
            let piece = &bytes[..newline.unwrap_or(bytes.len())];
            let kept = &piece[..piece.len().min(MAX_LINE_BYTES - self.line.len())];
            self.line.extend_from_slice(kept);
            self.num_cut_bytes += piece.len() - kept.len();
            let num_read = piece.len() + usize::from(newline.is_some());
            self.pipe.consume(num_read);
            if has_ended || newline.is_some() {
                let line = self.take_line();
                if has_ended || !line.is_empty() {
                    return Some(line).filter(|line| !line.is_empty());
                }
            }
        }
    }

    fn take_line(&mut self) -> String {
        let mut line = String::from_utf8_lossy(&self.line).trim_end().to_owned();
        if self.num_cut_bytes > 0 {
            line += &format!(" … [{} more bytes]", self.num_cut_bytes);
        }
        self.line.clear();
        self.num_cut_bytes = 0;
        line
    }
}

/// The last lines of one process's standard error.
#[derive(Clone, Debug, Default)]
pub(crate) struct StderrTail {
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl StderrTail {
    /// Logs standard error until it closes, and keeps its tail. `rank` is `None` for a process that is not a worker.
    pub(crate) async fn follow(self, rank: Option<usize>, stderr: impl AsyncRead + Unpin) {
        let mut lines = Lines::new(stderr);
        while let Some(line) = lines.next().await {
            if let Some(line) = re_emit(rank, &line) {
                self.push(line);
            }
        }
    }

    fn push(&self, line: String) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == MAX_TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// One sentence: how `process` exited and, if its output says so, why.
    pub(crate) fn exit_reason(&self, process: &str, status: ExitStatus) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<&str> = lines.iter().flat_map(|lines| lines.lines()).map(str::trim).collect();
        let stated = lines.iter().rev().find_map(|line| line.strip_prefix("error: "));
        let last = lines.iter().rev().find(|line| !line.is_empty()).copied();
        let how = match (status.signal(), status.code()) {
            (Some(signal), _) => {
                let name = Signal::try_from(signal).map_or_else(|_| signal.to_string(), |signal| signal.to_string());
                let hint = if signal == Signal::SIGKILL as i32 { ", perhaps because memory ran out" } else { "" };
                format!("was killed by {name}{hint}")
            }
            (None, code) => format!("exited with status {}", code.unwrap_or_default()),
        };
        match stated.or(last) {
            Some(why) => format!("{process} {how}: {why}"),
            None => format!("{process} {how}"),
        }
    }
}

/// A line of penstock_server's logger.
#[derive(Deserialize)]
struct LogLine {
    level: String,
    message: String,
    #[serde(default)]
    target: String,
}

/// Logs a line of standard error at its own level, except that information of ranks after the first is for the level debug: all
/// ranks of a group say the same. Returns the line if it may explain the process's exit.
fn re_emit(rank: Option<usize>, line: &str) -> Option<String> {
    let Ok(LogLine { level, message, target: module }) = serde_json::from_str(line) else {
        // Printed by the interpreter or a library.
        tracing::warn!(target: "worker", rank, "{line}");
        return Some(line.to_owned());
    };
    match level.as_str() {
        "TRACE" | "DEBUG" => tracing::debug!(target: "worker", rank, module, "{message}"),
        "INFO" if rank.is_some_and(|rank| rank > 0) => tracing::debug!(target: "worker", rank, module, "{message}"),
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
        let tail = StderrTail::default();
        lines.iter().for_each(|line| tail.push((*line).to_owned()));
        tail.exit_reason("the worker of rank 2", ExitStatus::from_raw(raw_status))
    }

    async fn lines(bytes: &[u8]) -> Vec<String> {
        let mut lines = Lines::new(bytes);
        let mut all = Vec::new();
        while let Some(line) = lines.next().await {
            all.push(line);
        }
        all
    }

    #[tokio::test]
    async fn lines_are_read_whatever_bytes_they_hold() {
        assert_eq!(lines(b"one  \r\n\n  \ntwo \xff\nlast").await, ["one", "two \u{fffd}", "last"]);
        assert!(lines(b"\n\n").await.is_empty());
    }

    #[tokio::test]
    async fn a_long_line_is_cut_and_the_next_one_is_whole() {
        let longest = "a".repeat(MAX_LINE_BYTES);
        let text = format!("{longest}\n{longest}{longest}b\nnext\n");
        let cut = format!("{longest} … [{} more bytes]", MAX_LINE_BYTES + 1);
        assert_eq!(lines(text.as_bytes()).await, [longest, cut, "next".to_owned()]);
    }

    #[tokio::test]
    async fn a_line_that_never_ends_takes_bounded_memory() {
        let mut lines = Lines::new(tokio::io::AsyncReadExt::take(tokio::io::repeat(b'a'), 64 << 20));
        let line = lines.next().await.unwrap();
        assert!(line.len() < MAX_LINE_BYTES + 100 && line.ends_with("more bytes]"), "{} bytes", line.len());
        assert!(lines.line.capacity() <= 2 * MAX_LINE_BYTES);
    }

    #[test]
    fn an_exit_is_explained_by_the_stated_error() {
        let lines = ["error: no model here", "some library's last line"];
        assert_eq!(reason(1 << 8, &lines), "the worker of rank 2 exited with status 1: no model here");
    }

    #[test]
    fn an_exit_without_a_stated_error_is_explained_by_the_last_line() {
        let lines = ["Traceback (most recent call last):\n  File x\nValueError: no", "  "];
        assert_eq!(reason(3 << 8, &lines), "the worker of rank 2 exited with status 3: ValueError: no");
    }

    #[test]
    fn a_kill_hints_at_memory() {
        let expected = "the worker of rank 2 was killed by SIGKILL, perhaps because memory ran out";
        assert_eq!(reason(Signal::SIGKILL as i32, &[]), expected);
    }

    #[test]
    fn only_error_log_lines_explain_an_exit() {
        assert_eq!(re_emit(Some(0), r#"{"level":"INFO","message":"loaded","target":"a"}"#), None);
        let error = r#"{"level":"ERROR","message":"boom\nValueError: x","target":"a"}"#;
        assert_eq!(re_emit(Some(0), error), Some("boom\nValueError: x".to_owned()));
        assert_eq!(re_emit(None, "Segmentation fault"), Some("Segmentation fault".to_owned()));
    }
}
