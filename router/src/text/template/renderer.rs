//! The renderer process: its limits, and the loop that renders one chat template for the server.

use std::fs;
use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{SysconfVar, alarm, sysconf};

use super::compiled::Compiled;
use super::error::TemplateError;
use super::input::ChatInputs;
use super::limit::{MAX_MEMORY_BYTES, MAX_PROMPT_BYTES, RENDER_DEADLINE, START_DEADLINE};
use super::process::{Start, receive, send};

/// Renders a chat template for the server until the server closes the Unix socket that is this process's standard input.
///
/// A program whose first command-line argument is [`RENDERER_ARGUMENT`](super::RENDERER_ARGUMENT) calls this and exits.
///
/// # Errors
///
/// If the process's limits cannot be set, or the socket fails.
pub fn run_chat_renderer() -> io::Result<()> {
    prctl::set_name(c"chat-renderer")?;
    limit_memory()?;
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut requests = BufReader::new(socket.try_clone()?);
    let Some(Start { source, special_tokens }) = receive(&mut requests)? else { return Ok(()) };
    let template = within(START_DEADLINE, || Compiled::new(&source, special_tokens, jiff::Zoned::now));
    send(&socket, &template.as_ref().map(Compiled::traits))?;
    let Ok(template) = template else { return Ok(()) };
    while let Some(inputs) = receive::<ChatInputs>(&mut requests)? {
        let prompt = within(RENDER_DEADLINE, || template.render_adapted(inputs));
        send(&socket, &prompt.and_then(refuse_too_long))?;
    }
    Ok(())
}

/// From here on, an allocation beyond the limit aborts this process.
fn limit_memory() -> io::Result<()> {
    let mapped_pages = fs::read_to_string("/proc/self/statm")?;
    let mapped_pages: u64 = mapped_pages.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let page_bytes = sysconf(SysconfVar::PAGE_SIZE)?.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096);
    let limit = mapped_pages * page_bytes + MAX_MEMORY_BYTES;
    setrlimit(Resource::RLIMIT_AS, limit, limit)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    Ok(())
}

/// The server kills this process at the deadline. If the server has died, the alarm does.
fn within<T>(deadline: Duration, work: impl FnOnce() -> T) -> T {
    alarm::set(u32::try_from(deadline.as_secs()).unwrap_or(u32::MAX).saturating_add(1));
    let result = work();
    alarm::cancel();
    result
}

fn refuse_too_long(prompt: String) -> Result<String, TemplateError> {
    if prompt.len() > MAX_PROMPT_BYTES { Err(TemplateError::TooLong) } else { Ok(prompt) }
}
