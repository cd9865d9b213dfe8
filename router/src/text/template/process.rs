//! The server's side of the processes that render chat templates, and the protocol between the two: JSON values, one per
//! line, over a Unix socket.
//!
//! A template is a program by the model's author over texts of the client's choice. minijinja limits the number of
//! instructions, but not the cost of one: an expression can double a string or iterate over 10^18 items. A process can be
//! limited in memory and killed at any point, so templates are rendered in processes of their own.

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

use super::error::TemplateError;
use super::input::ChatInputs;
use super::limit::{MAX_PROMPT_BYTES, RENDER_DEADLINE, START_DEADLINE};
use super::probe::TemplateTraits;

/// First command-line argument of a renderer process, which calls [`run_chat_renderer`](super::run_chat_renderer).
pub const RENDERER_ARGUMENT: &str = "render-chat-template";

/// The longest line that the server reads from a renderer: a prompt, with room for JSON's escapes.
const MAX_REPLY_BYTES: u64 = 2 * MAX_PROMPT_BYTES as u64;

/// The first line to a renderer: the template of all its renderings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) source: String,
    pub(super) special_tokens: Map<String, Value>,
}

/// Renders one template in processes that it starts on demand and reuses.
pub(super) struct Renderer {
    program: PathBuf,
    start: Start,
    traits: TemplateTraits,
    idle: Mutex<Vec<RendererProcess>>,
}

impl Renderer {
    /// Starts the first process. The outer error means that no process can be started, the inner error that the
    /// template is unusable.
    pub(super) fn start(program: &Path, start: Start) -> io::Result<Result<Self, TemplateError>> {
        let mut process = RendererProcess::spawn(program)?;
        let started = process.call(&start, START_DEADLINE);
        let idle = Mutex::new(vec![process]);
        Ok(started.map(|traits| Self { program: program.to_owned(), start, traits, idle }))
    }

    /// What the template writes.
    pub(super) fn traits(&self) -> &TemplateTraits {
        &self.traits
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
        process.call::<TemplateTraits>(&self.start, START_DEADLINE)?;
        Ok(process)
    }

    fn lock_idle(&self) -> std::sync::MutexGuard<'_, Vec<RendererProcess>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropping it kills the process.
struct RendererProcess {
    child: Child,
    socket: UnixStream,
}

impl RendererProcess {
    fn spawn(program: &Path) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let child = Command::new(program)
            // The program may be given as /proc/self/exe.
            .arg0("penstock")
            .arg(RENDERER_ARGUMENT)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // A failed allocation writes a line there, which repeats the error of the refused request.
            .stderr(Stdio::null())
            // Without free memory, writing a backtrace takes longer than the deadline.
            .env("RUST_BACKTRACE", "0")
            // mimalloc would reserve 1 GiB at once, which the memory limit would not count.
            .env("MIMALLOC_ARENA_RESERVE", "0")
            // Ctrl-C in a terminal must not fail requests that the server is still draining.
            .process_group(0)
            .spawn()?;
        Ok(Self { child, socket })
    }

    /// Sends a request and returns the reply. Kills the process if it has not replied by the deadline.
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

    /// Kills the process and returns why it did not reply. `error`: the socket's error, if there was one.
    fn end(&mut self, error: Option<&io::Error>) -> TemplateError {
        // This does not change the status of a process that has ended already.
        let _ = self.child.kill();
        let status = self.child.wait();
        if error.is_some_and(|error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)) {
            return TemplateError::TooSlow;
        }
        match status {
            Ok(status) if status.signal() == Some(SIGALRM) => TemplateError::TooSlow,
            // Rust aborts the process when an allocation fails or the stack overflows.
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
        // Both calls fail only if the process has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes `value` as one line.
pub(super) fn send(socket: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut out = BufWriter::new(socket);
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Reads one line. Returns `None` when the other side has closed the socket.
pub(super) fn receive<T: DeserializeOwned>(socket: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if socket.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}
