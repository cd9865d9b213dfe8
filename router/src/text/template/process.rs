//! The process that renders one chat template, seen from the server, and the protocol between the two: JSON values, one a
//! line, over a Unix socket.
//!
//! A template is a program of the model's author over texts of the client's choosing. minijinja bounds its instructions,
//! but not what one instruction costs: an expression can double a string or iterate over 10^18 items. A process can be
//! limited in memory and ended at any point, so rendering happens in one (ADR 29).

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::libc::SIGALRM;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ChatInputs, TemplateError};

/// First argument with which the server starts the program that calls [`run_chat_renderer`](super::run_chat_renderer).
pub const RENDERER_ARGUMENT: &str = "render-chat-template";

/// Wall-clock time that one rendering may take.
pub(super) const RENDER_DEADLINE: Duration = Duration::from_secs(5);

/// Wall-clock time that a process may take to start and to compile and try out its template.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(10);

/// Memory that a renderer process may map in addition to what it maps at its start.
pub(super) const MAX_MEMORY_BYTES: u64 = 512 << 20;

/// Longest prompt that a template may write.
pub(super) const MAX_PROMPT_BYTES: usize = 32 << 20;

/// Longest line that the server reads from a renderer: a prompt, with room for JSON's escapes.
const MAX_REPLY_BYTES: u64 = 2 * MAX_PROMPT_BYTES as u64;

/// The first line to a renderer: what it renders from now on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) source: String,
    pub(super) special_tokens: Map<String, Value>,
}

/// The answer to [`Start`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Started {
    pub(super) uses_tools: bool,
}

/// Renders one template in processes of its own, which it starts when needed and keeps for the next request.
pub(super) struct Renderer {
    program: PathBuf,
    start: Start,
    uses_tools: bool,
    idle: Mutex<Vec<RendererProcess>>,
}

impl Renderer {
    /// Starts the first process. The outer error says that no process can be started, the inner one that the template
    /// cannot be used.
    pub(super) fn start(program: &Path, start: Start) -> io::Result<Result<Self, TemplateError>> {
        let mut process = RendererProcess::spawn(program)?;
        let started: Result<Started, _> = process.call(&start, START_DEADLINE);
        let idle = Mutex::new(vec![process]);
        Ok(started.map(|Started { uses_tools }| Self { program: program.to_owned(), start, uses_tools, idle }))
    }

    /// Whether the template reads `tools`.
    pub(super) fn uses_tools(&self) -> bool {
        self.uses_tools
    }

    /// Blocks for up to [`START_DEADLINE`] and [`RENDER_DEADLINE`].
    pub(super) fn render(&self, inputs: &ChatInputs) -> Result<String, TemplateError> {
        let mut process = self.take_process()?;
        let rendered = process.call(inputs, RENDER_DEADLINE);
        if process.is_running() {
            self.lock_idle().push(process);
        }
        rendered
    }

    fn take_process(&self) -> Result<RendererProcess, TemplateError> {
        let idle = || self.lock_idle().pop();
        while let Some(mut process) = idle() {
            if process.is_running() {
                return Ok(process);
            }
        }
        let failed = |error: io::Error| TemplateError::Renderer(error.to_string());
        let mut process = RendererProcess::spawn(&self.program).map_err(failed)?;
        process.call::<Started>(&self.start, START_DEADLINE)?;
        Ok(process)
    }

    fn lock_idle(&self) -> std::sync::MutexGuard<'_, Vec<RendererProcess>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropping it ends the process.
struct RendererProcess {
    child: Child,
    socket: UnixStream,
}

impl RendererProcess {
    fn spawn(program: &Path) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let child = Command::new(program)
            .arg(RENDERER_ARGUMENT)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // An allocation that fails writes a line there. The refused request says the same.
            .stderr(Stdio::null())
            // A backtrace would take longer than the deadline once memory is used up.
            .env("RUST_BACKTRACE", "0")
            // Ctrl-C in a terminal must not end requests that the server still drains.
            .process_group(0)
            .spawn()?;
        Ok(Self { child, socket })
    }

    /// Sends a request and returns the answer to it. Ends the process unless it has answered by the deadline.
    fn call<T: DeserializeOwned>(&mut self, request: &impl Serialize, deadline: Duration) -> Result<T, TemplateError> {
        match self.exchange(request, deadline) {
            Ok(Some(reply)) => reply,
            Ok(None) => Err(self.end(None)),
            Err(error) => Err(self.end(Some(&error))),
        }
    }

    fn exchange<T: DeserializeOwned>(&self, request: &impl Serialize, deadline: Duration) -> io::Result<Option<T>> {
        self.socket.set_write_timeout(Some(deadline))?;
        self.socket.set_read_timeout(Some(deadline))?;
        send(&self.socket, request)?;
        receive(&mut BufReader::new((&self.socket).take(MAX_REPLY_BYTES)))
    }

    /// Ends the process and says why it gave no answer. `error`: of the socket.
    fn end(&mut self, error: Option<&io::Error>) -> TemplateError {
        // Has no effect on the status of a process that is ending already.
        let _ = self.child.kill();
        let status = self.child.wait();
        if error.is_some_and(|error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)) {
            return TemplateError::TooSlow;
        }
        match status {
            Ok(status) if status.signal() == Some(SIGALRM) => TemplateError::TooSlow,
            // Rust aborts when an allocation fails, and when the stack overflows.
            Ok(status) if status.signal().is_some() => TemplateError::TooLarge,
            Ok(status) => TemplateError::Renderer(status.to_string()),
            Err(error) => TemplateError::Renderer(error.to_string()),
        }
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for RendererProcess {
    fn drop(&mut self) {
        // Both fail only if the process has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes `value` and the end of the line.
pub(super) fn send(socket: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut out = BufWriter::new(socket);
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Reads one value; `None` when the other side has closed the socket.
pub(super) fn receive<T: DeserializeOwned>(socket: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if socket.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}
